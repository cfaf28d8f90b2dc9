"""Aggregates of numbers: counts, sums, means, extremes, variance. See `accumulator.py` for their protocol.

The sum of integers is an integer of any width (`numeric` in SQL, `int` in Python).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.model.arguments import check_flags
from millpy.model.field_types import decimal_of, mean_decimal, value_of_plain
from millpy.model.identity import Identity
from millpy.model.record import RecordType, WideInt, arrow_type
from millpy.model.time import to_datetime
from millpy.windowing.accumulator import Accumulator, Aggregate, ArrayAccumulator, PartialArrays
from millpy.windowing.aggregates.balance import CountBalance, mean_of, sum_of, variance_of
from millpy.windowing.group_by import Column, Groups, Integers, unbounded

NUMBERS = (int, float)
EXACT = (int, float, Decimal)
ORDERED = (int, float, Decimal, str, datetime, date)


class Count(Aggregate):
    """The number of records; `Count("field")` counts those whose field is not None."""

    kind = "count"
    forgets = ""

    def bind(self, record_type: RecordType, *, retracts: bool = False) -> Accumulator:
        """Return the operations of the aggregate; without a field they count records."""
        if self.field is None:
            return CountBalance() if retracts else CountAccumulator(None, int)
        return super().bind(record_type, retracts=retracts)

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that count the values."""
        return CountAccumulator(field, kind)

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations that count values and retractions."""
        return CountBalance(field, kind)


class Sum(Aggregate):
    """The sum: for integers an integer of any width, for Decimals the exact Decimal."""

    kind = "sum"
    takes = EXACT
    forgets = ""

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the sum."""
        return SumAccumulator(field, kind)

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the exact sum."""
        return sum_of(field, kind)


class Mean(Aggregate):
    """The arithmetic mean; of Decimals with 38 digits behind the point."""

    kind = "mean"
    takes = EXACT
    forgets = ""

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep sum and count."""
        return MeanAccumulator(field, kind)

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the exact sum, and the count."""
        return mean_of(field, kind)


class Min(Aggregate):
    """The smallest value of numbers, text (by code point), datetimes or dates."""

    kind = "min"
    takes = ORDERED
    forgets = "it keeps only the smallest value"

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the smallest value."""
        return ExtremeAccumulator(field, kind, smaller)


