"""Lines of one file, NDJSON or CSV, cut into bundles by position, without a loop over lines.

A last record without a newline is a record. When its file has grown behind it, it is whole if a newline follows; else
it was read too early: the whole record then becomes one dead letter, so that nothing is lost.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

import msgspec
import numpy as np
import pyarrow as pa

from millpy.errors import BrokenFileError
from millpy.formats import Format as PayloadFormat
from millpy.formats import Message
from millpy.formats.byte_order_marks import MARK_BYTES_MAX, UTF_8, is_wide, wide_mark
from millpy.formats.message import NO_HEAD, FileHead
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.protocol import FixedBound, RejectedRow, TakeBound
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.files.byte_reader import REPLACED_HINT, Bytes, FilePosition, open_bytes
from millpy.sources.files.csv_header import check_format_header, check_header, column_names
from millpy.sources.files.csv_records import Positions, record_ends
from millpy.sources.files.named_paths import PathFields
from millpy.sources.files.transcoding import Utf8Reader

Format = Literal["json", "csv", "parquet"]
NONE: Positions = np.empty(0, np.int64)
_READ_BYTES = 4_000_000
HEADER_BYTES_MAX = 65_536
CONTINUED = "continued_line"
"""Reason of the dead letter of a record that was read before it was written to its end."""
(_NEWLINE,) = b"\n"
_IS_BLANK = np.array([bytes([code]).isspace() for code in range(256)])


@dataclass(slots=True)
class FilePiece:
    """A bundle of one file.

    Attributes:
        after: the position behind the piece, at which reading resumes.
        describe: returns the origin of a row; called only for dead letters.
        ended: whether this is the last piece of the file.
        notes: see `SourceBatch`.
        finished: see `SourceBatch`.
        records: see `SourceBatch`.
        messages: see `SourceBatch`.
        moved: whether the position has moved, even if there are no records.
    """

    after: FilePosition
    describe: Callable[[int], str] = str
    block: bytes = b""
    payloads: Sequence[bytes] = ()
    batch: pa.RecordBatch | None = None
    header: tuple[str, ...] = ()
    refused: tuple[RejectedRow, ...] = ()
    format: Literal["json", "csv", "columns"] = "json"
    ended: bool = False
    notes: dict[str, bytes | None] = field(default_factory=dict)
    finished: bool = False
    records: int = 0
    messages: Mapping[int, Message] = field(default_factory=dict)
    moved: bool = False


class ExpandedLines:
    """What expands the lines of files by a payload format.

    Args:
        expander: the source's expander.
        now_us: returns the time, which is that of the arrival of a line.
        format, record_type: the source's.
        fields: what the names of files add to records.

    Attributes:
        head: the lines of a file that are no messages.
        encoding: the encoding of a file whose byte order mark says no other; None for UTF-8.
    """

    def __init__(
        self,
        expander: Expander,
        now_us: Callable[[], int],
        format: PayloadFormat,
        record_type: RecordType,
        fields: PathFields,
    ) -> None:
        self._expander = expander
        self._fields = fields
        self._now_us = now_us
        self._format, self._record_type = format, record_type
        self.head = format.head
        self.encoding = format.text_encoding

    def check_header(self, path: str, line: bytes) -> None:
        """Raise HeaderError for a header that cannot give a record."""
        check_format_header(path, line, self._format, self._record_type, self._fields.find(path)[1])

    def messages(self, lines: Sequence[bytes], path: str, header: bytes | None) -> Iterator[Message]:
        """Yield lines of a file as messages that arrive now."""
        arrived_at, (ending, _) = self._now_us(), self._fields.find(path)
        for line in lines:
            yield Message(line.removesuffix(b"\r"), path, arrived_at=arrived_at, header=header, ending=ending)

    def expand(self, lines: Sequence[bytes], path: str, header: bytes | None, bound: TakeBound) -> Expansion:
        """Expand lines, from the front, as many as fit into a bundle. Blank lines have no records."""
        messages = self.messages(lines, path, header)
        return self._expander.expand(messages, records_max=bound.records, bytes_max=bound.bytes, skip_blank=True)


class LineReader:
    """A blocking reader of one file.

    Args:
        start: the position to begin at; its `head` goes into all positions.
        opened: the file, which the caller closes.
        kind: "json" or "csv".
        limits: bounds on records, bundles and reads.
        stopping: makes reading raise StoppedError once it is set.
        bound: the bound of a piece, read before each; by default a bundle of `limits`.
        record_type: the type of the records, which the header of a CSV file has to give; None for any.
        lines: what expands lines by a payload format, for the kind "json"; None for lines that are records.
    """

    def __init__(  # noqa: PLR0913 - as `FileReader`
        self,
        start: FilePosition,
        opened: BinaryIO,
        kind: Literal["json", "csv"],
        limits: Limits,
        stopping: threading.Event,
        bound: TakeBound | None = None,
        record_type: RecordType | None = None,
        lines: ExpandedLines | None = None,
    ) -> None:
        self._opened = opened
        self._stopping = stopping
        self._kind = kind
        self._record_type = record_type
        self._lines = lines
        self._header_line: bytes | None = None
        self._bound = bound or FixedBound(limits.bundle_records_max, limits.bundle_bytes_max)
        self._records_max, self._bytes_max = self._bound.records, self._bound.bytes
        self._record_bytes_max = limits.record_bytes_max
        # A longer line is not read whole. What is kept of it must be too long also for its format.
        self._line_bytes_max = limits.record_bytes_max if lines is None else limits.message_bytes_max
        self._read_bytes = min(_READ_BYTES, limits.bundle_bytes_max)
        self._header: tuple[str, ...] = ()
        self._at = msgspec.structs.replace(start, offset=0, line=0, size=0)
        self._buffer = b""
        self._ends: Positions = NONE  # ends of records in the buffer: the index of each newline
        self._start = 0  # start of the unread bytes in the buffer
        self._line = 0  # index in _ends of the first unread newline
        self._at_end = False
        self._continued = 0  # bytes of the next record that were read as a record before
        self._defect: BrokenFileError | None = None
        self._stream = self._open()
        self._check_mark(self._peek(MARK_BYTES_MAX))
        if self._kind == "csv":
            self._read_header()
        elif self._buffer.startswith(UTF_8):
            self._skip(len(UTF_8), lines=0)
            self._header_line = UTF_8 if lines is not None and (lines.head.has_header or lines.encoding) else None
        if lines is not None:
            self._read_head(lines)
        if start.offset > self._at.offset:
            self._seek(start)

    @property
    def at(self) -> FilePosition:
        """The current position."""
        return self._at

    @property
    def taken(self) -> int:
        """The bytes of the file up to its end, when it has been read to that; decompressed."""
        return self._stream.taken if isinstance(self._stream, Utf8Reader) else self._at.offset

    def rest(self) -> bytes:
        """Return the unread bytes before a defect: the beginning of a record."""
        return self._buffer[self._start : self._start + self._record_bytes_max]

    def _open(self) -> Bytes:
        stream = open_bytes(self._at.path, self._opened, self._stopping)
        encoding = None if self._lines is None else self._lines.encoding
        return Utf8Reader(self._at.path, stream, encoding) if encoding and is_wide(encoding) else stream

    def _check_mark(self, begin: bytes) -> None:
        """Raise BrokenFileError for a file that its mark says to be UTF-16 or UTF-32; a format with a header does."""
        wide, lines = wide_mark(begin), self._lines
        # What decodes the first line says it, too, and better.
        if wide is None or (lines is not None and lines.head == FileHead(has_header=True)):
            return
        is_csv = self._kind == "csv" or (lines is not None and lines.encoding is not None)
        hint = f"read it by format=Csv({wide.setting}), or convert it to UTF-8" if is_csv else "convert it to UTF-8"
        raise BrokenFileError(f"{self._at.path} is {wide.name}, by its byte order mark; {hint}", hint=hint)

    def _read_header(self) -> None:
        while not len(self._ends) and not self._at_end:
            self._fill()
        if not self._buffer:
            return  # an empty file has no records, so it needs no header
        end = int(self._ends[0]) + 1 if len(self._ends) else len(self._buffer)
        text = self._buffer[:end].removeprefix(UTF_8).decode(errors="replace").rstrip("\r\n")
        try:
            header = column_names(text)
        except csv.Error:  # lines that end in a lone CR
            header = ()
        if len(set(header)) != len(header) or not header:
            raise BrokenFileError(
                f"{self._at.path}: the first line is not a header with distinct names: {text[:200]!r}",
                hint="begin a CSV file with the names of its columns",
            )
        if self._record_type is not None:
            line = self._buffer[: min(end, self._record_bytes_max)].removeprefix(UTF_8).rstrip(b"\r\n")
            check_header(self._at.path, line, header, self._record_type)
        self._header = header
        self._skip(end, lines=self._buffer[:end].count(b"\n"))

    def _read_head(self, lines: ExpandedLines) -> None:
        """Read the header of a payload format, and pass over the other lines that are no messages."""
        head = lines.head
        if head == NO_HEAD or self._is_over():
            return  # an empty file has no messages, so it needs no header
        for _ in range(head.skip):
            self._read_line(f"it ends before line {head.skip + 1}")
        if not head.has_header:
            # This tells the format that a line is not a message with such lines of its own.
            self._header_line = self._header_line or b""
            return
        missing = "it has only blank lines and comments" + (f" behind line {head.skip}" if head.skip else "")
        while head.is_passed(line := self._read_line(missing)):
            pass
        # The mark tells the format the encoding of all lines.
        self._header_line = (self._header_line or b"") + line
        lines.check_header(self._at.path, self._header_line)
        for _ in range(head.skip_below):
            if not self._is_over():
                self._read_line()

    def _is_over(self) -> bool:
        """Tell whether the file has no more bytes."""
        while self._start == len(self._buffer) and not self._at_end:
            self._fill()
        return self._start == len(self._buffer)

    def _read_line(self, missing: str = "") -> bytes:
        """Read a line of up to HEADER_BYTES_MAX: a dead letter of the file has the header, too.

        Raises:
            BrokenFileError: it is longer, or the file is over, which means what `missing` says.
        """
        path = self._at.path
        if self._is_over():
            raise self._defect or BrokenFileError(
                f"{path} has no header: {missing}", hint="check that the file fits its format=Csv(…)"
            )
        while (
            self._line == len(self._ends) and not self._at_end and len(self._buffer) - self._start <= HEADER_BYTES_MAX
        ):
            self._fill()
        whole = self._line < len(self._ends)
        end = int(self._ends[self._line]) + 1 if whole else len(self._buffer)
        line = self._buffer[self._start : end]
        if len(line) > HEADER_BYTES_MAX:
            raise BrokenFileError(
                f"{path}: line {self._at.line + 1} has more than {HEADER_BYTES_MAX} bytes",
                hint="begin the file with the names of its columns, or with shorter lines before them",
            )
        self._skip(len(line), lines=1)
        return line.rstrip(b"\r\n")

    def _peek(self, count: int) -> bytes:
        self._fill()
        return self._buffer[:count]

    def _skip(self, count: int, *, lines: int) -> None:
        self._start += count
        self._line += int(np.searchsorted(self._ends[self._line :], self._start))
        self._advance(count, lines)

    def _advance(self, count: int, lines: int) -> None:
        at = self._at
        self._at = FilePosition(at.path, at.offset + count, at.line + lines, at.head, at.head_bytes)

    def _seek(self, start: FilePosition) -> None:
        self._stream = self._open()
        # A truncated or replaced file that is shorter must not look like a file that was read to its end.
        cut = start.cut if start.cut <= self._line_bytes_max else 0
        offset = start.offset - cut
        reached = self._stream.pass_over(offset)
        if reached < offset:
            raise BrokenFileError(
                f"{start.path} has shrunk to {reached} bytes, and {start.offset} bytes of it were already read",
                hint=REPLACED_HINT,
            )
        self._buffer, self._ends, self._start, self._line, self._at_end = b"", NONE, 0, 0, False
        self._at = FilePosition(start.path, offset, start.line, start.head, start.head_bytes)
        if cut:
            self._look_behind(cut)

    def _look_behind(self, cut: int) -> None:
        """Pass the last record that was read without a newline, if a newline follows it; else read it again, whole."""
        while len(self._buffer) < cut + 2 and not self._at_end:
            self._fill()
        behind = self._buffer[cut : cut + 2]
        if not behind and self._defect is None:
            self._skip(cut, lines=0)
        elif behind.startswith((b"\n", b"\r\n")):
            self._skip(cut + behind.index(b"\n") + 1, lines=0)
        else:
            self._at = msgspec.structs.replace(self._at, line=self._at.line - self._buffer[:cut].count(b"\n") - 1)
            self._continued = cut

    def _fill(self, *, whole_records: bool = True) -> None:
        """Read more bytes and append them to the unread bytes."""
        try:
            piece = self._stream.read(self._read_bytes)
        except BrokenFileError as error:
            # Records that are complete before the defect come first.
            self._defect, self._at_end = error, True
            return
        rest = self._buffer[self._start :]
        if not piece:
            self._at_end = True
        if self._kind == "csv" and whole_records and (b'"' in piece or b'"' in rest):
            self._buffer = rest + piece
            self._ends = record_ends(self._buffer, self._record_bytes_max, at_end=self._at_end)
        elif piece:
            newlines = np.flatnonzero(np.frombuffer(piece, np.uint8) == _NEWLINE) + len(rest)
            self._ends = np.concatenate([self._ends[self._line :] - self._start, newlines])
            self._buffer = rest + piece
        else:
            return
        self._start, self._line = 0, 0

    def read(self) -> FilePiece:
        """Return the next bundle of lines; an empty piece at the end of the file.

        Raises:
            BrokenFileError: the file has a defect, and all complete records before it have been returned.
            SourceUnavailableError: the file cannot be read now.
        """
        self._records_max, self._bytes_max = self._bound.records, self._bound.bytes
        if self._continued:
            self._records_max = 1
        self._fill_bundle()
        unread = len(self._buffer) - self._start
        if self._defect is not None and self._line == len(self._ends):
            raise self._defect
        if not unread:
            return FilePiece(self._at, ended=True)
        before = self._at
        start, line = self._start, self._line
        block, ends = self._cut()
        if self._continued:
            return self._refused(block, before)
        if self._lines is not None:
            return self._expanded(self._lines, block, before, start, line)
        ended = self._at_end and self._defect is None and self._start == len(self._buffer)
        piece = FilePiece(self._at, header=self._header, format="csv" if self._kind == "csv" else "json", ended=ended)
        piece.records = records_in(block, ends)
        if self._kind == "csv" and block.count(b"\n") > len(ends):
            return _with_payloads(piece, block, ends, before)
        piece.block = block
        piece.describe = _describer(block, before)
        return piece

    def _expanded(self, lines: ExpandedLines, block: bytes, before: FilePosition, start: int, line: int) -> FilePiece:
        """Expand the lines of a block, as many as fit; go back to the first of the others."""
        texts = block.removesuffix(b"\n").split(b"\n")
        found = lines.expand(texts, before.path, self._header_line, self._bound)
        if found.taken < len(texts):
            size = sum(map(len, texts[: found.taken])) + found.taken
            self._start, self._line = start + size, line + found.taken
            self._at = FilePosition(before.path, before.offset, before.line, before.head, before.head_bytes)
            self._advance(size, found.taken)
            block = block[:size]
        ended = self._at_end and self._defect is None and self._start == len(self._buffer)
        piece = FilePiece(self._at, payloads=found.payloads, refused=tuple(found.refused), ended=ended)
        piece.records, piece.messages = len(found.payloads), found.messages
        piece.describe = found.describe(_describer(block, before))
        piece.moved = True
        return piece

    def _refused(self, block: bytes, before: FilePosition) -> FilePiece:
        """Return a record that was read too early as a dead letter."""
        early, self._continued = self._continued, 0
        ended = self._at_end and self._defect is None and self._start == len(self._buffer)
        piece = FilePiece(self._at, header=self._header, format="csv" if self._kind == "csv" else "json", ended=ended)
        line = block.removesuffix(b"\n")
        piece.payloads, piece.records = [line], 1
        detail = (
            f"its first {early} bytes were the end of the file when it was read, and were taken as a record: "
            "correct what that has done before you replay this one"
        )
        piece.refused = (RejectedRow(0, CONTINUED, detail),)
        if self._lines is not None:
            piece.messages = dict(enumerate(self._lines.messages([line], before.path, self._header_line)))
        piece.describe = _describer(block, before)
        return piece

    def _fill_bundle(self) -> None:
        while not self._at_end:
            lines = len(self._ends) - self._line
            if lines > self._records_max or (lines and len(self._buffer) - self._start > self._bytes_max):
                return
            # The bound of this take may be far below a valid line, which must not depend on it.
            if not lines and len(self._buffer) - self._start > max(self._bytes_max, self._line_bytes_max):
                self._pass_long_line()
                return
            self._fill()

    def _pass_long_line(self) -> None:
        """Skip a line that exceeds a bundle, but keep its beginning, which is dead-lettered as too long."""
        kept = self._buffer[self._start : self._start + self._line_bytes_max + 1]
        skipped = len(self._buffer) - self._start - len(kept)
        self._buffer, self._ends, self._start, self._line = b"", NONE, 0, 0
        while not len(self._ends) and not self._at_end:
            skipped += len(self._buffer)
            self._buffer = b""
            self._fill(whole_records=False)
        end = int(self._ends[0]) if len(self._ends) else 0
        skipped += end
        self._buffer = kept + self._buffer[end:]
        self._ends = self._ends - end + len(kept)
        if self._kind == "csv" and b'"' in self._buffer:
            first, rest = self._ends[:1], self._buffer[len(kept) + 1 :]
            behind = record_ends(rest, self._record_bytes_max, at_end=self._at_end) + len(kept) + 1
            self._ends = np.concatenate([first, behind])
        self._advance(skipped, 0)

    def _cut(self) -> tuple[bytes, Positions]:
        """Return the bytes of complete records and their ends (except that of a last record without a newline)."""
        lines = len(self._ends)
        last = min(self._line + self._records_max, lines)
        last = min(last, max(int(np.searchsorted(self._ends, self._start + self._bytes_max)), self._line + 1))
        if self._line < lines:
            end, count = int(self._ends[last - 1]) + 1, last - self._line
            if (
                self._at_end
                and self._defect is None
                and last == lines
                and count < self._records_max
                and len(self._buffer) - self._start <= self._bytes_max
            ):
                end = len(self._buffer)  # the last line has no newline
        else:
            end = len(self._buffer)
        block = self._buffer[self._start : end]
        ends = self._ends[self._line : last] - self._start
        self._start, self._line = end, min(last, lines)
        newlines = len(ends) if self._kind == "json" else block.count(b"\n")
        self._advance(len(block), newlines + (not block.endswith(b"\n")))
        if not block.endswith(b"\n"):
            cut = len(block) - (int(ends[-1]) + 1 if len(ends) else 0)
            self._at = msgspec.structs.replace(self._at, cut=cut)
        return block, ends


def records_in(block: bytes, ends: Positions) -> int:
    """Return the number of records in a block that are not blank, including one after the last end."""
    starts = np.concatenate([[0], ends + 1])
    stops = np.concatenate([ends, [len(block)]])
    if starts[-1] == len(block):
        starts, stops = starts[:-1], stops[:-1]
    first = np.frombuffer(block, np.uint8)[np.minimum(starts, len(block) - 1)]
    suspects = np.flatnonzero(_IS_BLANK[first])
    blank = sum(not block[starts[place] : stops[place]].strip() for place in suspects.tolist())
    return len(starts) - blank


def _with_payloads(piece: FilePiece, block: bytes, ends: Positions, before: FilePosition) -> FilePiece:
    """Fill in one payload per record, because newlines do not separate records; skip blank lines."""
    starts = [0, *(ends + 1).tolist()]
    cuts = [(start, end) for start, end in zip(starts, [*ends.tolist(), len(block)], strict=True) if end > start]
    payloads = [block[start:end] for start, end in cuts]
    kept = [index for index, payload in enumerate(payloads) if payload.strip()]

    newlines = _Newlines(block)

    def describe(row: int) -> str:
        start = cuts[kept[row]][0]
        line = int(np.searchsorted(newlines.places(), start))
        return f"{before.path}:{before.line + line + 1} (byte {before.offset + start})"

    piece.payloads = [payloads[index] for index in kept]
    piece.describe = describe
    return piece


@dataclass(slots=True)
class _Newlines:
    """The ends of lines in a block, computed once, when a row is first described."""

    block: bytes
    found: Positions | None = None

    def places(self) -> Positions:
        if self.found is None:
            self.found = np.flatnonzero(np.frombuffer(self.block, np.uint8) == _NEWLINE)
        return self.found


def _describer(block: bytes, before: FilePosition) -> Callable[[int], str]:
    newlines = _Newlines(block)

    def describe(row: int) -> str:
        start = int(newlines.places()[row - 1]) + 1 if row else 0
        return f"{before.path}:{before.line + row + 1} (byte {before.offset + start})"

    return describe
