"""What a fetch has brought, record by record, whatever is in it.

aiokafka raises when a batch cannot be read, and would raise for ever: the partition would stand still. Here such a
batch is read again, more patiently: records that can be read are read, each of the others is an `Unreadable`, and so is
the rest of a batch that cannot be expanded or has no end of faults. Every offset is a record or is named by one.

And aiokafka hands over as many records as it is asked for, however large: 4 MB of zstd can be 600 records of 60 MB.
Here a fetch ends when it holds enough; what is left is fetched again.
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

from millpy.injectors.kafka_expansion import CODECS, ExpansionError, bound_expansion, expanded, too_long_headers

FETCHED_BYTES_MAX = 32_000_000
UNREADABLE_MAX = 100
"""Of one batch; then the rest of it is."""
_RECORD_BYTES = 200
_HEADER_BYTES = 150
"""What they take in memory beside what they hold."""
_DELTA_MAX = 10_000_000
"""Offsets of a batch whose checksum is wrong: what it says may be wrong as well."""
_HEADER = struct.Struct(">qiibIhiqqqhii")
_FRAME = struct.Struct(">qi")
_CHECKED = struct.calcsize(">qiibI")
"""Where what the checksum is of begins."""
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
class Unreadable:
    """Offsets that cannot be read, in the place of a record without a value.

    Attributes:
        first, offset: from which offset to which.
        detail: why not.
        damaged: the checksum is wrong, so it may be whole when it is fetched again.
    """

    first: int
    offset: int
    detail: str
    damaged: bool = False
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    timestamp: int = -1


def read_patiently() -> None:
    """Make aiokafka read within the bounds; once is enough, and again does nothing."""
    bound_expansion()
    fetcher.MemoryRecords = Batches
    fetcher.PartitionRecords = Records


class Batches:
    """The batches of a fetch."""

    def __init__(self, data: Any) -> None:
        self._data = bytes(data or b"")
        self._batches = MemoryRecords(self._data)
        self._begin = self._end = 0

    @property
    def place(self) -> int:
        """How many bytes have been given."""
        return self._end

    @property
    def newest(self) -> bytes:
        """The bytes of the one that was given last."""
        return self._data[self._begin : self._end]

    def has_next(self) -> bool:
        """Whether there is another whole one."""
        return bool(self._batches.has_next())

    def size_in_bytes(self) -> int:
        """Of all."""
        return int(self._batches.size_in_bytes())

    def next_batch(self) -> Any:
        """The next one; None when there is none."""
        batch = self._batches.next_batch()
        if batch is not None:
            _, length = _FRAME.unpack_from(self._data, self._end)
            self._begin, self._end = self._end, self._end + _FRAME.size + length
        return batch


class Records(fetcher.PartitionRecords):  # type: ignore[misc]
    """The records of a fetch."""

    next_fetch_offset: int
    _records_iterator: Iterator[Any]
    _size = 0

    def __iter__(self) -> Records:
        self._size = 0
        return self

    def __next__(self) -> Any:
        try:
            if self._size > FETCHED_BYTES_MAX:
                raise StopIteration
            return next(self._records_iterator)
        except StopIteration:
            self._records_iterator = iter(())  # it holds us and an expanded batch, which nobody else would collect soon
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
                yield from self._patiently(batch, error)
                read = place

    def _patiently(self, batch: bytes, error: Exception) -> Iterator[Any]:
        """What is left of a batch that cannot be read."""
        base, _, _, magic, checksum, attributes, delta, *_, count = _HEADER.unpack_from(batch.ljust(_HEADER.size))
        if magic >= 2 and calc_crc32c(batch[_CHECKED:]) != checksum:
            last = base + delta if 0 <= delta < _DELTA_MAX else self.next_fetch_offset
            yield self._gone(max(last, self.next_fetch_offset), f"{_said(batch)}: its checksum is wrong", damaged=True)
            return
        last = base + delta if magic >= 2 else base
        if last < self.next_fetch_offset:
            return  # all of it is read
        try:
            if magic < 2 or attributes & _CONTROL:
                raise error
            data, codec = batch[_HEADER.size :], _codec(batch)
            if codec and codec not in CODECS:
                raise ValueError(f"its compression {codec} is unknown")
            data = expanded(CODECS[codec], data) if codec else data
        except _FAULTS as why:
            self._size += FETCHED_BYTES_MAX // 4  # it has cost as much
            yield self._gone(last, f"{_said(batch)}: {why}")
            return
        yield from self._one_by_one(batch, data, count, last)

    def _one_by_one(self, batch: bytes, data: bytes, count: int, last: int) -> Iterator[Any]:
        place = faults = 0
        for _ in range(count):
            offset = self.next_fetch_offset
            try:
                length, place = decode_varint(data, place)
                if not 0 < length <= len(data) - place:
                    raise ValueError(f"a record of {length} bytes")
                record, place = data[place : place + length], place + length
            except (IndexError, ValueError) as error:
                if offset <= last:
                    yield self._gone(last, f"{_said(batch)}: {error}")
                return
            try:
                found = _record(self._tp, batch, record)
                if found.offset > last:
                    raise ValueError(f"a record of offset {found.offset} in it")
            except (IndexError, ValueError, OverflowError) as error:
                faults += 1
                if faults == UNREADABLE_MAX:
                    yield self._gone(last, f"{_said(batch)}: {faults} records of it cannot be read")
                    return
                found = Unreadable(offset, _offset_of(batch, record, offset, last), f"{_said(batch)}: {error}")
            if found.offset < self.next_fetch_offset:
                continue
            self.next_fetch_offset = found.offset + 1
            self._size += _RECORD_BYTES + len(record)
            yield found
        self.next_fetch_offset = max(last + 1, self.next_fetch_offset)

    def _gone(self, last: int, detail: str, *, damaged: bool = False) -> Unreadable:
        first, self.next_fetch_offset = self.next_fetch_offset, last + 1
        return Unreadable(first, max(first, last), detail, damaged)

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
    """Which offset a record has that cannot be read otherwise."""
    try:
        _, place = decode_varint(record, 1)
        delta, _ = decode_varint(record, place)
    except (IndexError, ValueError):
        return at_least
    base: int = _FRAME.unpack_from(batch)[0]
    return int(min(max(base + delta, at_least), at_most))


def _record(tp: Any, batch: bytes, record: bytes) -> ConsumerRecord:
    """A record of a batch; header names that are no text are shown as well as they can be.

    Raises:
        IndexError, ValueError: it is none.
    """
    if too_long_headers(record, 0, len(record)):
        raise ValueError("a record with too many headers")
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
        raise ValueError(f"a record of {len(record)} bytes that ends after {place}")
    kind = attributes >> 3 & 1
    at_ms = newest_ms if kind else first_ms + delta_ms
    return ConsumerRecord(tp.topic, tp.partition, base + delta, at_ms, kind, key, value, None, -1, -1, tuple(headers))


def _bytes(record: bytes, place: int) -> tuple[bytes | None, int]:
    length, place = decode_varint(record, place)
    if length < 0:
        return None, place
    if length > len(record) - place:
        raise ValueError(f"{length} bytes of {len(record) - place}")
    return record[place : place + length], place + length
