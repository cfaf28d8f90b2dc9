"""Files as a source: NDJSON and CSV, plain or gzipped; a set of files is one source partition, read in order.

The position is (file, byte offset in the decompressed stream, line), so nothing has to be acknowledged: after a crash
the next owner goes on at the committed position. Reading happens in a thread, one bundle ahead. A bundle never spans
two files and never holds more lines than a bundle may; lines are cut by position, never looped over.

    CSV: the first line of each file is its header; one record a line (a quoted newline is not supported).
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt

from millpy.errors import ConfigError, MillError, SourceUnavailableError
from millpy.injectors.protocol import SourceSetup, Taken
from millpy.limits import Limits

PARTITION = "files"
_READ_BYTES = 4_000_000
_BOM = b"\xef\xbb\xbf"


class FilePosition(msgspec.Struct, frozen=True):
    """Where reading goes on: `offset` counts decompressed bytes, `line` complete lines before it (header included)."""

    file: int
    path: str
    offset: int
    line: int


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Files:
    """Files read one after the other; the source ends with the last one.

    Args:
        paths: at least one; `.gz` is decompressed. Paths are relative to the working directory.
        format: "json" (NDJSON) or "csv"; by default what the first name says (.csv is CSV, else NDJSON).
    """

    paths: tuple[str, ...]
    format: Literal["json", "csv"]

    def __init__(self, *paths: str | Path, format: Literal["json", "csv"] | None = None) -> None:
        if not paths:
            raise ConfigError("no file is named", hint='Files("monday.ndjson", "tuesday.ndjson")')
        names = tuple(str(path) for path in paths)
        guessed = "csv" if ".csv" in Path(names[0]).suffixes else "json"
        object.__setattr__(self, "paths", names)
        object.__setattr__(self, "format", format or guessed)

    def __repr__(self) -> str:
        return f"Files({', '.join(map(repr, self.paths))}, format={self.format!r})"

    def partitions(self) -> tuple[str, ...]:
        """The set is one source partition."""
        return (PARTITION,)

    def connect(self, setup: SourceSetup) -> FileInjector:
        """A reader, not yet open."""
        return FileInjector(self, setup)


def File(path: str | Path, *, format: Literal["json", "csv"] | None = None) -> Files:  # noqa: N802
    """One file: `File("readings.ndjson.gz")`."""
    return Files(path, format=format)


class FileInjector:
    """Reads a set of files, one bundle ahead."""

    def __init__(self, source: Files, setup: SourceSetup) -> None:
        self._source = source
        self._setup = setup
        self._reader: _Reader | None = None
        self._ahead: asyncio.Task[_Lines] | None = None
        self._ended = False

    async def open(self, position: bytes | None) -> None:
        """Go to a stored position and start reading.

        Raises:
            ConfigError: a file is missing, or the position belongs to files that are not in the set.
            SourceUnavailableError: a file cannot be read.
        """
        self._reader = _Reader(self._source, self._setup.limits)
        try:
            await asyncio.to_thread(self._reader.open, position)
        except MillError:
            await self.close()
            raise
        self._read_ahead()

    def _read_ahead(self) -> None:
        assert self._reader is not None
        self._ahead = asyncio.create_task(asyncio.to_thread(self._reader.read), name="millpy-read-ahead")
        self._ahead.add_done_callback(lambda _: self._setup.ready.set())

    async def take(self) -> Taken | None:
        """The lines that were read ahead; None while the thread still reads or when all has been handed over."""
        if self._ahead is None or not self._ahead.done():
            return None
        lines = self._ahead.result()
        self._ahead = None
        if lines.finished:
            self._ended = True
        else:
            self._read_ahead()
        return Taken(
            format=self._source.format,
            arrived_at=self._setup.clock.now_us(),
            block=lines.block,
            header=lines.header,
            describe=_describer(lines),
            position=msgspec.json.encode(lines.after),
            finished=lines.finished,
        )

    async def acknowledge(self, token: Any) -> None:
        """Nothing to do: the position is ours."""

    def quiet(self) -> bool:
        """Whether everything has been read."""
        return self._ended

    async def close(self) -> None:
        """Stop reading."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # A thread cannot be cancelled; it ends with its piece.
            await asyncio.wait([ahead])
            if not ahead.cancelled():
                ahead.exception()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