class Max(Aggregate):
    """The largest value of numbers, text (by code point), datetimes or dates."""

    kind = "max"
    takes = ORDERED
    forgets = "it keeps only the largest value"

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep the largest value."""
        return ExtremeAccumulator(field, kind, larger)


@dataclass(frozen=True, repr=False)
class Variance(Aggregate):
    """The sample variance, NULL for fewer than two values; `Variance("x", population=True)` is that of a population."""

    kind = "variance"
    population: bool = False
    takes = NUMBERS
    forgets = ""

    def __post_init__(self) -> None:
        check_flags(population=self.population)

    def identity(self) -> Identity:
        """Describe the aggregate and its parameters."""
        return {**super().identity(), "population": self.population}

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep count, mean and the sum of squared distances from it."""
        return VarianceAccumulator(field, kind, self.population, root=False)

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations that keep count and exact sums."""
        return variance_of(field, kind, population=self.population, root=False)


class StandardDeviation(Variance):
    """The square root of the variance."""

    kind = "standard_deviation"

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations of the variance, with its root as the result."""
        return VarianceAccumulator(field, kind, self.population, root=True)

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations of the variance, with its root as the result."""
        return variance_of(field, kind, population=self.population, root=True)


class CountAccumulator(ArrayAccumulator):
    """Keeps a count."""

    result = int
    stored_form = "value"

    def __init__(self, field: str | None, kind: type) -> None:
        super().__init__(field, kind)
        self.is_small = True

    def empty(self) -> int:
        """Return 0."""
        return 0

    def add(self, accumulator: int, value: Any, at: int) -> int:
        """Add one value."""
        return accumulator + 1

    def merge(self, one: int, other: int) -> int:
        """Add up two counts."""
        return one + other

    def result_of(self, accumulator: int) -> int:
        """Return the count."""
        return accumulator

    def aggregate(self, groups: Groups) -> PartialArrays:
        """Count the records, or the values of the field, of each group."""
        counts = groups.counts if self.field is None else groups.valid_counts(self.field)
        return PartialArrays(self, counts, counts)

    def gather(self, accumulators: list[Any]) -> PartialArrays:
        """Return accumulators, which are counts, as arrays."""
        counts = np.array(accumulators, np.int64)
        return PartialArrays(self, counts, counts)

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Add up the counts of neighboring groups."""
        counts = np.add.reduceat(arrays.counts, offsets)
        return PartialArrays(self, counts, counts)

    def accumulators_of(self, arrays: PartialArrays) -> list[Any]:
        """Return the count of each group."""
        counts: list[Any] = arrays.counts.tolist()
        return counts

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the counts as a column."""
        return pa.array(arrays.counts.astype(np.int64))


class SumAccumulator(ArrayAccumulator):
    """Keeps a sum; None until there is a value."""

    stored_form = "value"

    def __init__(self, field: str, kind: type) -> None:
        super().__init__(field, kind)
        self.result = (WideInt if kind is int else kind) | None

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value."""
        return value if accumulator is None else accumulator + value

    def merge(self, one: Any, other: Any) -> Any:
        """Add up two sums."""
        if one is None or other is None:
            return other if one is None else one
        return one + other

    def result_of(self, accumulator: Any) -> Any:
        """Return the sum."""
        return decimal_of(accumulator) if self.kind is Decimal and accumulator is not None else accumulator

    def from_stored(self, stored: Any) -> Any:
        """Convert a sum from its stored form: wide integers, infinities and NaN are stored as text."""
        return None if stored is None else _number_of(self.kind)(stored)

    def aggregate(self, groups: Groups) -> PartialArrays:
        """Sum the values of each group."""
        assert self.field is not None
        return PartialArrays(self, groups.sums(self.field), groups.valid_counts(self.field))

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Add up the sums of neighboring groups."""
        return PartialArrays(self, summed(arrays.values, offsets), np.add.reduceat(arrays.counts, offsets))

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the sums, NULL for a group without values."""
        if arrays.values.dtype == object or self.kind is Decimal:
            return super().column_of(arrays)
        found = pa.array(arrays.values, mask=arrays.counts == 0)
        return found.cast(arrow_type(self.result)) if self.kind is int else found


