"""Rows of one Parquet file, a bundle at a time; a position is a number of rows.

Row groups before the position are skipped, the one that holds it is decoded from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import BinaryIO

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.errors import BrokenFileError, SourceUnavailableError
from millpy.injectors.files_bytes import FilePosition
from millpy.injectors.files_lines import Piece
from millpy.injectors.protocol import FixedBound, TakeBound
from millpy.injectors.tables import plain
from millpy.limits import Limits


class ParquetReader:
    """Blocking reader of one file.

    Args:
        start: where to begin; its `head` goes into all positions.
        opened: the file; whoever opened it closes it.
        fields: names of the columns that are wanted; empty for all.
        bound: how much a piece may hold, asked before each; by default a bundle of `limits`.
    """

    def __init__(
        self,
        start: FilePosition,
        opened: BinaryIO,
        fields: Sequence[str],
        limits: Limits,
        bound: TakeBound | None = None,
    ) -> None:
        self._bound = bound or FixedBound(limits.bundle_records_max, limits.bundle_bytes_max)
        self._at = msgspec.structs.replace(start, size=0)
        self._waiting: pa.RecordBatch | None = None
        with _defects(start):
            self._file = pq.ParquetFile(opened, page_checksum_verification=True)
        metadata = self._file.metadata
        ends = list(accumulate(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
        self._rows = ends[-1] if ends else 0
        if self._rows < start.offset:
            raise BrokenFileError(
                f"{start.path} is shorter ({self._rows} rows) than what was already read of it ({start.offset})",
                hint="put the old file back, or use a new graph",
            )
        groups = [index for index, end in enumerate(ends) if end > start.offset]
        self._skip = start.offset - (ends[groups[0] - 1] if groups and groups[0] else 0)
        columns = [name for name in self._file.schema_arrow.names if not fields or name in fields]
        self._batches = self._file.iter_batches(
            batch_size=limits.bundle_records_max, row_groups=groups, columns=columns, use_threads=False
        )

    @property
    def at(self) -> FilePosition:
        """Where reading has come to."""
        return self._at

    def rest(self) -> bytes:
        """Nothing: rows behind a defect have no bytes of their own."""
        return b""

    def read(self) -> Piece:
        """The next bundle of rows; empty at the end of the file.

        Raises:
            BrokenFileError: the file is cut or corrupt from here on.
            SourceUnavailableError: it cannot be read now.
        """
        batch = self._next()
        if batch is None:
            return Piece(self._at, format="columns", ended=True)
        count, bytes_max = len(batch), self._bound.bytes
        if batch.nbytes > bytes_max:
            count = max(1, count * bytes_max // batch.nbytes)
        count = min(count, self._bound.records)
        self._waiting = batch.slice(count) if count < len(batch) else None
        before, batch = self._at, batch.slice(0, count)
        self._at = msgspec.structs.replace(before, offset=before.offset + count, line=before.line + count)
        ended = self._at.offset == self._rows
        return Piece(self._at, _describer(before), batch=batch, format="columns", ended=ended)

    def _next(self) -> pa.RecordBatch | None:
        while self._waiting is None:
            with _defects(self._at):
                batch = next(self._batches, None)
            if batch is None:
                return None
            passed = min(self._skip, len(batch))
            self._skip -= passed
            if passed < len(batch):
                self._waiting = plain(batch.slice(passed))
        return self._waiting


@contextmanager
def _defects(at: FilePosition) -> Iterator[None]:
    """Tell a file that cannot be reached from one that is no whole Parquet file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise SourceUnavailableError(f"{at.path}: {error}", hint="is the file readable?") from error
        raise BrokenFileError(
            f"{at.path}, behind row {at.line}: {error}", hint="what could be read before that was read"
        ) from error


def _describer(before: FilePosition) -> Callable[[int], str]:
    def describe(row: int) -> str:
        return f"{before.path}: row {before.offset + row + 1}"

    return describe
