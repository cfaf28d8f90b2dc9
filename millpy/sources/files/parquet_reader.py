"""Rows of one Parquet file, a bundle at a time; a position is a number of rows.

Row groups before the position are skipped; the row group of the position is decoded from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millpy.errors import BrokenFileError, SourceUnavailableError
from millpy.ingest.arrow_columns import plain
from millpy.ingest.protocol import FixedBound, TakeBound
from millpy.limits import Limits
from millpy.sources.files.byte_reader import FilePosition
from millpy.sources.files.line_reader import FilePiece
from millpy.sources.files.parquet_pages import (
    PAGE_BYTES_MAX,
    VALUES_MAX,
    bound_pages,
    check_file,
    check_footer,
    is_delta,
)

_VALUE_BYTES = 16


class ParquetReader:
    """A blocking reader of one file.

    Args:
        start: the position to begin at; its `head` goes into all positions.
        opened: the file, which the caller closes.
        fields: the names of the columns to read; empty for all.
        limits: bounds on bundles.
        bound: the bound of a piece, read before each; by default a bundle of `limits`.
        exact: the columns whose decimals stay decimals; the others become floats.
    """

    def __init__(
        self,
        start: FilePosition,
        opened: BinaryIO,
        fields: Sequence[str],
        limits: Limits,
        bound: TakeBound | None = None,
        *,
        exact: Collection[str] = (),
    ) -> None:
        self._exact = exact
        self._bound = bound or FixedBound(limits.bundle_records_max, limits.bundle_bytes_max)
        self._at = msgspec.structs.replace(start, size=0)
        self._waiting: pa.RecordBatch | None = None
        self._sizes: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        with _defects(start):
            self._file = _opened(opened, fields)
        metadata = self._file.metadata
        ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._rows = ends[-1] if ends else 0
        if self._rows < start.offset:
            raise BrokenFileError(
                f"{start.path} has shrunk to {self._rows} rows, and {start.offset} rows of it were already read",
                hint="restore the old file, or use a new graph",
            )
        groups = [index for index, end in enumerate(ends) if end > start.offset]
        self._skip = start.offset - (ends[groups[0] - 1] if groups and groups[0] else 0)
        columns = [name for name in self._file.schema_arrow.names if not fields or name in fields]
        with _defects(start):
            check_file(opened, self._file, columns)
        groups, at_once, self._fault = _readable(opened, self._file, groups, columns)
        at_once = min(at_once, _rows_at_once(self._file, columns, limits))
        self._batches = self._file.iter_batches(
            batch_size=at_once, row_groups=groups, columns=columns, use_threads=False
        )

    @property
    def at(self) -> FilePosition:
        """The current position."""
        return self._at

    def rest(self) -> bytes:
        """Return no bytes: rows after a defect cannot be told apart."""
        return b""

    def read(self) -> FilePiece:
        """Return the next bundle of rows; an empty piece at the end of the file.

        Raises:
            BrokenFileError: the file is truncated or corrupt from here on.
            SourceUnavailableError: the file cannot be read now.
        """
        batch = self._next()
        if batch is None:
            return FilePiece(self._at, format="columns", ended=True)
        count = min(self._rows_within(self._bound.bytes), self._bound.records)
        self._waiting = batch.slice(count) if count < len(batch) else None
        self._sizes = self._sizes[count:]
        before, batch = self._at, batch.slice(0, count)
        self._at = msgspec.structs.replace(before, offset=before.offset + count, line=before.line + count)
        ended = self._at.offset == self._rows
        return FilePiece(
            self._at, _describer(before), batch=plain(batch, self._exact), format="columns", ended=ended, records=count
        )

    def _next(self) -> pa.RecordBatch | None:
        while self._waiting is None:
            with _defects(self._at):
                batch = next(self._batches, None)
                if batch is None and self._fault is not None:
                    raise self._fault
            if batch is None:
                return None
            passed = min(self._skip, len(batch))
            self._skip -= passed
            if passed < len(batch):
                self._waiting = batch.slice(passed)
                with _defects(self._at):
                    self._sizes = sum(map(_sizes, self._waiting.columns), np.zeros(len(self._waiting), np.int64))
        return self._waiting

    def _rows_within(self, bytes_max: int) -> int:
        """Return how many of the waiting rows, at least one, fit into `bytes_max`."""
        if self._sizes[0] > PAGE_BYTES_MAX:
            with _defects(self._at):
                raise ValueError(f"the next row has {self._sizes[0]} bytes, which is too many")
        return max(1, int(np.searchsorted(np.cumsum(self._sizes), bytes_max, side="right")))


def _opened(opened: BinaryIO, fields: Sequence[str]) -> pq.ParquetFile:
    """Open a file with texts read as dictionaries, so that a long text in a million rows is in memory once."""
    check_footer(opened)
    file = pq.ParquetFile(opened, page_checksum_verification=True)
    schema = file.schema
    texts = [
        column.path
        for index, column in enumerate(map(schema.column, range(len(schema))))
        if column.physical_type == "BYTE_ARRAY"
        and column.max_repetition_level == 0
        and not is_delta(file, index)
        and (column.path in fields or (not fields and column.path in file.schema_arrow.names))
    ]
    return pq.ParquetFile(opened, page_checksum_verification=True, read_dictionary=texts) if texts else file


def _readable(
    opened: BinaryIO, file: pq.ParquetFile, groups: Sequence[int], names: Sequence[str]
) -> tuple[list[int], int, ValueError | None]:
    """Return the row groups before one with too large pages, how many rows to decode at once, and its error or None."""
    found: list[int] = []
    deltas = {index for index in range(len(file.schema)) if is_delta(file, index)}
    at_once = VALUES_MAX
    for group in groups:
        try:
            at_once = min(at_once, bound_pages(opened, file, group, names, deltas))
        except ValueError as fault:
            return found, at_once, fault
        found.append(group)
    return found, at_once, None


def _rows_at_once(file: pq.ParquetFile, names: Sequence[str], limits: Limits) -> int:
    """Return how many rows fit into a bundle by the minimum bytes of a row, independently of the file's metadata."""
    wanted = [
        column for column in map(file.schema.column, range(len(file.schema))) if column.path.partition(".")[0] in names
    ]
    row_bytes = sum(max(_VALUE_BYTES, column.length or 0) for column in wanted)
    return max(1, min(limits.bundle_records_max, limits.bundle_bytes_max // max(1, row_bytes)))


def _sizes(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bytes of each value with dictionaries expanded."""
    kind = array.type
    sizes: npt.NDArray[np.int64]
    if pa.types.is_dictionary(kind) and _is_bytes(kind.value_type):
        lengths = _lengths(array.dictionary)
        sizes = lengths[array.indices.fill_null(0).to_numpy(zero_copy_only=False)] if len(lengths) else _zeros(array)
    elif _is_bytes(kind):
        sizes = _lengths(array)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind) or _is_fixed(kind):
        places = _places(array) if _is_fixed(kind) else array.offsets.to_numpy(zero_copy_only=False)
        inner = [array.keys, array.items] if pa.types.is_map(kind) else [array.values]
        ends = np.concatenate(([0], np.cumsum(sum(_sizes(part[places[0] : places[-1]]) for part in inner))))
        sizes = np.diff(ends[places - places[0]])
    elif pa.types.is_struct(kind):
        sizes = sum((_sizes(array.field(place)) for place in range(kind.num_fields)), _zeros(array))
    elif pa.types.is_nested(kind):
        raise ValueError(f"a column has type {kind}, which is not supported")
    else:
        sizes = np.full(len(array), array.nbytes // max(1, len(array)), np.int64)
    return sizes


def _lengths(texts: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = pc.binary_length(texts).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _places(array: pa.FixedSizeListArray) -> npt.NDArray[np.int64]:
    """Return the bounds of the lists in `array.values`."""
    places: npt.NDArray[np.int64] = (array.offset + np.arange(len(array) + 1)) * array.type.list_size
    return places


def _zeros(array: pa.Array) -> npt.NDArray[np.int64]:
    return np.zeros(len(array), np.int64)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


@contextmanager
def _defects(at: FilePosition) -> Iterator[None]:
    """Raise SourceUnavailableError if the file cannot be read now, BrokenFileError if it is not complete Parquet."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise SourceUnavailableError(f"{at.path}: {error}", hint="make the file readable") from error
        raise BrokenFileError(
            f"{at.path}, after row {at.line}: {error}", hint="replace the file; its beginning has been read"
        ) from error


def _describer(before: FilePosition) -> Callable[[int], str]:
    def describe(row: int) -> str:
        return f"{before.path}: row {before.offset + row + 1}"

    return describe
