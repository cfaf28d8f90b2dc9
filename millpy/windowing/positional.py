"""First, last, the largest or smallest few, and all: aggregates that keep values of a window's records.

They go by event time; among equal event times by order of arrival. What they keep is bounded: `N_MAX` values of a
`Top`, `Collect.limit` values and `COLLECT_BYTES_MAX` bytes and a value of a `Collect`, per key and window.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice, takewhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import SchemaError
from millpy.model.time import to_datetime
from millpy.windowing.fold import Aggregate, Fold, Partial, sayable
from millpy.windowing.grouping import Groups, Integers, Sorted

N_MAX = 1_000
COLLECT_LIMIT_MAX = 10_000
COLLECT_BYTES_MAX = 1_000_000
KEPT = (int, float, str, bool, datetime)


class First(Aggregate):
    """The value of the earliest record that has one."""

    takes = KEPT

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps [event time, value]."""
        return EdgeFold(field, kind, last=False)


class Last(Aggregate):
    """The value of the latest record that has one."""

    takes = KEPT

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps [event time, value]."""
        return EdgeFold(field, kind, last=True)


@dataclass(frozen=True, repr=False)
class Top(Aggregate):
    """The n largest values as a list, the largest first: `Top("value", n=3)`; `smallest=True`: the n smallest.

    Values that are equal each count. NaN is left out. A column of lists is `jsonb` in SQL, where an infinity is null.

    Raises:
        SchemaError: n is not between 1 and 1,000.
    """

    n: int = 10
    smallest: bool = False
    takes = (int, float, str, datetime)

    def __post_init__(self) -> None:
        if not 1 <= self.n <= N_MAX:
            raise SchemaError(f"Top keeps between 1 and {N_MAX} values, not {self.n}", hint='Top("value", n=3)')

    def __repr__(self) -> str:
        return f"Top({self.field!r}, n={self.n}{', smallest=True' if self.smallest else ''})"

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps the values."""
        return TopFold(field, kind, self.n, self.smallest)


@dataclass(frozen=True, repr=False)
class Collect(Aggregate):
    """All values as a list, in order of event time: `Collect("value", limit=100)`.

    Bounded: of more than `limit` values the earliest are kept, and none behind the first 1,000,000 bytes of them. A
    `Count` beside it tells how many there were. A column of lists is `jsonb` in SQL, where NaN and infinities are null.

    Raises:
        SchemaError: the limit is not between 1 and 10,000.
    """

    limit: int = 1_000
    takes = KEPT

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= COLLECT_LIMIT_MAX:
            raise SchemaError(
                f"Collect keeps between 1 and {COLLECT_LIMIT_MAX} values, not {self.limit}",
                hint='Collect("value", limit=100)',
            )

    def __repr__(self) -> str:
        return f"Collect({self.field!r}, limit={self.limit})"

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps [[event time, ...], [value, ...]]."""
        return CollectFold(field, kind, self.limit)


class ValueFold(Fold):
    """Keeps values of its field: datetimes as µs."""

    keeps_values = True

    def value_again(self, stored: Any) -> Any:
        """A value from JSON, in which 1.0 may be 1 and an infinity text."""
        return float(stored) if self.kind is float and stored is not None else stored

    def shown(self, value: Any) -> Any:
        """A value as a result shows it."""
        return to_datetime(value) if self.kind is datetime and value is not None else value

    def shown_in_list(self, values: Iterable[Any]) -> list[Any]:
        """Values as a list shows them: JSON has no infinities and no NaN."""
        if self.kind is float:
            return [value if value - value == 0.0 else None for value in values]
        return [self.shown(value) for value in values]


class EdgeFold(ValueFold):
    """Keeps [event time, value] of the first or last."""

    def __init__(self, field: str, kind: type, last: bool) -> None:
        super().__init__(field, kind)
        self.result = kind | None
        self._last = last

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more."""
        return self.merge(accumulator, [at, value])

    def merge(self, one: Any, other: Any) -> Any:
        """The earlier or later of both."""
        if one is None or other is None:
            return other if one is None else one
        if self._last:
            return other if other[0] >= one[0] else one
        return one if one[0] <= other[0] else other

    def result_of(self, accumulator: Any) -> Any:
        """The value."""
        return None if accumulator is None else self.shown(accumulator[1])

    def restored(self, stored: Any) -> Any:
        """As for a sum."""
        return None if stored is None else [stored[0], self.value_again(stored[1])]

    def partial(self, groups: Groups) -> Partial:
        """First or last of every group."""
        assert self.field is not None
        found = groups.by_time(self.field)
        at = found.ends() - 1 if self._last else found.offsets
        times = groups.records.event_times[found.rows[at]].tolist()
        accumulators: list[Any] = [None] * len(groups)
        pairs = zip(found.groups.tolist(), times, found.values[at].tolist(), strict=True)
        for group, time, value in pairs:
            accumulators[group] = [time, value]
        return Partial(accumulators)


