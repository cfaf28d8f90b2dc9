"""Aggregates, and their operations on accumulators: record by record, and by whole columns.

A user writes an `Aggregate`; `bind` makes its `Accumulator`, the protocol whose laws make a result depend only on the
records of its window (I9), not on bundles, crashes and merges. Every aggregate ignores nulls; a result over only nulls
is NULL (for a count: 0).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from millpy.errors import GraphError, RefusedValueError, SchemaError
from millpy.model.field_types import decimal_text, enum_type, is_enum, plain_value
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import RecordType, WideInt, arrow_type, getter, is_wide, without_none
from millpy.model.step_progress import StepProgress
from millpy.windowing.group_by import Column, Groups, Integers

MergeOrder: TypeAlias = Literal["any", "event_time", "arrival"]
"""The orders of merging that give the same result: any; any that keeps the order of arrival among accumulators with
records of equal event time; the order of arrival only."""


@dataclass(frozen=True, repr=False)
class Aggregate(GraphPart):
    """One column of a windowed result, such as `Count()` or `Mean("temperature")`.

    Attributes:
        field: name of the field to aggregate; "a.b" for a nested one.
        takes: types of the field that the aggregate accepts; empty for all.
        merge_order: how far `merge` of its accumulators is commutative.
        forgets: why the aggregate cannot subtract a record again; empty if it can.
    """

    field: str | None = None
    kind: ClassVar[str] = ""
    """The word for the aggregate in the stored descriptions of graphs."""
    takes: ClassVar[tuple[type, ...]] = ()
    merge_order: ClassVar[MergeOrder] = "any"
    forgets: ClassVar[str] = "it does not keep the records"

    def identity(self) -> Identity:
        """Describe the aggregate and its parameters."""
        return {"kind": self.kind, "field": self.field}

    def bind(self, record_type: RecordType, *, retracts: bool = False) -> Accumulator:
        """Return the operations of the aggregate on records of a type, some of which are retractions if `retracts`.

        Raises:
            SchemaError: the field does not exist, or the aggregate does not accept its type.
            GraphError: the aggregate cannot subtract.
        """
        if retracts and self.forgets:
            raise GraphError(
                f"{self!r} cannot subtract records that are retracted: {self.forgets}",
                hint="use Count, Sum, Mean, Variance, StandardDeviation, or a Combiner that defines subtract; or let"
                " the windows before it have accumulation=Accumulation.DISCARDING, whose panes are never retracted",
            )
        name = type(self).__name__
        if self.field is None:
            raise SchemaError(f"{name} needs a field", hint=f'for example {name}("temperature")')
        kind = record_type.field_type(self.field)
        members = is_enum(kind)
        kind = enum_type(kind) if members else kind
        if self.takes and kind not in self.takes:
            takes = ", ".join(t.__name__ for t in self.takes)
            raise SchemaError(
                f"{self!r} does not accept a field of type {getattr(kind, '__name__', kind)}", hint=f"use {takes}"
            )
        bound = self.bind_balance(self.field, kind) if retracts else self.bind_field(self.field, kind)
        bound.keeps_values &= not members  # what they are is known, and storable
        if is_wide(record_type.annotations_along(self.field)[-1]):  # of the values of the field
            bound.result = {int | None: WideInt | None, list[int]: list[int | None]}.get(bound.result, bound.result)
        return bound

    def bind_field(self, field: str, kind: type) -> Accumulator:
        """Return the operations on a field whose type the aggregate accepts."""
        raise NotImplementedError

    def bind_balance(self, field: str, kind: type) -> Accumulator:
        """Return the operations that subtract, too; only for an aggregate that forgets nothing."""
        raise NotImplementedError


class Accumulator:
    """The operations of one aggregate on its accumulators: the protocol of aggregates.

    An aggregate is defined by six operations: `empty`, `add`, `merge`, `result_of`, `to_stored` and `from_stored`. For
    accumulators a, b and c of records that arrived in this order, these laws hold ("=": equal results, now and after
    any further records; sums of floats up to rounding):

        associative   merge(merge(a, b), c) = merge(a, merge(b, c))
        commutative   merge(a, b) = merge(b, a), as far as `Aggregate.merge_order` claims
        identity      merge(empty(), a) = a = merge(a, empty())
        bundles       adding the records of b to a, one by one, gives merge(a, b)
        codec         from_stored(to_stored(a)) = a, also after jsonb has rewritten the numbers
        finite        to_stored(a) is JSON without NaN, infinities and integers beyond 64 bits, and keeps a bounded
                      number of values, however many records there are
        inverse       subtract(add(a, r), r) = a, in any order of additions and subtractions, also across merges; only
                      of accumulators from `Aggregate.bind(..., retracts=True)`
        columns       `aggregate`, `gather`, `concatenate`, `combine` and the results of a `PartialAggregate` agree with
                      the six operations

    `tests/property/test_aggregate_laws.py` checks every aggregate.

    Attributes:
        result: annotation of the result column.
        field: name of the field; None for `Count()` and combiners, which have no field.
        kind: type of the field.
        keeps_values: whether accumulators contain values of records, so that text must be storable.
        calls_user: whether `aggregate`, `merge` and `result_of` call user code, which may raise.
        shares: aggregates with equal `shares` share one accumulator; None for one that does not share.
        memory_bytes: an estimate of the bytes of an accumulator in memory.
        stores_text: whether the stored form of an accumulator is much shorter than its JSON.
        is_small: whether an accumulator has a few words at most, whatever the records.
        stored_form: how SQL reads the result of a stored accumulator, for the views `…_live`: value (the result, as
            `plain_value`), timed value ([event time, result]), mean or mean of integers ([sum, count]); empty if it
            cannot.
        progress: the progress to which calls of user code are reported.
    """

    result: Any
    keeps_values: bool = False
    calls_user: bool = False
    shares: Hashable = None
    memory_bytes: int = 100
    stores_text: bool = False
    is_small: bool = False
    stored_form: str = ""

    def __init__(self, field: str | None, kind: type) -> None:
        self.field = field
        self.kind = kind
        self._read = getter(field) if field is not None else None
        self.progress = StepProgress()

    def empty(self) -> Any:
        """Return the accumulator of zero records."""
        return None

    def value_of(self, record: Any) -> Any:
        """Return the value of a record's field as in `plain_value`, -0.0 as 0.0 (as in SQL); 1 without a field."""
        value = self._read(record) if self._read is not None else 1
        if self.kind is float:
            return None if value is None else value + 0.0
        return plain_value(value)

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """Return the accumulator with one more value, which is not None; `at` is the record's event time in µs."""
        raise NotImplementedError

    def subtract(self, accumulator: Any, value: Any, at: int) -> Any:
        """Return the accumulator with one value less: that of a record which is retracted."""
        raise NotImplementedError

    def merge(self, one: Any, other: Any) -> Any:
        """Merge two accumulators; neither is used afterwards. The records of `other` arrived later."""
        raise NotImplementedError

    def result_of(self, accumulator: Any) -> Any:
        """Return the value of the result column."""
        raise NotImplementedError

    def to_stored(self, accumulator: Any) -> Any:
        """Convert an accumulator to its stored form, a value that JSON can hold."""
        return json_safe(accumulator)

    def from_stored(self, stored: Any) -> Any:
        """Convert an accumulator from its stored form, where jsonb may have written 1.0 as 1."""
        return stored

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Aggregate the records of each group."""
        raise NotImplementedError

    def gather(self, accumulators: list[Any]) -> PartialAggregate:
        """Return the partial aggregate whose group n has accumulator n."""
        return PartialAggregate(accumulators)

    def concatenate(self, one: PartialAggregate, other: PartialAggregate) -> PartialAggregate:
        """Return the groups of one partial aggregate followed by those of another."""
        return PartialAggregate([*one.accumulators(slice(None)), *other.accumulators(slice(None))])

    def combine(self, partial: PartialAggregate, order: Integers, offsets: Integers) -> PartialAggregate:
        """Merge groups of a partial aggregate, which does not change.

        Args:
            partial: the groups.
            order: the groups to merge; those of one result are neighbors.
            offsets: the positions in `order` at which results begin.
        """
        accumulators = partial.accumulators(order)
        bounds = zip(offsets.tolist(), [*offsets[1:].tolist(), len(accumulators)], strict=True)
        return PartialAggregate([reduce(self.merge, accumulators[lo:hi]) for lo, hi in bounds])

    def check(self, accumulator: Any) -> None:
        """Raise if the accumulator has no result that its column can hold. Only combiners can fail."""

    def column(self, results: Sequence[Any]) -> pa.Array:
        """Return results as an Arrow array of the column's type."""
        if without_none(self.result)[0] is Decimal:
            results = [None if result is None else decimal_text(result) for result in results]
        return pa.array(results, arrow_type(self.result))


