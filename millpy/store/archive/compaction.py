"""Compaction: adjacent small files of an hour as one file, with bundles and their order as they were.

A merged file has one row group for each bucket, as any other, with the records of the files in their order. So a reader
finds the same bundles, and a key's records in the same order.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.errors import ArchiveUnavailableError, CorruptionError
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.archive.parquet import METADATA, FileDescription, RowGroup, open_writer
from millpy.store.archive.reader import described
from millpy.store.archive.storage import parquet_file

MERGED_RECORDS_MAX = 1_000_000
MERGED_BYTES_MAX = 32_000_000
"""Bounds of a merged file, and of the memory of its readers, which decode whole files."""
TRY_AGAIN_S, TRY_AGAIN_S_MAX = 3_600.0, 86_400.0
"""Seconds until a damaged file is tried again: at first, and at most."""
MERGED_FILES_MAX = 200
"""How many files are open at a time; what is left is merged in the next round."""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file that may be merged with the one behind it.

    Attributes:
        path: path below the directory of all archives.
        records, bytes: its size.
    """

    path: str
    records: int
    bytes: int


def first_run(files: Sequence[SmallFile], unlike: Container[str] = (), alone: Container[str] = ()) -> list[SmallFile]:
    """Return the first adjacent files that fit into one file; an empty list if there are none.

    Args:
        files: all files of an hour, in their order.
        unlike: paths of files that cannot be merged with the file before.
        alone: paths of files that cannot be merged with any.
    """
    run: list[SmallFile] = []
    for file in files:
        if file.path in alone:
            if len(run) > 1:
                break
            run = []
        elif file.path not in unlike and len(run) < MERGED_FILES_MAX and _fit([*run, file]):
            run.append(file)
        elif len(run) > 1:
            break
        else:
            run = [file]
    return run if len(run) > 1 else []


class DamagedFiles:
    """Files that cannot be read: what is beside them is merged without them.

    They are tried again after a time that doubles with each attempt, up to a day: someone may have restored them.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}

    def add(self, path: str, now: float) -> float:
        """Add a file; return for how many seconds it is left alone. Times are of one clock."""
        wait_s, _ = self._found.get(path, (TRY_AGAIN_S / 2, 0.0))
        wait_s = min(2 * wait_s, TRY_AGAIN_S_MAX)
        self._found[path] = (wait_s, now + wait_s)
        return wait_s

    def waiting(self, now: float) -> set[str]:
        """Return the files that are left alone."""
        return {path for path, (_, until) in self._found.items() if now < until}


def can_be_read(directory: ArchiveDirectory, path: str) -> bool:
    """Tell whether all records of a file can be read."""
    try:
        with parquet_file(directory.find(path)) as source:
            described(source.metadata)
            for place in range(source.num_row_groups):
                source.read_row_group(place)
    except (ArchiveUnavailableError, CorruptionError, OSError, pa.ArrowException):
        return False
    return True


def _fit(files: Sequence[SmallFile]) -> bool:
    return (
        sum(file.records for file in files) <= MERGED_RECORDS_MAX
        and sum(file.bytes for file in files) <= MERGED_BYTES_MAX
    )


def merge(files: Sequence[str]) -> tuple[pa.Buffer, int] | None:
    """Return the content of a merged file, and how many of the files are in it; None if the first two do not fit.

    Files of one layout can be merged: a deployment may have added a field in between. One row group is in memory at a
    time, and the whole result, encoded.

    Args:
        files: their full names.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(parquet_file(file)) for file in files]
        descriptions = [described(source.metadata) for source in sources]
        layouts = [
            (source.schema_arrow.remove_metadata(), description.buckets)
            for source, description in zip(sources, descriptions, strict=True)
        ]
        count = len(list(takewhile(lambda layout: layout == layouts[0], layouts)))
        merged = list(zip(sources, descriptions, strict=True))[:count]
        return (_merged(merged, *layouts[0]), count) if count > 1 else None


def _merged(files: Sequence[tuple[pq.ParquetFile, FileDescription]], schema: pa.Schema, buckets: int) -> pa.Buffer:
    sink, groups = pa.BufferOutputStream(), list[RowGroup]()
    with open_writer(sink, schema) as writer:
        for bucket in range(buckets):
            table = _bucket(files, bucket, schema)
            if len(table):
                writer.write_table(table, row_group_size=len(table))
                groups.append((bucket, len(table)))
        bundles = [bundle for _, description in files for bundle in description.bundles]
        description = FileDescription(buckets, bundles, groups)
        writer.add_key_value_metadata({METADATA: msgspec.json.encode(description).decode()})
    return sink.getvalue()


def _bucket(files: Sequence[tuple[pq.ParquetFile, FileDescription]], bucket: int, schema: pa.Schema) -> pa.Table:
    tables = [
        source.read_row_group(place).cast(schema)
        for source, description in files
        for place, (of, _) in enumerate(description.row_groups)
        if of == bucket
    ]
    return pa.concat_tables(tables) if tables else schema.empty_table()
