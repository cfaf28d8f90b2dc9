"""Checks windows over panes that are retracted: after every commit they equal a batch over the panes consumed so far.

The panes are the rows of the inner table, which `recount.py` checks. `InnerRows` keeps what the table had after each
bundle, and a judge adds up what its interval has consumed: neither knows of retractions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from millpy.store.memory.tables import Row
from millpy.testing.simulation.graphs import group_of
from millpy.testing.simulation.history import CommittedBundle, ObservedInterval, RunHistory

Total = tuple[int, int, int]
"""(panes, records, sum of the values)."""
Totals = dict[tuple[int, int], Total]
"""(group, window start) -> total."""
PaneTime = Callable[[Row], int | None]
"""Returns the event time of the pane in a row; None if it is not sure."""


class InnerRows:
    """The rows of the inner tables after each bundle that has written any, by interval.

    Attributes:
        unsure: windows over panes of which one may belong to another.
    """

    def __init__(self, history: RunHistory) -> None:
        self._history = history
        self._after: dict[int, list[tuple[int, Totals]]] = {}
        self.unsure: set[tuple[int, int]] = set()

    def note(self, commit: CommittedBundle, time_of: PaneTime, total_us: int) -> None:
        """Keep the rows after a bundle of an inner interval, for windows of a length over its panes."""
        table = commit.observed.computation
        interval_id, found = commit.observed.interval_id, Totals()
        for row in self._history.rows(table):
            if row["interval_id"] == interval_id:
                group, at = group_of(row["device"]), time_of(row)
                if at is None:
                    within = (row["window_start"], row["window_end"] - 1)
                    self.unsure.update((group, time // total_us * total_us) for time in within)
                    continue
                name = (group, at // total_us * total_us)
                found[name] = _sum(found.get(name), (1, row["n"], row["total"]))
        self._after.setdefault(interval_id, []).append((commit.bundle, found))

    def through(self, interval_id: int, bundle: int) -> Totals:
        """Return the rows of an interval after a bundle, added up by group and larger window."""
        return next((totals for at, totals in reversed(self._after.get(interval_id, ())) if at <= bundle), {})


def _sum(one: Total | None, other: Total) -> Total:
    return other if one is None else (one[0] + other[0], one[1] + other[1], one[2] + other[2])


@dataclass(slots=True)
class LevelJudge:
    """Judges one interval of windows over panes.

    Attributes:
        adds_up: whether a window gives several panes, which add up to its row.
        homes: groups that are known to belong to this interval.
    """

    table: str
    observed: ObservedInterval
    history: RunHistory
    inner: InnerRows
    total_us: int
    adds_up: bool
    homes: set[int] = field(default_factory=set)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Compare the rows after a bundle."""
        self.homes.update(name[2] for name in commit.changes if name[0] == "window")
        self.homes.update(row["group"] for row in commit.rows.get(self.table, ()))
        yield from self.finished()

    def expected(self) -> Totals:
        """Return the totals of the consumed panes, in windows that the watermark has passed."""
        found = Totals()
        for producer, (seq, _) in self.observed.cursors.items():
            for name, total in self.inner.through(producer, seq).items():
                if name[1] + self.total_us <= self.observed.input_watermark:
                    found[name] = _sum(found.get(name), total)
        return found

    def finished(self) -> Iterator[str]:
        """Yield the differences between the rows and the totals."""
        found = rows_of(self.history, self.table, self.observed.interval_id)
        expected = {name: total for name, total in self.expected().items() if name[0] in self.homes}
        for name in sorted((found.keys() | expected.keys()) - self.inner.unsure):
            first = 1 if self.adds_up else 0
            if (found.get(name) or ())[first:] != (expected.get(name) or ())[first:]:
                yield f"{self.table}: {name} has {found.get(name)} instead of {expected.get(name)}"


def rows_of(history: RunHistory, table: str, interval_id: int) -> Totals:
    """Return the rows that an interval has written."""
    mine = (row for row in history.rows(table) if row["interval_id"] == interval_id)
    return {(row["group"], row["window_start"]): (row["parts"], row["n"], row["total"]) for row in mine}


def whole_totals(judges: Sequence[LevelJudge]) -> Iterator[str]:
    """Yield the groups that belong to no interval, of all intervals of a finished computation."""
    known = set().union(*(judge.homes for judge in judges))
    expected = {group for judge in judges for group, _ in judge.expected()}
    for group in expected - known:
        yield f"{judges[0].table}: no pane of group {group} had an effect"
