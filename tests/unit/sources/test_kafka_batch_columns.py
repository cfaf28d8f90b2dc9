"""A batch that is read as columns has the records that aiokafka finds in it; what is odd is left to aiokafka."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy.ingest.payload_column import PayloadColumn
from millpy.sources.kafka import batch_columns
from millpy.sources.kafka.batch_columns import read_columns

Row = tuple[bytes | None, bytes | None, int]
ATTRIBUTES_AT, LAST_DELTA_AT, COUNT_AT, RECORDS_AT = 21, 23, 57, 61


@pytest.fixture(autouse=True, scope="module")
def _small_batches() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_columns, "BATCH_RECORDS_MIN", 1)
        yield


def a_batch(
    rows: Sequence[Row], headers: Sequence[tuple[str, bytes]] = (), base: int = 0, attributes: int = 0
) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
        batch_size=10**9,
    )  # fmt: skip
    for offset, (key, value, at) in enumerate(rows):
        builder.append(offset, timestamp=at, key=key, value=value, headers=list(headers))
    built = bytes(builder.build())
    return struct.pack(">q", base) + built[8:21] + struct.pack(">h", attributes) + built[23:]


def by_aiokafka(batch: bytes) -> list[Any]:
    return [
        (found.offset, -1 if found.timestamp is None else found.timestamp, found.key, found.value)
        for found in DefaultRecordBatch(batch)
    ]


def by_columns(batch: bytes, at_once: int = 7) -> list[Any] | None:
    found = read_columns(batch)
    if found is None:
        return None
    rows: list[Any] = []
    for part in found.parts(at_once):
        assert part.size == int(part.sizes().sum())
        keys = part.keys or [None] * len(part)
        rows += zip(part.offsets.tolist(), part.timestamps.tolist(), keys, part.values, strict=True)
    return rows


contents = st.none() | st.binary(max_size=9) | st.binary(min_size=60, max_size=70) | st.just(b'{"a":1}' * 2_500)
times = st.integers(0, 2**41)
rows = st.lists(st.tuples(contents, contents, times), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(0, 2**60), st.sampled_from([0, 8]))
@example([(None, None, 0), (None, None, 0), (b"", bytes(68), 0)], 0, 0)  # zeros that look like a record's begin
def test_records_without_headers_are_those_of_aiokafka(chosen: Sequence[Row], base: int, attributes: int) -> None:
    batch = a_batch(chosen, base=base, attributes=attributes)

    assert by_columns(batch) == by_aiokafka(batch)


@settings(max_examples=50, deadline=None)
@given(rows)
def test_records_of_text_of_usual_lengths_are_found_without_a_walk(chosen: Sequence[Row]) -> None:
    usual = [(None, b'{"n":%064d}' % at, at) for _, _, at in chosen]
    batch = a_batch(usual)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_columns, "_walk", None)
        assert by_columns(batch) == by_aiokafka(batch)


text_rows = rows.map(lambda chosen: [(None, b'{"n":%064d}' % at, at) for _, _, at in chosen])
odd_bytes = st.sampled_from([0x00, 0x01, 0x7F, 0x80, 0x81, 0xFF]) | st.integers(0, 255)


@settings(max_examples=1_000, deadline=None)
@given(rows | text_rows, st.lists(st.tuples(st.integers(0, 2**16), odd_bytes), min_size=1, max_size=3), st.booleans())
def test_changed_bytes_give_no_other_records_than_aiokafka_finds(
    chosen: Sequence[Row], changes: Sequence[tuple[int, int]], in_front: bool
) -> None:
    batch = bytearray(a_batch(chosen))
    end = min(len(batch), 100) if in_front else len(batch)
    for place, byte in changes:
        batch[ATTRIBUTES_AT + place % (end - ATTRIBUTES_AT)] = byte
    found = by_columns(bytes(batch))

    if found is not None:
        assert found == by_aiokafka(bytes(batch))  # raises if aiokafka cannot read it


@pytest.mark.parametrize(
    "odd",
    [
        a_batch([(b"k", b"v", 0)], headers=[("h", b"v")]),
        a_batch([(b"k", b"v", 0)])[:-1],
        a_batch([(b"k", b"v", 0)]) + b"\0",
        a_batch([(b"k", b"v", 0)], attributes=1),
        b"",
    ],
)
def test_what_is_odd_is_left_to_aiokafka(odd: bytes) -> None:
    assert read_columns(odd) is None


def of_records(*records: bytes, last: int | None = None, count: int | None = None) -> bytes:
    """A batch of records that are given byte by byte, behind their lengths."""
    data = b"".join(varint(len(record)) + record for record in records)
    head = bytearray(a_batch([(None, b"v", 0)])[:RECORDS_AT])
    struct.pack_into(">i", head, 8, len(head) - 12 + len(data))
    struct.pack_into(">i", head, LAST_DELTA_AT, len(records) - 1 if last is None else last)
    struct.pack_into(">i", head, COUNT_AT, len(records) if count is None else count)
    return bytes(head) + data


def varint(number: int, size: int = 1) -> bytes:
    """A number in `size` bytes or more."""
    raw, found = (number << 1) ^ (number >> 63), bytearray()
    while raw or len(found) < size:
        found.append(raw & 0x7F | 0x80)
        raw >>= 7
    found[-1] &= 0x7F
    return bytes(found)


def a_record(
    attributes: bytes = b"\0", at: bytes = b"\0", delta: bytes = b"\0", key: bytes = b"\1", value: bytes = b"\2v",
    headers: bytes = b"\0",
) -> bytes:  # fmt: skip
    return attributes + at + delta + key + value + headers


SECOND = varint(1)


def test_plain_records_are_read() -> None:
    batch = of_records(a_record(), a_record(delta=SECOND, key=b"\2k"))

    assert by_columns(batch) == by_aiokafka(batch) == [(0, 0, None, b"v"), (1, 0, b"k", b"v")]


@pytest.mark.parametrize(
    "corrupt",
    {
        "attributes that aiokafka takes for a varint": of_records(a_record(b"\x80"), a_record(delta=SECOND)),
        "a negative length": of_records(a_record(), b"")[:-1] + b"\1",
        "fewer records than the header says": of_records(a_record(), count=2),
        "more records than the header says": of_records(a_record(), a_record(delta=SECOND), count=1),
        "bytes behind the last record": of_records(a_record()) + b"\0\0\0",
        "a record cut off": of_records(a_record(), a_record(delta=SECOND))[:-1],
        "a record with bytes left": of_records(a_record(headers=b"\0\0")),
        "a key up to the next record": of_records(a_record(key=varint(5)), a_record(delta=SECOND)),
        "a value beyond the batch": of_records(a_record(value=varint(2**31))),
        "a value of 2**62 bytes": of_records(a_record(value=varint(2**62))),
        "a negative number of headers": of_records(a_record(headers=b"\1")),
        "a key's size of eleven bytes": of_records(a_record(key=b"\x81" + b"\x80" * 9 + b"\0")),
    }.items(),
    ids=lambda case: case[0],
)
def test_batch_that_aiokafka_cannot_read_gives_no_rows(corrupt: tuple[str, bytes]) -> None:
    with pytest.raises(CorruptRecordException):
        by_aiokafka(corrupt[1])

    assert read_columns(corrupt[1]) is None


@pytest.mark.parametrize(
    "strange",
    {
        "attributes": of_records(a_record(b"\2")),
        "a key of -2 bytes": of_records(a_record(key=varint(-2))),
        "a value of -2 bytes": of_records(a_record(value=varint(-2))),
        "an offset before the batch": of_records(a_record(delta=varint(-1))),
        "an offset twice": of_records(a_record(), a_record()),
        "offsets that fall": of_records(a_record(delta=SECOND), a_record()),
        "an offset beyond the batch": of_records(a_record(), a_record(delta=SECOND), last=0),
        "an offset of six bytes": of_records(a_record(delta=varint(0, size=6))),
        "a key's size of six bytes": of_records(a_record(key=varint(-1, size=6))),
        "a value's size of six bytes": of_records(a_record(value=varint(1, size=6) + b"v")),
    }.items(),
    ids=lambda case: case[0],
)
def test_batch_that_the_protocol_forbids_gives_no_rows(strange: tuple[str, bytes]) -> None:
    by_aiokafka(strange[1])  # returns what the caller judges by its offsets

    assert read_columns(strange[1]) is None


def test_compacted_batch_is_read_although_offsets_are_missing() -> None:
    batch = of_records(a_record(delta=SECOND), a_record(delta=varint(4, size=5)), last=9)

    assert by_columns(batch) == by_aiokafka(batch) == [(1, 0, None, b"v"), (4, 0, None, b"v")]


def test_values_are_cut_out_only_if_some_are_missing() -> None:
    whole, missing = read_columns(a_batch([(b"k", b"v", 0)])), read_columns(a_batch([(None, b"v", 0), (b"k", None, 0)]))
    assert whole is not None
    assert missing is not None

    assert isinstance(whole.rows(0, 1).values, PayloadColumn)
    assert missing.rows(0, 2).values == [b"v", None]
    assert missing.rows(0, 2).keys == [None, b"k"]