class MeanAccumulator(ArrayAccumulator):
    """Keeps [sum, count]."""

    def __init__(self, field: str, kind: type) -> None:
        super().__init__(field, kind)
        self.result = (Decimal if kind is Decimal else float) | None
        self.stored_form = {int: "mean of integers", float: "mean"}.get(kind, "")

    def empty(self) -> Any:
        """Return the accumulator of zero records."""
        return [0, 0]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value."""
        return [accumulator[0] + value, accumulator[1] + 1]

    def merge(self, one: Any, other: Any) -> Any:
        """Add up two sums and two counts."""
        return [one[0] + other[0], one[1] + other[1]]

    def result_of(self, accumulator: Any) -> Any:
        """Return the mean."""
        total, count = accumulator
        if self.kind is Decimal:
            return mean_decimal(total, count) if count else None
        return total / count if count else None

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return [_number_of(self.kind)(stored[0]), stored[1]]

    def aggregate(self, groups: Groups) -> PartialArrays:
        """Sum and count the values of each group."""
        assert self.field is not None
        return PartialArrays(self, groups.sums(self.field), groups.valid_counts(self.field))

    def gather(self, accumulators: list[Any]) -> PartialArrays:
        """Return accumulators, which are pairs, as two arrays."""
        counts = np.array([count for _, count in accumulators], np.int64)
        return PartialArrays(self, self.numbers([total for total, _ in accumulators]), counts)

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Add up the sums of neighboring groups."""
        return PartialArrays(self, summed(arrays.values, offsets), np.add.reduceat(arrays.counts, offsets))

    def accumulators_of(self, arrays: PartialArrays) -> list[Any]:
        """Return [sum, count] of each group."""
        return list(map(list, zip(arrays.values.tolist(), arrays.counts.tolist(), strict=True)))

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the means, NULL for a group without values."""
        if arrays.values.dtype != np.float64:
            return super().column_of(arrays)  # Python divides integers without rounding them first
        return pa.array(arrays.values / np.maximum(arrays.counts, 1), mask=arrays.counts == 0)


class ExtremeAccumulator(ArrayAccumulator):
    """Keeps the smallest or largest value, as `plain_value`."""

    keeps_values = True
    stored_form = "value"

    def __init__(self, field: str, kind: type, choose: Callable[..., Any]) -> None:
        super().__init__(field, kind)
        self.result = kind | None
        self._choose = choose

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value."""
        return value if accumulator is None else self._choose(accumulator, value)

    def merge(self, one: Any, other: Any) -> Any:
        """Return the smaller or larger of two accumulators."""
        if one is None or other is None:
            return other if one is None else one
        return self._choose(one, other)

    def result_of(self, accumulator: Any) -> Any:
        """Return the extreme; µs as a datetime if the field is one."""
        if accumulator is not None and (convert := value_of_plain(self.kind)) is not None:
            return convert(accumulator)
        return to_datetime(accumulator) if self.kind is datetime and accumulator is not None else accumulator

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return _number_of(self.kind)(stored) if self.kind in EXACT and stored is not None else stored

    def aggregate(self, groups: Groups) -> PartialArrays:
        """Return the smallest or largest value of each group."""
        assert self.field is not None
        values = groups.smallest(self.field) if self._choose is smaller else groups.largest(self.field)
        return PartialArrays(self, values, groups.valid_counts(self.field))

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Merge neighboring groups; those without values have no part in it."""
        counts = np.add.reduceat(arrays.counts, offsets)
        values = np.zeros(len(offsets), arrays.values.dtype)
        there = np.flatnonzero(arrays.counts)
        if len(there):
            group = np.repeat(np.arange(len(offsets)), np.diff(offsets, append=len(arrays.counts)))[there]
            begin = np.flatnonzero(np.diff(group, prepend=-1))
            extreme = np.minimum if self._choose is smaller else np.maximum
            values[group[begin]] = extreme.reduceat(arrays.values[there], begin)
        return PartialArrays(self, values, counts)

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the extremes, NULL for a group without values."""
        if arrays.values.dtype == object or value_of_plain(self.kind) is not None:
            return super().column_of(arrays)
        return pa.array(arrays.values, mask=arrays.counts == 0).cast(arrow_type(self.result))


