"""Aggregates: what is computed of each window. Frozen values; `Fold` is one of them bound to a record type.

An accumulator is what JSON can hold: a count, a sum, a pair, a smallest value. Whole-number sums stay whole numbers of
any width; where a result does not fit its 64-bit column, it is NULL. A result over nothing but nulls is NULL too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from millpy.errors import SchemaError
from millpy.model.record import RecordType, arrow_type, getter
from millpy.model.time import instant, to_datetime
from millpy.windowing.grouping import Column, Groups, Integers

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
NUMBERS = (int, float)
ORDERED = (int, float, str, datetime)


@dataclass(frozen=True, repr=False)
class Aggregate:
    """One column of a windowed result. Made as `Count()`, `Mean("temperature")`."""

    field: str | None = None
    takes: ClassVar[tuple[type, ...]] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.field is None else repr(self.field)})"

    def bind(self, record_type: RecordType) -> Fold:
        """The fold over records of this type.

        Raises:
            SchemaError: the field does not exist, or cannot be aggregated like this.
        """
        name = type(self).__name__
        if self.field is None:
            raise SchemaError(f"{name} needs a field", hint=f'{name}("temperature")')
        kind = record_type.field_type(self.field)
        if self.takes and kind not in self.takes:
            takes = ", ".join(t.__name__ for t in self.takes)
            raise SchemaError(f"{self!r} cannot take {getattr(kind, '__name__', kind)}", hint=f"it takes {takes}")
        return self.fold(self.field, kind)

    def fold(self, field: str, kind: type) -> Fold:
        """The fold over a field of this type."""
        raise NotImplementedError


class Count(Aggregate):
    """How many records; `Count("field")`: how many whose field is not None."""

    def bind(self, record_type: RecordType) -> Fold:
        """The fold over records of this type."""
        return CountFold(None, int) if self.field is None else super().bind(record_type)

    def fold(self, field: str, kind: type) -> Fold:
        """Counts what is not None."""
        return CountFold(field, kind)


class Sum(Aggregate):
    """The sum; of whole numbers it is a whole number, and NULL where 64 bits cannot hold it."""

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


class Partial:
    """One aggregate of every group of a bundle, as arrays: accumulators or results of any of the groups.

    Attributes:
        values: sum, count or extreme by group.
        counts: rows by group that are not null; where 0, `values` means nothing.
    """

    def __init__(self, fold: Fold, values: Column, counts: Integers) -> None:
        self.values = values
        self.counts = counts
        self._fold = fold

    def accumulators(self, groups: Integers | slice) -> list[Any]:
        """Accumulators of some groups, as Python values."""
        return self._fold.accumulators_of(self.values[groups].tolist(), self.counts[groups].tolist())

    def results(self, groups: Integers) -> pa.Array:
        """Results of some groups, as a column."""
        return self._fold.column_of(self.values[groups], self.counts[groups])


class Fold:
    """An aggregate of one field, as operations on accumulators.

    Attributes:
        result: annotation of the result column.
        field: None for `Count()`.
    """

    result: Any

    def __init__(self, field: str | None, kind: type) -> None:
        self.field = field
        self.kind = kind
        self._read = getter(field) if field is not None else None

    def empty(self) -> Any:
        """The accumulator of no records."""
        return None

    def value_of(self, record: Any) -> Any:
        """What of a record is folded: numbers, text, µs; None is left out."""
        value = self._read(record) if self._read is not None else 1
        return instant(value) if isinstance(value, datetime) else value

    def add(self, accumulator: Any, value: Any) -> Any:
        """The accumulator after one more value that is not None."""
        raise NotImplementedError

    def merge(self, one: Any, other: Any) -> Any:
        """The accumulator of both; neither is used afterwards."""
        raise NotImplementedError

    def result_of(self, accumulator: Any) -> Any:
        """What the result column says."""
        raise NotImplementedError

    def restored(self, stored: Any) -> Any:
        """An accumulator from JSON, in which jsonb may have written 1.0 as 1."""
        return stored

    def partial(self, groups: Groups) -> Partial:
        """The fold of every group."""
        raise NotImplementedError

    def accumulators_of(self, values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        """Accumulators from `Partial.values` and `counts`."""
        return [value if count else None for value, count in zip(values, counts, strict=True)]

    def column_of(self, values: Column, counts: Integers) -> pa.Array:
        """A result column from `Partial.values` and `counts`."""
        return self.column([self.result_of(a) for a in self.accumulators_of(values.tolist(), counts.tolist())])

    def column(self, results: Sequence[Any]) -> pa.Array:
        """Results as a column."""
        return pa.array(results, arrow_type(self.result))


class CountFold(Fold):
    """Counts."""

    result = int

    def empty(self) -> int:
        """None yet."""
        return 0

    def add(self, accumulator: int, value: Any) -> int:
        """One more."""
        return accumulator + 1

    def merge(self, one: int, other: int) -> int:
        """All of them."""
        return one + other

    def result_of(self, accumulator: int) -> int:
        """The count."""
        return accumulator

    def partial(self, groups: Groups) -> Partial:
        """Counts by group."""
        counts = groups.counts if self.field is None else groups.valid_counts(self.field)
        return Partial(self, counts, counts)

    def accumulators_of(self, values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        """They are the counts."""
        return list(values)

    def column_of(self, values: Column, counts: Integers) -> pa.Array:
        """They are the counts."""
        return pa.array(values.astype(np.int64))


class SumFold(Fold):
    """Adds up; None until there is a value."""

    def __init__(self, field: str, kind: type) -> None:
        super().__init__(field, kind)
        self.result = kind | None

    def add(self, accumulator: Any, value: Any) -> Any:
        """One more."""
        return value if accumulator is None else accumulator + value

    def merge(self, one: Any, other: Any) -> Any:
        """All of them."""
        if one is None or other is None:
            return other if one is None else one
        return one + other

    def result_of(self, accumulator: Any) -> Any:
        """The sum, None if it is wider than its column."""
        return narrow(accumulator) if self.kind is int else accumulator

    def restored(self, stored: Any) -> Any:
        """Wide whole numbers, and floats that are none, are stored as text."""
        return None if stored is None else self.kind(stored)

    def partial(self, groups: Groups) -> Partial:
        """Sums by group."""
        assert self.field is not None
        return Partial(self, groups.sums(self.field), groups.valid_counts(self.field))

    def column_of(self, values: Column, counts: Integers) -> pa.Array:
        """The sums, where there is a value."""
        if values.dtype == object:
            return super().column_of(values, counts)
        return pa.array(values, mask=counts == 0)


class MeanFold(Fold):
    """Keeps [sum, count]."""

    result = float | None

    def empty(self) -> Any:
        """Nothing."""
        return [0, 0]

    def add(self, accumulator: Any, value: Any) -> Any:
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

    def partial(self, groups: Groups) -> Partial:
        """Sums and counts by group."""
        assert self.field is not None
        return Partial(self, groups.sums(self.field), groups.valid_counts(self.field))

    def accumulators_of(self, values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
        """Pairs."""
        return [[value, count] for value, count in zip(values, counts, strict=True)]

    def column_of(self, values: Column, counts: Integers) -> pa.Array:
        """The means, where there is a value."""
        if values.dtype != np.float64:
            return super().column_of(values, counts)  # Python divides whole numbers without rounding them first
        return pa.array(values / np.maximum(counts, 1), mask=counts == 0)


class ExtremeFold(Fold):
    """Keeps the smallest or largest; datetimes as µs."""

    def __init__(self, field: str, kind: type, choose: Callable[..., Any]) -> None:
        super().__init__(field, kind)
        self.result = kind | None
        self._choose = choose

    def add(self, accumulator: Any, value: Any) -> Any:
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

    def partial(self, groups: Groups) -> Partial:
        """Extremes by group."""
        assert self.field is not None
        values = groups.smallest(self.field) if self._choose is smaller else groups.largest(self.field)
        return Partial(self, values, groups.valid_counts(self.field))

    def column_of(self, values: Column, counts: Integers) -> pa.Array:
        """The extremes, where there is a value."""
        if values.dtype == object:
            return super().column_of(values, counts)
        return pa.array(values, mask=counts == 0).cast(arrow_type(self.result))


def smaller(one: Any, other: Any) -> Any:
    """The smaller of two; NaN if one is, as numpy has it, so that the order of arrival does not matter."""
    return one if one != one or one <= other else other


def larger(one: Any, other: Any) -> Any:
    """The larger of two; NaN if one is."""
    return one if one != one or one >= other else other


def narrow(value: int | None) -> int | None:
    """A whole number that fits its 64-bit column, else None."""
    return value if value is not None and INT64_MIN <= value <= INT64_MAX else None
