"""Ranking: the n keys of a window with the greatest values, over panes that may be corrected.

Without retractions n entries are enough. With them, an entry that is taken back lets the next one move up, so up to
`KEPT_MAX` entries are kept, each with a count: of values minus retractions. Beyond that bound the worst ones are
dropped, and whatever is worse than the best that was dropped is ignored from then on, retractions included. So the
ranking has no wrong entry; it can only become shorter than n, after nearly KEPT_MAX entries have been taken back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from heapq import merge
from itertools import islice
from typing import Any

import msgspec

from millpy.errors import SchemaError
from millpy.windowing.aggregates.combiner import Combiner

N_MAX = 1_000
KEPT_MAX = 10_000
"""Maximum of entries that are kept of a window, if some may be retracted."""


class Ranking(Combiner[Any]):
    """The n records with the greatest values of a field, as a list of their labels and values, the best first.

    Of equal values the one with the smaller labels comes first. Records whose value is None, NaN or infinite have no
    rank.

    Args:
        by: the field of the values: int or float.
        labels: the fields of the labels, and their types.
        kind: the type of the values.
        n: how many, from 1 to 1,000.
        smallest: whether the least values are the best.
        retracts: whether some of the records may be retractions.

    Raises:
        SchemaError: n is out of bounds, or the values are no numbers.
    """

    stored_as = "ranking"

    def __init__(
        self, by: str, labels: Mapping[str, type], kind: Any, n: int, *, smallest: bool = False, retracts: bool = False
    ) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= N_MAX:
            raise SchemaError(f"n of top_n must be between 1 and {N_MAX:,}, not {n!r}", hint="for example n=10")
        if kind not in (int, float):
            raise SchemaError(f"top_n cannot rank by field {by!r}: it is no number", hint="name a count, sum or mean")
        self.by, self.labels, self.n, self.smallest = by, tuple(labels), n, smallest
        self.entry = msgspec.defstruct("Ranked", [*labels.items(), (by, kind)], frozen=True)
        self._kept_max = KEPT_MAX if retracts else n
        order = tuple.__class_getitem__((kind, *labels.values()))
        entry = msgspec.defstruct("Entry", [("order", order), ("count", int)], array_like=True)
        self._entry: Any = entry
        self._kept: Any = msgspec.defstruct(
            "Kept",
            [("entries", list[entry], msgspec.field(default_factory=list)), ("dropped", order | None, None)],  # type: ignore[valid-type]
        )
        self.accumulator = self._kept  # type: ignore[misc]
        self.result_type = list[self.entry]  # type: ignore[misc,name-defined]

    def parameters(self) -> Mapping[str, Any]:
        """Return what the ranking depends on."""
        return {"by": self.by, "labels": list(self.labels), "n": self.n, "smallest": self.smallest}

    def create(self) -> Any:
        """Return the accumulator without entries."""
        return self._kept()

    def add(self, accumulator: Any, record: Any) -> Any:
        """Add a record."""
        return self._count(accumulator, record, 1)

    def subtract(self, accumulator: Any, record: Any) -> Any:
        """Take a record back."""
        return self._count(accumulator, record, -1)

    def merge(self, one: Any, other: Any) -> Any:
        """Merge two rankings."""
        found: list[Any] = []
        for entry in merge(one.entries, other.entries, key=_order):
            if found and found[-1].order == entry.order:
                found[-1].count += entry.count
            else:
                found.append(entry)
        bounds = [each.dropped for each in (one, other) if each.dropped is not None]
        merged = self._kept([entry for entry in found if entry.count], min(bounds, default=None))
        return self._bounded(merged)

    def result(self, accumulator: Any) -> list[Any]:
        """Return the n best entries."""
        best = islice((entry.order for entry in accumulator.entries if entry.count > 0), self.n)
        return [self.entry(*labels, value if self.smallest else 0 - value) for value, *labels in best]

    def _count(self, accumulator: Any, record: Any, change: int) -> Any:
        value = getattr(record, self.by)
        if value is None or value - value != 0:
            return accumulator
        order = (value if self.smallest else 0 - value, *(getattr(record, label) for label in self.labels))
        if accumulator.dropped is not None and order >= accumulator.dropped:
            return accumulator
        entries: list[Any] = accumulator.entries
        place = bisect_left(entries, order, key=_order)
        if place < len(entries) and entries[place].order == order:
            entries[place].count += change
            if not entries[place].count:
                del entries[place]
            return accumulator
        entries.insert(place, self._entry(order, change))
        return self._bounded(accumulator)

    def _bounded(self, accumulator: Any) -> Any:
        """Drop what is beyond the bound."""
        entries: list[Any] = accumulator.entries
        if len(entries) > self._kept_max:
            bound = entries[self._kept_max].order
            accumulator.dropped = bound if accumulator.dropped is None else min(bound, accumulator.dropped)
            del entries[self._kept_max :]
        if accumulator.dropped is not None:
            del entries[bisect_left(entries, accumulator.dropped, key=_order) :]
        return accumulator


def _order(entry: Any) -> tuple[Any, ...]:
    order: tuple[Any, ...] = entry.order
    return order
