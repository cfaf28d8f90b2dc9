"""An id is remembered for the horizon to its last microsecond, in memory and by the next owner, and not one longer."""

from __future__ import annotations

import numpy as np
import pytest

from millpy.ingest.dedupe import DedupeIndex
from millpy.model.checkpoint import DedupeRun
from millpy.model.time import Instant

WITHIN = 10
LARGE = 100
"""More ids than a small bundle has: they become a tier at once."""


def ids(first: int, count: int) -> bytes:
    return b"".join(
        (number * 0x9E3779B97F4A7C15 % 2**128).to_bytes(16, "big") for number in range(first, first + count)
    )


def duplicates(index: DedupeIndex, first: int, count: int, *times: int) -> int:
    """How many of a bundle of ids were seen; one time for all of them, or one each."""
    clocks = np.full(count, times[0], np.int64) if len(times) == 1 else np.array(times, np.int64)
    found, run = index.check(ids(first, count), clocks)
    assert run is not None
    return int(found.sum())


@pytest.mark.parametrize("count", [1, LARGE], ids=["small bundle", "tier"])
@pytest.mark.parametrize(("later", "expected"), [(WITHIN, True), (WITHIN + 1, False)])
def test_an_id_seen_exactly_the_horizon_ago_is_a_duplicate(count: int, later: int, expected: bool) -> None:
    index = DedupeIndex(WITHIN)
    assert duplicates(index, 0, count, 0) == 0

    assert duplicates(index, 0, count, later) == count * expected


def test_a_duplicate_refreshes_its_id_to_the_last_microsecond() -> None:
    for count in (1, LARGE):
        index = DedupeIndex(WITHIN)
        found = [duplicates(index, 0, count, at) for at in (0, WITHIN, 2 * WITHIN, 3 * WITHIN, 4 * WITHIN + 1)]

        assert found == [0, count, count, count, 0]


def test_a_tier_at_the_edge_of_the_horizon_outlives_new_tiers() -> None:
    index = DedupeIndex(WITHIN)
    duplicates(index, 0, LARGE, 0)

    for number in range(1, 12):  # often enough that tiers are merged on the way
        duplicates(index, number * LARGE, LARGE, WITHIN)

    assert duplicates(index, 0, LARGE, WITHIN) == LARGE


def test_an_id_at_the_edge_of_the_horizon_outlives_older_ids_of_its_tier() -> None:
    index = DedupeIndex(WITHIN)
    duplicates(index, 0, LARGE, *range(-LARGE + 1, 1))

    for number in range(1, 12):
        duplicates(index, number * LARGE, LARGE, WITHIN)

    assert duplicates(index, LARGE - 1, 1, WITHIN) == 1
    assert duplicates(index, LARGE - 2, 1, WITHIN) == 0


def test_the_next_owner_and_a_renewed_run_know_an_id_at_the_edge() -> None:
    seen = np.array([-1, 0], "<i8").tobytes()
    runs = [
        DedupeRun(ids(0, 2), seen, Instant(WITHIN), Instant(0)),
        DedupeRun(b"", b"", Instant(WITHIN), Instant(WITHIN)),  # the clock has gone on
    ]

    def owner() -> DedupeIndex:
        return DedupeIndex(WITHIN, runs)

    renewed = owner().renew()
    assert renewed is not None
    for index in (owner(), DedupeIndex(WITHIN, [renewed])):
        assert duplicates(index, 1, 1, WITHIN) == 1
        assert duplicates(index, 0, 1, WITHIN) == 0


def test_a_run_is_kept_for_as_long_as_its_newest_id() -> None:
    for count in (2, LARGE):
        _, run = DedupeIndex(WITHIN).check(ids(0, count), np.arange(count, dtype=np.int64))

        assert run is not None
        assert run.expires_at == count - 1 + WITHIN


def test_a_source_that_is_quiet_for_exactly_the_horizon_forgets_nothing() -> None:
    index = DedupeIndex(WITHIN)
    duplicates(index, 0, 1, 0)

    assert index.expire(WITHIN) is None
    assert duplicates(index, 0, 1, WITHIN) == 1
    assert index.expire(WITHIN + 1) is not None
    assert len(index) == 0


@pytest.mark.parametrize(("count", "is_renewed"), [(LARGE, True), (LARGE + 1, False)])
def test_more_ids_than_a_run_may_have_are_not_renewed(
    count: int, is_renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the runs that they have, and in memory."""
    monkeypatch.setattr("millpy.ingest.dedupe.RENEWED_IDS_MAX", LARGE)
    index = DedupeIndex(WITHIN)
    duplicates(index, 0, count, 0)

    assert (index.renew() is not None) is is_renewed
    assert duplicates(index, 0, count, WITHIN) == count
