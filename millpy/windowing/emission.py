"""Emission: panes as columns, for a result table and for whoever consumes the windowed stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from millpy.model.checkpoint import ResultRows
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX, Records, RecordType, column_name
from millpy.model.time import to_datetime
from millpy.windowing.aggregate import Aggregate, Fold, Partial
from millpy.windowing.grouping import Groups, Integers
from millpy.windowing.open_windows import OpenPane

TIMINGS = ("on_time", "late")
Column: TypeAlias = "pa.Array | list[Any]"


def output_type(record_type: RecordType, key_fields: Sequence[str], aggregates: dict[str, Aggregate]) -> RecordType:
    """The record type of a windowed stream: key fields, window, aggregates, pane."""
    fields: list[tuple[str, Any]] = [(column_name(name), record_type.along(name)[-1]) for name in key_fields]
    fields += [("window_start", datetime), ("window_end", datetime)]
    fields += [(name, aggregate.bind(record_type).result) for name, aggregate in aggregates.items()]
    fields += [("pane_index", int), ("pane_timing", str), ("late_count", int)]
    return RecordType(msgspec.defstruct("WindowedResult", fields, kw_only=False, frozen=True))


class Emission:
    """The panes of one turn, gathered column by column.

    Columns are in the order of the record type: keys, window_start and window_end in µs, aggregates, pane_index,
    pane_timing, late_count. Direct panes (of windows that never touched the state) and first panes of open windows
    come first; `first` of them.
    """

    def __init__(self, folds: Sequence[Fold], key_fields: int, size_us: int) -> None:
        self._folds = folds
        self._key_fields = key_fields
        self._size_us = size_us
        self._direct: list[Column] = []
        self._direct_count = 0
        self._open: list[tuple[int, Key, OpenPane]] = []

    def add_direct(
        self, groups: Groups, partials: Sequence[Partial], late: Integers, picks: Integers, keys: Sequence[Key]
    ) -> None:
        """Emit groups as they are, as the first and only panes of their windows; at most once a turn."""
        assert not self._direct, "direct panes are added once"
        if not len(picks):
            return
        starts = groups.starts[picks]
        late_counts = late[picks]
        self._direct_count = len(picks)
        self._direct = [
            *self._key_columns([keys[code] for code in groups.codes[picks].tolist()]),
            pa.array(starts),
            pa.array(starts + self._size_us),
            *(partial.results(picks) for partial in partials),
            pa.array(np.zeros(len(picks), np.int64)),
            [TIMINGS[count > 0] for count in late_counts.tolist()] if late_counts.any() else [TIMINGS[0]] * len(picks),
            pa.array(late_counts.astype(np.int64)),
        ]

    def add_open(self, due: Sequence[tuple[int, Key, OpenPane]]) -> None:
        """Emit panes of open windows, and count them as emitted."""
        self._open = sorted(due, key=lambda item: item[2].emitted)

    def __len__(self) -> int:
        return self._direct_count + len(self._open)

    def take(self) -> tuple[list[Column], int]:
        """(columns, how many of the rows are first panes); moves the panes' indexes."""
        first = sum(not pane.emitted for _, _, pane in self._open) + self._direct_count
        columns = self._open_columns() if self._open else []
        for _, _, pane in self._open:
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

    def _key_columns(self, keys: Sequence[Key]) -> list[list[Any]]:
        if self._key_fields == 1:
            return [list(keys)]
        return [list(column) for column in zip(*keys, strict=True)]

    def _open_columns(self) -> list[Column]:
        starts = [start for start, _, _ in self._open]
        panes = [pane for _, _, pane in self._open]
        return [
            *self._key_columns([key for _, key, _ in self._open]),
            starts,
            [start + self._size_us for start in starts],
            *([fold.result_of(pane.values[i]) for pane in panes] for i, fold in enumerate(self._folds)),
            [pane.pane_index for pane in panes],
            [TIMINGS[pane.late_count > 0] for pane in panes],
            [pane.late_count for pane in panes],
        ]


def result_rows(table_id: int, columns: Sequence[Column], count: int, first: int) -> list[ResultRows]:
    """First panes, which may be copied, apart from those that replace a row."""
    parts = ((0, first, True), (first, count, False))
    return [
        ResultRows(table_id, [column[lo:hi] for column in columns], hi - lo, is_first)
        for lo, hi, is_first in parts
        if lo < hi
    ]


def records_of(record_type: RecordType, columns: Sequence[Column], count: int, keys: int) -> Records:
    """Panes as records; their event time is the last instant of their window."""
    ends = np.asarray(columns[keys + 1], np.int64)
    if count <= SMALL_RECORDS_MAX:
        values = [column if isinstance(column, list) else column.to_pylist() for column in columns]
        for at in (keys, keys + 1):
            values[at] = [to_datetime(instant) for instant in values[at]]
        return Records(record_type, ends - 1, objects=list(map(record_type.struct, *values)))
    arrays = []
    for column, field in zip(columns, record_type.schema, strict=True):
        is_instant = field.name in ("window_start", "window_end")
        made = (
            pa.array(_plain(column, field.type), pa.int64() if is_instant else field.type)
            if isinstance(column, list)
            else column
        )
        arrays.append(made.cast(field.type) if is_instant else made)
    return Records(record_type, ends - 1, batch=pa.RecordBatch.from_arrays(arrays, schema=record_type.schema))


def _plain(column: list[Any], type_: pa.DataType) -> list[Any]:
    """Text columns of UUIDs are text in Arrow."""
    return [str(value) for value in column] if pa.types.is_string(type_) else column