class RowsRefusedError(RefusedValueError):
    """A combiner raised for some rows: they become dead letters, and the other rows are added without them.

    Attributes:
        errors: row -> error.
    """

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"user code raised for {len(errors)} rows")
        self.errors = dict(errors)


class PartialAggregate:
    """One accumulator for each of some groups, as a list."""

    def __init__(self, accumulators: list[Any]) -> None:
        self._accumulators = accumulators

    def accumulators(self, groups: Integers | slice) -> list[Any]:
        """Return the accumulators of some groups as Python values."""
        if isinstance(groups, slice):
            return self._accumulators[groups]
        return [self._accumulators[group] for group in groups.tolist()]

    def results(self, groups: Integers, member: Accumulator) -> pa.Array:
        """Return the results of some groups as a column; `member` computes them."""
        return member.column([member.result_of(accumulator) for accumulator in self.accumulators(groups)])


class PartialArrays(PartialAggregate):
    """One accumulator for each of some groups, as arrays: for aggregates that keep one or a few numbers.

    Attributes:
        values: sum, count or extreme by group.
        counts: rows by group that are not null; where 0, `values` is undefined.
        extra: a second number by group, for the aggregates that need one.
    """

    def __init__(self, member: ArrayAccumulator, values: Column, counts: Integers, extra: Column | None = None) -> None:
        self.values = values
        self.counts = counts
        self.extra = extra
        self._member = member

    def accumulators(self, groups: Integers | slice) -> list[Any]:
        """Return the accumulators of some groups as Python values."""
        return self._member.accumulators_of(self.select(groups))

    def results(self, groups: Integers, member: Accumulator) -> pa.Array:
        """Return the results of some groups as a column; `member` computes them."""
        assert isinstance(member, ArrayAccumulator), member
        return member.column_of(self.select(groups))

    def select(self, groups: Integers | slice) -> PartialArrays:
        """Return the given groups, in the given order."""
        return PartialArrays(
            self._member, self.values[groups], self.counts[groups], None if self.extra is None else self.extra[groups]
        )


