"""Aggregates that keep values of a window's records: the first, the last, the largest or smallest few, and all.

First, last and all are in order of event time; among equal event times, of arrival. The memory per key and window is
bounded: `Top` keeps at most `N_MAX` values, `Collect` at most `limit` values and `COLLECT_BYTES_MAX` bytes plus one
value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from itertools import accumulate, islice, takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import SchemaError
from millpy.model.arguments import check_flags, is_whole
from millpy.model.field_types import value_of_plain
from millpy.model.identity import Identity
from millpy.model.time import to_datetime
from millpy.windowing.accumulator import Accumulator, Aggregate, PartialAggregate, json_safe
from millpy.windowing.group_by import GroupedColumn, Groups, Integers

N_MAX = 1_000
COLLECT_LIMIT_MAX = 10_000
COLLECT_BYTES_MAX = 1_000_000
KEPT = (int, float, str, bool, datetime)


class First(Aggregate):
    """The value in the earliest record where the field is not None."""

    kind = "first"
    takes = (*KEPT, Decimal, date)
    forgets = "it keeps only the first value"
    merge_order = "event_time"

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep [event time, value]."""
        return EdgeAccumulator(field, kind, last=False)


class Last(Aggregate):
    """The value in the latest record where the field is not None."""

    kind = "last"
    takes = (*KEPT, Decimal, date)
    forgets = "it keeps only the last value"
    merge_order = "event_time"

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep [event time, value]."""
        return EdgeAccumulator(field, kind, last=True)


@dataclass(frozen=True, repr=False)
class Top(Aggregate):
    """The n largest values as a list, the largest first: `Top("value", n=3)`. With `smallest=True`, the n smallest.

    Equal values count separately. NaN is ignored. A column of lists is `jsonb` in SQL. It has null for
    an infinity, and for an integer beyond 64 bits, which a sum may be.

    Raises:
        SchemaError: n is not between 1 and 1,000.
    """

    kind = "top"
    n: int = 10
    smallest: bool = False
    takes = (int, float, str, datetime)
    forgets = "it keeps only the best values"

    def __post_init__(self) -> None:
        check_flags(smallest=self.smallest)
        if not is_whole(self.n, 1, N_MAX):
            raise SchemaError(
                f"n of Top must be between 1 and {N_MAX}, not {self.n!r}", hint='for example Top("value", n=3)'
            )

    def identity(self) -> Identity:
        """Describe the aggregate and its parameters."""
        return {**super().identity(), "n": self.n, "smallest": self.smallest}

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the values."""
        return TopAccumulator(field, kind, self.n, self.smallest)


@dataclass(frozen=True, repr=False)
class Collect(Aggregate):
    """All values as a list, in order of event time: `Collect("value", limit=100)`.

    The list keeps the earliest `limit` values, and no value after the first 1,000,000 bytes of text. A `Count` beside
    it tells how many there were. A column of lists is `jsonb` in SQL. It has null for NaN and
    infinities, and for an integer beyond 64 bits, which a sum may be.

    Raises:
        SchemaError: the limit is not between 1 and 10,000.
    """

    kind = "collect"
    limit: int = 1_000
    takes = KEPT
    forgets = "it keeps only the earliest values"
    merge_order = "event_time"

    def __post_init__(self) -> None:
        if not is_whole(self.limit, 1, COLLECT_LIMIT_MAX):
            raise SchemaError(
                f"limit of Collect must be between 1 and {COLLECT_LIMIT_MAX}, not {self.limit!r}",
                hint='for example Collect("value", limit=100)',
            )

    def identity(self) -> Identity:
        """Describe the aggregate and its parameters."""
        return {**super().identity(), "limit": self.limit}

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep [[event time, ...], [value, ...]]."""
        return CollectAccumulator(field, kind, self.limit)


class ValueAccumulator(Accumulator):
    """Keeps values of a field; datetimes as µs."""

    keeps_values = True

    def restored_value(self, stored: Any) -> Any:
        """Convert a value from its stored form, where 1.0 may be 1, and infinities, NaN and wide integers are text."""
        if self.kind is Decimal and stored is not None:
            return int(stored)
        return self.kind(stored) if self.kind in (int, float) and stored is not None else stored

    def result_value(self, value: Any) -> Any:
        """Convert a value to a result: µs to a datetime, if the field is one; as `value_of_plain`."""
        if value is not None and (convert := value_of_plain(self.kind)) is not None:
            return convert(value)
        return to_datetime(value) if self.kind is datetime and value is not None else value

    def result_list(self, values: Iterable[Any]) -> list[Any]:
        """Convert values to a list as a result; None stands for NaN, infinities, and integers beyond 64 bits."""
        if self.kind is float:
            return [value if value - value == 0.0 else None for value in values]
        if self.kind is int:
            return [value if -(2**63) <= value < 2**63 else None for value in values]
        return [self.result_value(value) for value in values]


class EdgeAccumulator(ValueAccumulator):
    """Keeps [event time, value] of the first or last record."""

    stored_form = "timed value"

    def __init__(self, field: str, kind: type, last: bool) -> None:
        super().__init__(field, kind)
        self.result = kind | None
        self._last = last
        self.is_small = kind in (bool, int, float, Decimal, datetime, date)

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value, if it is earlier or later than the one that is kept."""
        return self.merge(accumulator, [at, value])

    def merge(self, one: Any, other: Any) -> Any:
        """Return the earlier or later of two accumulators; of equal event times, the one that arrived first or last."""
        if one is None or other is None:
            return other if one is None else one
        if self._last:
            return other if other[0] >= one[0] else one
        return one if one[0] <= other[0] else other

    def result_of(self, accumulator: Any) -> Any:
        """Return the value."""
        return None if accumulator is None else self.result_value(accumulator[1])

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return None if stored is None else [stored[0], self.restored_value(stored[1])]

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Return the first or last value of each group, with its event time."""
        assert self.field is not None
        found = groups.by_time(self.field)
        at = found.ends() - 1 if self._last else found.offsets
        times = groups.records.event_times[found.rows[at]].tolist()
        accumulators: list[Any] = [None] * len(groups)
        pairs = zip(found.groups.tolist(), times, found.values[at].tolist(), strict=True)
        for group, time, value in pairs:
            accumulators[group] = [time, value]
        return PartialAggregate(accumulators)


class TopAccumulator(ValueAccumulator):
    """Keeps the values, best first."""

    def __init__(self, field: str, kind: type, n: int, smallest: bool) -> None:
        super().__init__(field, kind)
        self.result = list[kind | None] if kind is float else list[kind]  # type: ignore[valid-type]
        self._n = n
        self._smallest = smallest

    def empty(self) -> list[Any]:
        """Return the accumulator of zero records."""
        return []

    def add(self, accumulator: list[Any], value: Any, at: int) -> list[Any]:
        """Add one value, if it is among the n best."""
        return self.merge(accumulator, [value] if value == value else [])

    def merge(self, one: list[Any], other: list[Any]) -> list[Any]:
        """Return the n best values of two accumulators."""
        return sorted(one + other, reverse=not self._smallest)[: self._n]

    def result_of(self, accumulator: list[Any]) -> list[Any]:
        """Return the values."""
        return self.result_list(accumulator)

    def from_stored(self, stored: Any) -> list[Any]:
        """Convert the accumulator from its stored form."""
        return [self.restored_value(value) for value in stored]

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Return the n best values of each group."""
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
        return PartialAggregate(accumulators)


