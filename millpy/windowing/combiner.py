"""A user's own aggregate: `create`, `add`, `merge`, `result`, run by key and window over whole bundles.

What the accumulators of a combiner say is in the state as JSON, and decoded anew for every merge: what a call that
raises has changed in place is never seen again. Nor is what `add` does to a record: the record is in other windows, in
other aggregates and with other consumers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import reduce
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

import msgspec

from millpy.errors import CallTimeoutError, SchemaError
from millpy.model.delta import encode_value
from millpy.model.identity import parameters_text, type_text
from millpy.model.quarantine import payload_of
from millpy.model.record import RecordType, arrow_type
from millpy.model.step_progress import UNRETURNED_MAX, Call, is_users
from millpy.windowing.fold import Aggregate, Fold, Folds, Partial, RowsRefusedError
from millpy.windowing.grouping import Groups

A = TypeVar("A")


class Combiner(Aggregate, Generic[A]):
    """An aggregate of your own, over whole records.

    Subclass it, name the types, and hand an instance to `aggregate`. Every method must depend on nothing but its
    arguments, and `merge` must not mind where a window's records were cut into bundles. When a method raises, the
    records at fault become dead letters, and no aggregate of the window counts them.

    Attributes:
        accumulator: type of the accumulator: what msgspec writes as JSON (a Struct, list, dict, number, text).
        result_type: type of the result column; add `| None` when there may be none.

    Examples:
        >>> class Range(Combiner[list[float]]):
        ...     accumulator = list[float]
        ...     result_type = float
        ...     def create(self): return [math.inf, -math.inf]
        ...     def add(self, accumulator, record):
        ...         return [min(accumulator[0], record.value), max(accumulator[1], record.value)]
        ...     def merge(self, one, other): return [min(one[0], other[0]), max(one[1], other[1])]
        ...     def result(self, accumulator): return accumulator[1] - accumulator[0]
    """

    accumulator: ClassVar[Any]
    result_type: ClassVar[Any]
    in_order = True

    def identity(self) -> str:
        """The class, what its instance was given, and the shape of the accumulator; not what its methods do."""
        return f"{parameters_text(self)} keeping {type_text(self.accumulator)}"

    def create(self) -> A:
        """The accumulator of no records."""
        raise NotImplementedError

    def add(self, accumulator: A, record: Any) -> A:
        """The accumulator after one more record; either may be changed in place."""
        raise NotImplementedError

    def merge(self, one: A, other: A) -> A:
        """The accumulator of both; the records of `other` came later. Either may be changed in place."""
        raise NotImplementedError

    def result(self, accumulator: A) -> Any:
        """What the result column says; the accumulator must not be changed."""
        raise NotImplementedError

    def bind(self, record_type: RecordType) -> Fold:
        """The fold over records of this type.

        Raises:
            SchemaError: a type is not named, or has no column or JSON form.
        """
        for name in ("accumulator", "result_type"):
            if not hasattr(self, name):
                raise SchemaError(
                    f"{type(self).__name__} does not say its {name}", hint=f"class {type(self).__name__}: {name} = ..."
                )
        arrow_type(self.result_type)
        return CombinerFold(self, record_type.clone() or _itself)


class CombinerFold(Fold):
    """A combiner; accumulators are JSON text, so that they are stored as they are."""

    calls_user = True

    def __init__(self, combiner: Combiner[Any], clone: Callable[[Any], Any]) -> None:
        super().__init__(None, object)
        self.result = combiner.result_type
        self._combiner = combiner
        self._clone = clone
        self._row = 0
        self._decode = msgspec.json.Decoder(combiner.accumulator).decode

    def empty(self) -> msgspec.Raw:
        """What `create` makes."""
        return self._encoded(self._combiner.create())

    def value_of(self, record: Any) -> Any:
        """The whole record."""
        return record

    def add(self, accumulator: msgspec.Raw, value: Any, at: int) -> msgspec.Raw:
        """One more record."""
        return self._encoded(self._combiner.add(self._decode(accumulator), self._clone(value)))

    def merge(self, one: msgspec.Raw, other: msgspec.Raw) -> msgspec.Raw:
        """All of them."""
        run = self.progress.run
        try:
            return self._encoded(self._combiner.merge(self._decode(one), self._decode(other)))
        finally:
            self.progress.done(run)

    def result_of(self, accumulator: msgspec.Raw) -> Any:
        """What `result` makes of it; what nests, as lists and dicts."""
        run = self.progress.run
        try:
            result = self._combiner.result(self._decode(accumulator))
        finally:
            self.progress.done(run)
        return result if isinstance(result, _SCALARS) else msgspec.to_builtins(result, builtin_types=_SCALARS)

    def stored(self, accumulator: msgspec.Raw) -> msgspec.Raw:
        """As it is."""
        return accumulator

    def restored(self, stored: Any) -> msgspec.Raw:
        """As JSON text again."""
        return self._encoded(stored)

    def _encoded(self, accumulator: Any) -> msgspec.Raw:
        return msgspec.Raw(encode_value(accumulator))

    def partial(self, groups: Groups) -> Partial:
        """Every group's records, one after the other.

        Raises:
            RowsRefusedError: all records that `add` does not take, or whose accumulator cannot be stored.
        """
        objects = groups.records.objects()
        refused: dict[int, BaseException] = {}
        self.progress.in_hand = lambda: self._call_of(objects[self._row])
        found = [self._added(rows, objects, refused) for rows in groups.rows_by_group()]
        if refused:
            raise RowsRefusedError(refused)
        return Partial(found)

    def _added(self, rows: Sequence[int], objects: Sequence[Any], refused: dict[int, BaseException]) -> msgspec.Raw:
        """The accumulator of some rows; when one of them raises, again with an eye on each."""
        run = self.progress.run
        if self.progress.unreturned:
            error = CallTimeoutError(f"{type(self._combiner).__name__}.add has not returned, {UNRETURNED_MAX} times")
            hopeless = [row for row in rows if self.progress.is_hopeless(self._call_of(objects[row]))]
            refused.update(dict.fromkeys(hopeless, error))
            rows = [row for row in rows if row not in refused]
        try:
            accumulator = self._combiner.create()
            for self._row in rows:
                row = self._row
                accumulator = self._combiner.add(accumulator, self._clone(objects[row]))
                self.progress.done(run)
            return self._encoded(accumulator)
        except BaseException as error:
            if not is_users(error):
                raise
            trouble = error
        try:
            encoded = self.empty()
        except BaseException as error:
            if not is_users(error):
                raise
            refused.update(dict.fromkeys(rows, trouble))
            return msgspec.Raw(b"null")
        for self._row in rows:
            row = self._row
            try:
                encoded = self.add(encoded, objects[row], 0)
            except BaseException as error:
                if not is_users(error):
                    raise
                refused[row] = error
            self.progress.done(run)
        return encoded

    def _call_of(self, record: Any) -> Call:
        return type(self._combiner).__name__, (payload_of(record),)

    def check(self, accumulator: msgspec.Raw) -> None:
        """Raise when there is no result of an accumulator that its column can hold."""
        result = self.result_of(accumulator)
        self.column([result])
        if not isinstance(result, float):
            encode_value(result)


def failure_of(folds: Folds, values: Sequence[Any]) -> Exception | None:
    """Why a combiner makes no result of a window's accumulators that its column can hold; None when all do."""
    try:
        folds.check(values)
    except Exception as error:  # user code: the pane is set aside
        return error
    return None


def _itself(record: Any) -> Any:
    return record


_SCALARS = (int, float, str, bytes, bool, datetime, UUID, type(None))


def try_merges(
    folds: Folds, groups: Groups, partials: Sequence[Partial], others: Callable[[int], Sequence[Sequence[Any]]]
) -> None:
    """Merge what the user's combiners made, and ask for results, to no effect.

    `others`: group -> accumulators (one per fold) that it will be merged into.

    Raises:
        RowsRefusedError: all rows of the groups for which a method raises.
    """
    failed: dict[int, BaseException] = {}
    for place, fold in enumerate(folds.folds):
        if not isinstance(fold, CombinerFold):
            continue
        for group, accumulator in enumerate(partials[place].accumulators(slice(None))):
            run = fold.progress.run
            try:
                parts = [*(other[place] for other in others(group) if place < len(other)), accumulator]
                fold.check(reduce(fold.merge, parts))
            except BaseException as error:
                if not is_users(error):
                    raise
                failed[group] = error
            fold.progress.done(run)
    if failed:
        rows_of = groups.rows_by_group()
        raise RowsRefusedError({row: error for group, error in failed.items() for row in rows_of[group]})
