"""What must hold when a simulated graph has finished: nothing is left, and the results are the oracle's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from millpy.store.memory_tables import Row
from millpy.testing.simulation.checkers import Evidence, Violation
from millpy.testing.simulation.graphs import GROUP_WINDOW_US, PERIOD_US
from millpy.testing.simulation.oracle import END, WatchOracle, grouped


def finished(evidence: Evidence) -> Iterator[Violation]:
    """What must hold when the graph has finished: nothing is left, and the results are the oracle's."""
    books = evidence.books
    for book in books.by_interval.values():
        if book.low_watermark < END:
            yield Violation("I5", f"interval {book.interval_id} has not reached the end")
        left = [name for name in book.keyed if name[0] in ("timer", "window")]
        if left:
            yield Violation("I6", f"interval {book.interval_id} has finished with {left[:3]}")
    accounting = books.database.accounting(books.graph_id)
    if not accounting.balanced:
        yield Violation("I8", f"the store's own accounts do not add up: {accounting}")
    yield from (Violation("oracle", what) for what in _outcome(evidence))


def _outcome(evidence: Evidence) -> Iterator[str]:
    books = evidence.books
    if evidence.file is not None:
        if evidence.lines.total() != len(evidence.file):
            yield f"{evidence.lines.total()} of {len(evidence.file)} lines are committed"
    for partition, broker in evidence.brokers.items() if evidence.file is None else ():
        numbers = evidence.committed.get(partition, set())
        if missing := [m.number for m in broker.published if m.number not in numbers]:
            yield f"messages {missing[:5]} of {partition} were published and never committed"
    yield from evidence.branches.finished()
    set_aside = sum(source.dead for source in evidence.sources.values())
    if "watcher" in evidence.shape.branches:
        yield from _watched_to_the_end(evidence)
        set_aside += sum(evidence.refused(book.interval_id).total() for book in books.of("watcher"))
    requests, letters = books.database.requests, list(books.dead_letters())
    for number, _, _, letter in letters:
        replayed = requests.standing("dead_letters", number).state == "replayed"
        set_aside += replayed or letter.computation in ("parks", "sets_aside")
    if len(letters) != set_aside:
        yield f"{len(letters)} dead letters instead of {set_aside}"


def _watched_to_the_end(evidence: Evidence) -> Iterator[str]:
    books, source = evidence.books, evidence.source
    watch = WatchOracle(source)
    for book in books.of("watcher"):
        watch.refused += evidence.refused(book.interval_id)
    watch.advance(max(source.by_bundle))
    rows_of_marks = books.rows("marks")
    marks = Counter(
        (r["device"], r["kind"], r["number"], r["total"], r["event_time"]) for r in rows_of_marks if r["kind"] != "ping"
    )
    yield from _differences("marks", marks, watch.marks)
    yield from _pings(rows_of_marks)
    if evidence.shape.deep:
        said = [(row["group"], row["kind"], row["event_time"]) for row in rows_of_marks]
        rows = books.rows("per_group")
        groups = Counter({(row["group"], row["window_start"] // GROUP_WINDOW_US): row["n"] for row in rows})
        for _, late in books.late_records():
            if late.computation == "per_group":
                starts = zip(map(json.loads, late.keys), late.window_starts, strict=True)
                groups.update((group, start // GROUP_WINDOW_US) for group, start in starts if start is not None)
        yield from _differences("per_group", groups, grouped(said, GROUP_WINDOW_US, pings=True))
        totals: Counter[tuple[int, int]] = Counter()
        for row in books.rows("totals"):
            totals[row["group"], row["period"]] += row["marks"]
        yield from _differences("totals", totals, grouped(said, PERIOD_US, pings=False))


def _pings(rows: Sequence[Row]) -> Iterator[str]:
    """Timers by the clock: how many depends on it, but a device's are numbered without gap or repetition."""
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
