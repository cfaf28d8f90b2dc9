"""Reading one file after the other in a thread: choosing the next file and position, and reacting to defects."""

from __future__ import annotations

import os
import threading
from decimal import Decimal
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from millpy.errors import BrokenFileError, SourceUnavailableError
from millpy.ingest.protocol import RejectedRow, TakeBound
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.files.byte_reader import (
    REPLACED_HINT,
    FilePosition,
    StoppedError,
    check_grown,
    check_same,
    recognize,
    tail_of,
)
from millpy.sources.files.csv_header import HeaderError
from millpy.sources.files.file_queue import FileQueue, NextFile, Notes
from millpy.sources.files.line_reader import ExpandedLines, FilePiece, Format, LineReader
from millpy.sources.files.parquet_reader import ParquetReader

BROKEN = "broken_file"
Broken = Literal["stop", "dead_letter"]


def format_of(path: str) -> Format:
    """Return the format for a file's suffix, ignoring case and .gz: .csv, .parquet or .pq, else NDJSON."""
    ending = Path(path.lower().removesuffix(".gz")).suffix
    return {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}.get(ending, "json")  # type: ignore[return-value]


class FileReader:
    """A blocking reader of a source partition.

    Args:
        queue: the order of the files.
        notes: the files that have been read to their end.
        format: the format of all files; None chooses it by each file's suffix.
        broken: the reaction to a defect: "stop" or "dead_letter".
        record_type: the type of the records; None in tests that look at bytes only.
        limits: bounds on records, bundles and reads.
        bound: the bound of a piece; by default a bundle of `limits`.
        lines: what expands lines by a payload format; None for JSON, CSV and Parquet.
    """

    def __init__(  # noqa: PLR0913 - the settings of a source and its bounds
        self,
        queue: FileQueue,
        notes: Notes,
        *,
        format: Format | None,
        broken: Broken,
        record_type: RecordType | None,
        limits: Limits,
        bound: TakeBound | None = None,
        lines: ExpandedLines | None = None,
    ) -> None:
        self._queue = queue
        self._notes = notes
        self._format = format
        self._broken = broken
        self._record_type = record_type
        # The columns to read from Parquet files; empty for all.
        self._fields = tuple(record_type.struct.__struct_encode_fields__) if record_type is not None else ()
        self._exact = frozenset() if record_type is None else record_type.named(Decimal) | record_type.named(int)
        self._limits = limits
        self._bound = bound
        self._lines = lines
        self._opened: BinaryIO | None = None
        self._file: LineReader | ParquetReader | None = None
        self._size = 0  # size of the open file when it was opened
        self._stopping = threading.Event()
        self._resume: FilePosition | None = None
        self._at = FilePosition("")
        self._pending: dict[str, bytes | None] = {}
        self._unreadable: str | None = None  # "" for the directory

    def open(self, position: bytes | None) -> None:
        """Set the stored position; `read` seeks to it, because that may take long.

        Raises:
            ConfigError: a file or the directory is missing.
            BrokenFileError: the file at the position is not the file that was read.
            SourceUnavailableError: the file cannot be read.
        """
        self._queue.check()
        if position is None:
            return
        self._at = msgspec.json.decode(position, type=FilePosition)
        done = self._notes.done.get(self._at.path)
        if self._at.path and (done is None or self._at.offset > done.offset):  # otherwise it was read to its end
            self._resume = self._at
            if self._broken == "stop":
                with self._queue.open(self._at.path) as opened:
                    check_same(self._at, opened)

    def stop(self) -> None:
        """Make a `read` in another thread end soon."""
        self._stopping.set()

    def close(self) -> None:
        """Close the open file."""
        self._file = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def is_waiting(self) -> bool:
        """Tell whether a file has not settled yet."""
        return self._queue.is_waiting()

    def is_unreadable(self) -> bool:
        """Tell whether a file that is still there could not be read when it was tried last, or the directory."""
        return self._unreadable is not None and (not self._unreadable or os.path.lexists(self._unreadable))

    def read(self) -> FilePiece | None:
        """Return the next piece; None when there is none now.

        Raises:
            BrokenFileError: a file has a defect, and `broken="stop"`.
            SourceUnavailableError: a file cannot be read now.
            StoppedError: after `stop`.
        """
        while not self._stopping.is_set():
            begun, path = self._at, ""
            try:
                if self._file is None:
                    following = NextFile(self._resume) if self._resume is not None else self._queue.next()
                    self._has_read("")
                    if following is None:
                        return FilePiece(self._at, finished=True) if self._queue.is_over() else None
                    begun, path = following.position, following.position.path
                    self._begin(following)
                assert self._file is not None
                begun, path = self._file.at, self._file.at.path
                piece = self._file.read()
                self._has_read(path)
            except BrokenFileError as error:
                if self._broken == "stop":
                    raise
                self._has_read(path)
                return self._dead_letter(error, begun)
            except SourceUnavailableError:
                self._unreadable = path
                # The error loses the reader's buffer: start again behind the last piece that was returned.
                if self._file is not None:
                    self._resume = self._file.at
                self.close()
                raise
            self._at = piece.after
            if piece.ended:
                self._finish(piece)
            if piece.block or piece.payloads or piece.batch is not None or piece.ended or piece.moved:
                piece.notes = {**self._pending, **piece.notes}
                self._pending = {}
                return piece
        raise StoppedError

    def _has_read(self, path: str) -> None:
        if self._unreadable == path:
            self._unreadable = None

    def _begin(self, following: NextFile) -> None:
        position = following.position
        self._size = 0 if following.grown else position.size
        if following.problem:
            raise BrokenFileError(following.problem, hint=REPLACED_HINT)
        self._opened = opened = self._queue.open(position.path)
        if following.grown:
            check_grown(position, opened)
        elif position.offset:
            check_same(position, opened)
        head, head_bytes, self._size = recognize(position.path, opened)
        position = msgspec.structs.replace(position, head=head, head_bytes=head_bytes)
        kind = self._format or format_of(position.path)
        if kind == "parquet":
            self._file = ParquetReader(position, opened, self._fields, self._limits, self._bound, exact=self._exact)
        else:
            self._file = LineReader(
                position,
                opened,
                kind,
                self._limits,
                self._stopping,
                self._bound,
                record_type=self._record_type if self._lines is None else None,
                lines=self._lines,
            )
        self._resume = None
        self._pending.update(self._queue.changed_notes())

    def _finish(self, piece: FilePiece) -> None:
        """Record that a file has been read to its end."""
        assert self._opened is not None, piece.after
        changed_ns, path = _changed_ns(self._opened), piece.after.path
        # For a plain file, the bytes read count: a writer may be appending to it at this moment.
        is_plain = not path.lower().endswith(".gz")
        size = self._file.taken if is_plain and isinstance(self._file, LineReader) else self._size
        tail = tail_of(path, self._opened, size)
        self.close()
        done = msgspec.structs.replace(piece.after, size=size, changed_ns=changed_ns, tail=tail)
        piece.notes = self._notes.finish(done)
        piece.finished = self._queue.is_over()

    def _dead_letter(self, error: BrokenFileError, begun: FilePosition) -> FilePiece:
        """Return the rest of a broken file as one dead letter; nothing more of a file that has only grown since."""
        rest = self._file.rest() if self._file is not None else b""
        if isinstance(error, HeaderError):
            rest = error.header
        at = self._file.at if self._file is not None else begun
        head, is_known = self._head_of_broken(at)
        # The opened file counts: a complete file may have replaced it since, and must be read.
        changed_ns = begun.changed_ns if self._opened is None else _changed_ns(self._opened)
        self.close()
        self._resume = None
        if not self._size:
            self._size, changed_ns = _size_of(at.path)
        self._at = msgspec.structs.replace(at, size=self._size, broken=True, changed_ns=changed_ns, broken_head=head)
        notes = {**self._pending, **self._notes.finish(self._at)}
        self._pending = {}
        if is_known:
            return FilePiece(self._at, notes=notes, finished=self._queue.is_over(), moved=True)
        place = f"{at.path}:{at.line + 1} (byte {at.offset})"
        return FilePiece(
            self._at,
            lambda _: place,
            payloads=[rest],
            refused=(RejectedRow(0, BROKEN, error.message),),
            notes=notes,
            finished=self._queue.is_over(),
            records=1,
        )

    def _head_of_broken(self, at: FilePosition) -> tuple[tuple[str, int] | None, bool]:
        """Return a hash of a broken file's first bytes with their number, and whether it is a dead letter already.

        It is one if the file was broken at this place before, and still begins as it did then: each look at a file that
        grows finds the same defect.
        """
        before = self._notes.done.get(at.path)
        known = before.broken_head if before is not None and before.broken and before.offset == at.offset else None
        try:
            opened = self._opened or self._queue.open(at.path)
            try:
                head, head_bytes, _ = recognize(at.path, opened)
                return (head, head_bytes), known is not None and recognize(at.path, opened, known[1])[:2] == known
            finally:
                if opened is not self._opened:
                    opened.close()
        except (BrokenFileError, SourceUnavailableError):  # it has gone
            return None, False


def _changed_ns(opened: BinaryIO) -> int:
    return os.fstat(opened.fileno()).st_mtime_ns


def _size_of(path: str) -> tuple[int, int]:
    """Return size and time of change of a file that could not be opened; zeros when it does not exist."""
    try:
        state = Path(path).lstat()
    except OSError:
        return 0, 0
    return state.st_size, state.st_mtime_ns