class TopFold(ValueFold):
    """Keeps the values, best first."""

    def __init__(self, field: str, kind: type, n: int, smallest: bool) -> None:
        super().__init__(field, kind)
        self.result = list[kind | None] if kind is float else list[kind]  # type: ignore[valid-type]
        self._n = n
        self._smallest = smallest

    def empty(self) -> list[Any]:
        """None yet."""
        return []

    def add(self, accumulator: list[Any], value: Any, at: int) -> list[Any]:
        """One more, unless it is not good enough."""
        return self.merge(accumulator, [value] if value == value else [])

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        """The best of both."""
        return sorted(one + other, reverse=not self._smallest)[: self._n]

    def result_of(self, accumulator: list[Any]) -> list[Any]:
        """The values."""
        return self.shown_in_list(accumulator)

    def restored(self, stored: Any) -> list[Any]:
        """As for a sum."""
        return [self.value_again(value) for value in stored]

    def partial(self, groups: Groups) -> Partial:
        """The best of every group."""
        assert self.field is not None
        found = groups.by_group(self.field)
        values = found.values[_order_by_value(groups, found)]
        accumulators: list[Any] = [[] for _ in range(len(groups))]
        bounds = zip(found.groups.tolist(), found.offsets.tolist(), found.ends().tolist(), strict=True)
        for group, lo, hi in bounds:
            if self._smallest:
                accumulators[group] = _numbers(values[lo:hi])[: self._n]
            else:
                accumulators[group] = _numbers(values[lo:hi])[: -self._n - 1 : -1]
        return Partial(accumulators)


class CollectFold(ValueFold):
    """Keeps event times and values, earliest first."""

    def __init__(self, field: str, kind: type, limit: int) -> None:
        super().__init__(field, kind)
        self.result = list[kind | None] if kind is float else list[kind]  # type: ignore[valid-type]
        self._limit = limit

    def empty(self) -> list[list[Any]]:
        """None yet."""
        return [[], []]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more, unless there are enough earlier ones."""
        return self.merge(accumulator, [[at], [value]])

    def merge(self, one: Any, other: Any) -> Any:
        """The earliest of both."""
        times, values = one[0] + other[0], one[1] + other[1]
        if one[0] and other[0] and other[0][0] < one[0][-1]:
            order = sorted(range(len(times)), key=times.__getitem__)
            times, values = [times[place] for place in order], [values[place] for place in order]
        return self._bounded(times, values)

    def result_of(self, accumulator: Any) -> list[Any]:
        """The values."""
        return self.shown_in_list(accumulator[1])

    def stored(self, accumulator: Any) -> Any:
        """Times are whole numbers; values may be what JSON cannot say."""
        return [accumulator[0], [sayable(value) for value in accumulator[1]]]

    def restored(self, stored: Any) -> Any:
        """As for a sum."""
        return [stored[0], [self.value_again(value) for value in stored[1]]]

    def partial(self, groups: Groups) -> Partial:
        """The earliest of every group."""
        assert self.field is not None
        found = groups.by_time(self.field)
        times, values = groups.records.event_times[found.rows], found.values
        accumulators: list[Any] = [[[], []] for _ in range(len(groups))]
        bounds = zip(found.groups.tolist(), found.offsets.tolist(), found.ends().tolist(), strict=True)
        for group, lo, hi in bounds:
            hi = min(hi, lo + self._limit)
            accumulators[group] = self._bounded(times[lo:hi].tolist(), values[lo:hi].tolist())
        return Partial(accumulators)

    def _bounded(self, times: list[Any], values: list[Any]) -> Any:
        """The earliest values that are few and small enough."""
        count = min(len(values), self._limit)
        if self.kind is str:
            # By the bytes before each: what is kept then says itself that it is full, whatever is merged with it later.
            sizes = accumulate((len(value.encode(errors="replace")) for value in values[:count]), initial=0)
            count = sum(1 for _ in takewhile(lambda before: before < COLLECT_BYTES_MAX, islice(sizes, count)))
        return [times[:count], values[:count]]


def _order_by_value(groups: Groups, found: Sorted) -> Integers:
    """The order of values by group, smallest first; text by code point."""
    if found.values.dtype != object:
        return groups.order_within(found, found.values)
    ranks = pc.rank(pa.array(found.values, pa.string()), "ascending", tiebreaker="dense")
    return groups.order_within(found, ranks.to_numpy(zero_copy_only=False))


def _numbers(values: Any) -> list[Any]:
    """Values as Python has them, without NaN."""
    return [value for value in values.tolist() if value == value]
