"""Where archives are: a few operations on files, which a local directory and an object store can do.

`storage_at` returns the storage at a place. A file of it has a full name, by which any process reads it: a task of
Spark has no storage, only names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from millpy.errors import ArchiveUnavailableError, CorruptionError, UsageError
from millpy.store.archive.local_storage import LocalStorage
from millpy.store.archive.object_storage import ObjectStorage, read_object
from millpy.store.archive.parquet import METADATA

PENDING = ".pending"
"""The folder of files that are not published; a final name is behind its hour and a comma there."""
TAIL_BYTES = 65_536
"""What is read of a file in an object store for its metadata, which usually are shorter."""
OWNER = ".millpy-database"
"""The file that names the database to which all archives of a place belong."""
READERS = 8
"""Files that are looked at together: each waits for a disk or a network."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class ArchiveStorage(Protocol):
    """Files below one root, by their paths. Every operation raises ArchiveUnavailableError if it cannot be done.

    Attributes:
        settled_s: seconds after which a request of a process that has lost the archive is no longer under way.
    """

    settled_s: float

    def full_name(self, path: str) -> str:
        """Return the name by which any process reads a file."""
        ...

    def create(self, path: str, content: pa.Buffer) -> None:
        """Write a new file durably."""
        ...

    def create_once(self, path: str, content: bytes) -> bytes:
        """Write a file durably unless there is one; return the content that it has."""
        ...

    def move(self, source: str, target: str) -> None:
        """Give a file another name durably, unless it has it already."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        ...

    def list_files(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder; none if there is no such folder."""
        ...


def storage_at(place: str | Path) -> ArchiveStorage:
    """Return the storage at a place: a directory, or a URL.

    Raises:
        UsageError: there can be no archive.
    """
    text = str(place)
    if "://" not in text:
        return LocalStorage(Path(place))
    if text.startswith("file://"):
        return LocalStorage(Path(unquote(urlsplit(text).path)))
    return ObjectStorage(text)


def claim_place(place: str | Path, database: str) -> None:
    """Mark a place as that of a database's archives.

    An archiver deletes pending files of its intervals that its database does not know, so it must see no other's.

    Args:
        place: a directory, or a URL.
        database: what tells the database from all others.

    Raises:
        UsageError: it belongs to another database.
        ArchiveUnavailableError: it cannot be read or written.
    """
    storage = storage_at(place)
    owner = storage.create_once(OWNER, database.encode()).decode(errors="replace")
    if owner != database:
        raise UsageError(
            f"{storage.full_name('')} has the archives of another database",
            hint=f"name another place; or delete {OWNER} there, if this database was restored from that one",
        )


def parquet_file(name: str | Path) -> pq.ParquetFile:
    """Open an archived file by its full name. One that is in an object store is in memory then.

    Raises:
        ArchiveUnavailableError: it cannot be read.
        FileNotFoundError: it was deleted.
        CorruptionError: it is not what an archiver has written.
    """
    return _published(str(name), _opened)


def parquet_metadata(name: str | Path) -> pq.FileMetaData:
    """Read the metadata of an archived file by its full name; see `parquet_file`."""
    return _published(str(name), _metadata)


def _published(name: str, read: Callable[[str], Result]) -> Result:
    """Read a file. A pending one may have got its final name since it was found."""
    try:
        return _whole(name, read)
    except FileNotFoundError:
        folder, pending, last = name.rpartition(f"/{PENDING}/")
        if not pending:
            raise
        return _whole(f"{folder}/{last.replace(',', '/', 1)}", read)


def _whole(name: str, read: Callable[[str], Result]) -> Result:
    try:
        return read(name)
    except FileNotFoundError:
        raise
    except pa.ArrowInvalid as error:
        raise CorruptionError(
            f"{name} is not a whole file of an archive: {error}",
            hint="copy it again, or restore it; or move it away, if no archiver has written it",
        ) from error
    except OSError as error:
        raise ArchiveUnavailableError(
            f"{name} cannot be read: {error}", hint="restore its rights, or its disk"
        ) from error


def _opened(name: str) -> pq.ParquetFile:
    file = pq.ParquetFile(pa.BufferReader(read_object(name)) if "://" in name else name)
    _check_described(file.metadata)
    return file


def _metadata(name: str) -> pq.FileMetaData:
    if "://" in name:
        end = read_object(name, TAIL_BYTES)
        length = int.from_bytes(end[-8:-4], "little") + 8  # Parquet: the metadata, their length, a magic number
        found = pq.read_metadata(pa.BufferReader(end if length <= len(end) else read_object(name, length)))
    else:
        found = pq.read_metadata(name)
    _check_described(found)
    return found


def _check_described(metadata: pq.FileMetaData) -> None:
    if METADATA.encode() not in (metadata.metadata or {}):
        raise pa.ArrowInvalid(f"it has no metadata {METADATA!r}")


def published_files(storage: ArchiveStorage, archive: str) -> list[str]:
    """Return the paths of an archive's published files. A copy may hold what other programs have left, too."""
    return [
        path
        for path in storage.list_files(archive)
        if path.startswith(f"{archive}/hour=") and path.endswith(".parquet")
    ]


def together(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of a function of files, in their order."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(do, items))