class VarianceAccumulator(ArrayAccumulator):
    """Keeps [count, mean, sum of squared distances from the mean], merged after Chan, Golub and LeVeque (1979).

    Attributes:
        ddof: what the divisor of the variance has less than the count.
        is_root: whether the result is the standard deviation.
    """

    result = float | None

    def __init__(self, field: str, kind: type, population: bool, root: bool) -> None:
        super().__init__(field, kind)
        self.shares = ("variance", field)
        self.ddof = 0 if population else 1
        self.is_root = root

    def empty(self) -> Any:
        """Return the accumulator of zero records."""
        return [0, 0.0, 0.0]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value. Welford's product would be 0 where the mean rounds to it, though the square overflows."""
        number = float(value)
        return self.merge(accumulator, [1, number, number - number])  # NaN for an infinity

    def merge(self, one: Any, other: Any) -> Any:
        """Combine two counts, means and sums of squares."""
        if not one[0] or not other[0]:
            return other if not one[0] else one
        count = one[0] + other[0]
        away = other[1] - one[1]
        mean = one[1] + away * (other[0] / count)
        return [count, mean, one[2] + other[2] + away * away * (one[0] * other[0] / count)]

    def result_of(self, accumulator: Any) -> float | None:
        """Return the variance or its root."""
        count, _, squares = accumulator
        if count <= self.ddof:
            return None
        if not math.isfinite(squares):
            return math.nan  # the squares overflow; the sign of the infinity would depend on bundles
        variance = squares / (count - self.ddof)
        return math.sqrt(variance) if self.is_root else variance

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return [stored[0], float(stored[1]), float(stored[2])]

    def aggregate(self, groups: Groups) -> PartialArrays:
        """Return the count, mean and sum of squared distances of each group."""
        assert self.field is not None
        found = groups.by_group(self.field)
        values = found.values.astype(np.float64)
        sizes = found.ends() - found.offsets
        counts = np.zeros(len(groups), np.int64)
        counts[found.groups] = sizes
        firsts = np.zeros(len(groups))
        firsts[found.groups] = values[found.offsets]
        with np.errstate(over="ignore", invalid="ignore"):
            # Distances from the first value, whose sum does not overflow where their squares do not.
            apart = values - np.repeat(firsts[found.groups], sizes)
            shifts = groups.reduce(np.add, found, apart) / np.maximum(counts, 1)
            away = apart - np.repeat(shifts[found.groups], sizes)
            squares = groups.reduce(np.add, found, away * away)
        return PartialArrays(self, firsts + shifts, counts, squares)

    def gather(self, accumulators: list[Any]) -> PartialArrays:
        """Return accumulators, which are triples, as three arrays."""
        counts, means, squares = zip(*accumulators, strict=True) if accumulators else ((), (), ())
        arrays = (np.array(means, np.float64), np.array(counts, np.int64), np.array(squares, np.float64))
        return PartialArrays(self, *arrays)

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Merge neighboring groups like `merge`, but all groups of a result at once."""
        assert arrays.extra is not None
        sizes = np.diff(offsets, append=len(arrays.counts))
        counts = np.add.reduceat(arrays.counts, offsets)
        filled = np.where(arrays.counts > 0, np.arange(len(arrays.counts)), len(arrays.counts) - 1)
        firsts = arrays.values[np.minimum.reduceat(filled, offsets)]
        with np.errstate(over="ignore", invalid="ignore"):
            apart = np.where(arrays.counts > 0, arrays.values - np.repeat(firsts, sizes), 0.0)
            shifts = np.add.reduceat(apart * arrays.counts, offsets) / np.maximum(counts, 1)
            away = np.where(arrays.counts > 0, apart - np.repeat(shifts, sizes), 0.0)
            squares = np.add.reduceat(arrays.extra + away * away * arrays.counts, offsets)
        return PartialArrays(self, np.where(counts > 0, firsts + shifts, 0.0), counts, squares)

    def accumulators_of(self, arrays: PartialArrays) -> list[Any]:
        """Return [count, mean, sum of squared distances] of each group."""
        assert arrays.extra is not None
        columns = (arrays.counts.tolist(), arrays.values.tolist(), arrays.extra.tolist())
        return list(map(list, zip(*columns, strict=True)))

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the variances or their roots, NULL for a group with too few values."""
        assert arrays.extra is not None
        squares = np.where(np.isfinite(arrays.extra), arrays.extra, np.nan)  # as in `result_of`
        variances = squares / np.maximum(arrays.counts - self.ddof, 1)
        return pa.array(np.sqrt(variances) if self.is_root else variances, mask=arrays.counts <= self.ddof)


def _number_of(kind: type) -> Callable[[Any], Any]:
    """Return the function that restores a number of a field's type: that of a Decimal is whole."""
    return int if kind is Decimal else kind


def summed(values: Column, offsets: Integers) -> Column:
    """Sum the values from each of `offsets` up to the next: as Python ints if 64 bits may overflow."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is a result like any other
        return np.add.reduceat(unbounded(values), offsets)


def smaller(one: Any, other: Any) -> Any:
    """Return the smaller value, or NaN if either is NaN (like numpy), so that the order of arrival does not matter."""
    return one if one != one or one <= other else other


def larger(one: Any, other: Any) -> Any:
    """Return the larger value, or NaN if either is NaN."""
    return one if one != one or one >= other else other