@dataclass(frozen=True, slots=True)
class _Lines:
    """Whole lines from one file, where they begin, and where reading goes on."""

    block: bytes
    header: tuple[str, ...]
    before: FilePosition
    after: FilePosition
    finished: bool


def _describer(lines: _Lines) -> Callable[[int], str]:
    """Name the place of row i, e.g. `readings.ndjson.gz:12 (byte 1344)`; only dead letters pay for it."""

    def describe(row: int) -> str:
        newlines = np.flatnonzero(np.frombuffer(lines.block, np.uint8) == ord("\n")) if row else np.empty(0, np.int64)
        start = int(newlines[row - 1]) + 1 if row else 0
        return f"{lines.before.path}:{lines.before.line + row + 1} (byte {lines.before.offset + start})"

    return describe


class _Reader:
    """Blocking reader of the set: bytes in large pieces, cut at newlines."""

    def __init__(self, source: Files, limits: Limits) -> None:
        self._source = source
        self._records_max = limits.bundle_records_max
        self._bytes_max = limits.bundle_bytes_max
        self._record_bytes_max = limits.record_bytes_max
        self._stream: BinaryIO | None = None
        self._header: tuple[str, ...] = ()
        self._at = FilePosition(0, source.paths[0], 0, 0)
        self._buffer = b""
        self._newlines: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._start = 0  # of what is not yet handed over, in the buffer
        self._line = 0  # its first newline, in _newlines
        self._at_end = False

    def open(self, position: bytes | None) -> None:
        """Check all files, go to the position."""
        for path in self._source.paths:
            if not Path(path).is_file():
                raise ConfigError(f"there is no file {path!r}", hint=f"looked in {Path.cwd()}; give an existing path")
        if position is None:
            self._open_file(0)
            return
        stored = msgspec.json.decode(position, type=FilePosition)
        if stored.path not in self._source.paths:
            raise ConfigError(
                f"reading had come to {stored.path!r}, which is not among the files any more",
                hint="keep the files of a graph and add new ones at the end",
            )
        same = stored.file < len(self._source.paths) and self._source.paths[stored.file] == stored.path
        self._open_file(stored.file if same else self._source.paths.index(stored.path))
        self._seek(stored)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _open_file(self, index: int) -> None:
        self.close()
        path = self._source.paths[index]
        self._buffer, self._newlines, self._start, self._line, self._at_end = b"", np.empty(0, np.int64), 0, 0, False
        self._at = FilePosition(index, path, 0, 0)
        try:
            opened = gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb")
            self._stream = cast("BinaryIO", opened)
        except OSError as error:
            raise SourceUnavailableError(f"{path}: {error}", hint="is the file readable?") from error
        if self._source.format == "csv":
            self._read_header()
        elif self._peek(len(_BOM)) == _BOM:
            self._skip(len(_BOM), lines=0)

    def _read_header(self) -> None:
        while not len(self._newlines) and not self._at_end:
            self._fill()
        if not self._buffer:
            self._header = ()  # a file of no bytes has no records, so it needs no header
            return
        end = int(self._newlines[0]) + 1 if len(self._newlines) else len(self._buffer)
        text = self._buffer[:end].removeprefix(_BOM).decode(errors="replace").rstrip("\r\n")
        header = tuple(next(csv.reader([text]), []))
        if len(set(header)) != len(header) or not header:
            raise ConfigError(
                f"{self._at.path}: no header with distinct names in the first line: {text[:200]!r}",
                hint="a CSV file begins with the names of its columns",
            )
        self._header = header
        self._skip(end, lines=1)

    def _peek(self, count: int) -> bytes:
        self._fill()
        return self._buffer[:count]

    def _skip(self, count: int, *, lines: int) -> None:
        self._start += count
        self._line += lines
        self._at = FilePosition(self._at.file, self._at.path, self._at.offset + count, self._at.line + lines)

    def _seek(self, stored: FilePosition) -> None:
        if stored.offset <= self._at.offset:
            return
        assert self._stream is not None
        try:
            self._stream.seek(stored.offset)
            # A file that was cut or replaced by a shorter one must not look like one that was read to its end.
            reached = self._stream.tell() if self._source.paths[self._at.file].endswith(".gz") else self._size()
        except (OSError, EOFError, zlib.error) as error:
            raise SourceUnavailableError(f"{stored.path}: {error}", hint="is the file whole?") from error
        if reached < stored.offset:
            raise ConfigError(
                f"{stored.path} is shorter ({reached} bytes) than what was already read of it ({stored.offset})",
                hint="put the old file back, or use a new graph",
            )
        self._buffer, self._newlines, self._start, self._line, self._at_end = b"", np.empty(0, np.int64), 0, 0, False
        self._at = FilePosition(self._at.file, stored.path, stored.offset, stored.line)

    def _size(self) -> int:
        return Path(self._at.path).stat().st_size

    def _fill(self) -> None:
        """Read one more piece behind what is not yet handed over."""
        assert self._stream is not None
        try:
            piece = self._stream.read(_READ_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise SourceUnavailableError(f"{self._at.path}: {error}", hint="is the file whole?") from error
        if not piece:
            self._at_end = True
            return
        rest = self._buffer[self._start :]
        newlines = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + len(rest)
        self._newlines = np.concatenate([self._newlines[self._line :] - self._start, newlines])
        self._buffer, self._start, self._line = rest + piece, 0, 0

    def read(self) -> _Lines:
        """The next bundle of lines; empty only with `finished`."""
        while True:
            self._fill_bundle()
            if self._start < len(self._buffer):
                before = self._at
                block = self._cut()
                return _Lines(block, self._header, before, self._at, self._is_last())
            if self._at.file + 1 == len(self._source.paths):
                return _Lines(b"", self._header, self._at, self._at, True)
            self._open_file(self._at.file + 1)

    def _fill_bundle(self) -> None:
        while not self._at_end:
            lines = len(self._newlines) - self._line
            if lines > self._records_max or (lines and len(self._buffer) - self._start > self._bytes_max):
                return
            if not lines and len(self._buffer) - self._start > self._bytes_max:
                self._pass_long_line()
                return
            self._fill()

    def _pass_long_line(self) -> None:
        """Read past a line that no bundle can hold; its beginning stays, and is set aside as too long."""
        kept = self._buffer[self._start : self._start + self._record_bytes_max + 1]
        skipped = len(self._buffer) - self._start - len(kept)
        self._buffer, self._newlines, self._start, self._line = b"", np.empty(0, np.int64), 0, 0
        while not len(self._newlines) and not self._at_end:
            skipped += len(self._buffer)
            self._buffer = b""
            self._fill()
        end = int(self._newlines[0]) if len(self._newlines) else 0
        skipped += end
        self._buffer = kept + self._buffer[end:]
        self._newlines = self._newlines - end + len(kept)
        self._at = FilePosition(self._at.file, self._at.path, self._at.offset + skipped, self._at.line)

    def _cut(self) -> bytes:
        lines = len(self._newlines)
        last = min(self._line + self._records_max, lines)
        last = min(last, max(int(np.searchsorted(self._newlines, self._start + self._bytes_max)), self._line + 1))
        if self._line < lines:
            end, count = int(self._newlines[last - 1]) + 1, last - self._line
            if (
                self._at_end
                and last == lines
                and count < self._records_max
                and len(self._buffer) - self._start <= self._bytes_max
            ):
                count += end < len(self._buffer)  # the last line has no newline
                end = len(self._buffer)
        else:
            end, count = len(self._buffer), 1
        block = self._buffer[self._start : end]
        self._start, self._line = end, min(last, lines)
        self._at = FilePosition(self._at.file, self._at.path, self._at.offset + len(block), self._at.line + count)
        return block

    def _is_last(self) -> bool:
        return self._at_end and self._start == len(self._buffer) and self._at.file + 1 == len(self._source.paths)
