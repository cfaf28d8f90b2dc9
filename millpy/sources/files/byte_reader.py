"""Reading the bytes of one file, plain or gzipped, in large pieces, and recognizing a file.

To reach a position, a gzip file is decompressed from its beginning. All bytes before a defect are returned before the
defect is raised. A file is recognized by a hash of its first 4,096 bytes, so that reading does not resume in the middle
of a replaced file. A file that was read to its end is recognized also by its last 4,096 bytes at that time: it has
grown if both are unchanged, and was replaced otherwise.
"""

from __future__ import annotations

import os
import threading
import zlib
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from millpy.errors import BrokenFileError, SourceUnavailableError

HEAD_BYTES = 4_096
REPLACED_HINT = (
    "restore the old file and put the new one beside it under another name, or read everything anew by "
    "`millpy deploy GRAPH.py --reset NAME` with the source and all its readers"
)
_CHUNK_BYTES = 65_536
_SALVAGE_PARTS = 64
_GZIP = 31  # zlib's name for a gzip header and trailer


class FilePosition(msgspec.Struct, frozen=True):
    """A position in a file, at which reading resumes.

    Attributes:
        path: the file's path.
        offset: the decompressed bytes before the position; rows for Parquet.
        line: the lines before the position, including a CSV header; rows for Parquet.
        head: a hash of the file's first bytes, see `recognize`.
        head_bytes: the number of these bytes.
        size: the bytes of the file on disk when it was read to its end; 0 before.
        tail: a hash of the last bytes of these, see `tail_of`; empty before.
        cut: the bytes of a last record without a newline that were read as a record; 0 without one.
        broken: whether a defect stopped reading.
        broken_head: a hash of the first bytes of the file that had the defect, and their number; None without one.
        changed_ns: when the file was last changed, recorded with `size`.
        gone_us: when the file was first missing; 0 while it exists.
    """

    path: str
    offset: int = 0
    line: int = 0
    head: str = ""
    head_bytes: int = 0
    size: int = 0
    broken: bool = False
    changed_ns: int = 0
    gone_us: int = 0
    tail: str = ""
    cut: int = 0
    broken_head: tuple[str, int] | None = None


class Bytes(Protocol):
    """A file that is read from front to back."""

    def read(self, count: int) -> bytes:
        """Return about `count` bytes; empty at the end. Raises BrokenFileError, SourceUnavailableError."""
        ...

    def pass_over(self, count: int) -> int:
        """Skip `count` bytes; return how many there were."""
        ...


class StoppedError(Exception):
    """Reading was stopped, and its result is not needed any more."""


def open_bytes(path: str, opened: BinaryIO, stopping: threading.Event) -> Bytes:
    """Return a reader at the beginning of a file, which decompresses `.gz`."""
    opened.seek(0)
    kind = _GzipReader if path.lower().endswith(".gz") else _PlainReader
    return kind(path, opened, stopping)


def recognize(path: str, opened: BinaryIO, head_bytes: int = HEAD_BYTES) -> tuple[str, int, int]:
    """Return a hash of the first bytes, their number and the file's size. Raises SourceUnavailableError."""
    try:
        opened.seek(0)
        head = opened.read(head_bytes)
        return xxhash.xxh3_64_hexdigest(head), len(head), os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise SourceUnavailableError(f"{path}: {error}", hint="make the file readable") from error


def tail_of(path: str, opened: BinaryIO, size: int) -> str:
    """Return a hash of the last HEAD_BYTES before `size`, on disk. Raises SourceUnavailableError."""
    try:
        at = opened.tell()
        opened.seek(max(0, size - HEAD_BYTES))
        tail = opened.read(min(size, HEAD_BYTES))
        opened.seek(at)
    except OSError as error:
        raise SourceUnavailableError(f"{path}: {error}", hint="make the file readable") from error
    return xxhash.xxh3_64_hexdigest(tail)


def check_grown(done: FilePosition, opened: BinaryIO) -> None:
    """Check that a file is the one that was read to its end, as it was then or longer.

    Raises:
        BrokenFileError: it is shorter, or its first or last bytes of then differ.
        SourceUnavailableError: it cannot be read.
    """
    head, head_bytes, size = recognize(done.path, opened, done.head_bytes)
    if size < done.size:
        problem = f"has shrunk from {done.size} to {size} bytes since it was read to its end"
    elif (head, head_bytes) != (done.head, done.head_bytes):
        problem = "is not the file that was read to its end: its first bytes differ"
    elif done.tail and tail_of(done.path, opened, done.size) != done.tail:
        problem = f"is not the file that was read to its end, grown: the bytes before byte {done.size} differ"
    else:
        return
    raise BrokenFileError(f"{done.path} {problem}", hint=REPLACED_HINT)


