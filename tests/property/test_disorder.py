"""A percentile's bound is a function of the order of records: bundles, crashes and replays change no row watermark."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.disorder import Disorder
from millpy.ingest.intake import Intake, IntakeResult, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import EventTime
from millpy.model.checkpoint import Delta, Entries, Kind
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MIN, ClockReading, Instant, seconds

NOW = Instant(10_000_000_000_000)
CAP_S, CAP_US = 20, 20_000_000
UPPER = sorted({0, *(ms * 1000 for ms in range(1, 16)), *((k << s) * 1000 for k in range(8, 16) for s in range(37))})


class Reading(msgspec.Struct):
    at: int


TYPE = RecordType(Reading)


def event_time(percentile: float | None) -> EventTime:
    return EventTime("at", unit="us", max_disorder=seconds(CAP_S), percentile=percentile)


class Committed:
    """What a store keeps of an intake's deltas."""

    def __init__(self) -> None:
        self.values: dict[tuple[Any, str, str], bytes | None] = {}
        self.watermark = Instant(INSTANT_MIN)

    def commit(self, result: IntakeResult) -> None:
        delta: Delta = result.delta
        for entries in delta:
            for subkey, value in zip(entries.subkeys, entries.values, strict=True):
                self.values[entries.kind, entries.namespace, subkey] = value
        self.watermark = result.watermark

    def intake(self, percentile: float | None) -> Intake:
        stored = []
        for (kind, namespace, subkey), value in self.values.items():
            entries = Entries(kind, namespace)
            entries.add(b'""', 0, subkey, value)
            stored.append(entries)
        recovered = StoredInterval(1, 2, low_watermark=self.watermark, entries=tuple(stored))
        return Intake(IntakeSettings(stream="readings", record_type=TYPE, event_time=event_time(percentile)), recovered)


def step(intake: Intake, times: Sequence[int]) -> IntakeResult:
    batch = SourceBatch("json", NOW, payloads=[b'{"at":%d}' % at for at in times])
    return intake.step(batch, clock=ClockReading.certain(NOW), quiet=False)


def in_pieces(times: Sequence[int], percentile: float, rng: random.Random) -> tuple[list[int], Committed]:
    """Return the row watermarks of a run that is cut at random, and crashes at random; and what it leaves."""
    committed, found, at = Committed(), [], 0
    intake = committed.intake(percentile)
    while at < len(times):
        size = rng.choice([1, 7, 100, 1_024, 3_000])
        result = step(intake, times[at : at + size])
        if rng.random() < 0.3:  # it crashed before its commit
            intake = committed.intake(percentile)
            continue
        assert result.watermark >= committed.watermark  # I5
        assert result.records.watermarks is not None
        found += result.records.watermarks.tolist()
        committed.commit(result)
        at += size
        if rng.random() < 0.3:  # it crashed after its commit
            intake = committed.intake(percentile)
    return found, committed


def by_loop(
    times: Sequence[int],
    percentile: float | None = None,
    *,
    changes: Mapping[int, tuple[float | None, int]] | None = None,
) -> Iterator[int]:
    """Yield the watermark before each record, and behind the last, by the rules of the documentation.

    Args:
        times: the event times.
        percentile: the percentile, from the first record on; or:
        changes: the percentile and the largest bound from a record on.
    """
    changes = changes or {0: (percentile, CAP_US)}
    newest = watermark = int(INSTANT_MIN)
    weights, block, bound, cap = dict.fromkeys(range(len(UPPER)), 0), [0] * len(UPPER), CAP_US, CAP_US
    for number, at in enumerate(times, 1):
        if number - 1 in changes:
            percentile, cap = changes[number - 1]
            bound = bound_of(weights, percentile, cap)
            watermark = max(watermark, newest - bound)
        yield watermark
        block[bisect_left(UPPER, max(newest - at, 0))] += 1
        newest = max(newest, at)
        if number % 1_024 == 0:
            weights = {k: w + 1_024 * block[k] - -(-w // 128) for k, w in weights.items()}
            block, bound = [0] * len(UPPER), bound_of(weights, percentile, cap)
        watermark = max(watermark, newest - bound)
    yield watermark


def bound_of(weights: Mapping[int, int], percentile: float | None, cap: int) -> int:
    total, reached = sum(weights.values()), 0
    if percentile is None or total * (1 - percentile) < 10 * 1_024:
        return cap
    for k, weight in weights.items():
        reached += weight
        if reached >= total * percentile:
            return min(UPPER[k], cap)
    raise AssertionError("the last bucket reaches the total")


def feed(rng: random.Random, count: int) -> list[int]:
    """Return event times whose disorder changes along the way; some are years behind."""
    times, at = [], 1_000_000_000_000
    usual = 1_000
    for number in range(count):
        if number % 1_500 == 0:
            usual = rng.choice([1, 1_000, 50_000, 2_000_000, 60_000_000])
        at += rng.choice([0, 1_000, 10_000])
        behind = rng.choice([0, 0, rng.randint(0, usual)])
        times.append(at - (500_000_000_000 if rng.random() < 0.004 else behind))
    return times


def check(seed: int, percentile: float) -> None:
    rng = random.Random(seed)
    times = feed(rng, 9_000)
    *expected, last = by_loop(times, percentile)
    found, committed = in_pieces(times, percentile, rng)

    # Not `found == expected`: where the variable CI is set, pytest spends minutes on the difference of such lists.
    differing = [n for n, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert not differing[:1]
    assert committed.watermark == last
    counted = msgspec.json.decode(committed.values[Kind.DISORDER, "", "counted"] or b"")
    assert (counted["late"], counted["late_by_percentile"]) == late_counts(times, expected)


def late_counts(times: Sequence[int], watermarks: Sequence[int]) -> tuple[int, int]:
    """Return how many records were late, and how many of them only because of the percentile."""
    promised = [newest - CAP_US for newest in accumulate([int(INSTANT_MIN), *times], max)]
    late = [at < before for at, before in zip(times, watermarks, strict=True)]
    by_percentile = [is_late and at >= by for is_late, at, by in zip(late, times, promised, strict=False)]
    return sum(late), sum(by_percentile)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.9, 0.99, 0.997]))
def test_row_watermarks_depend_on_the_order_of_records_alone(seed: int, percentile: float) -> None:
    check(seed, percentile)


def test_bound_that_is_not_committed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disorder, "entries", lambda self: ())

    with pytest.raises(AssertionError):
        check(1, 0.9)


def test_bound_that_changes_with_the_bundle_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Disorder._learn

    def at_once(self: Disorder, lags: Any) -> list[int]:
        bounds = learn(self, lags)
        return [bounds[-1]] * len(bounds)

    monkeypatch.setattr(Disorder, "_learn", at_once)

    with pytest.raises(AssertionError):
        check(1, 0.9)
