"""The dedupe index is an exact sliding horizon, in any bundles and with any owner."""

from __future__ import annotations

import gzip
import hashlib
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy.clock import SystemClock
from millpy.ingest.dedupe import DedupeIds, DedupeIndex
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MIN, ClockReading, minutes

CAMPUSIOT = Path(__file__).parents[3] / "shared" / "data" / "campusiot_lorawan"
WITHIN = 10


def an_id(number: int) -> bytes:
    """Every third id shares its upper half with its neighbors, which never happens to hashes."""
    return hashlib.md5(b"%d" % (number // 3)).digest()[:8] + number.to_bytes(8, "big")


def by_brute_force(records: list[tuple[int, int]]) -> list[bool]:
    last: dict[int, int] = {}
    clock, found = -(10**9), []
    for number, time in records:
        clock = max(clock, time)
        found.append(number in last and clock - last[number] <= WITHIN)
        last[number] = clock
    return found


records = st.one_of(
    st.lists(st.tuples(st.integers(0, most), st.integers(0, 200)), max_size=records_max)
    for most, records_max in ((30, 200), (200, 500))  # small bundles only; some with more ids than fit into one
)
in_order = records.map(
    lambda rows: [(number, time) for (number, _), time in zip(rows, sorted(t for _, t in rows), strict=True)]
)


@settings(deadline=None)
@given(
    st.one_of(records, in_order),
    st.lists(st.one_of(st.integers(1, 3), st.integers(1, 200)), min_size=1),
    st.sets(st.integers(0, 20)),
    st.sets(st.integers(0, 20)),
    st.integers(1, 200),
)
def test_duplicates_equal_those_of_brute_force_in_any_bundles_and_owners(
    rows: list[tuple[int, int]], sizes: list[int], takeovers: set[int], renewals: set[int], recent_max: int
) -> None:
    index, runs, found, start, bundle = DedupeIndex(WITHIN, recent_ids_max=recent_max), [], [], 0, 0

    while start < len(rows):
        part = rows[start : start + sizes[bundle % len(sizes)]]
        duplicates, run = index.check(b"".join(an_id(n) for n, _ in part), np.array([t for _, t in part], np.int64))
        found += duplicates.tolist()
        assert run is not None
        runs.append(run)
        if bundle in renewals and (whole := index.renew()) is not None:
            runs = [whole]
        if bundle in takeovers:
            alive = [r for r in runs if r.expires_at >= runs[-1].clock]
            index = DedupeIndex(WITHIN, alive, recent_ids_max=recent_max)
        start, bundle = start + len(part), bundle + 1

    assert found == by_brute_force(rows)


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(records, in_order, in_order.map(lambda rows: [(number % 8, time) for number, time in rows])),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([3, 10, 40, 100])), min_size=1, max_size=3),
    st.integers(1, 60),
    st.integers(1, 200),
)
@example([(1, 0), (2, 20), (1, 25), (2, 25)], [(2, 100)], 60, 200)  # id 1 is stored in a run that has not expired
def test_changed_horizon_brings_no_forgotten_id_back_in_any_bundles(
    rows: list[tuple[int, int]], changes: list[tuple[int, int]], size: int, recent_max: int
) -> None:
    """A deployment sets the floor, and keeps the runs that have not expired for the longer horizon."""
    index, runs, found = DedupeIndex(WITHIN, recent_ids_max=recent_max), [], []
    wanted: list[bool] = []
    last: dict[int, int] = {}
    within, floor, clock = WITHIN, INSTANT_MIN, INSTANT_MIN
    for count, changed in [*changes, (len(rows), WITHIN)]:
        part, rows = rows[:count], rows[count:]
        for start in range(0, len(part), size):
            bundle = part[start : start + size]
            ids, times = b"".join(an_id(n) for n, _ in bundle), np.array([t for _, t in bundle], np.int64)
            duplicates, run = index.check(ids, times)
            found += duplicates.tolist()
            assert run is not None
            runs.append(run)
        for number, time in part:
            clock = max(clock, time)
            seen = last.get(number, INSTANT_MIN)
            wanted.append(seen >= max(floor, clock - within) and number in last)
            last[number] = clock
        floor = max(floor, clock - within)
        longer = max(changed - within, 0)
        alive = [replace(r, expires_at=r.expires_at + longer) for r in runs if r.expires_at >= runs[-1].clock]
        runs, within = alive, changed
        index = DedupeIndex(within, runs, recent_ids_max=recent_max, floor=floor)

    assert found == wanted


@pytest.mark.parametrize("recent_max", [1, 3, 1_000])
def test_an_id_is_known_until_the_last_instant_of_the_horizon(recent_max: int) -> None:
    """On a clock with few values, ids are often exactly as old as the horizon."""
    rng, within = random.Random(recent_max), 2
    for _ in range(120):
        index, clock = DedupeIndex(within, recent_ids_max=recent_max), 0
        last: dict[int, int] = {}
        runs: list[Any] = []
        for _ in range(12):
            clock += rng.choice([0, 0, 1, 2, 3])
            numbers = [rng.randrange(8) for _ in range(rng.choice([1, 1, 2, 4]))]
            wanted = []
            for number in numbers:
                wanted.append(clock - last.get(number, -99) <= within)
                last[number] = clock
            found, run = index.check(b"".join(map(an_id, numbers)), np.full(len(numbers), clock, np.int64))
            assert found.tolist() == wanted
            runs.append(run)
            if rng.random() < 0.2:  # a new owner
                index = DedupeIndex(within, [run for run in runs if run.expires_at >= clock], recent_ids_max=recent_max)


