"""Where archives are: a few operations on files, which a local directory and an object store can do.

`storage_at` returns the storage at a place. A file of it has a full name, by which any process reads it: a task of
Spark has no storage, only names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from millpy.store.archive.local_storage import LocalStorage

READERS = 8
"""Files that are looked at together: each waits for a disk or a network."""
Item = TypeVar("Item")
Result = TypeVar("Result")


class ArchiveStorage(Protocol):
    """Files below one root, by their paths. Every operation raises ArchiveUnavailableError if it cannot be done."""

    def full_name(self, path: str) -> str:
        """Return the name by which any process reads a file."""
        ...

    def create(self, path: str, content: pa.Buffer) -> None:
        """Write a new file durably."""
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

    def below(self, folder: str) -> list[str]:
        """Return the paths of all files below a folder; none if there is no such folder."""
        ...


def storage_at(place: str | Path) -> ArchiveStorage:
    """Return the storage at a place."""
    return LocalStorage(Path(place))


def parquet_file(name: str | Path) -> pq.ParquetFile:
    """Open an archived file by its full name."""
    return pq.ParquetFile(name)


def parquet_metadata(name: str | Path) -> pq.FileMetaData:
    """Read the metadata of an archived file by its full name."""
    return pq.read_metadata(name)


def together(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of a function of files, in their order."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(do, items))
