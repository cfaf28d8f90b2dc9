from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.errors import GraphError
from millpy.ingest.disorder import BLOCK, EDGES, Disorder, buckets_of
from millpy.ingest.settings import EventTime
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, seconds

S = 1_000_000
LEARNING = EventTime("at", max_disorder=seconds(60), percentile=0.99)


class Taker:
    def __init__(self, settings: EventTime = LEARNING) -> None:
        self.disorder = Disorder(settings)
        self.watermark = self.promised = self.newest = Instant(INSTANT_MIN)

    def take(self, *times: int) -> list[int]:
        before = np.maximum.accumulate(np.array([self.newest, *times], np.int64))
        at = np.array(times, np.int64)
        watermarks, self.promised = self.disorder.take(before, at, self.watermark, self.promised)
        self.newest, self.watermark = Instant(int(before[-1])), Instant(int(watermarks[-1]))
        return watermarks.tolist()

    def counted(self) -> dict[str, Any]:
        (entries,) = self.disorder.entries()
        return msgspec.json.decode(entries.values[0] or b"")


def alternating(count: int, lag: int, start: int = 0) -> list[int]:
    """Return times that advance by 1 s, of which every second is `lag` behind the one before it."""
    return [start + k * S - (lag if k % 2 else 0) for k in range(count)]


def test_edges_are_at_most_an_eighth_apart() -> None:
    finite = EDGES[:-1]

    assert np.all(np.diff(finite) <= np.maximum(finite[:-1] // 8, 1_000))
    assert len(EDGES) == 305
    assert finite[-1] > timedelta(days=32 * 365) // timedelta(microseconds=1)


def test_bucket_is_the_first_whose_edge_is_not_below_the_lag() -> None:
    finite = EDGES[1:-1]
    lags = np.unique(np.concatenate([finite, finite - 1, finite + 1, finite + 999, [1, 2**61, INSTANT_MAX]]))

    assert np.array_equal(buckets_of(lags), np.searchsorted(EDGES, lags))


def test_bound_is_the_largest_allowed_until_it_is_learned() -> None:
    taker = Taker()
    taker.take(*alternating(BLOCK - 1, 3 * S))
    before = taker.disorder.bound_us
    taker.take(BLOCK * S)

    assert (before, 2 * S <= taker.disorder.bound_us <= 4 * S) == (60 * S, True)


def test_high_percentile_needs_more_records() -> None:
    taker = Taker(EventTime("at", max_disorder=seconds(60), percentile=0.999))
    taker.take(*alternating(9 * BLOCK, 3 * S))
    early = taker.disorder.bound_us
    taker.take(*alternating(2 * BLOCK, 3 * S, start=9 * BLOCK * S))

    assert (early, taker.disorder.bound_us < 5 * S) == (60 * S, True)


def test_one_device_far_behind_does_not_widen_the_bound() -> None:
    taker = Taker()
    times = [at - (10**14 if k % 200 == 0 else 0) for k, at in enumerate(alternating(20 * BLOCK, 2 * S))]
    taker.take(*times)

    assert taker.disorder.bound_us <= 3 * S


def test_feed_of_which_most_is_far_behind_has_the_largest_bound_allowed() -> None:
    taker = Taker()
    taker.take(*alternating(20 * BLOCK, 10**14))

    assert taker.disorder.bound_us == 60 * S


def test_watermark_stays_when_the_bound_grows() -> None:
    taker = Taker()
    taker.take(*(k * S for k in range(4 * BLOCK)))
    assert taker.disorder.bound_us == 0
    watermarks = taker.take(*alternating(40 * BLOCK, 30 * S, start=4 * BLOCK * S))

    assert taker.disorder.bound_us > 20 * S
    assert watermarks == sorted(watermarks)


def test_disorder_that_grows_at_once_makes_no_more_late_than_is_documented() -> None:
    taker = Taker()
    arrivals = np.arange(400_000) * 1_000  # a thousand a second
    taker.take(*arrivals[:200_000].tolist())
    assert (taker.disorder.bound_us, taker.counted()["late"]) == (0, 0)
    delays = np.random.default_rng(1).integers(0, 4 * S, 200_000)
    taker.take(*(arrivals[200_000:] - delays).tolist())
    late = taker.counted()["late"]
    taker.take(*(arrivals[200_000:] + 200 * S - delays).tolist())

    assert 3_000 < late < 8_000
    assert taker.counted()["late"] - late < 0.011 * 200_000


def test_late_records_are_counted_by_cause() -> None:
    taker = Taker()
    taker.take(*(k * S for k in range(BLOCK)))  # the bound is 0
    newest = (BLOCK - 1) * S
    taker.take(newest - 5 * S, newest - 70 * S, newest)
    counted = taker.counted()

    assert {name: counted[name] for name in ("records", "late", "late_by_percentile", "beyond", "bound")} == {
        "records": BLOCK + 3,
        "late": 2,
        "late_by_percentile": 1,
        "beyond": 2,
        "bound": 0,
    }


def test_what_is_stored_is_bounded() -> None:
    taker = Taker()
    times = [INSTANT_MIN // 16 for _ in range(2)]
    for edge in [*EDGES[:-1].tolist()] * 8:
        times += [0, -edge]
    taker.take(*times)
    taker.take(*times[: BLOCK - 1])
    (entries,) = taker.disorder.entries()

    assert entries.subkeys == ["counted", "learned"]
    assert sum(len(value or b"") for value in entries.values) < 20_000


@pytest.mark.parametrize("percentile", [0.0, 1.0, 99.0, -1.0, float("nan"), 0.99999, "0.99", 1, True])
def test_impossible_percentile_is_refused(percentile: Any) -> None:
    with pytest.raises(GraphError, match="percentile must be"):
        EventTime("at", max_disorder=seconds(1), percentile=percentile)


def test_percentile_needs_a_largest_bound() -> None:
    with pytest.raises(GraphError, match="needs max_disorder"):
        EventTime("at", sorted=True, percentile=0.99)


def test_percentile_is_shown() -> None:
    assert repr(LEARNING) == "EventTime('at', max_disorder=minutes(1), percentile=0.99)"
