"""The slice codec: what is encoded comes back, and damage is noticed."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec
import numpy as np
import pytest

from millpy.errors import SegmentChecksumError
from millpy.model.record import Records, RecordType, WideInt
from millpy.store.codec import decode_slice, encode_slice


class Part(msgspec.Struct):
    name: str
    sizes: list[int]


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float | None
    count: int
    good: bool
    raw: bytes
    id: UUID


class Nested(msgspec.Struct):
    part: Part
    labels: dict[str, str]


class Grown(msgspec.Struct):
    """A Nested of a later version."""

    part: Part
    labels: dict[str, str]
    unit: str = "mm"
    at: datetime | None = None
    number: WideInt = 7
    id: UUID = UUID(int=1)
    parts: list[Part] = []
    more: dict[str, int] = msgspec.field(default_factory=lambda: {"a": 1})


READINGS = RecordType(Reading)
NESTED = RecordType(Nested)


def some_readings(count: int, *, watermarks: np.ndarray | None = None) -> Records:
    objects = [
        Reading(
            device=f"dev-{row % 7}",
            at=datetime.fromtimestamp(row, UTC),
            temperature=None if row % 5 == 0 else row / 3,
            count=row,
            good=row % 2 == 0,
            raw=bytes([row % 256]),
            id=UUID(int=row),
        )
        for row in range(count)
    ]
    return Records(READINGS, np.arange(count, dtype=np.int64) * 1_000_000, watermarks=watermarks, objects=objects)


def assert_same(found: Records, expected: Records) -> None:
    assert found.objects() == expected.objects()
    assert found.event_times.tolist() == expected.event_times.tolist()
    assert (found.watermarks is None) == (expected.watermarks is None)
    if expected.watermarks is not None and found.watermarks is not None:
        assert found.watermarks.tolist() == expected.watermarks.tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 64, 65, 5_000])
def test_records_come_back_as_they_were(count: int) -> None:
    records = some_readings(count)

    stored = encode_slice(records)

    assert stored.records == count
    assert_same(decode_slice(READINGS, stored.payload, stored.checksum), records)


@pytest.mark.parametrize("count", [0, 1, 3, 2_000])
@pytest.mark.parametrize("run_length", [1, 2, 700])
def test_watermarks_before_the_rows_come_back(count: int, run_length: int) -> None:
    watermarks = np.arange(count, dtype=np.int64) // run_length * 1_000_000 - 2**62
    records = some_readings(count, watermarks=watermarks)

    stored = encode_slice(records)

    assert_same(decode_slice(READINGS, stored.payload, stored.checksum), records)


def test_nested_records_come_back() -> None:
    objects = [Nested(Part("a", [1, 2]), {"x": "y"}), Nested(Part("b", []), {})]
    records = Records(NESTED, np.zeros(2, np.int64), objects=objects)

    stored = encode_slice(records)

    assert_same(decode_slice(NESTED, stored.payload, stored.checksum), records)


def test_slice_of_a_larger_batch_holds_only_its_rows() -> None:
    records = some_readings(5_000)
    records.batch()
    few = Records(READINGS, records.event_times[10:12], batch=records.batch().slice(10, 2))

    stored = encode_slice(few)

    assert len(stored.payload) < 1_500
    assert decode_slice(READINGS, stored.payload, stored.checksum).objects() == records.objects()[10:12]


def test_one_record_is_small() -> None:
    stored = encode_slice(some_readings(1, watermarks=np.zeros(1, np.int64)))

    assert len(stored.payload) < 800


def test_equal_watermarks_cost_almost_nothing() -> None:
    plain = encode_slice(some_readings(5_000))
    with_watermarks = encode_slice(some_readings(5_000, watermarks=np.zeros(5_000, np.int64)))

    assert len(with_watermarks.payload) - len(plain.payload) < 64


def test_checksum_fits_a_bigint() -> None:
    checksums = [encode_slice(some_readings(count)).checksum for count in range(32)]

    assert all(-(2**63) <= checksum < 2**63 for checksum in checksums)
    assert min(checksums) < 0 < max(checksums)


def test_every_damaged_byte_is_noticed() -> None:
    stored = encode_slice(some_readings(1))

    for place in range(len(stored.payload)):
        damaged = bytearray(stored.payload)
        damaged[place] ^= 1
        with pytest.raises(SegmentChecksumError):
            decode_slice(READINGS, bytes(damaged), stored.checksum)


@pytest.mark.parametrize("count", [1, 3_000])
def test_slice_of_an_earlier_version_of_the_type_has_the_defaults_of_new_fields(count: int) -> None:
    parts = [Nested(Part(f"p{row}", [row]), {"row": str(row)}) for row in range(count)]
    stored = encode_slice(Records(NESTED, np.arange(count, dtype=np.int64), objects=parts))

    found = decode_slice(RecordType(Grown), stored.payload, stored.checksum)

    assert found.objects() == [Grown(nested.part, nested.labels) for nested in parts]
    assert found.batch().schema == RecordType(Grown).schema
