"""Emission of panes as columns, for a result table and for consumers of the windowed stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.checkpoint import AbsorbedRows, ResultRows
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Records, RecordType, column_name
from millpy.model.time import to_datetime
from millpy.windowing.accumulator import AccumulatorSet, Aggregate, PartialAggregate
from millpy.windowing.aggregates.combiner import failure_of
from millpy.windowing.group_by import Integers
from millpy.windowing.pane_codec import DuePane
from millpy.windowing.triggers import Trigger

RETRACTED = "retracted"
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


def output_type(record_type: RecordType, key_fields: Sequence[str], aggregates: dict[str, Aggregate]) -> RecordType:
    """Return the record type of a stream of panes: key fields, window, aggregates, and what the pane is.

    Raises:
        SchemaError: an aggregate does not accept its field.
    """
    fields: list[tuple[str, Any]] = [
        (column_name(name), record_type.annotations_along(name)[-1]) for name in key_fields
    ]
    fields += [("window_start", datetime), ("window_end", datetime)]
    fields += [(name, aggregate.bind(record_type).result) for name, aggregate in aggregates.items()]
    fields += [("pane_index", int), ("pane_timing", str), ("late_count", int)]
    return RecordType(msgspec.defstruct("WindowedResult", fields, kw_only=False, frozen=True))


class Emission:
    """The panes that a turn emits, as columns.

    Columns are in the order of the record type: keys, window_start and window_end in µs, aggregates, pane_index,
    pane_timing, late_count. Panes that are the first of their window come first: direct panes, which never were in the
    state, then those of open windows.

    Attributes:
        failed: (pane, error) for which a combiner has no result, because its code has changed since it accepted the
            records. They count as emitted, so that they are not tried again, and get no pane index.
    """

    def __init__(self, accumulators: AccumulatorSet, key_fields: int, trigger: Trigger) -> None:
        self._accumulators = accumulators
        self._trigger = trigger
        self._key_fields = key_fields
        self._direct: list[Column] = []
        self._direct_count = 0
        self._direct_first = 0
        self._open: list[DuePane] = []
        self._absorbed: list[DuePane] = []
        self._retracted: list[DuePane] = []
        self.failed: list[tuple[DuePane, Exception]] = []
        self._retracted_columns: list[Column] = []

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
            pa.array(numbers),
            self._trigger.timings(late_counts.tolist()),
            pa.array(late_counts.astype(np.int64)),
        ]

    def add_open(self, due: Sequence[DuePane]) -> None:
        """Emit panes of open windows; callable once a turn."""
        if self._accumulators.calls_user:
            due = [item for item in due if self._has_results(item)]
        self._open = sorted(due, key=lambda item: item[3].emitted)

    def _has_results(self, due: DuePane) -> bool:
        """Tell whether a pane has results; if not, record it as failed."""
        error = failure_of(self._accumulators, due[3].values)
        if error is not None:
            self.failed.append((due, error))
            due[3].emitted = True
        return error is None

    def retract(self, panes: Sequence[DuePane]) -> None:
        """Retract the newest panes of sessions that were merged into others; callable once a turn.

        Their accumulators may change afterwards.
        """
        assert not self._absorbed, "panes are retracted once a turn"
        self._absorbed = list(panes)
        self._retracted = [item for item in panes if not self._accumulators.calls_user or self._has_results(item)]
        if self._retracted:
            self._retracted_columns = self._columns_of(self._retracted, [RETRACTED] * len(self._retracted))

    def __len__(self) -> int:
        return self._direct_count + len(self._open)

    def take_columns(self) -> tuple[list[Column], int]:
        """Return (columns, how many of the panes are the first of their window), and mark open panes as emitted."""
        assert not self._open or self._direct_first == self._direct_count, "first panes come first"
        first = sum(not pane.emitted for _, _, _, pane in self._open) + self._direct_first
        timings = self._trigger.timings([pane.late_count for _, _, _, pane in self._open])
        columns = self._columns_of(self._open, timings) if self._open else []
        for _, _, _, pane in self._open:
            pane.pane_index += 1
            pane.emitted = True
        if not self._direct or not columns:
            return self._direct or columns, first
        joined: list[Column] = []
        for one, other in zip(self._direct, columns, strict=True):
            if isinstance(one, list):
                joined.append([*one, *other])
            else:
                joined.append(pa.concat_arrays([one, pa.array(other, one.type)]))
        return joined, first

    def absorbed_rows(self, table_id: int) -> list[AbsorbedRows]:
        """Return the result rows to delete: those of the retracted panes."""
        columns = self._names_of(self._absorbed) if self._absorbed else []
        return [AbsorbedRows(table_id, columns, len(self._absorbed))] if self._absorbed else []

    def retractions(self, record_type: RecordType) -> list[Records]:
        """Return the retracted panes as records."""
        if not self._retracted:
            return []
        return [records_of(record_type, self._retracted_columns, len(self._retracted), self._key_fields)]

    def _key_columns(self, keys: Sequence[Key]) -> list[list[Any]]:
        if self._key_fields == 1:
            return [list(keys)]
        return [list(column) for column in zip(*keys, strict=True)]

    def _names_of(self, due: Sequence[DuePane]) -> list[Column]:
        """Return the columns that name panes: keys, window_start and window_end."""
        keys = self._key_columns([key for _, _, key, _ in due])
        return [*keys, [start for start, _, _, _ in due], [end for _, end, _, _ in due]]

    def _columns_of(self, due: Sequence[DuePane], timings: Sequence[str]) -> list[Column]:
        panes = [pane for _, _, _, pane in due]
        return [
            *self._names_of(due),
            *(
                [self._accumulators.result(p.values, place, member) for p in panes]
                for place, member in self._accumulators.columns
            ),
            [pane.pane_index for pane in panes],
            list(timings),
            [pane.late_count for pane in panes],
        ]


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


def records_in_order(record_type: RecordType, columns: Sequence[Column], count: int, keys: int) -> Records:
    """Return panes as records, by the end of their window and their key; `keys` is the number of key fields.

    They come from memory in an order that a new owner does not know, and consumers may depend on it.
    """
    records = records_of(record_type, columns, count, keys)
    ends = records.event_times.tolist()
    names: Sequence[Any] = columns[0] if keys == 1 else list(zip(*columns[:keys], strict=True))
    order = sorted(range(count), key=names.__getitem__)
    order.sort(key=ends.__getitem__)
    return records.take(np.array(order, np.int64))


def records_of(record_type: RecordType, columns: Sequence[Column], count: int, keys: int) -> Records:
    """Return panes as records, whose event time is the last µs of the window; `keys` is the number of key fields."""
    ends = np.asarray(columns[keys + 1], np.int64)
    if count <= SMALL_RECORDS_MAX and record_type.flat and all(isinstance(column, list) for column in columns):
        values = list(columns)
        for at in (keys, keys + 1):
            values[at] = [to_datetime(instant) for instant in values[at]]
        return Records(record_type, ends - 1, objects=list(map(record_type.struct, *values)))
    arrays = []
    for column, field in zip(columns, record_type.schema, strict=True):
        if not isinstance(column, list):
            arrays.append(column.cast(field.type))
        elif field.name in ("window_start", "window_end"):
            arrays.append(pa.array(column, pa.int64()).cast(field.type))
        else:
            arrays.append(pa.array(_plain(column, field.type), field.type))
    return Records(record_type, ends - 1, batch=pa.RecordBatch.from_arrays(arrays, schema=record_type.schema))


def _plain(column: list[Any], type_: pa.DataType) -> list[Any]:
    """Convert the values of a UUID column to text, its type in Arrow."""
    return [None if value is None else str(value) for value in column] if pa.types.is_string(type_) else column
