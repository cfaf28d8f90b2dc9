"""Aggregates of numbers: counts, sums, means, extremes, variance. Frozen values; see `fold.py` for what they do.

Whole numbers stay whole: the sum of whole numbers is a whole number of any width (`numeric` in SQL, `int` in Python).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.model.record import WideInt, arrow_type
from millpy.model.time import to_datetime
from millpy.windowing.fold import Aggregate, ArrayFold, Arrays, Fold
from millpy.windowing.grouping import Column, Groups, Integers, unbounded

NUMBERS = (int, float)
ORDERED = (int, float, str, datetime)


class Count(Aggregate):
    """How many records; `Count("field")`: how many whose field is not None."""

    def bind(self, record_type: Any) -> Fold:
        """The fold over records of this type."""
        return CountFold(None, int) if self.field is None else super().bind(record_type)

    def fold(self, field: str, kind: type) -> Fold:
        """Counts what is not None."""
        return CountFold(field, kind)


class Sum(Aggregate):
    """The sum; of whole numbers it is a whole number of any width."""

    takes = NUMBERS

    def fold(self, field: str, kind: type) -> Fold:
        """Adds up."""
        return SumFold(field, kind)


class Mean(Aggregate):
    """The arithmetic mean."""

    takes = NUMBERS

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps sum and count."""
        return MeanFold(field, kind)


class Min(Aggregate):
    """The smallest value: of numbers, text (by code point) or datetimes."""

    takes = ORDERED

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps the smallest."""
        return ExtremeFold(field, kind, smaller)


class Max(Aggregate):
    """The largest value: of numbers, text (by code point) or datetimes."""

    takes = ORDERED

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps the largest."""
        return ExtremeFold(field, kind, larger)


@dataclass(frozen=True, repr=False)
class Variance(Aggregate):
    """The variance of a sample, NULL of fewer than two values; `Variance("x", population=True)`: of all there is."""

    population: bool = False
    takes = NUMBERS

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.field!r}{', population=True' if self.population else ''})"

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps count, mean and the sum of squared distances from it."""
        return VarianceFold(field, kind, self.population, root=False)


class StandardDeviation(Variance):
    """The square root of the variance."""

    def fold(self, field: str, kind: type) -> Fold:
        """Keeps what the variance keeps."""
        return VarianceFold(field, kind, self.population, root=True)


class CountFold(ArrayFold):
    """Counts."""

    result = int

    def empty(self) -> int:
        """None yet."""
        return 0

    def add(self, accumulator: int, value: Any, at: int) -> int:
        """One more."""
        return accumulator + 1

    def merge(self, one: int, other: int) -> int:
        """All of them."""
        return one + other

    def result_of(self, accumulator: int) -> int:
        """The count."""
        return accumulator

    def partial(self, groups: Groups) -> Arrays:
        """Counts by group."""
        counts = groups.counts if self.field is None else groups.valid_counts(self.field)
        return Arrays(self, counts, counts)

    def gathered(self, accumulators: list[Any]) -> Arrays:
        """They are the counts."""
        counts = np.array(accumulators, np.int64)
        return Arrays(self, counts, counts)

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """All of them."""
        counts = np.add.reduceat(arrays.counts, offsets)
        return Arrays(self, counts, counts)

    def accumulators_of(self, arrays: Arrays) -> list[Any]:
        """They are the counts."""
        counts: list[Any] = arrays.counts.tolist()
        return counts

    def column_of(self, arrays: Arrays) -> pa.Array:
        """They are the counts."""
        return pa.array(arrays.counts.astype(np.int64))


class SumFold(ArrayFold):
    """Adds up; None until there is a value."""

    def __init__(self, field: str, kind: type) -> None:
        super().__init__(field, kind)
        self.result = (WideInt if kind is int else float) | None

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more."""
        return value if accumulator is None else accumulator + value

    def merge(self, one: Any, other: Any) -> Any:
        """All of them."""
        if one is None or other is None:
            return other if one is None else one
        return one + other

    def result_of(self, accumulator: Any) -> Any:
        """The sum."""
        return accumulator

    def restored(self, stored: Any) -> Any:
        """Wide whole numbers, and floats that are none, are stored as text."""
        return None if stored is None else self.kind(stored)

    def partial(self, groups: Groups) -> Arrays:
        """Sums by group."""
        assert self.field is not None
        return Arrays(self, groups.sums(self.field), groups.valid_counts(self.field))

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """Sums of sums."""
        return Arrays(self, summed(arrays.values, offsets), np.add.reduceat(arrays.counts, offsets))

    def column_of(self, arrays: Arrays) -> pa.Array:
        """The sums, where there is a value."""
        if arrays.values.dtype == object:
            return super().column_of(arrays)
        found = pa.array(arrays.values, mask=arrays.counts == 0)
        return found.cast(arrow_type(self.result)) if self.kind is int else found


