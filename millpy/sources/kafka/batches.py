"""The records of a fetch, including unreadable ones.

aiokafka raises on a batch that it cannot read, at every attempt, so the partition would make no progress. This module
reads such a batch again, record by record: it returns the readable records, and an `UnreadableRecord` for each other
one, for a batch that cannot be decompressed, and for the rest of a batch with too many faults. Each offset belongs to a
record or to an `UnreadableRecord`.

Also, aiokafka returns as many records as requested, however large: 4 MB of zstd can become 600 records of 60 MB. Here a
fetch ends when its records exceed a bound; the rest is fetched again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c, decode_varint
from aiokafka.structs import ConsumerRecord

from millpy.sources.kafka.expansion import CODECS, ExpansionError, bound_expansion, expanded, too_long_headers

FETCHED_BYTES_MAX = 32_000_000
UNREADABLE_MAX = 100
"""The most unreadable records of one batch; at this number, the rest of the batch counts as unreadable."""
_RECORD_BYTES = 200
_HEADER_BYTES = 150
"""The memory that a record or a header takes beside its content."""
_DELTA_MAX = 10_000_000
"""The most offsets that the header of a batch with a wrong checksum may claim; beyond, it is not trusted."""
_HEADER = struct.Struct(">qiibIhiqqqhii")
_FRAME = struct.Struct(">qi")
_CHECKED = struct.calcsize(">qiibI")
"""The offset of the first byte that the checksum covers."""
_CONTROL = 0x20
_FAULTS = (
    CorruptRecordException,
    UnsupportedCodecError,
    ExpansionError,
    ValueError,
    IndexError,
    TypeError,
    OverflowError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class UnreadableRecord:
    """A range of unreadable offsets, in the form of a record without a value.

    Attributes:
        first: the first offset.
        offset: the last offset.
        detail: why the records are unreadable.
        damaged: whether the checksum is wrong, so that another fetch may return the records intact.
    """

    first: int
    offset: int
    detail: str
    damaged: bool = False
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = -1


def tolerate_unreadable_records() -> None:
    """Make aiokafka read by this module. Idempotent."""
    bound_expansion()
    fetcher.MemoryRecords = Batches
    fetcher.PartitionRecords = FetchedRecords


class Batches:
    """The batches of a fetch."""

    def __init__(self, data: Any) -> None:
        self._data = bytes(data or b"")
        self._batches = MemoryRecords(self._data)
        self._begin = self._end = 0

    @property
    def place(self) -> int:
        """The number of bytes returned so far."""
        return self._end

    @property
    def newest(self) -> bytes:
        """The bytes of the batch returned last."""
        return self._data[self._begin : self._end]

    def has_next(self) -> bool:
        """Tell whether there is another complete batch."""
        return bool(self._batches.has_next())

    def size_in_bytes(self) -> int:
        """Return the size of all batches."""
        return int(self._batches.size_in_bytes())

    def next_batch(self) -> Any:
        """Return the next batch; None when there is none."""
        batch = self._batches.next_batch()
        if batch is not None:
            _, length = _FRAME.unpack_from(self._data, self._end)
            self._begin, self._end = self._end, self._end + _FRAME.size + length
        return batch


class FetchedRecords(fetcher.PartitionRecords):  # type: ignore[misc]
    """The records of a fetch."""

    next_fetch_offset: int
    _records_iterator: Iterator[Any]
    _size = 0

    def __iter__(self) -> FetchedRecords:
        self._size = 0
        return self

    def __next__(self) -> Any:
        try:
            if self._size > FETCHED_BYTES_MAX:
                raise StopIteration
            return next(self._records_iterator)
        except StopIteration:
            self._records_iterator = iter(())  # frees the reference cycle with a decompressed batch
            raise

    def _unpack_records(self) -> Iterator[Any]:
        read = -1
        while True:
            try:
                yield from super()._unpack_records()
                return
            except _FAULTS as error:
                batch, place = self._records.newest, self._records.place
                if place == read or not batch or (isinstance(error, UnsupportedCodecError) and _codec(batch) in CODECS):
                    raise
                yield from self._read_tolerantly(batch, error)
                read = place

    def _read_tolerantly(self, batch: bytes, error: Exception) -> Iterator[Any]:
        """Yield the unread offsets of a batch that aiokafka cannot read."""
        base, _, _, magic, checksum, attributes, delta, *_, count = _HEADER.unpack_from(batch.ljust(_HEADER.size))
        if magic >= 2 and calc_crc32c(batch[_CHECKED:]) != checksum:
            last = base + delta if 0 <= delta < _DELTA_MAX else self.next_fetch_offset
            yield self._unreadable(
                max(last, self.next_fetch_offset), f"{_said(batch)}: its checksum is wrong", damaged=True
            )
            return
        last = base + delta if magic >= 2 else base
        if last < self.next_fetch_offset:
            return  # all of its records have been read
        try:
            if magic < 2 or attributes & _CONTROL:
                raise error
            data, codec = batch[_HEADER.size :], _codec(batch)
            if codec and codec not in CODECS:
                raise ValueError(f"unknown compression {codec}")
            data = expanded(CODECS[codec], data) if codec else data
        except _FAULTS as why:
            self._size += FETCHED_BYTES_MAX // 4  # the memory and time of the failed attempt
            yield self._unreadable(last, f"{_said(batch)}: {why}")
            return
        yield from self._one_by_one(batch, data, count, last)

    def _one_by_one(self, batch: bytes, data: bytes, count: int, last: int) -> Iterator[Any]:
        place = faults = 0
        for _ in range(count):
            offset = self.next_fetch_offset
            try:
                length, place = decode_varint(data, place)
                if not 0 < length <= len(data) - place:
                    raise ValueError(f"a record claims {length} bytes")
                record, place = data[place : place + length], place + length
            except (IndexError, ValueError) as error:
                if offset <= last:
                    yield self._unreadable(last, f"{_said(batch)}: {error}")
                return
            try:
                found = _record(self._tp, batch, record)
                if found.offset > last:
                    raise ValueError(f"a record has offset {found.offset}, beyond the batch")
            except (IndexError, ValueError, OverflowError) as error:
                faults += 1
                if faults == UNREADABLE_MAX:
                    yield self._unreadable(last, f"{_said(batch)}: {faults} unreadable records")
                    return
                found = UnreadableRecord(offset, _offset_of(batch, record, offset, last), f"{_said(batch)}: {error}")
            if found.offset < self.next_fetch_offset:
                continue
            self.next_fetch_offset = found.offset + 1
            self._size += _RECORD_BYTES + len(record)
            yield found
        self.next_fetch_offset = max(last + 1, self.next_fetch_offset)

    def _unreadable(self, last: int, detail: str, *, damaged: bool = False) -> UnreadableRecord:
        first, self.next_fetch_offset = self.next_fetch_offset, last + 1
        return UnreadableRecord(first, max(first, last), detail, damaged)

    def _consumer_record(self, tp: Any, record: Any) -> ConsumerRecord:
        key, value, headers = record.key, record.value, record.headers
        size = _RECORD_BYTES + (0 if value is None else len(value)) + (0 if key is None else len(key))
        if headers:
            size += _HEADER_BYTES * len(headers)
        self._size += size
        return ConsumerRecord(
            tp.topic, tp.partition, record.offset, record.timestamp, record.timestamp_type, key, value, None, -1, -1,
            tuple(headers),
        )  # fmt: skip


def _codec(batch: bytes) -> int:
    return int(_HEADER.unpack_from(batch.ljust(_HEADER.size))[5]) & 7


def _said(batch: bytes) -> str:
    return f"a batch of {len(batch)} bytes"


def _offset_of(batch: bytes, record: bytes, at_least: int, at_most: int) -> int:
    """Return the offset of an unreadable record, or `at_least` if that is unreadable, too."""
    try:
        _, place = decode_varint(record, 1)
        delta, _ = decode_varint(record, place)
    except (IndexError, ValueError):
        return at_least
    base: int = _FRAME.unpack_from(batch)[0]
    return int(min(max(base + delta, at_least), at_most))


def _record(tp: Any, batch: bytes, record: bytes) -> ConsumerRecord:
    """Decode a record of a batch; replace the bytes of header names that are not UTF-8.

    Raises:
        IndexError: the bytes are not a record.
        ValueError: the bytes are not a record.
    """
    if too_long_headers(record, 0, len(record)):
        raise ValueError("a record has too many bytes of headers")
    base, _, _, _, _, attributes, _, first_ms, newest_ms, *_ = _HEADER.unpack_from(batch)
    delta_ms, place = decode_varint(record, 1)
    delta, place = decode_varint(record, place)
    key, place = _bytes(record, place)
    value, place = _bytes(record, place)
    count, place = decode_varint(record, place)
    headers = []
    for _ in range(count):
        name, place = _bytes(record, place)
        content, place = _bytes(record, place)
        headers.append(((name or b"").decode(errors="replace"), content))
    if place != len(record):
        raise ValueError(f"a record of {len(record)} bytes ends after {place}")
    kind = attributes >> 3 & 1
    at_ms = newest_ms if kind else first_ms + delta_ms
    return ConsumerRecord(tp.topic, tp.partition, base + delta, at_ms, kind, key, value, None, -1, -1, tuple(headers))


def _bytes(record: bytes, place: int) -> tuple[bytes | None, int]:
    length, place = decode_varint(record, place)
    if length < 0:
        return None, place
    if length > len(record) - place:
        raise ValueError(f"a field claims {length} of {len(record) - place} bytes")
    return record[place : place + length], place + length
