"""Rebuild accumulators from the row of a finished window, so that a late record can still be added to it.

A row has results, not accumulators. These can be rebuilt:

    count, sum, smallest, largest    from their own column
    mean                             with the number of its values
    variance, standard deviation     with the number of its values, and their mean (or sum)

The number of values is the column of `Count("field")`, or of `Count()` if the field is never None. Sums, means and
variances of floats are right up to rounding, as those of accumulators that were merged in another order. A mean of
Decimals is rounded, and so needs the exact sum. Every other aggregate keeps more than its result.

NULL means "no values" only where a count says so: the column of an aggregate that was appended later is NULL, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec

from millpy.errors import UsageError
from millpy.model.field_types import plain_value
from millpy.model.record import RecordType, without_none
from millpy.model.time import to_datetime
from millpy.windowing.accumulator import Accumulator, AccumulatorSet
from millpy.windowing.aggregates.balance import CountBalance, SumBalance
from millpy.windowing.aggregates.numeric import (
    CountAccumulator,
    ExtremeAccumulator,
    MeanAccumulator,
    SumAccumulator,
    VarianceAccumulator,
)


class NotRebuiltError(UsageError):
    """The row of a finished window does not say what its accumulators were."""


def read_row(row: bytes | str, results: Mapping[str, Any]) -> dict[str, Any]:
    """Read a row of a result table from JSON, with numbers of any width and all their digits.

    Args:
        row: the row as a JSON object.
        results: result column -> its annotation: these values get the type that a record has.
    """
    found: dict[str, Any] = json.loads(row, parse_float=Decimal)
    for name, annotation in results.items():
        found[name] = _typed(found[name], without_none(annotation)[0])
    return found


def _typed(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if kind in (float, Decimal):
        return kind(value)  # NaN and infinities are text
    if kind is date:
        return date.fromisoformat(value)
    if kind is datetime:
        return msgspec.convert(value, datetime) if isinstance(value, str) else to_datetime(value)
    return value


class Rebuilder:
    """Rebuilds the accumulators of windows from their rows.

    Args:
        accumulators: the operations of the aggregates.
        names: the result columns, in the order of `accumulators.columns`.
        record_type: the type of the records.
    """

    def __init__(self, accumulators: AccumulatorSet, names: Sequence[str], record_type: RecordType) -> None:
        self._accumulators = accumulators
        self._record_type = record_type
        self._columns: list[tuple[str, int, Accumulator]] = [
            (name, place, member) for name, (place, member) in zip(names, accumulators.columns, strict=True)
        ]

    def accumulators_of(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the accumulators of a window with this row, as `read_row` reads it.

        The list is shorter if the row is from before its last aggregates were appended.

        Raises:
            NotRebuiltError: the row does not say what the accumulators were.
        """
        found: list[Any] = []
        for place, member in enumerate(self._accumulators.members):
            columns = [(name, own) for name, at, own in self._columns if at == place]
            if not columns:
                raise NotRebuiltError(
                    "no column of the result table has the number of its records", hint="add a column n=Count()"
                )
            name, own = columns[0]
            result = row[name]
            if result is None and self._is_unknown(name, member, row):
                break
            found.append(self._rebuilt(name, own, result, row))
        for place in range(len(found), len(self._accumulators.members)):
            for name, at, _ in self._columns:
                if at == place and row[name] is not None:
                    raise NotRebuiltError(f"column {name} has a value, but one before it is from before its aggregate")
        return found

    def _is_unknown(self, name: str, member: Accumulator, row: Mapping[str, Any]) -> bool:
        """Tell whether the NULL in a column means that the window was over before the aggregate was appended."""
        if isinstance(member, CountAccumulator | CountBalance):
            return True
        if isinstance(member, SumBalance) and member.squares:
            return False  # refused below
        if isinstance(member, VarianceAccumulator | MeanAccumulator | SumBalance | SumAccumulator | ExtremeAccumulator):
            count = self._count(member, row)
            if count is None:
                raise NotRebuiltError(
                    f"column {name} is NULL, and nothing says whether its window had no values or was over before"
                    " the aggregate was added",
                    hint=f'a column Count("{member.field}") says so',
                )
            return count > (member.ddof if isinstance(member, VarianceAccumulator) else 0)
        return False

    def _rebuilt(self, name: str, member: Accumulator, result: Any, row: Mapping[str, Any]) -> Any:
        if isinstance(member, CountAccumulator | CountBalance):
            return int(result)
        if isinstance(member, SumAccumulator | ExtremeAccumulator):
            return None if result is None else plain_value(result)
        if isinstance(member, MeanAccumulator | VarianceAccumulator | SumBalance):
            return self._moments(name, member, result, row)
        raise NotRebuiltError(
            f"column {name} cannot be added to: its aggregate keeps more than its result",
            hint="recompute it: `millpy late replay GRAPH.py --into-window --archive PLACE`; or use millpy.correct()",
        )

    def _moments(self, name: str, member: Accumulator, result: Any, row: Mapping[str, Any]) -> Any:
        """Return the accumulator of a mean, a variance, or of a sum that subtracts."""
        assert member.field is not None, name
        count = self._count(member, row)
        if count is None:
            raise NotRebuiltError(
                f"column {name} cannot be added to: no column has the number of its values",
                hint=f'add a column Count("{member.field}")',
            )
        if not count:
            return member.empty()
        total = self._total(member.field, member.kind, count, row)
        if total is None:
            needed = "Sum" if member.kind is Decimal else "Mean"
            raise NotRebuiltError(
                f"column {name} cannot be added to: no column has the {needed.lower()} of its values",
                hint=f'add a column {needed}("{member.field}")',
            )
        if not math.isfinite(total):
            raise NotRebuiltError(f"column {name} cannot be added to: its values are not finite")
        if isinstance(member, MeanAccumulator):
            return [total, count]
        if isinstance(member, VarianceAccumulator):
            return [count, total / count, self._squares(name, member, result, count)]
        assert isinstance(member, SumBalance), member
        if member.squares:
            raise NotRebuiltError(f"column {name} cannot be added to: it subtracts records, and keeps exact squares")
        return [count, *member.one(total)[1:]]

    def _squares(self, name: str, member: VarianceAccumulator, result: Any, count: int) -> float:
        """Return the sum of squared distances from the mean."""
        if count == 1:
            return 0.0
        found = float(result)
        squares = (found * found if member.is_root else found) * (count - member.ddof)
        if not math.isfinite(squares):
            raise NotRebuiltError(f"column {name} cannot be added to: its variance is not finite")
        return squares

    def _total(self, field: str, kind: type, count: int, row: Mapping[str, Any]) -> Any:
        """Return the sum of the values of a field; None if no column tells."""
        for name, _, member in self._columns:
            if member.field != field or row[name] is None:
                continue
            if isinstance(member, SumAccumulator) or (isinstance(member, SumBalance) and member.is_sum):
                return plain_value(row[name])
        for name, _, member in self._columns:
            if member.field != field or row[name] is None:
                continue
            if isinstance(member, MeanAccumulator) or (isinstance(member, SumBalance) and member.is_mean):
                if kind is Decimal:
                    continue  # it is rounded, and the sum of Decimals is exact
                total = float(row[name]) * count
                return round(total) if kind is int and math.isfinite(total) else total
        return None

    def _count(self, member: Accumulator, row: Mapping[str, Any]) -> int | None:
        """Return the number of a member's values; None if no column tells."""
        whole = member.field is not None and not self._record_type.is_nullable(member.field)
        for name, _, other in self._columns:
            if isinstance(other, CountAccumulator | CountBalance) and row[name] is not None:
                if other.field == member.field or (whole and other.field is None):
                    return int(row[name])
        return None