class MeanFold(ArrayFold):
    """Keeps [sum, count]."""

    result = float | None

    def empty(self) -> Any:
        """Nothing."""
        return [0, 0]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more."""
        return [accumulator[0] + value, accumulator[1] + 1]

    def merge(self, one: Any, other: Any) -> Any:
        """All of them."""
        return [one[0] + other[0], one[1] + other[1]]

    def result_of(self, accumulator: Any) -> float | None:
        """The mean."""
        total, count = accumulator
        return total / count if count else None

    def restored(self, stored: Any) -> Any:
        """As for a sum."""
        return [self.kind(stored[0]), stored[1]]

    def partial(self, groups: Groups) -> Arrays:
        """Sums and counts by group."""
        assert self.field is not None
        return Arrays(self, groups.sums(self.field), groups.valid_counts(self.field))

    def gathered(self, accumulators: list[Any]) -> Arrays:
        """Pairs as two arrays."""
        counts = np.array([count for _, count in accumulators], np.int64)
        return Arrays(self, self.numbers([total for total, _ in accumulators]), counts)

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """Sums of sums."""
        return Arrays(self, summed(arrays.values, offsets), np.add.reduceat(arrays.counts, offsets))

    def accumulators_of(self, arrays: Arrays) -> list[Any]:
        """Pairs."""
        return list(map(list, zip(arrays.values.tolist(), arrays.counts.tolist(), strict=True)))

    def column_of(self, arrays: Arrays) -> pa.Array:
        """The means, where there is a value."""
        if arrays.values.dtype != np.float64:
            return super().column_of(arrays)  # Python divides whole numbers without rounding them first
        return pa.array(arrays.values / np.maximum(arrays.counts, 1), mask=arrays.counts == 0)


class ExtremeFold(ArrayFold):
    """Keeps the smallest or largest; datetimes as µs."""

    keeps_values = True

    def __init__(self, field: str, kind: type, choose: Callable[..., Any]) -> None:
        super().__init__(field, kind)
        self.result = kind | None
        self._choose = choose

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more."""
        return value if accumulator is None else self._choose(accumulator, value)

    def merge(self, one: Any, other: Any) -> Any:
        """Of all."""
        if one is None or other is None:
            return other if one is None else one
        return self._choose(one, other)

    def result_of(self, accumulator: Any) -> Any:
        """The extreme; a datetime where the field is one."""
        return to_datetime(accumulator) if self.kind is datetime and accumulator is not None else accumulator

    def restored(self, stored: Any) -> Any:
        """As for a sum."""
        return float(stored) if self.kind is float and stored is not None else stored

    def partial(self, groups: Groups) -> Arrays:
        """Extremes by group."""
        assert self.field is not None
        values = groups.smallest(self.field) if self._choose is smaller else groups.largest(self.field)
        return Arrays(self, values, groups.valid_counts(self.field))

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """Extremes of extremes."""
        counts = np.add.reduceat(arrays.counts, offsets)
        values = np.zeros(len(offsets), arrays.values.dtype)
        there = np.flatnonzero(arrays.counts)
        if len(there):
            group = np.repeat(np.arange(len(offsets)), np.diff(offsets, append=len(arrays.counts)))[there]
            begin = np.flatnonzero(np.diff(group, prepend=-1))
            extreme = np.minimum if self._choose is smaller else np.maximum
            values[group[begin]] = extreme.reduceat(arrays.values[there], begin)
        return Arrays(self, values, counts)

    def column_of(self, arrays: Arrays) -> pa.Array:
        """The extremes, where there is a value."""
        if arrays.values.dtype == object:
            return super().column_of(arrays)
        return pa.array(arrays.values, mask=arrays.counts == 0).cast(arrow_type(self.result))


