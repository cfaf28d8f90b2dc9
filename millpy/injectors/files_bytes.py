"""Bytes of one file, plain or gzipped, in large pieces; and what a file is recognized by.

A gzip file is decompressed from its beginning to reach a position; what could be decompressed before a defect is
handed over before the defect is raised. A file is recognized by a hash of its first bytes, so that one that was
replaced is not read on in the middle; one with the same 4,096 bytes and no shorter passes for the same.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import xxhash

from millpy.errors import BrokenFileError, SourceUnavailableError

HEAD_BYTES = 4_096
_CHUNK_BYTES = 65_536
_SALVAGE_BYTES = 512
_GZIP = 31  # zlib's name for a gzip header and trailer


class FilePosition(msgspec.Struct, frozen=True):
    """Where reading goes on in a file.

    Attributes:
        offset: bytes before it, decompressed; rows for Parquet.
        line: lines before it, a CSV header included; rows for Parquet.
        head, head_bytes: what the file is recognized by, see `recognize`.
        size: bytes of the file on disk, noted when it has been read to its end; 0 before.
        broken: it could not be read any further.
    """

    path: str
    offset: int = 0
    line: int = 0
    head: str = ""
    head_bytes: int = 0
    size: int = 0
    broken: bool = False


class Bytes(Protocol):
    """A file that is read from front to back."""

    def read(self, count: int) -> bytes:
        """About so many bytes; empty at the end. Raises BrokenFileError, SourceUnavailableError."""
        ...

    def pass_over(self, count: int) -> int:
        """Go forward; returns how many bytes there were."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def open_bytes(path: str) -> Bytes:
    """Open a file; `.gz` is decompressed. Raises SourceUnavailableError."""
    try:
        opened = Path(path).open("rb")
    except OSError as error:
        raise SourceUnavailableError(f"{path}: {error}", hint="is the file readable?") from error
    return _Gzip(path, opened) if path.lower().endswith(".gz") else _Plain(path, opened)


def recognize(path: str, head_bytes: int = HEAD_BYTES) -> tuple[str, int, int]:
    """(hash of the first bytes, how many these are, the file's size). Raises SourceUnavailableError."""
    try:
        with Path(path).open("rb") as opened:
            head = opened.read(head_bytes)
            opened.seek(0, 2)
            return xxhash.xxh3_64_hexdigest(head), len(head), opened.tell()
    except OSError as error:
        raise SourceUnavailableError(f"{path}: {error}", hint="is the file readable?") from error


def check_same(stored: FilePosition) -> None:
    """Refuse a file that is not the one in which reading had come to a position.

    Raises:
        BrokenFileError: it begins otherwise, or has become too short.
        SourceUnavailableError: it cannot be read.
    """
    head, head_bytes, size = recognize(stored.path, stored.head_bytes)
    if head_bytes < stored.head_bytes:
        raise BrokenFileError(
            f"{stored.path} is shorter ({size} bytes) than when it was read up to line {stored.line}",
            hint="put the old file back, and the new one beside it under another name",
        )
    if (head, head_bytes) != (stored.head, stored.head_bytes):
        raise BrokenFileError(
            f"{stored.path} is not the file that was read up to line {stored.line}: it begins otherwise",
            hint="put the old file back, and the new one beside it under another name",
        )


class _Plain:
    def __init__(self, path: str, opened: BinaryIO) -> None:
        self._path = path
        self._file = opened
        self._at = 0

    def read(self, count: int) -> bytes:
        try:
            piece = self._file.read(count)
            if not piece and self._size() < self._at:
                raise self._shorter(self._size(), self._at)
        except OSError as error:
            raise SourceUnavailableError(f"{self._path}: {error}", hint="is the file readable?") from error
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
            f"{self._path} is shorter ({size} bytes) than what was already read of it ({read})",
            hint="put the old file back, or use a new graph",
        )

    def close(self) -> None:
        self._file.close()


class _Gzip:
    """One gzip member after the other; zeros behind the last are padding."""

    def __init__(self, path: str, opened: BinaryIO) -> None:
        self._path = path
        self._file = opened
        self._member = zlib.decompressobj(_GZIP)
        self._begun = False  # this member
        self._padded = False  # a member has ended: zeros may follow
        self._waiting = b""  # compressed
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
        """At most so many bytes; empty at the end and at a defect."""
        while self._defect is None:
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
        before = self._member.copy()
        fed, self._begun = self._waiting, True
        try:
            piece = self._member.decompress(fed, count)
        except zlib.error as error:
            self._defect = self._broken(str(error))
            return _salvaged(before, fed)
        self._waiting = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
        return piece

    def _compressed(self) -> bytes:
        try:
            return self._file.read(_CHUNK_BYTES)
        except OSError as error:
            raise SourceUnavailableError(f"{self._path}: {error}", hint="is the file readable?") from error

    def _broken(self, why: str) -> BrokenFileError:
        return BrokenFileError(f"{self._path}: {why}", hint="what could be read before that was read")

    def pass_over(self, count: int) -> int:
        passed = 0
        while passed < count and (piece := self.read(min(count - passed, _CHUNK_BYTES * 4))):
            passed += len(piece)
        return passed

    def close(self) -> None:
        self._file.close()


def _salvaged(member: zlib._Decompress, fed: bytes) -> bytes:
    """What comes out before the defect: `decompress` keeps nothing of a piece in which it fails."""
    found = []
    for start in range(0, len(fed), _SALVAGE_BYTES):
        before, piece = member.copy(), fed[start : start + _SALVAGE_BYTES]
        try:
            found.append(member.decompress(piece))
        except zlib.error:
            member = before
            for place in range(len(piece)):
                try:
                    found.append(member.decompress(piece[place : place + 1]))
                except zlib.error:
                    return b"".join(found)
    return b"".join(found)
