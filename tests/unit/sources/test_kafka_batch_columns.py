"""A batch that is read as columns has the records that aiokafka finds in it; what is odd is left to aiokafka."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.payload_column import PayloadColumn
from millpy.sources.kafka import batch_columns
from millpy.sources.kafka.batch_columns import read_columns

Row = tuple[bytes | None, bytes | None, int]


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
    return [(found.offset, found.timestamp, found.key, found.value) for found in DefaultRecordBatch(batch)]


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


@settings(max_examples=300, deadline=None)
@given(rows, st.data())
def test_changed_bytes_give_no_other_records_than_aiokafka_finds(chosen: Sequence[Row], data: Any) -> None:
    batch = bytearray(a_batch(chosen))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(57, len(batch) - 1))
        batch[place] = data.draw(st.integers(0, 255))
    found = by_columns(bytes(batch))

    if found is not None:
        with suppress(CorruptRecordException):  # of some impossible sizes it is stricter than the protocol
            assert found == by_aiokafka(bytes(batch))


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


def test_length_that_is_negative_is_no_length() -> None:
    batch = bytearray(a_batch([(None, b"v" * 9, 0)]))
    batch[61] |= 1

    assert read_columns(bytes(batch)) is None
    with pytest.raises(CorruptRecordException):
        by_aiokafka(bytes(batch))


def test_values_are_cut_out_only_if_some_are_missing() -> None:
    whole, missing = read_columns(a_batch([(b"k", b"v", 0)])), read_columns(a_batch([(None, b"v", 0), (b"k", None, 0)]))
    assert whole is not None
    assert missing is not None

    assert isinstance(whole.rows(0, 1).values, PayloadColumn)
    assert missing.rows(0, 2).values == [b"v", None]
    assert missing.rows(0, 2).keys == [None, b"k"]
