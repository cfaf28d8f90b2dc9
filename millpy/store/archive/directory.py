"""The directory of an archive: a file is written under `.pending`, and gets its final name once it is committed.

In an object store, these are objects, and their names begin with the same paths.

    GRAPH/ARCHIVE/.pending/hour=2026-11-22T08,NAME      written, perhaps committed
    GRAPH/ARCHIVE/hour=2026-11-22T08/NAME               committed

NAME is INTERVAL-SEQUENCER-BUNDLE-TOKEN.parquet. The sequencer tells an interval's owner which pending files no other
process can still commit; the random token keeps files of another database from being overwritten.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from millpy.clock import random_id
from millpy.errors import ArchiveUnavailableError
from millpy.model.checkpoint import Grant
from millpy.model.time import Instant, to_datetime
from millpy.store.archive.storage import PENDING, storage_at


class ArchiveDirectory:
    """The files of one archive.

    Args:
        place: where all archives are: a directory, or the URL of an object store.
        name: the archive's path below it; paths of files begin with it.
    """

    def __init__(self, place: str | Path, name: str) -> None:
        self._storage = storage_at(place)
        self._name = name

    @property
    def settled_s(self) -> float:
        """Seconds after which a deleted file stays deleted, whatever its former owner has begun."""
        return self._storage.settled_s

    def write(self, grant: Grant, bundle: int, hour: Instant, content: pa.Buffer) -> str:
        """Write a pending file durably; return its final path below the root.

        Raises:
            ArchiveUnavailableError: the file cannot be written.
        """
        return self._write(f"{self._name}/hour={hour_name(hour)}", grant, str(bundle), content)

    def try_out(self, grant: Grant, size: int) -> None:
        """Write a pending file of a size, and delete it.

        Raises:
            ArchiveUnavailableError: the file cannot be written or deleted.
        """
        path = self._write(f"{self._name}/hour=", grant, "0", pa.py_buffer(bytes(size)))
        self._storage.delete(self._pending(path))

    def rewrite(self, grant: Grant, path: str, content: pa.Buffer) -> str:
        """Write another content of a file as a pending file durably; return its final path below the root.

        Raises:
            ArchiveUnavailableError: the file cannot be written.
        """
        folder, name = path.rsplit("/", 1)
        return self._write(folder, grant, name.split("-")[2], content)

    def _write(self, folder: str, grant: Grant, bundle: str, content: pa.Buffer) -> str:
        path = f"{folder}/{grant.interval_id}-{grant.sequencer}-{bundle}-{random_id().hex[:12]}.parquet"
        self._storage.create(self._pending(path), content)
        return path

    def publish(self, path: str) -> None:
        """Give a committed file its final name. A file that has it already is left alone.

        Raises:
            ArchiveUnavailableError: the file cannot be renamed.
        """
        self._storage.move(self._pending(path), path)

    def find(self, path: str) -> str:
        """Return the full name of a committed file: it may not have its final one yet.

        Raises:
            ArchiveUnavailableError: it is in neither place.
        """
        pending = self._pending(path)
        while not self._storage.exists(path):
            if self._storage.exists(pending):
                return self._storage.full_name(pending)
            if not self._storage.exists(path):  # not published in the meantime, either
                raise ArchiveUnavailableError(
                    f"the archive has lost {self._storage.full_name(path)}",
                    hint="restore the file; or name the directory into which the archiver writes",
                )
        return self._storage.full_name(path)

    def delete(self, path: str) -> None:
        """Delete a file that the manifest no longer lists, if it exists.

        Raises:
            ArchiveUnavailableError: the file cannot be deleted.
        """
        # The pending one first: its owner may be about to give it its final name.
        self._storage.delete(self._pending(path))
        self._storage.delete(path)

    def discard(self, path: str) -> None:
        """Delete a pending file that is not committed, if it exists."""
        with suppress(ArchiveUnavailableError):  # the next owner sweeps it
            self._storage.delete(self._pending(path))

    def pending(self, grant: Grant) -> list[str]:
        """Return the final paths of the interval's pending files whose commits are decided under this grant.

        Raises:
            ArchiveUnavailableError: the directory cannot be read.
        """
        found = []
        for path in self._storage.list_files(f"{self._name}/{PENDING}"):
            hour, _, name = path.rpartition("/")[2].partition(",")
            owner = name.split("-")[:2]
            if owner[0] == str(grant.interval_id) and int(owner[1]) <= grant.sequencer:
                found.append(f"{self._name}/{hour}/{name}")
        return found

    def _pending(self, path: str) -> str:
        hour, name = path.rsplit("/", 2)[1:]
        return f"{self._name}/{PENDING}/{hour},{name}"


def hour_name(at: Instant) -> str:
    """Return the name of an hour in a path; names of hours are in the order of time."""
    return to_datetime(at).isoformat()[:13]
