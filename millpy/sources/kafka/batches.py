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
from functools import cache
from itertools import chain, islice
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer import fetcher
from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c, decode_varint
from aiokafka.structs import ConsumerRecord

from millpy.sources.kafka.batch_columns import read_columns
from millpy.sources.kafka.expansion import (
    CODECS,
    ExpansionError,
    bound_legacy_expansion,
    expanded,
    too_long_headers,
    without_compression,
)
from millpy.sources.kafka.record_columns import RecordColumns, UnreadableRecord, columns_of

FETCHED_BYTES_MAX = 32_000_000
UNREADABLE_MAX = 100
"""The most unreadable records of one batch; at this number, the rest of the batch counts as unreadable."""
RUN_RECORDS = 8_192
RUN_BYTES = 8_000_000
"""The records and bytes of memory at which a run of records ends."""
_PART_RECORDS = 1_024
"""Records of which aiokafka's objects exist at the same time."""
_PART_HEADERS = 50_000
_LARGE_BYTES = 1_000_000
"""From larger batches, records are read a few at a time, because the headers of one may take 5 MB of memory."""
_LARGE_PART_RECORDS = 16
_RECORD_BYTES = 100
_HEADER_BYTES = 150
"""The memory that a record or a header takes beside its content."""
_DELTA_MAX = 10_000_000
"""The most offsets that the header of a batch with a wrong checksum may claim; beyond, it is not trusted."""
_HEADER = struct.Struct(">qiibIhiqqqhii")
_FRAME = struct.Struct(">qi")
_CHECKED = struct.calcsize(">qiibI")
"""The offset of the first byte that the checksum covers."""
_CONTROL = 0x20
_HEADERS = attrgetter("headers")
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


def read_by_columns(consumer: AIOKafkaConsumer) -> None:
    """Make a consumer that has started, and no other one of the process, read by this module."""
    bound_legacy_expansion()
    theirs = consumer._fetcher
    theirs._proc_fetch_request = MethodType(_process_fetch(), theirs)


@cache
def _process_fetch() -> FunctionType:
    """Return aiokafka's function that makes records of a fetch, with the classes of this module in place of its own."""
    found = fetcher.Fetcher._proc_fetch_request
    names = {**vars(fetcher), "MemoryRecords": Batches, "PartitionRecords": FetchedRecords}
    return FunctionType(found.__code__, names, found.__name__, found.__defaults__, found.__closure__)


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
    """The records of a fetch, as columns, a run of records at a time."""

    next_fetch_offset: int
    _records_iterator: Iterator[RecordColumns]
    _memory = 0

    def __iter__(self) -> FetchedRecords:
        self._memory = 0
        return self

    def __next__(self) -> RecordColumns:
        try:
            if self._memory > FETCHED_BYTES_MAX:
                raise StopIteration
            return next(self._records_iterator)
        except StopIteration:
            self._records_iterator = iter(())  # frees the reference cycle with a decompressed batch
            raise

    def _unpack_records(self) -> Iterator[RecordColumns]:
        parts: list[RecordColumns] = []
        records, begin, given, damaged = 0, self._memory, False, False
        try:
            while self._records.has_next() and not damaged:  # the rest is fetched again, perhaps with that batch
                for part in self._next_batch():
                    parts.append(part)
                    records += len(part)
                    damaged = part.damaged is not None
                    if records >= RUN_RECORDS or self._memory - begin >= RUN_BYTES:
                        yield RecordColumns.joined(parts)
                        parts, records, begin, given = [], 0, self._memory, True
        except _FAULTS:
            if not given and not parts:
                raise  # otherwise at the next fetch, which begins here
        if parts:
            yield RecordColumns.joined(parts)

    def _next_batch(self) -> Iterator[RecordColumns]:
        """Yield the records of the next batch that were not read yet."""
        place = self._records.place
        try:
            batch = self._records.next_batch()
            if not batch.validate_crc():
                raise CorruptRecordException(f"wrong checksum - {self._tp}")
            if not self._is_hidden(batch):
                yield from self._parts(batch)
            self.next_fetch_offset = batch.next_offset  # behind records that compaction removed, too
        except _FAULTS as error:
            newest = self._records.newest
            if self._records.place == place or (isinstance(error, UnsupportedCodecError) and _codec(newest) in CODECS):
                raise
            for found in self._read_tolerantly(newest, error):
                part = columns_of([found])
                self._memory += _memory_of(part)
                yield part

    def _is_hidden(self, batch: Any) -> bool:
        """Tell whether a batch is a transaction marker, or belongs to an aborted transaction."""
        if batch.producer_id is not None:
            self._consume_aborted_up_to(batch.base_offset)
            if batch.is_control_batch and self._contains_abort_marker(batch):
                self._aborted_producers.discard(batch.producer_id)
            if batch.is_transactional and batch.producer_id in self._aborted_producers:
                return True
        return bool(batch.is_control_batch)

    def _parts(self, batch: Any) -> Iterator[RecordColumns]:
        """Yield the records of a batch in parts."""
        newest = self._records.newest
        at_once = _LARGE_PART_RECORDS
        if isinstance(batch, DefaultRecordBatch):
            if (codec := _codec(newest)) in CODECS:
                newest = without_compression(newest, CODECS[codec])
                batch = DefaultRecordBatch(newest)
            at_once = at_once if len(newest) > _LARGE_BYTES else _PART_RECORDS
        last = batch.next_offset - 1
        whole = read_columns(newest)
        for part in map(columns_of, _in_parts(chain(batch), at_once)) if whole is None else whole.parts(RUN_RECORDS):
            self._memory += _memory_of(part)
            if part.next_offset > last + 1 or (part.offsets[1:] <= part.offsets[:-1]).any():
                raise CorruptRecordException(f"offsets do not rise up to {last}")
            if part.offsets[0] < self.next_fetch_offset:
                part = part.rows(int(np.searchsorted(part.offsets, self.next_fetch_offset)))
                if not len(part):
                    continue
            self.next_fetch_offset = part.next_offset
            yield part

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
            self._memory += FETCHED_BYTES_MAX // 4  # the memory and time of the failed attempt
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
            yield found
        self.next_fetch_offset = max(last + 1, self.next_fetch_offset)

    def _unreadable(self, last: int, detail: str, *, damaged: bool = False) -> UnreadableRecord:
        first, self.next_fetch_offset = self.next_fetch_offset, last + 1
        return UnreadableRecord(first, max(first, last), detail, damaged)


def _memory_of(part: RecordColumns) -> int:
    """Return about the memory that records need."""
    headers = 0 if part.headers is None else sum(map(len, part.headers))
    return _RECORD_BYTES * len(part) + part.size + _HEADER_BYTES * headers


def _in_parts(records: Iterator[Any], at_once: int) -> Iterator[list[Any]]:
    """Yield aiokafka's records in lists of about `_PART_RECORDS`, fewer if they have many headers."""
    more = True
    while more:  # aiokafka fails when a batch is asked for more after its end
        found: list[Any] = []
        headers = 0
        while more and len(found) < _PART_RECORDS and headers < _PART_HEADERS:
            piece = list(islice(records, at_once))
            more = len(piece) == at_once
            found += piece
            headers += sum(map(len, map(_HEADERS, piece)))
        if found:
            yield found


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