def check_same(stored: FilePosition, opened: BinaryIO) -> None:
    """Check that a file is the one that a stored position belongs to.

    Raises:
        BrokenFileError: its beginning differs, or it is too short.
        SourceUnavailableError: it cannot be read.
    """
    head, head_bytes, size = recognize(stored.path, opened, stored.head_bytes)
    if head_bytes < stored.head_bytes:
        raise BrokenFileError(
            f"{stored.path} has shrunk to {size} bytes since it was read up to line {stored.line}",
            hint="restore the old file, and put the new one beside it under another name",
        )
    if (head, head_bytes) != (stored.head, stored.head_bytes):
        raise BrokenFileError(
            f"{stored.path} is not the file that was read up to line {stored.line}: its first bytes differ",
            hint="restore the old file, and put the new one beside it under another name",
        )


def _refuse_stopped(stopping: threading.Event) -> None:
    if stopping.is_set():
        raise StoppedError


class _PlainReader:
    def __init__(self, path: str, opened: BinaryIO, stopping: threading.Event) -> None:
        self._path = path
        self._file = opened
        self._stopping = stopping
        self._at = 0

    def read(self, count: int) -> bytes:
        _refuse_stopped(self._stopping)
        try:
            piece = self._file.read(count)
            if not piece and self._size() < self._at:
                raise self._shorter(self._size(), self._at)
        except OSError as error:
            raise SourceUnavailableError(f"{self._path}: {error}", hint="make the file readable") from error
        self._at += len(piece)
        return piece

    def pass_over(self, count: int) -> int:
        found = min(count, self._size() - self._at)
        self._at += found
        self._file.seek(self._at)
        return found

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _shorter(self, size: int, read: int) -> BrokenFileError:
        return BrokenFileError(
            f"{self._path} has shrunk to {size} bytes, and {read} bytes of it were already read",
            hint="restore the old file, or use a new graph",
        )


class _GzipReader:
    """Reads one gzip member after the other; zeros after the last member are padding."""

    def __init__(self, path: str, opened: BinaryIO, stopping: threading.Event) -> None:
        self._path = path
        self._file = opened
        self._stopping = stopping
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False  # whether this member has begun
        self._padded = False  # a member has ended: zeros may follow
        self._waiting = b""  # compressed
        self._feed_bytes = _CHUNK_BYTES  # fed to the decompressor at a time
        self._defect: BrokenFileError | None = None

    def read(self, count: int) -> bytes:
        pieces: list[bytes] = []
        missing = count
        while missing > 0 and (piece := self._piece(missing)):
            pieces.append(piece)
            missing -= len(piece)
        if not pieces and self._defect is not None:
            raise self._defect
        return b"".join(pieces)

    def _piece(self, count: int) -> bytes:
        """Return at most `count` bytes; empty at the end and at a defect."""
        while self._defect is None:
            _refuse_stopped(self._stopping)
            if self._member.eof:
                self._member, self._begun, self._padded = zlib.decompressobj(_GZIP), False, True
            if not self._waiting:
                self._waiting = self._compressed()
                if not self._waiting:
                    if self._begun or not self._padded:
                        self._defect = self._broken("it ends in the middle of its gzip data")
                    return b""
            if self._padded and not self._begun:
                self._waiting = self._waiting.lstrip(b"\0")
            if self._waiting and (piece := self._decompress(count)):
                return piece
        return b""

    def _decompress(self, count: int) -> bytes:
        """Feed the waiting bytes, and ever fewer before a defect: a failing `decompress` call returns nothing."""
        before = self._member.copy()
        fed, kept, self._begun = self._waiting[: self._feed_bytes], self._waiting[self._feed_bytes :], True
        try:
            piece = self._member.decompress(fed, count)
        except zlib.error as error:
            self._member = before
            if self._feed_bytes == 1:
                self._defect = self._broken(str(error))
            self._feed_bytes = max(1, min(len(fed), self._feed_bytes) // _SALVAGE_PARTS)
            return b""
        self._waiting = (self._member.unused_data if self._member.eof else self._member.unconsumed_tail) + kept
        return piece

    def _compressed(self) -> bytes:
        try:
            return self._file.read(_CHUNK_BYTES)
        except OSError as error:
            raise SourceUnavailableError(f"{self._path}: {error}", hint="make the file readable") from error

    def _broken(self, why: str) -> BrokenFileError:
        return BrokenFileError(f"{self._path}: {why}", hint="replace the file; its beginning has been read")

    def pass_over(self, count: int) -> int:
        passed = 0
        while passed < count and (piece := self.read(min(count - passed, _CHUNK_BYTES * 4))):
            passed += len(piece)
        return passed
