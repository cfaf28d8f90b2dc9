"""Emission of panes as columns, for a result table and for consumers of the windowed stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.checkpoint import DeletedRows, ResultRows
from millpy.model.field_types import decimal_text
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Records, RecordType, column_name
from millpy.model.time import INSTANT_MIN, Instant, to_datetime
from millpy.windowing.accumulation import Accumulation, content_of, newest_of, withdraw
from millpy.windowing.accumulator import AccumulatorSet, Aggregate, PartialAggregate
from millpy.windowing.aggregates.combiner import failure_of
from millpy.windowing.group_by import Integers
from millpy.windowing.pane_codec import FIRST, NO_TIME, DuePane, FiringState, OpenPane, PaneContent
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.timestamp_combiner import TimestampCombiner, newest_time_of, time_of
from millpy.windowing.triggers import Trigger

_NONE = np.empty(0, np.int64)
Column: TypeAlias = "pa.Array | list[Any]"


class PaneIndex(Protocol):
    """The windows and keys of panes, as columns."""

    @property
    def starts(self) -> Instants:
        """Starts of the windows."""
        ...

    @property
    def ends(self) -> Instants:
        """Ends of the windows."""
        ...

    @property
    def codes(self) -> Integers:
        """Key codes."""
        ...


def output_type(
    record_type: RecordType,
    key_fields: Sequence[str],
    aggregates: dict[str, Aggregate],
    *,
    retracts: bool = False,
    mode: Accumulation = Accumulation.ACCUMULATING,
    rules: PaneRules = DEFAULT_RULES,
) -> RecordType:
    """Return the record type of a stream of panes: key fields, window, aggregates, and what the pane is.

    An aggregate that has no result for zero records may be None in a discarding window with empty panes.

    Raises:
        SchemaError: an aggregate does not accept its field.
        GraphError: `retracts` says that records may be retractions, and an aggregate cannot subtract.
    """
    fields: list[tuple[str, Any]] = [
        (column_name(name), record_type.annotations_along(name)[-1]) for name in key_fields
    ]
    fields += [("window_start", datetime), ("window_end", datetime)]
    may_be_empty = rules.with_empty_panes and mode is Accumulation.DISCARDING
    for name, aggregate in aggregates.items():
        bound = aggregate.bind(record_type, retracts=retracts)
        without = may_be_empty and not bound.calls_user and bound.result_of(bound.empty()) is None
        fields.append((name, bound.result | None if without else bound.result))
    if rules.pane_info:
        fields += [("pane_on_time_index", int), ("pane_last", bool)]
    fields += [("pane_index", int), ("pane_timing", str), ("late_count", int)]
    return RecordType(msgspec.defstruct("WindowedResult", fields, kw_only=False, frozen=True))


class Emission:
    """The panes that a turn emits, as columns.

    Columns are in the order of the record type: keys, window_start and window_end in µs, aggregates, `PANE_INFO` if the
    rules say so, pane_index, pane_timing, late_count. Panes that are the first of their window come first: direct
    panes, which never were in the state, then those of open windows.

    Args:
        accumulators: the operations of the aggregates.
        key_fields: number of key fields.
        trigger: the trigger of the windows.
        mode: what consumers get of a pane.
        rules: whether panes have `PANE_INFO`.
        over_by: windows that end by it are over: no pane follows.

    Attributes:
        failed: (pane, error) for which a combiner has no result, because its code has changed since it accepted the
            records. They count as emitted, so that they are not tried again, and get no pane index.
        retracted: number of panes that are retracted.
        withheld: `id` of the panes of which consumers get nothing: a combiner has a result for the window, but none
            for the records since the pane before. These come with the next pane; the pane is dead-lettered, too.
        direct_times: combined event times of the groups that `add_direct` gets, if they are combined; set before it.
        times: event times of the panes that consumers get, after `take_columns`; None for the ends of their windows.
    """

    def __init__(
        self,
        accumulators: AccumulatorSet,
        key_fields: int,
        trigger: Trigger,
        mode: Accumulation = Accumulation.ACCUMULATING,
        timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW,
        rules: PaneRules = DEFAULT_RULES,
        over_by: Instant = INSTANT_MIN,
    ) -> None:
        self._accumulators = accumulators
        self._combines = timestamps is not TimestampCombiner.END_OF_WINDOW
        self._trigger = trigger
        self._pane_info = rules.pane_info
        self._by_pane = trigger.per_pane or rules.with_empty_panes
        self._over_by = over_by
        self._key_fields = key_fields
        self._mode = mode
        self._direct: list[Column] = []
        self._direct_count = 0
        self.direct_times: Instants = _NONE
        self._direct_times: Instants = _NONE
        self._direct_first = 0
        self._open: list[DuePane] = []
        self._gone: list[DuePane] = []
        self._retractions: list[tuple[list[Column], int, Instants | None]] = []
        self.failed: list[tuple[DuePane, BaseException]] = []
        self.retracted = 0
        self.withheld: set[int] = set()
        self.times: Instants | None = None

    def add_direct(
        self,
        panes: PaneIndex,
        partials: Sequence[PartialAggregate],
        late: Integers,
        picks: Integers,
        keys: Sequence[Key],
        indexes: Integers | None = None,
        known: Integers | None = None,
    ) -> None:
        """Emit groups that do not pass through the state; callable once a turn.

        Args:
            panes: the windows and key codes of the groups.
            partials: their accumulators, by aggregate.
            late: their numbers of late records.
            picks: the groups to emit.
            keys: the keys by code.
            indexes: the pane index of each group. Default: 0.
            known: how many leading accumulators each group has; results of the others are NULL. Default: all.
        """
        assert not self._direct, "direct panes are added once"
        if not len(picks):
            return
        numbers = np.zeros(len(picks), np.int64) if indexes is None else indexes[picks]
        if indexes is not None:
            first_ones_first = np.argsort(numbers > 0, kind="stable")
            picks, numbers = picks[first_ones_first], numbers[first_ones_first]
        late_counts = late[picks]
        if self._combines:
            ends, times = panes.ends[picks], self.direct_times[picks]
            self._direct_times = np.where(times == NO_TIME, ends - 1, times)
        self._direct_count = len(picks)
        self._direct_first = int((numbers == 0).sum())
        self._direct = [
            *self._key_columns([keys[code] for code in panes.codes[picks].tolist()]),
            pa.array(panes.starts[picks]),
            pa.array(panes.ends[picks]),
            *(
                _where_known(partials[place].results(picks, member), place, None if known is None else known[picks])
                for place, member in self._accumulators.columns
            ),
            *((pa.array(numbers), pa.array(panes.ends[picks] <= self._over_by)) if self._pane_info else ()),
            pa.array(numbers),
            self._trigger.timings(late_counts.tolist()),
            pa.array(late_counts.astype(np.int64)),
        ]

    def add_open(self, due: Sequence[DuePane]) -> int:
        """Emit panes of open windows, and return their number; callable once a turn.

        A window whose every record is retracted has none: its row is deleted. A retracting window first retracts the
        pane that consumers have.
        """
        if self._accumulators.retracts:
            empty = [item for item in due if self._accumulators.is_empty(item[3].values)]
            due = [item for item in due if not self._accumulators.is_empty(item[3].values)]
            self._withdraw(empty)
        if self._accumulators.calls_user:
            due = [item for item in due if self._has_results(item, item[3]) and self._can_retract(item)]
        if self._mode is Accumulation.RETRACTING:
            self._retract(due)
        elif self._mode is Accumulation.DISCARDING and self._accumulators.calls_user:
            self._withhold(due)
        self._open = sorted(due, key=lambda item: item[3].emitted)
        return len(self._open)

    def _withdraw(self, panes: Sequence[DuePane]) -> None:
        """Delete the rows of windows that are empty, and retract their panes."""
        self._gone += [item for item in panes if newest_of(item[3]) is not None]
        if self._mode is Accumulation.RETRACTING:
            self._retract(panes)
        for _, _, _, pane in panes:
            withdraw(pane)
            pane.at = pane.newest_at = NO_TIME
            if pane.firing is not None and pane.firing.before:
                _take_back(pane.firing)

    def _withhold(self, panes: Sequence[DuePane]) -> None:
        """Find the panes of which consumers get nothing."""
        for item in panes:
            content = self._given_of(item[3])
            if content is item[3]:
                continue
            error = failure_of(self._accumulators, content.values)
            if error is not None:
                self.failed.append((item, error))
                self.withheld.add(id(item[3]))

    def _given_of(self, pane: OpenPane) -> PaneContent | OpenPane:
        """Return what consumers of a discarding window get of a pane."""
        return content_of(pane, self._mode) or PaneContent(self._accumulators.empty())

    def _has_results(self, due: DuePane, content: PaneContent | OpenPane) -> bool:
        """Tell whether a pane has results; if not, record it as failed."""
        error = failure_of(self._accumulators, content.values)
        if error is not None:
            self.failed.append((due, error))
            due[3].emitted, due[3].at = True, NO_TIME
            if (firing := due[3].firing) is not None and firing.before:
                _take_back(firing)
        return error is None

    def _can_retract(self, due: DuePane) -> bool:
        """Tell whether the newest pane that consumers have of a window has results, if it has to be retracted."""
        newest = newest_of(due[3]) if self._mode is Accumulation.RETRACTING else None
        return newest is None or self._has_results(due, newest)

    def absorb(self, panes: Sequence[DuePane]) -> None:
        """Delete the rows of sessions that were merged into others; retracting windows retract their panes as well."""
        self._gone += panes
        if self._mode is Accumulation.RETRACTING:
            self._retract(panes)

    def _retract(self, panes: Sequence[DuePane]) -> None:
        """Retract the newest panes that consumers have of windows; nothing for a window without any."""
        found = [(item, content) for item in panes if (content := newest_of(item[3])) is not None]
        if self._accumulators.calls_user:
            found = [(item, content) for item, content in found if self._has_results(item, content)]
        if found:
            columns = self._columns_of([item for item, _ in found], [content for _, content in found], step=-1)
            times = None
            if self._combines:
                times = np.array([newest_time_of(pane, end) for (_, end, _, pane), _ in found], np.int64)
            self._retractions.append((columns, len(found), times))
            self.retracted += len(found)

    def __len__(self) -> int:
        return self._direct_count + len(self._open)

    def take_columns(self) -> tuple[list[Column], list[Column], int]:
        """Mark open panes as emitted. Return their columns, what consumers get of them, and the number of first ones.

        Consumers of a discarding window get what the panes before had not.
        """
        assert not self._open or self._direct_first == self._direct_count, "first panes come first"
        first = sum(not pane.emitted for _, _, _, pane in self._open) + self._direct_first
        panes = [pane for _, _, _, pane in self._open]
        columns = self._with_direct(self._columns_of(self._open, panes) if panes else [])
        given = columns
        if self._combines:
            times = [time_of(pane, end) for _, end, _, pane in self._open if id(pane) not in self.withheld]
            self.times = np.concatenate([self._direct_times, np.array(times, np.int64)])
        if self._mode is Accumulation.DISCARDING and panes:
            items = [item for item in self._open if id(item[3]) not in self.withheld]
            contents = [self._given_of(pane) for _, _, _, pane in items]
            given = self._with_direct(self._columns_of(items, contents) if items else [])
        for _, end, _, pane in self._open:
            if self._combines:
                pane.newest_at, pane.at = time_of(pane, end), NO_TIME
            pane.pane_index += 1
            pane.emitted = True
            pane.kept = pane.kept if id(pane) in self.withheld else None
            if pane.firing is not None:
                pane.firing.before = ""
        return columns, given, first

    def _with_direct(self, columns: list[Column]) -> list[Column]:
        """Return the columns of direct panes followed by those of others."""
        if not self._direct or not columns:
            return self._direct or columns
        joined: list[Column] = []
        for one, other in zip(self._direct, columns, strict=True):
            if isinstance(one, list):
                joined.append([*one, *other])
            else:
                joined.append(pa.concat_arrays([one, pa.array(_plain(other, one.type), one.type)]))
        return joined

    def deleted_rows(self, table_id: int) -> list[DeletedRows]:
        """Return the result rows to delete: of merged sessions, and of windows without records."""
        return [DeletedRows(table_id, self._names_of(self._gone), len(self._gone))] if self._gone else []

    def retractions(self, record_type: RecordType) -> list[Records]:
        """Return the retracted panes as records."""
        return [
            records_in_order(record_type, columns, count, self._key_fields, times, retracts=True)
            for columns, count, times in self._retractions
        ]

    def _key_columns(self, keys: Sequence[Key]) -> list[list[Any]]:
        if self._key_fields == 1:
            return [list(keys)]
        return [list(column) for column in zip(*keys, strict=True)]

    def _names_of(self, due: Sequence[DuePane]) -> list[Column]:
        """Return the columns that name panes: keys, window_start and window_end."""
        keys = self._key_columns([key for _, _, key, _ in due])
        return [*keys, [start for start, _, _, _ in due], [end for _, end, _, _ in due]]

    def _columns_of(
        self, due: Sequence[DuePane], contents: Sequence[PaneContent | OpenPane], step: int = 0
    ) -> list[Column]:
        """Return the columns of panes with these contents; `step` is added to their indexes."""
        late_counts = [content.late_count for content in contents]
        return [
            *self._names_of(due),
            *(
                [self._accumulators.result(content.values, place, member) for content in contents]
                for place, member in self._accumulators.columns
            ),
            *(self._info(due, step) if self._pane_info else ()),
            [pane.pane_index + step for _, _, _, pane in due],
            self._timings(due, late_counts, step),
            late_counts,
        ]

    def _timings(self, due: Sequence[DuePane], late_counts: list[int], step: int) -> list[Any]:
        """Return the timings of panes, or of those before them."""
        if not self._by_pane:
            return list(self._trigger.timings(late_counts))
        firings = [pane.firing for _, _, _, pane in due]
        return [f and ((step and f.before) or f.timing) for f in firings]

    def _info(self, due: Sequence[DuePane], step: int) -> list[Column]:
        """Return the columns of `PANE_INFO` of panes, or of those before them."""
        if not self._by_pane:  # no pane is early
            indexes: list[Any] = [pane.pane_index + step for _, _, _, pane in due]
            return [indexes, [step == 0 and end <= self._over_by for _, end, _, _ in due]]
        firings = [pane.firing for _, _, _, pane in due]
        numbers = [f and (max(f.on_time_index - 1, -1) if step and f.before else f.on_time_index) for f in firings]
        return [numbers, [f is not None and f.last and not (step and f.before) for f in firings]]


def next_pane(
    record_type: RecordType, accumulators: AccumulatorSet, key_fields: int, rules: PaneRules, due: DuePane, timing: str
) -> Any:
    """Return the record that the next pane of a window would be, with all of the window's records."""
    start, end, key, pane = due
    keys = [key] if key_fields == 1 else list(key)  # type: ignore[arg-type]
    values = [accumulators.result(pane.values, place, member) for place, member in accumulators.columns]
    if rules.pane_info:
        before = -1 if pane.firing is None else pane.firing.on_time_index
        values += [-1 if timing == "early" else before + 1, False]
    instants = to_datetime(Instant(start)), to_datetime(Instant(end))
    return record_type.struct(*keys, *instants, *values, pane.pane_index, timing, pane.late_count)


