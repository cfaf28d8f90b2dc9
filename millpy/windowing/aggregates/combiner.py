"""User-defined aggregates, and the calls of their methods.

An accumulator of a combiner is JSON text, and every merge decodes it anew: a call that changes it in place and then
raises has no effect. `add` receives a copy of the record, because other windows, aggregates and consumers use the same
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

import msgspec
import numpy as np

from millpy.errors import CallTimeoutError, SchemaError
from millpy.model.arguments import check_function
from millpy.model.dead_letter import payload_of
from millpy.model.delta import encode_value
from millpy.model.field_types import is_carried, is_json
from millpy.model.identity import Identity, identity_of_type, identity_of_value
from millpy.model.record import RecordType, arrow_type, retractions_of, without_none
from millpy.model.step_progress import UNRETURNED_MAX, Call, is_user_error
from millpy.windowing.accumulator import Accumulator, AccumulatorSet, Aggregate, PartialAggregate, RowsRefusedError
from millpy.windowing.group_by import Groups

A = TypeVar("A")


_METHODS = {
    "create": (),
    "add": ("accumulator", "record"),
    "subtract": ("accumulator", "record"),
    "merge": ("one", "other"),
    "result": ("accumulator",),
}


class Combiner(Aggregate, Generic[A]):
    """A user-defined aggregate over whole records.

    Subclass it, name the types, and pass an instance to `aggregate`. The result of a method must depend only on its
    arguments. When a method raises, the records at fault become dead letters, and no aggregate of the window has them.

    The methods must obey these laws, so that results do not depend on how a window's records were cut into bundles.
    a, b and c are accumulators of records that arrived in this order; "=" means equal results, now and after any
    further records:

        merge(merge(a, b), c) = merge(a, merge(b, c))
        merge(create(), a) = a = merge(a, create())
        adding the records of b to a, one by one, gives merge(a, b)
        an accumulator encoded as JSON and decoded equals itself, so it contains no NaN or infinity
        in sessions also merge(a, b) = merge(b, a): sessions that a record joins are merged in order of their start
        with `subtract`, adding a record and subtracting it leaves the accumulator of zero records, in any order, also
        in two accumulators that are merged

    Attributes:
        accumulator: type of the accumulator, which msgspec can encode as JSON (a Struct, list, dict, number, text).
        result_type: type of the result column; add `| None` if the result may be None.
        stored_as: the name of the aggregate in deployed graphs; by default that of the class. To rename the class, set
            it to the old name.

    Examples:
        >>> class Range(Combiner[list[float]]):
        ...     accumulator = list[float]
        ...     result_type = float
        ...     def create(self): return []
        ...     def add(self, accumulator, record): return self.merge(accumulator, [record.value])
        ...     def merge(self, one, other):
        ...         values = one + other
        ...         return [min(values), max(values)] if values else []
        ...     def result(self, accumulator): return accumulator[-1] - accumulator[0]
    """

    accumulator: ClassVar[Any]
    result_type: ClassVar[Any]
    merge_order = "arrival"
    forgets = "it does not define subtract"
    stored_as: ClassVar[str] = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def identity(self) -> Identity:
        """Describe the name, the parameters and the type of the accumulator, but not the methods."""
        return {
            "kind": "combiner",
            "name": self.stored_as or type(self).__name__,
            "parameters": {name: identity_of_value(value) for name, value in sorted(self.parameters().items())},
            "accumulator": identity_of_type(self.accumulator),
        }

    def parameters(self) -> Mapping[str, Any]:
        """Return what the result depends on beside the records: by default the attributes that are not None.

        A graph with other parameters cannot be deployed over stored windows. Override this method if an attribute is
        neither data nor a function.
        """
        return {name: value for name, value in vars(self).items() if value is not None}

    def create(self) -> A:
        """Return the accumulator of zero records."""
        raise NotImplementedError

    def add(self, accumulator: A, record: Any) -> A:
        """Return the accumulator with one more record. Both arguments may be changed in place."""
        raise NotImplementedError

    def subtract(self, accumulator: A, record: Any) -> A:
        """Return the accumulator with one record less, which is retracted; both arguments may be changed in place.

        Define it only if it can undo `add`, also in an accumulator to which the record was not added: the two are
        merged later. Without it, the aggregate is refused over streams whose records may be retracted.
        """
        raise NotImplementedError

    def merge(self, one: A, other: A) -> A:
        """Merge two accumulators, which may be changed in place. Outside sessions the records of `other` came later."""
        raise NotImplementedError

    def result(self, accumulator: A) -> Any:
        """Return the value of the result column. The accumulator must not be changed."""
        raise NotImplementedError

    def bind(self, record_type: RecordType, *, retracts: bool = False) -> Accumulator:
        """Return the operations of the combiner on records of a type.

        Raises:
            SchemaError: a type is not named, or has no column or JSON form.
            GraphError: some records may be retractions, and it does not define `subtract`.
        """
        if retracts and type(self).subtract is Combiner.subtract:
            return super().bind(record_type, retracts=True)
        for name in ("accumulator", "result_type"):
            if not hasattr(self, name):
                raise SchemaError(
                    f"{type(self).__name__} does not define {name}", hint=f"class {type(self).__name__}: {name} = ..."
                )
        if is_json(self.result_type) or is_carried(without_none(self.result_type)[0]):
            raise SchemaError(
                f"{type(self).__name__}.result_type cannot be {self.result_type!r}",
                hint="use str, int, float, bool, datetime, UUID, a Struct, or list and dict[str, …] of these",
            )
        arrow_type(self.result_type)
        for name, parameters in _METHODS.items():
            hint = f"def {name}({', '.join(('self', *parameters))}): ..."
            if name != "subtract" and getattr(type(self), name) is getattr(Combiner, name):
                raise SchemaError(f"{type(self).__name__} does not define {name}", hint=hint)
            check_function("an aggregate", getattr(self, name), hint, takes=len(parameters))
        return CombinerAccumulator(self, record_type.cloner() or _itself)


class CombinerAccumulator(Accumulator):
    """The operations of a combiner, whose accumulators are JSON text."""

    calls_user = True

    def __init__(self, combiner: Combiner[Any], clone: Callable[[Any], Any]) -> None:
        super().__init__(None, object)
        self.result = combiner.result_type
        self._combiner = combiner
        self._clone = clone
        self._row = 0
        self._decode = msgspec.json.Decoder(combiner.accumulator).decode

    def empty(self) -> msgspec.Raw:
        """Return a new accumulator of the combiner."""
        return self._encoded(self._combiner.create())

    def value_of(self, record: Any) -> Any:
        """Return the whole record."""
        return record

    def add(self, accumulator: msgspec.Raw, value: Any, at: int) -> msgspec.Raw:
        """Add one record."""
        return self._encoded(self._combiner.add(self._decode(accumulator), self._clone(value)))

    def subtract(self, accumulator: msgspec.Raw, value: Any, at: int) -> msgspec.Raw:
        """Subtract one record."""
        return self._encoded(self._combiner.subtract(self._decode(accumulator), self._clone(value)))

    def merge(self, one: msgspec.Raw, other: msgspec.Raw) -> msgspec.Raw:
        """Merge two accumulators."""
        run = self.progress.run
        try:
            return self._encoded(self._combiner.merge(self._decode(one), self._decode(other)))
        finally:
            self.progress.count_unit(run)

    def result_of(self, accumulator: msgspec.Raw) -> Any:
        """Return the combiner's result, with nested values as lists and dicts."""
        run = self.progress.run
        try:
            result = self._combiner.result(self._decode(accumulator))
        finally:
            self.progress.count_unit(run)
        return result if isinstance(result, _SCALARS) else msgspec.to_builtins(result, builtin_types=_NESTED)

    def to_stored(self, accumulator: msgspec.Raw) -> msgspec.Raw:
        """Return the accumulator, which is JSON already."""
        return accumulator

    def from_stored(self, stored: Any) -> msgspec.Raw:
        """Encode the accumulator as JSON text again."""
        return self._encoded(stored)

    def _encoded(self, accumulator: Any) -> msgspec.Raw:
        return msgspec.Raw(encode_value(accumulator))

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Add the records of each group one by one, and subtract those that are retractions.

        Raises:
            RowsRefusedError: a call raises for some records, or makes an accumulator that cannot be stored.
        """
        objects, marks = groups.records.objects(), retractions_of(groups.records).tolist()
        refused: dict[int, BaseException] = {}
        self.progress.current_call = lambda: self._call_of(objects[self._row])
        found = [self._added(rows, objects, marks, refused) for rows in groups.rows_by_group()]
        if refused:
            raise RowsRefusedError(refused)
        return PartialAggregate(found)

    def _added(
        self, rows: Sequence[int], objects: Sequence[Any], marks: Sequence[bool], refused: dict[int, BaseException]
    ) -> msgspec.Raw:
        """Return the accumulator of some rows. If a call raises, add them again one by one to find those at fault."""
        run = self.progress.run
        if self.progress.unreturned:
            error = CallTimeoutError(f"{type(self._combiner).__name__}.add did not return, {UNRETURNED_MAX} times")
            hopeless = [row for row in rows if self.progress.is_hopeless(self._call_of(objects[row]))]
            refused.update(dict.fromkeys(hopeless, error))
            rows = [row for row in rows if row not in refused]
        try:
            accumulator = self._combiner.create()
            for self._row in rows:
                row = self._row
                change = self._combiner.subtract if marks[row] else self._combiner.add
                accumulator = change(accumulator, self._clone(objects[row]))
                self.progress.count_unit(run)
            return self._encoded(accumulator)
        except BaseException as error:
            if not is_user_error(error):
                raise
            trouble = error
        try:
            encoded = self.empty()
        except BaseException as error:
            if not is_user_error(error):
                raise
            refused.update(dict.fromkeys(rows, trouble))
            return msgspec.Raw(b"null")
        for self._row in rows:
            row = self._row
            try:
                encoded = (self.subtract if marks[row] else self.add)(encoded, objects[row], 0)
            except BaseException as error:
                if not is_user_error(error):
                    raise
                refused[row] = error
            self.progress.count_unit(run)
        return encoded

    def _call_of(self, record: Any) -> Call:
        return type(self._combiner).__name__, (payload_of(record),)

    def check(self, accumulator: msgspec.Raw) -> None:
        """Raise if the accumulator has no result that its column can hold."""
        result = self.result_of(accumulator)
        self.column([result])
        if not isinstance(result, float):
            encode_value(result)


def failure_of(accumulators: AccumulatorSet, values: Sequence[Any]) -> BaseException | None:
    """Return the error if a combiner has no result that its column can hold, else None. It calls user code."""
    try:
        accumulators.check(values)
    except BaseException as error:  # user code: the pane is dead-lettered
        if not is_user_error(error):
            raise
        return error
    return None


def _itself(record: Any) -> Any:
    return record


_SCALARS = (int, float, str, bytes, bool, datetime, UUID, type(None))
_NESTED = (datetime, bytes)
"""What a column of nested values takes as it is; a UUID becomes text."""


def try_merges(
    accumulators: AccumulatorSet,
    groups: Groups,
    partials: Sequence[PartialAggregate],
    others: Callable[[int], Sequence[Sequence[Any]]],
) -> None:
    """Try the merges that a turn will make with combiners, and their results; nothing changes.

    Args:
        accumulators: the aggregates.
        groups: the groups of the turn.
        partials: the accumulators of the groups, by aggregate.
        others: takes a group; returns the lists of accumulators, one per aggregate, into which it will be merged.

    Raises:
        RowsRefusedError: user code raises for some groups; the error has all of their rows.
    """
    failed: dict[int, BaseException] = {}
    for place, member in enumerate(accumulators.members):
        if not isinstance(member, CombinerAccumulator):
            continue
        for group, accumulator in enumerate(partials[place].accumulators(slice(None))):
            run = member.progress.run
            try:
                parts = [*(other[place] for other in others(group) if place < len(other)), accumulator]
                merged = reduce(member.merge, parts)
                if not _is_empty(accumulators, partials, others(group), group):  # an empty window has no result
                    member.check(merged)
            except BaseException as error:
                if not is_user_error(error):
                    raise
                failed[group] = error
            member.progress.count_unit(run)
    if failed:
        rows_of = groups.rows_by_group()
        raise RowsRefusedError({row: error for group, error in failed.items() for row in rows_of[group]})


def _is_empty(
    accumulators: AccumulatorSet, partials: Sequence[PartialAggregate], others: Sequence[Sequence[object]], group: int
) -> bool:
    """Tell whether a group and what it is merged into have no record that is not retracted."""
    if not accumulators.retracts:
        return False
    (own,) = partials[0].accumulators(np.array([group]))
    return accumulators.is_empty([own + sum(other[0] for other in others)])  # type: ignore[misc]