class VarianceFold(ArrayFold):
    """Keeps [count, mean, sum of squared distances from the mean], merged after Chan, Golub and LeVeque (1979)."""

    result = float | None

    def __init__(self, field: str, kind: type, population: bool, root: bool) -> None:
        super().__init__(field, kind)
        self.shares = ("variance", field)
        self._taken_off = 0 if population else 1
        self._root = root

    def empty(self) -> Any:
        """Nothing."""
        return [0, 0.0, 0.0]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """One more, after Welford."""
        count, mean, squares = accumulator
        away = float(value) - mean
        mean += away / (count + 1)
        return [count + 1, mean, squares + away * (float(value) - mean)]

    def merge(self, one: Any, other: Any) -> Any:
        """All of them."""
        if not one[0] or not other[0]:
            return other if not one[0] else one
        count = one[0] + other[0]
        away = other[1] - one[1]
        mean = one[1] + away * (other[0] / count)
        return [count, mean, one[2] + other[2] + away * away * (one[0] * other[0] / count)]

    def result_of(self, accumulator: Any) -> float | None:
        """The variance or its root."""
        count, _, squares = accumulator
        if count <= self._taken_off:
            return None
        if not math.isfinite(squares):
            return math.nan  # beyond doubles, where infinities of either sign come out, by what came together
        variance = squares / (count - self._taken_off)
        return math.sqrt(variance) if self._root else variance

    def restored(self, stored: Any) -> Any:
        """As for a sum."""
        return [stored[0], float(stored[1]), float(stored[2])]

    def partial(self, groups: Groups) -> Arrays:
        """Counts, means and squares by group."""
        assert self.field is not None
        found = groups.by_group(self.field)
        values = found.values.astype(np.float64)
        sizes = found.ends() - found.offsets
        counts = np.zeros(len(groups), np.int64)
        counts[found.groups] = sizes
        with np.errstate(over="ignore", invalid="ignore"):
            means = groups.reduced(np.add, found, values) / np.maximum(counts, 1)
            away = values - np.repeat(means[found.groups], sizes)
            squares = groups.reduced(np.add, found, away * away)
        return Arrays(self, means, counts, squares)

    def gathered(self, accumulators: list[Any]) -> Arrays:
        """Triples as three arrays."""
        counts, means, squares = zip(*accumulators, strict=True) if accumulators else ((), (), ())
        arrays = (np.array(means, np.float64), np.array(counts, np.int64), np.array(squares, np.float64))
        return Arrays(self, *arrays)

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """As `merge`, of any number at once."""
        assert arrays.extra is not None
        sizes = np.diff(offsets, append=len(arrays.counts))
        counts = np.add.reduceat(arrays.counts, offsets)
        with np.errstate(over="ignore", invalid="ignore"):
            means = np.add.reduceat(arrays.values * arrays.counts, offsets) / np.maximum(counts, 1)
            away = arrays.values - np.repeat(means, sizes)
            squares = np.add.reduceat(arrays.extra + away * away * arrays.counts, offsets)
        return Arrays(self, means, counts, squares)

    def accumulators_of(self, arrays: Arrays) -> list[Any]:
        """Triples."""
        assert arrays.extra is not None
        columns = (arrays.counts.tolist(), arrays.values.tolist(), arrays.extra.tolist())
        return list(map(list, zip(*columns, strict=True)))

    def column_of(self, arrays: Arrays) -> pa.Array:
        """The variances or their roots, of enough values."""
        assert arrays.extra is not None
        squares = np.where(np.isfinite(arrays.extra), arrays.extra, np.nan)  # as in `result_of`
        variances = squares / np.maximum(arrays.counts - self._taken_off, 1)
        return pa.array(np.sqrt(variances) if self._root else variances, mask=arrays.counts <= self._taken_off)


def summed(values: Column, offsets: Integers) -> Column:
    """Sums of neighbouring values; `offsets`: where each begins. Python ints where 64 bits might not do."""
    with np.errstate(over="ignore", invalid="ignore"):  # infinity is a result like any other
        return np.add.reduceat(unbounded(values), offsets)


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two; NaN if one is, as numpy has it, so that the order of arrival does not matter."""
    return one if one != one or one <= other else other


def larger(one: Any, other: Any) -> Any:
    """The larger of two; NaN if one is."""
    return one if one != one or one >= other else other
