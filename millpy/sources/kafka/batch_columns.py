"""The records of a whole batch as columns, without a client's object for each; or None.

None means that aiokafka decides, record by record, and not that the batch is damaged: of records with headers, of a
few records, for which this takes longer, and of whatever is odd. A result is what aiokafka returns
(tests/unit/sources/test_kafka_batch_columns.py). The beginning of a record is only known from the length of the one
before. So one loop guesses where each begins, and everything else, the proof of that included, is done for all records
at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from aiokafka.record.util import decode_varint

from millpy.ingest.payload_column import PayloadColumn, PayloadPiece, Places
from millpy.sources.kafka.record_columns import RecordColumns

BATCH_RECORDS_MIN = 300
"""The fewest records of a batch that are read as columns."""
_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAGIC, _CODEC, _LOG_APPEND_TIME = 2, 7, 8
_INT_BYTES, _LONG_BYTES = 5, 8
"""The most bytes of a size or offset, and of a timestamp; the protocol permits 10 of that."""


@dataclass(frozen=True, slots=True)
class BatchColumns:
    """The records of a batch, and where they are in its bytes.

    Attributes:
        offsets, timestamps: those of each record, as in `RecordColumns`.
    """

    offsets: Places
    timestamps: Places
    _keys: PayloadPiece
    _key_sizes: Places
    _values: PayloadPiece
    _value_sizes: Places

    def __len__(self) -> int:
        return len(self.offsets)

    def parts(self, records_max: int) -> Iterator[RecordColumns]:
        """Yield the records, at most `records_max` at a time."""
        for begin in range(0, len(self), records_max):
            yield self.rows(begin, begin + records_max)

    def rows(self, begin: int, end: int) -> RecordColumns:
        """Return the records from `begin` up to `end`."""
        chosen = slice(begin, end)
        values, value_sizes = self._values[chosen], self._value_sizes[chosen]
        key_sizes = self._key_sizes[chosen]
        return RecordColumns(
            _with_none(values.cut(), value_sizes) if (value_sizes < 0).any() else PayloadColumn([values]),
            self.offsets[chosen],
            self.timestamps[chosen],
            _with_none(self._keys[chosen].cut(), key_sizes) if (key_sizes >= 0).any() else None,
            size=int(np.maximum(value_sizes, 0).sum() + np.maximum(key_sizes, 0).sum()),
        )


def read_columns(batch: bytes) -> BatchColumns | None:
    """Return the records of an uncompressed batch, or None if aiokafka has to decide."""
    if len(batch) < _HEADER.size:
        return None
    base, _, _, magic, _, attributes, last_delta, first_ms, newest_ms, *_, count = _HEADER.unpack_from(batch)
    if magic != _MAGIC or attributes & _CODEC or count < BATCH_RECORDS_MIN:
        return None
    data = np.frombuffer(batch, np.uint8)
    try:
        begins, ends = _guess_records(data, batch, count)
        # Attributes have no meaning yet. The protocol has one byte of them, but aiokafka reads a varint.
        if (ends < begins).any() or data[begins].any():
            return None
        deltas_ms, at = _varints(data, begins + 1, _LONG_BYTES)
        deltas, at = _varints(data, at, _INT_BYTES)
        if deltas[0] < 0 or (deltas[1:] <= deltas[:-1]).any() or deltas[-1] > last_delta:  # compaction leaves gaps
            return None
        key_sizes, key_begins = _varints(data, at, _INT_BYTES)
        value_sizes, value_begins = _varints(data, _skip_contents(key_begins, key_sizes, ends), _INT_BYTES)
        at = _skip_contents(value_begins, value_sizes, ends)
        if data[at].any() or (at + 1 != ends).any():  # headers
            return None
    except (IndexError, ValueError):
        return None
    timestamps = np.full(count, newest_ms) if attributes & _LOG_APPEND_TIME else first_ms + deltas_ms
    keys = PayloadPiece(batch, key_begins, key_begins + np.maximum(key_sizes, 0))
    # Compact here and not where it is decoded: that thread has the most to do.
    values = PayloadPiece(batch, value_begins, value_begins + np.maximum(value_sizes, 0)).compact()
    return BatchColumns(base + deltas, timestamps, keys, key_sizes, values, value_sizes)


def _guess_records(data: npt.NDArray[np.uint8], batch: bytes, count: int) -> tuple[Places, Places]:
    """Return where each record begins, behind its length, and ends, where the next one has its length.

    Raises:
        IndexError, ValueError: the batch is not a chain of `count` records.
    """
    usual = _usual_places(data)
    if len(usual) == count + 1 and (found := _chained(data, usual)):
        return found
    if found := _chained(data, np.array(_walk(batch, count), np.int64)):
        return found
    raise ValueError("records that do not end where the next one begins")


def _chained(data: npt.NDArray[np.uint8], places: Places) -> tuple[Places, Places] | None:
    """Return where records begin and end that have their lengths at some places, if each ends at the next place."""
    sizes, begins = _varints(data, places[:-1], _INT_BYTES)
    ends = begins + sizes
    return (begins, ends) if (ends == places[1:]).all() else None


def _usual_places(data: npt.NDArray[np.uint8]) -> Places:
    """Return where lengths of two bytes are, if values are text: between a record that ends, and no attributes."""
    begin, end = _HEADER.size, len(data)
    behind = np.flatnonzero(data[begin : end - 3] == 0) + (begin + 1)
    found = behind[(data[behind] >= 0x80) & (data[behind + 1] < 0x80) & (data[behind + 2] == 0)]
    return np.concatenate([[begin], found, [end]])


def _walk(batch: bytes, count: int) -> list[int]:
    """Return where the length of each record is, and the end, by going from one to the next."""
    place, end = _HEADER.size, len(batch)
    places = []
    while place < end:
        places.append(place)
        first = batch[place]
        if first < 0x80:
            place += 1 + (first >> 1)
        elif (second := batch[place + 1]) < 0x80:
            place += 2 + ((first & 0x7F | second << 7) >> 1)
        else:
            length, place = decode_varint(batch, place)
            place += max(0, length)
    if len(places) != count:
        raise ValueError("another number of records")
    return [*places, end]


def _varints(data: npt.NDArray[np.uint8], at: Places, bytes_max: int) -> tuple[Places, Places]:
    """Decode a number at each place; return also the places behind. Raises IndexError, ValueError."""
    byte = data[at]
    raw = (byte & 0x7F).astype(np.int64)
    at = at + 1
    more = byte >= 0x80
    for shift in range(7, 7 * bytes_max, 7):
        if not more.any():
            break
        byte = data[at]
        raw |= np.where(more, (byte & 0x7F).astype(np.int64) << shift, 0)
        at += more
        more &= byte >= 0x80
    if more.any():
        raise ValueError("a number is too long")
    return (raw >> 1) ^ -(raw & 1), at


def _skip_contents(begins: Places, sizes: Places, ends: Places) -> Places:
    """Return the places behind contents, which must be in their records. Raises ValueError."""
    if (sizes > ends - begins).any() or (sizes < -1).any():
        raise ValueError("a content of an impossible size")
    return begins + np.maximum(sizes, 0)


def _with_none(contents: Sequence[bytes], sizes: Places) -> list[bytes | None]:
    """Return contents, None in place of those with a negative size."""
    found: list[bytes | None] = list(contents)
    for row in np.flatnonzero(sizes < 0).tolist():
        found[row] = None
    return found
