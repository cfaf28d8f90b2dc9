"""Folds: an aggregate bound to a record type, as operations on accumulators, one by one and by whole columns.

An accumulator is what JSON can hold, or what `Fold.stored` makes so. Nulls are left out of every aggregate; a result
over nothing but nulls is NULL (a count: 0). Folds are functions of the records of a window: in which bundles they came
does not show, but for the last digits of float sums (I9).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from millpy.errors import RefusedValueError, SchemaError
from millpy.model.record import RecordType, arrow_type, getter
from millpy.model.step_progress import StepProgress
from millpy.model.time import instant
from millpy.windowing.grouping import Column, Groups, Integers


@dataclass(frozen=True, repr=False)
class Aggregate:
    """One column of a windowed result. Made as `Count()`, `Mean("temperature")`."""

    field: str | None = None
    takes: ClassVar[tuple[type, ...]] = ()
    in_order: ClassVar[bool] = False
    """Whether accumulators have to be merged in the order in which their records came."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.field is None else repr(self.field)})"

    def identity(self) -> str:
        """What its stored accumulators mean: what it is, and with which parameters."""
        return repr(self)

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


class Fold:
    """An aggregate of one field, as operations on accumulators.

    Attributes:
        result: annotation of the result column.
        field: None for `Count()`.
        keeps_values: values themselves are in accumulators, so text has to be storable.
        calls_user: `partial`, `merge` and `result_of` run code of the user, which may raise.
        shares: folds of equal `shares` have one accumulator between them; None for one of its own.
        progress: what calls of user code are told to.
    """

    result: Any
    keeps_values: bool = False
    calls_user: bool = False
    shares: Hashable = None

    def __init__(self, field: str | None, kind: type) -> None:
        self.field = field
        self.kind = kind
        self._read = getter(field) if field is not None else None
        self.progress = StepProgress()

    def empty(self) -> Any:
        """The accumulator of no records."""
        return None

    def value_of(self, record: Any) -> Any:
        """What of a record is folded: numbers, text, µs; None is left out. Zero has no sign, as in the database."""
        value = self._read(record) if self._read is not None else 1
        if self.kind is float:
            return None if value is None else value + 0.0
        return instant(value) if isinstance(value, datetime) else value

    def add(self, accumulator: Any, value: Any, at: int) -> Any:
        """The accumulator after one more value that is not None, of a record of this event time."""
        raise NotImplementedError

    def merge(self, one: Any, other: Any) -> Any:
        """The accumulator of both; neither is used afterwards. The records of `other` came later."""
        raise NotImplementedError

    def result_of(self, accumulator: Any) -> Any:
        """What the result column says."""
        raise NotImplementedError

    def stored(self, accumulator: Any) -> Any:
        """An accumulator as JSON can hold it."""
        return sayable(accumulator)

    def restored(self, stored: Any) -> Any:
        """An accumulator from JSON, in which jsonb may have written 1.0 as 1."""
        return stored

    def partial(self, groups: Groups) -> Partial:
        """The fold of every group."""
        raise NotImplementedError

    def gathered(self, accumulators: list[Any]) -> Partial:
        """Accumulators as the fold of a group each."""
        return Partial(accumulators)

    def joined(self, one: Partial, other: Partial) -> Partial:
        """Groups of both."""
        return Partial([*one.accumulators(slice(None)), *other.accumulators(slice(None))])

    def combined(self, partial: Partial, order: Integers, offsets: Integers) -> Partial:
        """Merge groups in some order; `offsets`: where in it each result begins. What is merged stays as it is."""
        accumulators = partial.accumulators(order)
        bounds = zip(offsets.tolist(), [*offsets[1:].tolist(), len(accumulators)], strict=True)
        return Partial([reduce(self.merge, accumulators[lo:hi]) for lo, hi in bounds])

    def check(self, accumulator: Any) -> None:
        """Raise when there is no result of an accumulator that its column can hold; only code of the user may fail."""

    def column(self, results: Sequence[Any]) -> pa.Array:
        """Results as a column."""
        return pa.array(results, arrow_type(self.result))


class RowsRefusedError(RefusedValueError):
    """Code of the user did not take some rows: they are set aside, and the turn is stepped without them."""

    def __init__(self, errors: Mapping[int, BaseException]) -> None:
        super().__init__(f"{len(errors)} rows were refused")
        self.errors = dict(errors)


class Partial:
    """One accumulator of every group of a bundle, as a list."""

    def __init__(self, accumulators: list[Any]) -> None:
        self._accumulators = accumulators

    def accumulators(self, groups: Integers | slice) -> list[Any]:
        """Accumulators of some groups, as Python values."""
        if isinstance(groups, slice):
            return self._accumulators[groups]
        return [self._accumulators[group] for group in groups.tolist()]

    def results(self, groups: Integers, fold: Fold) -> pa.Array:
        """Results of some groups, as a column."""
        return fold.column([fold.result_of(accumulator) for accumulator in self.accumulators(groups)])


class Arrays(Partial):
    """The same as arrays, for folds whose accumulators are one or a few numbers.

    Attributes:
        values: sum, count or extreme by group.
        counts: rows by group that are not null; where 0, `values` means nothing.
    """

    def __init__(self, fold: ArrayFold, values: Column, counts: Integers, extra: Column | None = None) -> None:
        self.values = values
        self.counts = counts
        self.extra = extra
        self._fold = fold

    def accumulators(self, groups: Integers | slice) -> list[Any]:
        """Accumulators of some groups, as Python values."""
        return self._fold.accumulators_of(self.of(groups))

    def results(self, groups: Integers, fold: Fold) -> pa.Array:
        """Results of some groups, as a column."""
        assert isinstance(fold, ArrayFold), fold
        return fold.column_of(self.of(groups))

    def of(self, groups: Integers | slice) -> Arrays:
        """Some groups."""
        return Arrays(
            self._fold, self.values[groups], self.counts[groups], None if self.extra is None else self.extra[groups]
        )