class ArrayAccumulator(Accumulator):
    """An aggregate whose partial aggregates are `PartialArrays`."""

    def __init__(self, field: str | None, kind: type) -> None:
        super().__init__(field, kind)
        self.is_small = kind is not str  # numbers and times are

    def gather(self, accumulators: list[Any]) -> PartialArrays:
        """Return accumulators, numbers that may be None, as arrays."""
        counts = np.array([accumulator is not None for accumulator in accumulators], np.int64)
        values = [0 if accumulator is None else accumulator for accumulator in accumulators]
        return PartialArrays(self, self.numbers(values), counts)

    def numbers(self, values: list[Any]) -> Column:
        """Return values of the field's type as an array; of Python ints if 64 bits are too few."""
        if self.kind is float:
            return np.array(values, np.float64)
        try:
            return np.array(values, object if self.kind is str else np.int64)
        except OverflowError:
            return np.array(values, object)

    def concatenate(self, one: PartialAggregate, other: PartialAggregate) -> PartialArrays:
        """Return the groups of one partial aggregate followed by those of another."""
        assert isinstance(one, PartialArrays), one
        assert isinstance(other, PartialArrays), other
        extra = None
        if one.extra is not None and other.extra is not None:
            extra = np.concatenate([one.extra, other.extra])
        values = np.concatenate([one.values, other.values])
        return PartialArrays(self, values, np.concatenate([one.counts, other.counts]), extra)

    def combine(self, partial: PartialAggregate, order: Integers, offsets: Integers) -> PartialArrays:
        """Merge groups as array operations; see `Accumulator.combine`."""
        assert isinstance(partial, PartialArrays), partial
        return self.merge_neighbors(partial.select(order), offsets)

    def merge_neighbors(self, arrays: PartialArrays, offsets: Integers) -> PartialArrays:
        """Merge neighboring groups into one each: those from one of `offsets` up to the next."""
        raise NotImplementedError

    def accumulators_of(self, arrays: PartialArrays) -> list[Any]:
        """Return the accumulators of all groups as Python values."""
        values: list[Any] = arrays.values.tolist()
        if arrays.counts.all():
            return values
        return [value if count else None for value, count in zip(values, arrays.counts.tolist(), strict=True)]

    def column_of(self, arrays: PartialArrays) -> pa.Array:
        """Return the result column of all groups."""
        return self.column([self.result_of(accumulator) for accumulator in self.accumulators_of(arrays)])


