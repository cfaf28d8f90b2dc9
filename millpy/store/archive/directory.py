"""The directory of an archive: a file is written under `.pending`, and gets its final name once it is committed.

    GRAPH/ARCHIVE/.pending/hour=2026-11-22T08,NAME      written, perhaps committed
    GRAPH/ARCHIVE/hour=2026-11-22T08/NAME               committed

NAME is INTERVAL-SEQUENCER-BUNDLE-TOKEN.parquet. The sequencer tells an interval's owner which pending files no other
process can still commit; the random token keeps files of another database from being overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from millpy.clock import random_id
from millpy.errors import ArchiveUnavailableError
from millpy.model.checkpoint import Grant
from millpy.model.time import Instant, to_datetime

PENDING = ".pending"


class ArchiveDirectory:
    """The files of one archive.

    Args:
        root: the directory of all archives.
        name: the archive's path below it; paths of files begin with it.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._pending = root / name / PENDING

    def write(self, grant: Grant, bundle: int, hour: Instant, content: pa.Buffer) -> str:
        """Write a pending file durably; return its final path below the root.

        Raises:
            ArchiveUnavailableError: the file cannot be written.
        """
        return self._write(f"{self._name}/hour={hour_name(hour)}", grant, str(bundle), content)

    def rewrite(self, grant: Grant, path: str, content: pa.Buffer) -> str:
        """Write another content of a file as a pending file durably; return its final path below the root.

        Raises:
            ArchiveUnavailableError: the file cannot be written.
        """
        folder, name = path.rsplit("/", 1)
        return self._write(folder, grant, name.split("-")[2], content)

    def _write(self, folder: str, grant: Grant, bundle: str, content: pa.Buffer) -> str:
        path = f"{folder}/{grant.interval_id}-{grant.sequencer}-{bundle}-{random_id().hex[:12]}.parquet"
        with _unavailable(self._root / path):
            self._pending.mkdir(parents=True, exist_ok=True)
            with self._pending_file(path).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._pending)
        return path

    def publish(self, path: str) -> None:
        """Give a committed file its final name. A file that has it already is left alone.

        Raises:
            ArchiveUnavailableError: the file cannot be renamed.
        """
        final = self._root / path
        with _unavailable(final):
            final.parent.mkdir(exist_ok=True)
            try:
                self._pending_file(path).rename(final)
            except FileNotFoundError:
                if not final.exists():  # the interval's next owner has published it, unless it is lost
                    raise
            sync_directory(final.parent)
            sync_directory(self._root / self._name)

    def find(self, path: str) -> Path:
        """Return where a committed file is: it may not have its final name yet.

        Raises:
            ArchiveUnavailableError: it is in neither place.
        """
        final, pending = self._root / path, self._pending_file(path)
        while not final.exists():
            if pending.exists():
                return pending
            if not final.exists():  # not published in the meantime, either
                raise ArchiveUnavailableError(
                    f"the archive has lost {final}",
                    hint="restore the file; or name the directory into which the archiver writes",
                )
        return final

    def delete(self, path: str) -> None:
        """Delete a file that the manifest no longer lists, if it exists.

        Raises:
            ArchiveUnavailableError: the file cannot be deleted.
        """
        # The pending one first: its owner may be about to give it its final name.
        for file in (self._pending_file(path), self._root / path):
            with _unavailable(file):
                file.unlink(missing_ok=True)

    def discard(self, path: str) -> None:
        """Delete a pending file that is not committed, if it exists."""
        with suppress(OSError):  # the next owner sweeps it
            self._pending_file(path).unlink()

    def pending(self, grant: Grant) -> list[str]:
        """Return the final paths of the interval's pending files whose commits are decided under this grant.

        Raises:
            ArchiveUnavailableError: the directory cannot be read.
        """
        found = []
        with _unavailable(self._pending):
            for entry in self._pending.iterdir() if self._pending.exists() else ():
                hour, _, name = entry.name.partition(",")
                owner = name.split("-")[:2]
                if owner[0] == str(grant.interval_id) and int(owner[1]) <= grant.sequencer:
                    found.append(f"{self._name}/{hour}/{name}")
        return found

    def _pending_file(self, path: str) -> Path:
        hour, name = path.rsplit("/", 2)[1:]
        return self._pending / f"{hour},{name}"


def hour_name(at: Instant) -> str:
    """Return the name of an hour in a path; names of hours are in the order of time."""
    return to_datetime(at).isoformat()[:13]


@contextmanager
def _unavailable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArchiveUnavailableError(
            f"the archive cannot use {path}: {error.strerror}",
            hint="make room, or restore the directory and its rights",
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
