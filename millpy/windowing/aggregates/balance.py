"""Aggregates of numbers that can subtract: counts, sums, means and variances over streams with retractions.

Everything is kept exactly, so that a record which is added and subtracted leaves no trace, in any order and however
often:

    count      values minus retractions
    sum        a whole number. That of floats is in units of 2**-1126, of which every finite float is a multiple, so it
               has up to 2,200 bits
    squares    the same in units of 2**-2252
    NaN, infinities    are counted, not added

A result is rounded once, when it leaves. NaN beats infinities, and infinities of both signs make NaN, as in a sum of
floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np

from millpy.model.field_types import decimal_of, mean_decimal
from millpy.model.record import WideInt
from millpy.windowing.accumulator import Accumulator, PartialAggregate
from millpy.windowing.group_by import Column, GroupedColumn, Groups, Integers

UNIT_BITS = 1_126
"""A float's mantissa has 53 bits, and its least exponent is -1,073."""
_FINITE = (0, 0, 0)
"""The numbers of NaN, of infinities and of negative infinities among values that are all finite."""


class CountBalance(Accumulator):
    """Keeps the number of values minus that of retractions."""

    result = int

    def __init__(self, field: str | None = None, kind: type = int) -> None:
        super().__init__(field, kind)
        self.shares = ("count balance", field)

    def empty(self) -> int:
        """Return 0."""
        return 0

    def add(self, accumulator: int, value: Any, at: int) -> int:
        """Add one value."""
        return accumulator + 1

    def subtract(self, accumulator: int, value: Any, at: int) -> int:
        """Subtract one value."""
        return accumulator - 1

    def merge(self, one: int, other: int) -> int:
        """Add up two counts."""
        return one + other

    def result_of(self, accumulator: int) -> int:
        """Return the count."""
        return accumulator

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Count the values of each group."""
        return PartialAggregate(groups.balances(self.field).tolist())


class SumBalance(Accumulator):
    """Keeps [count, sum, sum of squares, number of NaN, of infinities, of negative infinities].

    Args:
        field, kind: the field, and its type.
        result: annotation of the result column.
        of: takes the accumulator and the unit of its sum, as a number of bits; returns the result.
        squares: whether the sum of squares is kept; else it is 0.

    Attributes:
        squares: the same.
        is_sum, is_mean: whether the result is the sum, or the mean.
    """

    def __init__(
        self, field: str, kind: type, result: Any, of: Callable[[Any, int], Any], *, squares: bool = False
    ) -> None:
        super().__init__(field, kind)
        self.result = result
        self.shares = ("sum balance", field, squares)
        self._of = of
        self.is_sum, self.is_mean = of in (_sum, _decimal_sum), of in (_mean, _decimal_mean)
        self.squares = squares
        self._bits = UNIT_BITS if kind is float else 0
        self.stores_text = kind is float
        self.memory_bytes = 700 if squares else 400

    def empty(self) -> list[int]:
        """Return the accumulator of zero records."""
        return [0, 0, 0, *_FINITE]

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Add one value."""
        return self.merge(accumulator, self.one(value))

    def subtract(self, accumulator: Any, value: Any, at: int) -> Any:
        """Subtract one value."""
        return [one - other for one, other in zip(accumulator, self.one(value), strict=True)]

    def merge(self, one: Any, other: Any) -> Any:
        """Add up two accumulators."""
        return [mine + theirs for mine, theirs in zip(one, other, strict=True)]

    def result_of(self, accumulator: Any) -> Any:
        """Return the result; None without values."""
        return self._of(accumulator, self._bits) if accumulator[0] > 0 else None

    def to_stored(self, accumulator: Any) -> Any:
        """Convert the accumulator to its stored form: numbers beyond 64 bits become text."""
        return [number if abs(number) < 2**63 else _text(number) for number in accumulator]

    def from_stored(self, stored: Any) -> Any:
        """Convert the accumulator from its stored form."""
        return [_number(part) if isinstance(part, str) else part for part in stored]

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Add up the values of each group, retractions with a minus."""
        assert self.field is not None
        found = groups.by_group(self.field)
        signs = groups.signs(found.rows)
        sums = _units(found.values) if self._bits else found.values.astype(object)
        columns = [
            groups.reduce(np.add, found, signs),
            groups.reduce(np.add, found, sums * signs),
            groups.reduce(np.add, found, sums * sums * signs) if self.squares else np.zeros(len(groups), np.int64),
            *(self._unusual(groups, found, signs) if self._bits else [np.zeros(len(groups), np.int64)] * 3),
        ]
        return PartialAggregate(list(map(list, zip(*(column.tolist() for column in columns), strict=True))))

    @staticmethod
    def _unusual(groups: Groups, found: GroupedColumn, signs: Integers) -> list[Column]:
        values = found.values
        masks = (np.isnan(values), values == np.inf, values == -np.inf)
        return [groups.reduce(np.add, found, np.where(mask, signs, 0)) for mask in masks]

    def one(self, value: Any) -> Any:
        """Return the accumulator of one value."""
        if not self._bits:
            return [1, value, value * value if self.squares else 0, *_FINITE]
        if not math.isfinite(value):
            return [1, 0, 0, int(value != value), int(value == math.inf), int(value == -math.inf)]
        numerator, denominator = value.as_integer_ratio()
        units = numerator << (UNIT_BITS - denominator.bit_length() + 1)
        return [1, units, units * units if self.squares else 0, *_FINITE]


def sum_of(field: str, kind: type) -> SumBalance:
    """Return the operations that keep a sum."""
    if kind is Decimal:
        return SumBalance(field, kind, Decimal | None, _decimal_sum)
    return SumBalance(field, kind, (WideInt if kind is int else float) | None, _sum)


def mean_of(field: str, kind: type) -> SumBalance:
    """Return the operations that keep sum and count."""
    if kind is Decimal:
        return SumBalance(field, kind, Decimal | None, _decimal_mean)
    return SumBalance(field, kind, float | None, _mean)


def variance_of(field: str, kind: type, *, population: bool, root: bool) -> SumBalance:
    """Return the operations that keep count, sum and sum of squares."""
    least = 0 if population else 1

    def variance(accumulator: Any, bits: int) -> float | None:
        count, total, squares, *unusual = accumulator
        if count <= least:
            return None
        if any(number > 0 for number in unusual):
            return math.nan
        found = _quotient(count * squares - total * total, count * (count - least) << 2 * bits)
        if not math.isfinite(found):
            return math.nan  # as of values that are never retracted
        return math.sqrt(found) if root else found

    return SumBalance(field, kind, float | None, variance, squares=True)


def _sum(accumulator: Any, bits: int) -> Any:
    return accumulator[1] if not bits else _rounded(accumulator, 1 << bits)


def _mean(accumulator: Any, bits: int) -> float:
    return _rounded(accumulator, accumulator[0] << bits)


def _decimal_sum(accumulator: Any, bits: int) -> Decimal:
    return decimal_of(accumulator[1])


def _decimal_mean(accumulator: Any, bits: int) -> Decimal:
    return mean_decimal(accumulator[1], accumulator[0])


def _rounded(accumulator: Any, divisor: int) -> float:
    """Return the sum divided by a number, or what infinities and NaN make of it."""
    _, total, _, nans, above, below = accumulator
    if nans > 0 or (above > 0 and below > 0):
        return math.nan
    if above > 0 or below > 0:
        return math.inf if above > 0 else -math.inf
    return _quotient(total, divisor)


def _quotient(numerator: int, denominator: int) -> float:
    """Return the float next to a quotient; an infinity if it is beyond all floats."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def _units(values: Column) -> Column:
    """Return floats as whole numbers of units, as Python ints; 0 for NaN and infinities."""
    mantissas, exponents = np.frexp(np.where(np.isfinite(values), values, 0.0))
    wholes = np.ldexp(mantissas, 53).astype(np.int64).astype(object)
    units: Column = wholes << (exponents.astype(np.int64) + (UNIT_BITS - 53)).astype(object)
    return units


def _text(number: int) -> str:
    """Return a whole number as text, "DIGITS:BITS" for DIGITS * 2**BITS; sums of floats end in many zero bits."""
    bits = (number & -number).bit_length() - 1
    return f"{number >> bits:x}:{bits}"


def _number(text: str) -> int:
    digits, _, bits = text.partition(":")
    return int(digits, 16) << int(bits)
