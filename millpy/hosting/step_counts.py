"""What a step counts for its interval (I8): records by input and outcome, result rows, and what is counted anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpy.hosting.interval_state import IntervalState
from millpy.hosting.replay import ReplayBatch, corrected_outcomes
from millpy.model.checkpoint import DeadLetter, RequestOutcome, Settlement
from millpy.model.stage import StepResult
from millpy.model.time import Instant


def count_step(interval: IntervalState, refused: Sequence[tuple[int, DeadLetter]], result: StepResult) -> None:
    """Count a stage's input, output and result rows (I8), and move its gauges."""
    for name, change in result.gauges.items():
        interval.count(name, "", change)
    for subscription in interval.plan.incoming.values():
        of, place = str(subscription.subscription_id), subscription.input
        interval.count("consumed", of, result.consumed_by_input.get(place, 0))
        interval.count("late", of, result.late_by_input.get(place, 0))
        interval.count("duplicate", of, result.duplicates_by_input.get(place, 0))
        interval.count("unmatched", of, result.unmatched_by_input.get(place, 0))
        letters = result.dead_lettered_by_input.get(place, 0) + sum(1 for i, _ in refused if i == place)
        interval.count("dead_lettered", of, letters)
    for table_id, rows in result.emitted_by_table.items():
        interval.count("emitted", str(table_id), rows)
    for part in result.results:
        interval.count("written", str(part.table_id), len(part.columns[0]))


def uncount_given_up(interval: IntervalState, settlements: Mapping[int, Settlement]) -> list[tuple[int, DeadLetter]]:
    """Return dead letters of a sink's messages, with their inputs; their records no longer count as consumed (I8)."""
    settlement = settlements.get(interval.interval_id)
    if settlement is None:
        return []
    of = {subscription.input: str(subscription.subscription_id) for subscription in interval.plan.incoming.values()}
    for letter in settlement.letters.values():
        interval.count("consumed", of[letter.input], -1)
    return [(letter.input, letter) for letter in settlement.letters.values()]


def uncount_replayed(
    interval: IntervalState, retaken: ReplayBatch, result: StepResult, watermark: Instant
) -> list[RequestOutcome]:
    """Subtract replayed records from the dead letters and late records; their new outcome is counted again (I8).

    Return the outcomes of corrections. Late records that are in their finished windows now count as consumed.
    """
    outcomes = corrected_outcomes(retaken, result.corrected, result.corrected_windows, watermark)
    of = {subscription.input: str(subscription.subscription_id) for subscription in interval.plan.incoming.values()}
    for request, (place, *_) in retaken.taken if retaken.arrived else ():
        interval.count("late" if request.table == "late_records" else "dead_lettered", of[place], -1)
    for outcome in outcomes:
        if outcome.corrects and outcome.request.window is not None and outcome.request.window.whole:
            interval.count("late", of[outcome.request.input], -1)
            interval.count("consumed", of[outcome.request.input], 1)
    return outcomes
