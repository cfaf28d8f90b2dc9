"""Quantiles of the last minute are right within their buckets, and take no more memory the more turns there are."""

from __future__ import annotations

import random

import pytest

from millpy.runtime import turn_latencies
from millpy.runtime.observer import TurnTimes
from millpy.runtime.turn_latencies import BUCKETS, SLICES, LatencyHistogram, TurnLatencies, resident_bytes


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_those_of_the_sorted_durations(seed: int) -> None:
    rng, histogram = random.Random(seed), LatencyHistogram()
    durations = sorted(rng.lognormvariate(-4, 2) + 0.0001 for _ in range(rng.randrange(1, 2_000)))
    for duration in rng.sample(durations, len(durations)):
        histogram.add(1_000.0, duration)

    for share, found in zip((0.5, 0.99), histogram.quantiles(1_000.0, 0.5, 0.99), strict=True):
        exact = durations[-int(-share * len(durations) // 1) - 1]
        assert found == pytest.approx(exact, rel=0.05)


def test_only_the_last_minute_counts() -> None:
    histogram = LatencyHistogram()
    assert histogram.quantiles(0.0, 0.5) == [None]

    histogram.add(5.0, 8.0)
    histogram.add(30.0, 0.5)

    assert histogram.quantiles(49.9, 0.99) == [pytest.approx(8.0, rel=0.05)]
    assert histogram.quantiles(65.0, 0.99) == [pytest.approx(0.5, rel=0.05)]
    assert histogram.quantiles(100.0, 0.99) == [None]
    histogram.add(1_000_000.0, 0.25)
    assert histogram.quantiles(1_000_000.0, 0.01, 0.99) == [pytest.approx(0.25, rel=0.05)] * 2


def test_durations_out_of_range_are_in_the_last_buckets() -> None:
    histogram = LatencyHistogram()
    for seconds in (-1.0, 0.0, 1e-9):
        histogram.add(0.0, seconds)
    assert histogram.quantiles(0.0, 0.99) == [pytest.approx(0.0001, rel=0.05)]

    for _ in range(100):
        histogram.add(0.0, 1e12)

    (longest,) = histogram.quantiles(0.0, 0.99)
    assert longest is not None and longest > 3_000


def test_memory_is_bounded_whatever_the_number_of_turns() -> None:
    histogram = LatencyHistogram()
    for turn in range(20_000):
        histogram.add(turn * 0.7, (turn % 977) / 100)

    assert [len(counts) for _, counts in histogram._slices] == [BUCKETS] * SLICES


def test_a_worker_reports_turns_and_commits_and_the_memory_of_its_process() -> None:
    latencies = TurnLatencies()
    latencies.add(TurnTimes(gathered=10.0, stepped_from=10.1, stepped_to=10.2, sent=11.0, committed=12.0))
    before = latencies.usage(lambda: 12.0)
    held = b"x" * 64_000_000
    after = latencies.usage(lambda: 100.0)

    assert (before.turn_p50_s, before.turn_p99_s) == (pytest.approx(2.0, rel=0.05),) * 2
    assert (before.commit_p50_s, before.commit_p99_s) == (pytest.approx(1.0, rel=0.05),) * 2
    assert before.memory_bytes is not None and after.memory_bytes is not None
    assert after.memory_bytes - before.memory_bytes == pytest.approx(len(held), rel=0.1)
    assert (after.turn_p50_s, after.commit_p99_s) == (None, None)


def test_memory_is_unknown_without_proc(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_latencies, "STATM", tmp_path_factory.mktemp("no") / "statm")
    assert resident_bytes() is None

    turn_latencies.STATM.write_text("not numbers")
    assert resident_bytes() is None
