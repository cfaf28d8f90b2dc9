"""The slice codec: slices survive encoding, and damage is detected."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import msgspec
import numpy as np
import pytest

from millpy.errors import SegmentChecksumError
from millpy.model.record import Records, RecordType, WideInt
from millpy.model.sites import SiteProgress
from millpy.store.codec import checksum_of, decode_slice, encode_slice, without_fields

ROOT = Path(__file__).resolve().parents[3]


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


class Shorter(msgspec.Struct):
    """A Reading of an earlier version."""

    device: str
    at: datetime
    temperature: float | None


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


class DeviceOnly(msgspec.Struct):
    device: str


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
def test_records_survive_encoding(count: int) -> None:
    records = some_readings(count)

    stored = encode_slice(records)

    assert stored.records == count
    assert_same(decode_slice(READINGS, stored.payload, stored.checksum), records)


@pytest.mark.parametrize("count", [0, 1, 3, 2_000])
@pytest.mark.parametrize("run_length", [1, 2, 700])
def test_row_watermarks_survive_encoding(count: int, run_length: int) -> None:
    watermarks = np.arange(count, dtype=np.int64) // run_length * 1_000_000 - 2**62
    records = some_readings(count, watermarks=watermarks)

    stored = encode_slice(records)

    assert_same(decode_slice(READINGS, stored.payload, stored.checksum), records)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 3_000])
@pytest.mark.parametrize("has_watermarks", [False, True])
def test_marks_of_retractions_survive_encoding(count: int, has_watermarks: bool) -> None:
    watermarks = np.arange(count, dtype=np.int64) // 3 if has_watermarks else None
    plain = some_readings(count, watermarks=watermarks)
    marks = np.arange(count) % 3 == 0
    records = Records(READINGS, plain.event_times, watermarks=watermarks, retracts=marks, objects=plain.objects())

    stored, values = encode_slice(records), encode_slice(plain)

    found = decode_slice(READINGS, stored.payload, stored.checksum)
    assert_same(found, records)
    assert found.retracts is not None
    assert found.retracts.tolist() == marks.tolist()
    assert decode_slice(READINGS, values.payload, values.checksum).retracts is None
    none = Records(READINGS, plain.event_times, watermarks=watermarks, retracts=marks & False, batch=plain.batch())
    assert encode_slice(none).payload == values.payload, "records that are no retractions have no marks"
    shorter = without_fields(stored, READINGS.schema, 3)
    kept = decode_slice(RecordType(Shorter), shorter.payload, shorter.checksum)
    assert kept.retracts is not None
    assert kept.retracts.tolist() == marks.tolist()


def test_nested_records_survive_encoding() -> None:
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


def test_one_record_is_encoded_in_few_bytes() -> None:
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


def damaged_slices(count: int, seed: int) -> Iterator[tuple[RecordType, bytes]]:
    """Slices with bytes changed, lost or put in, whose checksum is right."""
    rng = random.Random(seed)
    nested = [Nested(Part("ab", [1, 2, 3]), {"x": "y"}), Nested(Part("", []), {})] * 100
    whole = [
        (READINGS, encode_slice(some_readings(1)).payload),
        (READINGS, encode_slice(some_readings(300, watermarks=np.arange(300, dtype=np.int64) // 50)).payload),
        (READINGS, encode_slice(some_readings(70, watermarks=np.arange(70, dtype=np.int64))).payload),
        (NESTED, encode_slice(Records(NESTED, np.zeros(200, np.int64), objects=nested)).payload),
    ]
    for number in range(count):
        kind, payload = whole[number % len(whole)]
        damaged = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(damaged))
            match rng.randrange(4):
                case 0:
                    damaged[at] ^= 1 << rng.randrange(8)
                case 1:
                    damaged[at : at + 4] = rng.choice([b"\xff" * 4, b"\x00\x00\x00\x80", b"\xff\xff\xff\x7f", bytes(4)])
                case 2:
                    del damaged[at : at + rng.randrange(1, 16)]
                case _:
                    damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
        yield kind, bytes(damaged)


def refused_of_damaged(count: int) -> int:
    """How many of damaged slices are refused; the others must be records."""
    resource.setrlimit(resource.RLIMIT_AS, (8_000_000_000, 8_000_000_000))
    refused = 0
    for kind, payload in damaged_slices(count, 1):
        try:
            found = decode_slice(kind, payload, checksum_of(payload))
        except SegmentChecksumError:
            refused += 1
            continue
        with suppress(ValueError, OverflowError):  # a day that Python does not know, an id of other bytes
            found.objects()
    return refused


def test_bytes_with_a_right_checksum_decode_to_records_or_an_error() -> None:
    # Arrow takes lengths and offsets on trust: a damaged slice ended the process with SIGSEGV.
    script = "from tests.unit.store import test_codec; print(test_codec.refused_of_damaged(6_000))"

    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2_000:]
    assert int(done.stdout) > 3_000


@pytest.mark.parametrize("count", [0, 1, 3, 2_000])
def test_progress_of_sites_survives_encoding_with_any_number_of_records(count: int) -> None:
    records = some_readings(count, watermarks=np.arange(count, dtype=np.int64))
    records.sites = SiteProgress(-5, None if count == 1 else 7, {'"é\\""': -(2**62), "7": 2**62, "true": count})

    stored = encode_slice(records)
    found = decode_slice(READINGS, stored.payload, stored.checksum)

    assert found.sites == records.sites
    assert_same(found, records)
    kept = without_fields(stored, READINGS.schema, 1)
    assert decode_slice(RecordType(DeviceOnly), kept.payload, kept.checksum).sites == records.sites