def test_id_in_a_small_and_then_in_a_large_bundle_keeps_the_later_time() -> None:
    index = DedupeIndex(WITHIN, recent_ids_max=200)

    def check(first: int, count: int, time: int) -> list[bool]:
        ids = b"".join(an_id(n) for n in range(first, first + count))
        duplicates, _ = index.check(ids, np.full(count, time, np.int64))
        return duplicates.tolist()

    check(0, 1, time=0)
    assert check(0, 100, time=9) == [True] + [False] * 99
    for first in range(1_000, 1_200, 50):
        check(first, 50, time=9)  # what came in small bundles is sorted into a tier on the way

    assert check(0, 1, time=15) == [True]


def test_large_bundle_that_spans_the_horizon_finds_its_first_duplicates() -> None:
    # Ids of small bundles were sorted into a tier by the clock of the large bundle's last record, and so forgotten.
    index = DedupeIndex(WITHIN)
    index.check(an_id(0), np.array([0], np.int64))

    duplicates, _ = index.check(b"".join(map(an_id, range(100))), np.arange(5, 105, dtype=np.int64))

    assert duplicates.tolist() == [True] + [False] * 99


def test_many_tiers_remember_every_id_within_the_horizon() -> None:
    rng = np.random.default_rng(7)
    index, last, runs = DedupeIndex(40), dict[int, int](), []

    for time in range(120):
        numbers = rng.integers(0, 4_000, size=int(rng.integers(1, 200)))
        duplicates, run = index.check(b"".join(map(an_id, numbers.tolist())), np.full(len(numbers), time, np.int64))
        expected = []
        for number in numbers.tolist():
            expected.append(time - last.get(number, -100) <= 40)
            last[number] = time
        assert duplicates.tolist() == expected
        runs.append(run)
        if time % 50 == 49:
            index = DedupeIndex(40, [run for run in runs if run is not None and run.expires_at >= time])


def test_run_is_sorted_and_holds_duplicates_too() -> None:
    ids = [an_id(n) for n in (5, 1, 5)]

    _, run = DedupeIndex(WITHIN).check(b"".join(ids), np.array([1, 2, 3], np.int64))

    assert run is not None
    assert run.ids == b"".join(sorted({*ids}))
    assert sorted(np.frombuffer(run.times, "<i8").tolist()) == [2, 3]
    assert (run.clock, run.expires_at) == (3, 13)


def test_ids_beyond_the_horizon_leave_memory() -> None:
    index = DedupeIndex(WITHIN)

    for bundle in range(200):
        ids = b"".join(an_id(n) for n in range(bundle * 1000, bundle * 1000 + 1000))
        index.check(ids, np.full(1000, bundle * 100, np.int64))

    assert len(index) <= 2000


FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0])
TIMES = st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=2))]))


@given(
    st.lists(
        st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.uuids(), FLOATS, TIMES), min_size=1
    )
)
@settings(deadline=None)
@example([("", 0, False, UUID(int=0), zero, datetime(2026, 3, 1, tzinfo=UTC)) for zero in (0.0, -0.0)])
def test_ids_of_columns_equal_those_of_objects(rows: list[tuple[Any, ...]]) -> None:
    names = [("s", str), ("i", int), ("b", bool), ("u", UUID), ("f", float), ("t", datetime)]
    kind = msgspec.defstruct("Row", names)
    record_type = RecordType(kind)
    objects = [kind(*row) for row in rows if all(c.isprintable() for c in row[0])]
    batch = record_type.batch_of(objects)

    for fields in (["s"], ["i"], ["b"], ["u"], ["f"], ["t"], ["s", "i"], ["u", "b", "s", "i", "t", "f"]):
        ids = DedupeIds(Dedupe(*fields, within=minutes(1)), record_type)

        assert ids.of_batch(batch) == ids.of_objects(objects)
        assert ids.of_batch(batch.slice(1)) == ids.of_objects(objects[1:])
        for field in fields if len(fields) == 1 else ():
            values = {getattr(each, field) for each in objects}
            of_values = {ids.of_objects([each]) for each in objects}
            assert len(values) == len(of_values), "equal values have one id, different ones two"


@pytest.mark.skipif(not CAMPUSIOT.exists(), reason="the recorded feeds are not here")
@pytest.mark.parametrize("bundle", [50, 200, 5_000, 100_000])
def test_recorded_feed_has_exactly_its_known_duplicates(bundle: int) -> None:
    fields = [("device", str), ("fcnt", int | None), ("arrival_ms", int), ("arrival_seq", int)]
    settings = IntakeSettings(
        stream="frames",
        record_type=RecordType(msgspec.defstruct("Frame", fields)),
        event_time=EventTime("arrival_ms", unit="ms", max_disorder=minutes(1)),
        dedupe=Dedupe("device", "fcnt", within=minutes(10), time="arrival_ms", unit="ms"),
    )
    intake, accepted = Intake(settings, StoredInterval(1, 1)), []
    expected = pyarrow.parquet.read_table(CAMPUSIOT / "expected" / "duplicates_ttl600s.parquet")
    with gzip.open(CAMPUSIOT / "frames.csv.gz") as file:
        header, *lines = file.read().splitlines()

    for start in range(0, len(lines), bundle):
        block = b"\n".join(lines[start : start + bundle])
        taken = SourceBatch("csv", SystemClock().now_us(), block=block, header=header.decode().split(","))
        result = intake.step(taken, clock=ClockReading.certain(taken.arrived_at), quiet=False)
        accepted += [o.arrival_seq for o in result.records.objects()]

    assert intake.counts == {"injected": 91_063, "accepted": 82_641, "duplicate": 8_422, "dead_lettered": 0}
    assert set(accepted) == set(range(1, 91_064)) - set(expected.column("arrival_seq").to_pylist())