class CollectAccumulator(ValueAccumulator):
    """Keeps [event times, values], earliest first."""

    def __init__(self, field: str, kind: type, limit: int) -> None:
        super().__init__(field, kind)
        self.result = list[kind | None] if kind is float else list[kind]  # type: ignore[valid-type]
        self._limit = limit

    def empty(self) -> list[list[Any]]:
        """Return the accumulator of zero records."""
        return [[], []]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value, if it is among the earliest."""
        return self.merge(accumulator, [[at], [value]])

    def merge(self, one: Any, other: Any) -> Any:
        """Return the earliest values of two accumulators."""
        times, values = one[0] + other[0], one[1] + other[1]
        if one[0] and other[0] and other[0][0] < one[0][-1]:
            order = sorted(range(len(times)), key=times.__getitem__)
            times, values = [times[place] for place in order], [values[place] for place in order]
        return self._bounded(times, values)

    def result_of(self, accumulator: Any) -> list[Any]:
        """Return the values."""
        return self.result_list(accumulator[1])

    def to_stored(self, accumulator: Any) -> Any:
        """Convert the accumulator to its stored form: infinite values and NaN become text."""
        return [accumulator[0], [json_safe(value) for value in accumulator[1]]]

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return [stored[0], [self.restored_value(value) for value in stored[1]]]

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Return the earliest values of each group, with their event times."""
        assert self.field is not None
        found = groups.by_time(self.field)
        times, values = groups.records.event_times[found.rows], found.values
        accumulators: list[Any] = [[[], []] for _ in range(len(groups))]
        bounds = zip(found.groups.tolist(), found.offsets.tolist(), found.ends().tolist(), strict=True)
        for group, lo, hi in bounds:
            hi = min(hi, lo + self._limit)
            accumulators[group] = self._bounded(times[lo:hi].tolist(), values[lo:hi].tolist())
        return PartialAggregate(accumulators)

    def _bounded(self, times: list[Any], values: list[Any]) -> Any:
        """Return event times and values, cut to the limits on number and bytes."""
        count = min(len(values), self._limit)
        if self.kind is str:
            # Count the bytes before each value: the kept values then show that the list is full, for later merges.
            sizes = accumulate((len(value.encode(errors="replace")) for value in values[:count]), initial=0)
            count = sum(1 for _ in takewhile(lambda before: before < COLLECT_BYTES_MAX, islice(sizes, count)))
        return [times[:count], values[:count]]


def _order_by_value(groups: Groups, found: GroupedColumn) -> Integers:
    """Return the order that sorts the values of each group, smallest first; text by code point."""
    if found.values.dtype != object:
        return groups.order_within(found, found.values)
    if isinstance(next(iter(found.values), ""), int):
        return groups.order_within(found, np.unique(found.values, return_inverse=True)[1])  # wide integers
    ranks = pc.rank(pa.array(found.values, pa.string()), "ascending", tiebreaker="dense")
    return groups.order_within(found, ranks.to_numpy(zero_copy_only=False))


def _numbers(values: Any) -> list[Any]:
    """Return values as Python objects, without NaN."""
    return [value for value in values.tolist() if value == value]