class AccumulatorSet:
    """The aggregates of one windowed step, bound to its record type, and the result columns computed from them.

    A window that is open when a deployment appends an aggregate has no accumulator for it, because its earlier records
    are gone. Its list of accumulators is shorter, and so is that of a window that merges with it. Those results are
    NULL.

    Attributes:
        members: one Accumulator per stored accumulator; aggregates with equal `shares` have one together.
        columns: per result column, the place of its accumulator and the Accumulator that computes the result.
        texts: names of the text fields whose values are kept, so that they must be storable.
        calls_user: whether an aggregate is user code.
        memory_bytes: an estimate of the bytes of the accumulators in memory.
        stores_text: whether the stored form of an accumulator is much shorter than its JSON.
        is_small: whether all accumulators have a few words at most, whatever the records.
        retracts: whether records may be retractions. The first accumulator then counts the records that are left,
            whatever the aggregates are: a window without any has no result.

    Args:
        counter: the accumulator that counts records, if some of them may be retractions.
        first: an accumulator that the windows need, and no column shows; only without `counter`.
    """

    def __init__(
        self,
        aggregates: Mapping[str, Aggregate],
        record_type: RecordType,
        counter: Accumulator | None = None,
        first: Accumulator | None = None,
    ) -> None:
        assert counter is None or first is None, "there is one first place"
        self.members: list[Accumulator] = [] if first is None else [first]
        self.columns: list[tuple[int, Accumulator]] = []
        self.retracts = counter is not None
        shared: dict[Hashable, int] = {}
        if counter is not None:
            self.members.append(counter)
            shared[counter.shares] = 0
        for aggregate in aggregates.values():
            member = aggregate.bind(record_type, retracts=self.retracts)
            place = shared.get(member.shares) if member.shares is not None else None
            if place is None:
                place = len(self.members)
                self.members.append(member)
                if member.shares is not None:
                    shared[member.shares] = place
            self.columns.append((place, member))
        self.texts = sorted({f.field for f in self.members if f.keeps_values and f.kind is str and f.field})
        self.calls_user = any(member.calls_user for member in self.members)
        self.memory_bytes = sum(member.memory_bytes for member in self.members)
        self.stores_text = any(member.stores_text for member in self.members)
        self.is_small = all(member.is_small for member in self.members)

    def report_to(self, progress: StepProgress) -> None:
        """Report calls of user code to `progress`."""
        for member in self.members:
            member.progress = progress

    def empty(self) -> list[Any]:
        """Return the accumulators of zero records."""
        return [member.empty() for member in self.members]

    def add(self, values: list[Any], record: Any, at: int) -> None:
        """Add one record to the accumulators, in place."""
        for place, member in enumerate(self.members[: len(values)]):
            value = member.value_of(record)
            if value is not None:
                values[place] = member.add(values[place], value, at)

    def subtract(self, values: list[Any], record: Any, at: int) -> None:
        """Subtract one record, which is retracted, from the accumulators, in place."""
        for place, member in enumerate(self.members[: len(values)]):
            value = member.value_of(record)
            if value is not None:
                values[place] = member.subtract(values[place], value, at)

    def is_empty(self, values: Sequence[Any]) -> bool:
        """Tell whether every record of a window has been retracted."""
        return self.retracts and values[0] <= 0

    def copied(self, values: Sequence[Any]) -> list[Any]:
        """Return equal accumulators that share nothing with these."""
        return self.from_stored(self.to_stored(values))

    def merge(self, one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        """Merge two lists of accumulators; neither is used afterwards. The records of `other` arrived later."""
        return [member.merge(a, b) for member, a, b in zip(self.members, one, other, strict=False)]

    def results(self, values: Sequence[Any]) -> list[Any]:
        """Return the results of all columns."""
        return [self.result(values, place, member) for place, member in self.columns]

    @staticmethod
    def result(values: Sequence[Any], place: int, member: Accumulator) -> Any:
        """Return the result of the accumulator at a place; None if the window does not have it."""
        return member.result_of(values[place]) if place < len(values) else None

    def check(self, values: Sequence[Any]) -> None:
        """Raise if a combiner has no result that its column can hold."""
        for member, value in zip(self.members, values, strict=False):
            if member.calls_user:
                member.check(value)

    def to_stored(self, values: Sequence[Any]) -> list[Any]:
        """Convert accumulators to their stored form."""
        return [member.to_stored(value) for member, value in zip(self.members, values, strict=False)]

    def from_stored(self, values: Sequence[Any]) -> list[Any]:
        """Convert accumulators from their stored form."""
        return [member.from_stored(value) for member, value in zip(self.members, values, strict=False)]


def json_safe(value: Any) -> Any:
    """Return an accumulator in a form that JSON can hold: infinities, NaN and integers beyond 64 bits become text."""
    if isinstance(value, list):
        return [json_safe(part) for part in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