class ArrayFold(Fold):
    """A fold whose partial is `Arrays`."""

    def gathered(self, accumulators: list[Any]) -> Arrays:
        """Accumulators as arrays: of numbers that may be None."""
        counts = np.array([accumulator is not None for accumulator in accumulators], np.int64)
        values = [0 if accumulator is None else accumulator for accumulator in accumulators]
        return Arrays(self, self.numbers(values), counts)

    def numbers(self, values: list[Any]) -> Column:
        """Values of the field's type as an array."""
        if self.kind is float:
            return np.array(values, np.float64)
        try:
            return np.array(values, object if self.kind is str else np.int64)
        except OverflowError:
            return np.array(values, object)

    def joined(self, one: Partial, other: Partial) -> Arrays:
        """Groups of both."""
        assert isinstance(one, Arrays), one
        assert isinstance(other, Arrays), other
        extra = None
        if one.extra is not None and other.extra is not None:
            extra = np.concatenate([one.extra, other.extra])
        values = np.concatenate([one.values, other.values])
        return Arrays(self, values, np.concatenate([one.counts, other.counts]), extra)

    def combined(self, partial: Partial, order: Integers, offsets: Integers) -> Arrays:
        """Merge groups with array operations."""
        assert isinstance(partial, Arrays), partial
        return self.merged(partial.of(order), offsets)

    def merged(self, arrays: Arrays, offsets: Integers) -> Arrays:
        """Merge neighbouring groups; `offsets`: where each result begins."""
        raise NotImplementedError

    def accumulators_of(self, arrays: Arrays) -> list[Any]:
        """Accumulators of all groups."""
        values: list[Any] = arrays.values.tolist()
        if arrays.counts.all():
            return values
        return [value if count else None for value, count in zip(values, arrays.counts.tolist(), strict=True)]

    def column_of(self, arrays: Arrays) -> pa.Array:
        """The result column of all groups."""
        return self.column([self.result_of(accumulator) for accumulator in self.accumulators_of(arrays)])


class Folds:
    """The aggregates of one windowed step: accumulators first, then result columns made of them.

    A window that was open when an aggregate was added at the end has no accumulator for it, because it cannot know
    what came before: its list is shorter, and so is that of a window with which it merges. Those results are NULL.

    Attributes:
        folds: one fold per accumulator.
        columns: per result column: place of its accumulator, and the fold that reads it.
    """

    def __init__(self, aggregates: Mapping[str, Aggregate], record_type: RecordType) -> None:
        self.folds: list[Fold] = []
        self.columns: list[tuple[int, Fold]] = []
        shared: dict[Hashable, int] = {}
        for aggregate in aggregates.values():
            fold = aggregate.bind(record_type)
            place = shared.get(fold.shares) if fold.shares is not None else None
            if place is None:
                place = len(self.folds)
                self.folds.append(fold)
                if fold.shares is not None:
                    shared[fold.shares] = place
            self.columns.append((place, fold))
        self.texts = sorted({f.field for f in self.folds if f.keeps_values and f.kind is str and f.field})
        self.calls_user = any(fold.calls_user for fold in self.folds)

    def report_to(self, progress: StepProgress) -> None:
        """Tell the calls of user code to this progress."""
        for fold in self.folds:
            fold.progress = progress

    def empty(self) -> list[Any]:
        """Accumulators of no records."""
        return [fold.empty() for fold in self.folds]

    def add(self, values: list[Any], record: Any, at: int) -> None:
        """One more record, in place."""
        for place, fold in enumerate(self.folds[: len(values)]):
            value = fold.value_of(record)
            if value is not None:
                values[place] = fold.add(values[place], value, at)

    def merge(self, one: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        """Accumulators of both; neither is used afterwards. The records of `other` came later."""
        return [fold.merge(a, b) for fold, a, b in zip(self.folds, one, other, strict=False)]

    def results(self, values: Sequence[Any]) -> list[Any]:
        """One result per column."""
        return [self.result(values, place, fold) for place, fold in self.columns]

    @staticmethod
    def result(values: Sequence[Any], place: int, fold: Fold) -> Any:
        """The result of one column."""
        return fold.result_of(values[place]) if place < len(values) else None

    def check(self, values: Sequence[Any]) -> None:
        """Raise when a fold that calls the user makes no result of its accumulator that its column can hold."""
        for fold, value in zip(self.folds, values, strict=False):
            if fold.calls_user:
                fold.check(value)

    def stored(self, values: Sequence[Any]) -> list[Any]:
        """Accumulators as JSON can hold them."""
        return [fold.stored(value) for fold, value in zip(self.folds, values, strict=False)]

    def restored(self, values: Sequence[Any]) -> list[Any]:
        """Accumulators from JSON."""
        return [fold.restored(value) for fold, value in zip(self.folds, values, strict=False)]


def sayable(value: Any) -> Any:
    """An accumulator as JSON can hold it: infinities, NaN and whole numbers beyond 64 bits as text."""
    if isinstance(value, list):
        return [sayable(part) for part in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else str(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value