def _take_back(firing: FiringState) -> None:
    """Record that a pane is not emitted after all: the newest one is still the one before it."""
    firing.timing, firing.before = "" if firing.before == FIRST else firing.before, ""
    firing.on_time_index, firing.last = max(firing.on_time_index - 1, -1), False


def _where_known(results: pa.Array, place: int, known: Integers | None) -> pa.Array:
    """Return the results of the accumulator at a place, NULL where a group does not have it."""
    if known is None or int(known.min()) > place:
        return results
    return pc.if_else(pa.array(known > place), results, pa.scalar(None, results.type))


def result_rows(table_id: int, columns: Sequence[Column], count: int, first: int) -> list[ResultRows]:
    """Split panes into the `first` ones, which are new rows, and those that replace a row."""
    parts = ((0, first, True), (first, count, False))
    return [
        ResultRows(table_id, [column[lo:hi] for column in columns], hi - lo, is_first)
        for lo, hi, is_first in parts
        if lo < hi
    ]


def records_in_order(
    record_type: RecordType,
    columns: Sequence[Column],
    count: int,
    keys: int,
    times: Instants | None = None,
    *,
    retracts: bool = False,
) -> Records:
    """Return panes, or their retractions, as records, by the end of their window, key and start; see `records_of`.

    They come from memory in an order that a new owner does not know, and consumers may depend on it.
    """
    last_us = np.asarray(columns[keys + 1], np.int64) - 1
    records = records_of(record_type, columns, last_us if times is None else times, keys, retracts=retracts)
    ends = last_us.tolist()
    names: Sequence[Any] = columns[0] if keys == 1 else list(zip(*columns[:keys], strict=True))
    order = sorted(range(count), key=np.asarray(columns[keys], np.int64).tolist().__getitem__)
    order.sort(key=names.__getitem__)
    order.sort(key=ends.__getitem__)
    return records.take(np.array(order, np.int64))


