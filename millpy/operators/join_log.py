"""The log of a join's buffered rows: what one bundle changes, as bytes that are appended with its commit.

A piece has a kind, a side, a number of rows, and the length of its content. A log is a sequence of pieces, so logs of
several bundles may be concatenated.

    records   numbers int64[n], a checksum, and the records as a slice (`store/codec.py`)
    matches   numbers int64[n], match counts int64[n]: of a number that occurs several times the last one holds
    removed   numbers int64[n]: rows that have been retracted
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from millpy.errors import CorruptionError
from millpy.model.record import Records, RecordType
from millpy.store.codec import decode_slice, encode_slice

Integers = npt.NDArray[np.int64]
_PIECE = struct.Struct("<BBxxIQ")
_CHECKSUM = struct.Struct("<q")


class PieceKind(IntEnum):
    """What a piece of the log has."""

    RECORDS = 1
    MATCHES = 2
    REMOVED = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A decoded piece.

    Attributes:
        side: 0 for the left side, 1 for the right.
        numbers: the numbers of the rows.
        counts: their match counts, for a piece of matches.
        records: the records, for a piece of records.
    """

    kind: PieceKind
    side: int
    numbers: Integers
    counts: Integers | None = None
    records: Records | None = None


def records_piece(side: int, numbers: Integers, records: Records) -> bytes:
    """Encode rows that a bundle has added."""
    piece = encode_slice(records)
    content = b"".join((numbers.astype("<i8").tobytes(), _CHECKSUM.pack(piece.checksum), piece.payload))
    return _piece(PieceKind.RECORDS, side, len(numbers), content)


def matches_piece(side: int, numbers: Integers, counts: Integers) -> bytes:
    """Encode match counts that a bundle has changed."""
    content = numbers.astype("<i8").tobytes() + counts.astype("<i8").tobytes()
    return _piece(PieceKind.MATCHES, side, len(numbers), content)


def removed_piece(side: int, numbers: Integers) -> bytes:
    """Encode the numbers of rows that a bundle has removed."""
    return _piece(PieceKind.REMOVED, side, len(numbers), numbers.astype("<i8").tobytes())


def _piece(kind: PieceKind, side: int, count: int, content: bytes) -> bytes:
    return _PIECE.pack(kind, side, count, len(content)) + content


def pieces_of(log: bytes, types: Sequence[RecordType]) -> Iterator[Piece]:
    """Decode a log; `types` are the record types of the sides.

    Raises:
        SegmentChecksumError: the records are not those that were written.
        CorruptionError: this is no log.
    """
    at = 0
    while at < len(log):
        try:
            kind, side, count, length = _PIECE.unpack_from(log, at)
            content = log[at + _PIECE.size : at + _PIECE.size + length]
            numbers = np.frombuffer(content, "<i8", count).astype(np.int64)
            kind = PieceKind(kind)
            if kind is PieceKind.RECORDS:
                (checksum,) = _CHECKSUM.unpack_from(content, 8 * count)
                records = decode_slice(types[side], content[8 * count + _CHECKSUM.size :], checksum)
                yield Piece(kind, side, numbers, records=records)
            elif kind is PieceKind.MATCHES:
                yield Piece(kind, side, numbers, np.frombuffer(content, "<i8", count, 8 * count).astype(np.int64))
            else:
                yield Piece(kind, side, numbers)
        except (struct.error, ValueError, IndexError) as error:
            raise CorruptionError(
                f"the log of a join's rows cannot be decoded at byte {at}: {error}",
                hint="the storage below PostgreSQL may be damaged: keep everything, and restore from a backup",
            ) from error
        at += _PIECE.size + length
