"""How much goes into a turn: halved when one was too large, and by the time that records take."""

import random

import pytest

from millpy.limits import Limits
from millpy.runtime.turn_budget import FACTOR_MIN, FIRST_RECORDS, TurnBudget

LIMITS = Limits(bundle_records_max=1_024, bundle_bytes_max=2_048_000, step_s_max=2.0)


def measured(budget: TurnBudget, record_s: float, turns: int = 20) -> list[int]:
    """Turns as large as they may be, of records that take so long; returns their sizes."""
    sizes = []
    for _ in range(turns):
        sizes.append(budget.records)
        budget.stepped(budget.records, budget.records * record_s)
    return sizes


def test_a_turn_begins_small_and_grows_to_the_limit() -> None:
    sizes = measured(TurnBudget(LIMITS), 0.000_01)

    assert sizes[0] == FIRST_RECORDS
    assert sizes == sorted(sizes)
    assert sizes[2] == sizes[-1] == 1_024


@pytest.mark.parametrize("record_s", [0.002, 0.1, 1.9, 2.0, 90.0])
def test_a_step_takes_no_longer_than_its_time_or_one_record(record_s: float) -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, record_s)

    assert budget.records == max(1, int(2.0 / record_s))


def test_slow_records_shrink_the_next_turn() -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, 0.000_01)

    budget.stepped(1_000, 1_000 * 0.02)

    assert budget.records == 100
    assert measured(budget, 0.000_01)[-1] == 1_024


def test_all_intervals_of_a_turn_share_its_time() -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, 0.01)

    budget.takers = 10

    assert budget.records == 20


def test_every_limit_is_halved_until_a_turn_passes_and_then_grows_again() -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, 0.0)
    whole = (budget.records, budget.bytes, budget.segment_bytes, budget.panes, budget.timers)

    for _ in range(5):
        budget.voided()

    assert (budget.records, budget.bytes, budget.segment_bytes, budget.panes, budget.timers) == tuple(
        n // 32 for n in whole
    )
    for _ in range(200):
        budget.passed()
    assert (budget.records, budget.bytes, budget.segment_bytes, budget.panes, budget.timers) == whole


def test_limits_are_never_halved_to_zero() -> None:
    budget = TurnBudget(LIMITS)
    for _ in range(100):
        budget.voided()

    assert budget.factor == FACTOR_MIN
    assert min(budget.records, budget.bytes, budget.segment_bytes, budget.panes, budget.timers) == 1


@pytest.mark.parametrize(("records", "rows"), [(6, 0), (1_000, 12), (1, 40), (1, 1), (1, 0)])
def test_a_turn_refused_for_its_size_is_not_retried_whole(records: int, rows: int) -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, 0.0)

    budget.refused(records, rows)

    assert budget.records <= records // 2 or budget.panes <= rows // 2 or budget.factor == FACTOR_MIN


@pytest.mark.parametrize("passes_up_to", [1, 17, 999])
def test_an_unknown_limit_is_found_and_seldom_exceeded_again(passes_up_to: int) -> None:
    budget = TurnBudget(LIMITS)
    measured(budget, 0.0)
    voided = 0
    for _ in range(1_000):
        if budget.records > passes_up_to:
            voided += 1
            budget.voided()
        else:
            budget.passed()

    assert voided < 60


def test_budget_always_stays_within_its_limits() -> None:
    rng, budget = random.Random(7), TurnBudget(LIMITS)
    for _ in range(5_000):
        rng.choice([budget.voided, budget.passed, lambda: budget.stepped(rng.randrange(3_000), rng.random() * 1e6)])()
        assert 1 <= budget.records <= LIMITS.bundle_records_max
        assert 1 <= budget.bytes <= LIMITS.bundle_bytes_max
        assert 1 <= budget.segment_bytes <= LIMITS.segment_poll_bytes_max


def test_a_poll_reads_about_what_a_turn_takes() -> None:
    budget = TurnBudget(LIMITS)
    budget.takers = 2
    budget.polled(1_000, 34_000)
    assert budget.segment_bytes == budget.records * 2 * 34

    budget.polled(0, 0)  # nothing has come

    assert budget.segment_bytes == budget.records * 2 * 34
    budget.polled(1, LIMITS.segment_poll_bytes_max)
    assert budget.segment_bytes == LIMITS.segment_poll_bytes_max
