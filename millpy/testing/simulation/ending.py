"""Judges a finished simulated graph: no work is left, and the results equal the oracle's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from millpy.store.memory.tables import Row
from millpy.testing.simulation.checkers import Evidence, Violation
from millpy.testing.simulation.deployments import BRANCH_OF
from millpy.testing.simulation.folded_state import forget_deleted
from millpy.testing.simulation.graphs import GROUP_WINDOW_US, PERIOD_US
from millpy.testing.simulation.oracle import END, WatchOracle, grouped
from millpy.testing.simulation.repairs import late_records_added_once


def finished(evidence: Evidence) -> Iterator[Violation]:
    """Yield the violations in a finished graph: work that is left, and results that differ from the oracle's."""
    history = evidence.history
    for observed in history.by_interval.values():
        if observed.low_watermark < END:
            yield Violation("I5", f"interval {observed.interval_id} has not reached the end")
        forget_deleted(observed, evidence.shape.lateness_of(BRANCH_OF.get(observed.computation, "")))
        left = [name for name in observed.keyed if name[0] in ("timer", "window")]
        if left:
            yield Violation("I6", f"interval {observed.interval_id} has finished with {left[:3]}")
    accounting = history.database.accounting(history.graph_id)
    if not accounting.balanced:
        yield Violation("I8", f"the store's own accounts do not add up: {accounting}")
    yield from (Violation("oracle", what) for what in _outcome(evidence))


def _outcome(evidence: Evidence) -> Iterator[str]:
    history = evidence.history
    if evidence.file is not None:
        if evidence.lines.total() != len(evidence.file):
            yield f"{evidence.lines.total()} of {len(evidence.file)} lines are committed"
    for partition, broker in evidence.brokers.items() if evidence.file is None else ():
        numbers = evidence.committed.get(partition, set())
        if missing := [m.number for m in broker.published if m.number not in numbers]:
            yield f"messages {missing[:5]} of {partition} were published and never committed"
    yield from evidence.branches.finished()
    yield from late_records_added_once(evidence)
    expected = sum(source.dead for source in evidence.sources.values())
    if "watcher" in evidence.shape.branches:
        yield from _watched_to_the_end(evidence)
        expected += sum(evidence.refused(observed.interval_id).total() for observed in history.intervals_of("watcher"))
    requests, letters = history.database.requests, list(history.dead_letters())
    for number, _, _, letter in letters:
        replayed = requests.state_of("dead_letters", number).state == "replayed"
        expected += replayed or letter.computation in ("parks", "rejects")
    if len(letters) != expected:
        yield f"{len(letters)} dead letters instead of {expected}"


def _watched_to_the_end(evidence: Evidence) -> Iterator[str]:
    history, source = evidence.history, evidence.source
    watch = WatchOracle(source)
    for observed in history.intervals_of("watcher"):
        watch.refused += evidence.refused(observed.interval_id)
    watch.advance(max(source.by_bundle))
    rows_of_marks = history.rows("marks")
    marks = Counter(
        (r["device"], r["kind"], r["number"], r["total"], r["event_time"]) for r in rows_of_marks if r["kind"] != "ping"
    )
    yield from _differences("marks", marks, watch.marks)
    yield from _pings(rows_of_marks)
    if evidence.shape.deep:
        said = [(row["group"], row["kind"], row["event_time"]) for row in rows_of_marks]
        rows = history.rows("per_group")
        groups = Counter({(row["group"], row["window_start"] // GROUP_WINDOW_US): row["n"] for row in rows})
        for _, late in history.late_records():
            if late.computation == "per_group":
                starts = zip(map(json.loads, late.keys), late.window_starts, strict=True)
                groups.update((group, start // GROUP_WINDOW_US) for group, start in starts if start is not None)
        yield from _differences("per_group", groups, grouped(said, GROUP_WINDOW_US, pings=True))
        totals: Counter[tuple[int, int]] = Counter()
        for row in history.rows("totals"):
            totals[row["group"], row["period"]] += row["marks"]
        yield from _differences("totals", totals, grouped(said, PERIOD_US, pings=False))


def _pings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield devices whose pings have gaps in their numbers. How many there are depends on the clock."""
    by_device: dict[str, list[int]] = {}
    for row in rows:
        if row["kind"] == "ping":
            by_device.setdefault(row["device"], []).append(row["number"])
    for device, numbers in by_device.items():
        if sorted(numbers) != list(range(1, len(numbers) + 1)):
            yield f"pings of {device}: {sorted(numbers)}"


def _differences(what: str, found: Any, expected: Any) -> Iterator[str]:
    wrong = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    if wrong:
        shown = "; ".join(f"{name}: {found.get(name)} instead of {expected.get(name)}" for name in wrong[:3])
        yield f"{what}: {len(wrong)} of {len(expected)} differ: {shown}"
