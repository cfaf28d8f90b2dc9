"""The log of a join's buffered rows: what one bundle changes, as bytes that are appended with its commit.

A piece has a kind, a side, a number of rows, and the length of its content. A log is a sequence of pieces, so logs of
several bundles may be concatenated.

    records   numbers int64[n], a checksum, and the records as a slice (`codec.py`)
    matches   numbers int64[n], match counts int64[n]: of a number that occurs several times the last one holds
    retracted numbers int64[n]: rows that are to be removed, in this order, and what was made of them retracted
    removed   numbers int64[n]: rows for which that is done
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.errors import CorruptionError
from millpy.model.checkpoint import StoredSlice
from millpy.model.record import Records, RecordType
from millpy.store.codec import decode_slice, encode_slice, without_fields

Integers = npt.NDArray[np.int64]
_PIECE = struct.Struct("<BBxxIQ")
_CHECKSUM = struct.Struct("<q")


class PieceKind(IntEnum):
    """What a piece of the log has."""

    RECORDS = 1
    MATCHES = 2
    REMOVED = 3
    RETRACTED = 4


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
    return _records_piece(side, numbers, encode_slice(records))


def matches_piece(side: int, numbers: Integers, counts: Integers) -> bytes:
    """Encode match counts that a bundle has changed."""
    content = numbers.astype("<i8").tobytes() + counts.astype("<i8").tobytes()
    return _piece(PieceKind.MATCHES, side, len(numbers), content)


def numbers_piece(kind: PieceKind, side: int, numbers: Integers) -> bytes:
    """Encode the numbers of rows that a bundle has removed, or that it leaves to be removed."""
    return _piece(kind, side, len(numbers), numbers.astype("<i8").tobytes())


def _records_piece(side: int, numbers: Integers, piece: StoredSlice) -> bytes:
    content = b"".join((numbers.astype("<i8").tobytes(), _CHECKSUM.pack(piece.checksum), piece.payload))
    return _piece(PieceKind.RECORDS, side, len(numbers), content)


def _piece(kind: PieceKind, side: int, count: int, content: bytes) -> bytes:
    return _PIECE.pack(kind, side, count, len(content)) + content


def pieces_of(log: bytes, types: Sequence[RecordType]) -> Iterator[Piece]:
    """Decode a log; `types` are the record types of the sides.

    Raises:
        SegmentChecksumError: the records are not those that were written.
        CorruptionError: this is no log.
    """
    for piece, stored in _stored_pieces(log):
        if stored is None:
            yield piece
        else:
            yield replace(piece, records=decode_slice(types[piece.side], stored.payload, stored.checksum))


def log_without_fields(log: bytes, schema: pa.Schema, kept: int) -> bytes:
    """Return a log whose records have only the first `kept` columns. `schema` begins with the columns that they have.

    Raises:
        SegmentChecksumError: the records are not those that were written.
        CorruptionError: this is no log.
    """
    found = []
    for piece, stored in _stored_pieces(log):
        if stored is not None:
            found.append(_records_piece(piece.side, piece.numbers, without_fields(stored, schema, kept)))
        elif piece.counts is not None:
            found.append(matches_piece(piece.side, piece.numbers, piece.counts))
        else:
            found.append(numbers_piece(piece.kind, piece.side, piece.numbers))
    return b"".join(found)


def _stored_pieces(log: bytes) -> Iterator[tuple[Piece, StoredSlice | None]]:
    """Return the pieces of a log without their records, which are beside them as stored.

    Raises:
        CorruptionError: this is no log.
    """
    at = 0
    while at < len(log):
        try:
            kind, side, count, length = _PIECE.unpack_from(log, at)
            content = log[at + _PIECE.size : at + _PIECE.size + length]
            piece = Piece(PieceKind(kind), side, np.frombuffer(content, "<i8", count).astype(np.int64))
            stored = None
            if piece.kind is PieceKind.RECORDS:
                (checksum,) = _CHECKSUM.unpack_from(content, 8 * count)
                stored = StoredSlice(count, content[8 * count + _CHECKSUM.size :], checksum)
            elif piece.kind is PieceKind.MATCHES:
                piece = replace(piece, counts=np.frombuffer(content, "<i8", count, 8 * count).astype(np.int64))
        except (struct.error, ValueError, IndexError) as error:
            raise CorruptionError(
                f"the log of a join's rows cannot be decoded at byte {at}: {error}",
                hint="the storage below PostgreSQL may be damaged: keep everything, and restore from a backup",
            ) from error
        yield piece, stored
        at += _PIECE.size + length