def records_of(
    record_type: RecordType, columns: Sequence[Column], times: Instants, keys: int, *, retracts: bool = False
) -> Records:
    """Return panes, or their retractions, as records with these event times; `keys` is the number of key fields."""
    count = len(times)
    marks = np.ones(count, np.bool_) if retracts else None
    if count <= SMALL_RECORDS_MAX and record_type.flat and all(isinstance(column, list) for column in columns):
        values = list(columns)
        for at in (keys, keys + 1):
            values[at] = [to_datetime(instant) for instant in values[at]]
        objects = list(map(record_type.struct, *values))
        return Records(record_type, times, retracts=marks, objects=objects)
    arrays = []
    for column, field in zip(columns, record_type.schema, strict=True):
        if not isinstance(column, list):
            arrays.append(column.cast(field.type))
        elif field.name in ("window_start", "window_end"):
            arrays.append(pa.array(column, pa.int64()).cast(field.type))
        else:
            arrays.append(pa.array(_plain(column, field.type), field.type))
    batch = pa.RecordBatch.from_arrays(arrays, schema=record_type.schema)
    return Records(record_type, times, retracts=marks, batch=batch)


def _plain(column: list[Any], type_: pa.DataType) -> list[Any]:
    """Convert the values of a UUID or Decimal column to text, its type in Arrow."""
    if not pa.types.is_string(type_):
        return column
    return [decimal_text(value) if isinstance(value, Decimal) else value and str(value) for value in column]
