"""Recompute finished windows from an archive, for late records whose windows' rows do not tell enough.

A window has the archived records of its key that happened in it, except the late records that nobody has added. The
owner of the window gets its accumulators with the request, and adds the late record (`windowing/corrections.py`): this
process changes nothing by itself, and may be killed at any point.

Memory: the files are read a row group at a time, for `WINDOWS_MAX` windows at once. Only aggregates that depend on the
order of records need those of a window together, at most `RECORDS_IN_ORDER_MAX`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.admin.audits import dropped_before
from millpy.admin.past_windows import (
    Name,
    asked_windows,
    consumed,
    dead_letters_of,
    is_archived,
    late_records_of,
    missing_late_records,
    rows_of,
)
from millpy.admin.queries import Admin
from millpy.clock import SystemClock
from millpy.errors import StoreUnavailableError, UsageError
from millpy.graph import Graph, InjectorNode, StageNode
from millpy.model.dead_letter import error_text, payload_of
from millpy.model.deployment import GraphSpec, TableSpec
from millpy.model.keys import KEY_SPACE, Key, KeyHasher, key_from_text, key_hash
from millpy.model.record import Records, RecordType
from millpy.model.step_progress import is_user_error
from millpy.model.time import INSTANT_MIN, Instant, to_datetime
from millpy.store.archive.input import ArchivedInput, archived_input
from millpy.store.archive.parquet import EVENT_TIME, ORDINAL, PARTITION, SEQ, WATERMARK
from millpy.store.archive.reader import ArchiveReader, TimeRange, described
from millpy.store.archive.storage import parquet_file
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.rebuilding import NotRebuiltError, Rebuilder, read_row
from millpy.windowing.recomputation import NOT_GIVEN_HINT, RecomputedWindow, difference_of, stored_form
from millpy.windowing.window import SessionWindows

WINDOWS_MAX = 1_000
RECORDS_IN_ORDER_MAX = 1_000_000
RECOMPUTED_BYTES_MAX = 1_000_000
"""Of the accumulators of one window as JSON: they are in the request."""
STORED_BYTES_MAX = 64_000_000
"""Of those of all windows that are recomputed at once."""
ARCHIVED_WITHIN_S = 60.0
LOOK_EVERY_S = 0.5
NO_ROW_HINT = "somebody has deleted the row, or the database or your code refused it (see `millpy dead-letters list`)"
BEHIND_HINT = "check with `SELECT * FROM millpy.archive` that an archiver runs, and ask again"


@dataclass(slots=True)
class Recomputation:
    """What an archive says of the windows of late records.

    Attributes:
        recomputed: late record -> what its request gets, as JSON.
        refused: late record -> why its window cannot be recomputed.
        merged: late records whose windows' rows say enough.
        stored_bytes: the bytes of all accumulators as JSON.
    """

    recomputed: dict[int, str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    merged: list[int] = field(default_factory=list)
    stored_bytes: int = 0


@dataclass(slots=True)
class _Window:
    """A window that is recomputed: its late records, its row if there is one, and what the archive has of it."""

    name: Name
    key: Key
    ids: list[int]
    row: str | None
    content: RecomputedWindow
    in_order: list[tuple[tuple[str, int, int], Any, Instant]] = field(default_factory=list)
    partitions: set[str] = field(default_factory=set)
    records: int = 0

    @property
    def start(self) -> int:
        return self.name[1]

    @property
    def end(self) -> int:
        return self.name[2]


def recompute_windows(
    admin: Admin,
    graph: Graph,
    name: str,
    directory: str,
    ids: Sequence[int],
    table: TableSpec,
    *,
    since: int = INSTANT_MIN,
) -> Recomputation:
    """Recompute the finished windows of late records of one table, as far as their rows do not say enough.

    Args:
        admin: the database.
        graph: the graph, as it is deployed.
        name: its present name.
        directory: the directory of all archives.
        ids: open late records of the table's computation.
        table: a table of windows.
        since: when the graph was changed in place, in µs: earlier windows cannot be recomputed.

    Raises:
        UsageError: the archive lacks records.
        StoreUnavailableError: the archive is behind.
    """
    task = _Task(admin, graph, name, directory, table)
    found = Recomputation()
    windows = task.windows(ids, found)
    if early := [late for window in windows if window.start < since for late in window.ids]:
        at = to_datetime(Instant(since)).isoformat()
        why = f"its window begins before {at}, when the deployed graph was changed in place"
        found.refused.update(dict.fromkeys(early, why))
    windows = [window for window in windows if window.start >= since]
    for start in range(0, len(windows), WINDOWS_MAX):
        task.recompute(windows[start : start + WINDOWS_MAX], found)
    return found


class _Task:
    """One table, its archive, and its windows."""

    def __init__(self, admin: Admin, graph: Graph, name: str, directory: str, table: TableSpec) -> None:
        self._admin, self._graph, self._name, self._table = admin, graph, name, table
        self._directory = directory
        self._spec: GraphSpec = graph.spec()
        node = next(node for node in graph.nodes if node.name == table.computation)
        assert isinstance(node, StageNode)
        assert isinstance(node.logic, WindowedLogic)
        self._taken = node.inputs[0]
        self._windowing = node.logic
        self._record_type: RecordType = self._taken.record_type
        self._accumulators: AccumulatorSet = self._windowing.accumulators(self._record_type)
        output = self._windowing.output_type(self._record_type, self._taken.fields)
        self._result_types = {column: output.annotations_along(column)[-1] for column in self._columns}
        self._hasher = KeyHasher()
        self._dropped_us = dropped_before(admin, name).get(table.name, INSTANT_MIN)
        orders = {aggregate.merge_order for aggregate in self._windowing.aggregates.values()}
        self._by_arrival, self._in_order = "arrival" in orders, orders != {"any"}

    @property
    def _columns(self) -> tuple[str, ...]:
        return self._windowing.columns()

    def windows(self, ids: Sequence[int], found: Recomputation) -> list[_Window]:
        """Return the windows of late records whose rows do not say enough, by start."""
        asked = [
            row for row in asked_windows(self._admin, self._name, ids) if row["computation"] == self._table.computation
        ]
        rows = rows_of(self._admin, self._name, self._table, [row["id"] for row in asked])
        rebuilder = Rebuilder(self._accumulators, self._columns, self._record_type)
        windows: dict[Name, _Window] = {}
        # The windows of a session's late records are not those of its rows: the owner looks for them.
        sessions = isinstance(self._windowing.windows, SessionWindows)
        for one in asked:
            name = (one["key"], one["window_start"], one["window_end"])
            if name in windows:
                windows[name].ids.append(one["id"])
                continue
            row = rows.get(one["id"])
            is_settled = sessions or one["window_end"] < self._dropped_us  # the owner finds or refuses it
            if (row is None and is_settled) or (row is not None and self._is_enough(rebuilder, row)):
                found.merged.append(one["id"])
                continue
            key = key_from_text(one["key"], self._taken.key_types)
            windows[name] = _Window(name, key, [one["id"]], row, RecomputedWindow(self._accumulators))
        return sorted(windows.values(), key=lambda window: (window.start, window.name))

    def _is_enough(self, rebuilder: Rebuilder, row: str) -> bool:
        try:
            rebuilder.accumulators_of(read_row(row, self._result_types))
        except NotRebuiltError:
            return False
        return True

    def recompute(self, windows: Sequence[_Window], found: Recomputation) -> None:
        """Recompute some windows. If they cannot be read together, halve them."""
        of = archived_input(self._spec, self._table)
        if isinstance(of, str):
            for window in windows:
                if window.row is None:
                    found.merged += window.ids
                else:
                    found.refused.update(dict.fromkeys(window.ids, f"no archive has its window: {of}"))
            return
        self._await_archive(of.archive)
        missing = missing_late_records(self._admin, self._name, self._table.computation)
        self._take_late_records(windows)
        if why := self._read(windows, of, may_miss=missing > 0):
            if len(windows) == 1:
                found.refused.update(dict.fromkeys(windows[0].ids, why))
                return
            for half in (windows[: len(windows) // 2], windows[len(windows) // 2 :]):
                again = [_Window(w.name, w.key, w.ids, w.row, RecomputedWindow(self._accumulators)) for w in half]
                self.recompute(again, found)
            return
        for window in windows:
            self._conclude(window, found)

    def _await_archive(self, archive: str) -> None:
        """Wait until the archive has what the windows have."""
        through = consumed(self._admin, self._name, self._table.computation)
        clock = SystemClock()
        until = clock.monotonic() + ARCHIVED_WITHIN_S
        while not is_archived(self._admin, self._name, archive, through):
            if clock.monotonic() >= until:
                raise StoreUnavailableError(
                    f"{archive} has not got what {self._table.computation} has", hint=BEHIND_HINT
                )
            asyncio.run(clock.sleep(LOOK_EVERY_S))

    def _take_late_records(self, windows: Sequence[_Window]) -> None:
        computation = self._table.computation
        late = late_records_of(self._admin, self._name, computation, [window.name for window in windows])
        span = min(window.start for window in windows), max(window.end for window in windows)
        letters = dead_letters_of(self._admin, self._name, computation, span)
        times = [letter.event_time for letter in letters]
        for window in windows:
            inside = (bisect_left(times, at) for at in (window.start, window.end))
            for one in [*late.get(window.name, ()), *letters[slice(*inside)]]:
                window.content.expect(one.event_time, one.digest, one.records, added=one.added)

    def _read(self, windows: Sequence[_Window], of: ArchivedInput, *, may_miss: bool) -> str:
        """Add the archived records to windows; say why they cannot be read together, or alone."""
        try:
            return self._add_archived(windows, of, may_miss=may_miss)
        except UsageError as error:  # the archive lacks bundles
            return f"{error} ({error.hint})"

    def _add_archived(self, windows: Sequence[_Window], of: ArchivedInput, *, may_miss: bool) -> str:
        by_key: dict[Key, list[_Window]] = {}
        for window in windows:
            by_key.setdefault(window.key, []).append(window)
        kept = 0
        for partition, records, places in self._archived(windows, of, list(by_key)):
            keys = records.keys(of.key_fields, self._hasher)
            ours = np.array([key in by_key for key in keys.keys], np.bool_)[keys.codes]
            rows = np.flatnonzero(ours)
            taken, codes = records.take(rows), keys.codes[rows].tolist()
            assert taken.watermarks is not None
            columns = (rows.tolist(), taken.objects(), taken.event_times.tolist(), taken.watermarks.tolist(), codes)
            for row, record, at, watermark, code in zip(*columns, strict=True):
                for window in by_key[keys.keys[code]]:
                    if not window.start <= at < window.end:
                        continue
                    digest = sha256(payload_of(record)).digest() if at in window.content.times else b""
                    late = may_miss and watermark >= window.end + self._table.allowed_lateness_us
                    if not window.content.takes(at, digest, may_be_late=late):
                        continue
                    window.partitions.add(partition[row])
                    window.records += 1
                    if self._in_order:
                        window.in_order.append(((partition[row], *places[row]), record, at))
                        kept += 1
                    else:
                        window.content.add(record, at)
            if kept > RECORDS_IN_ORDER_MAX:
                return f"its aggregates need its records in order, and it has more than {RECORDS_IN_ORDER_MAX:,}"
        return ""

    def _archived(
        self, windows: Sequence[_Window], of: ArchivedInput, keys: Sequence[Key]
    ) -> Iterator[tuple[list[str], Records, list[tuple[int, int]]]]:
        """Yield the archived records of the windows' time, with partition, and bundle and place in it, of each."""
        listed = self._admin.archive_files(self._name, of.archive)
        reader = ArchiveReader(self._directory, of.archive, listed)
        first, last = min(window.start for window in windows), max(window.end for window in windows)
        span = TimeRange(Instant(first), Instant(last))
        if not any(file.event_time_hi >= first and file.event_time_lo < last for file in listed):
            return
        chosen = reader.holding(span)
        source = next(node for node in self._graph.injectors() if node.name == of.source)
        reader.check(chosen, of.source, span, _ahead_us(source))
        schema = pa.schema([*self._record_type.schema, *_PLACES])
        same_key = self._archive_fields(of.archive) == of.key_fields
        spans = [(window.start, window.end) for window in windows]
        for file in chosen:
            if any(start <= file.event_time_hi and file.event_time_lo < end for start, end in spans):
                yield from self._of_file(reader.find(file), of.source, schema, span, keys if same_key else None)

    def _archive_fields(self, archive: str) -> tuple[str, ...]:
        (node,) = (node for node in self._graph.nodes if node.name == archive)
        assert isinstance(node, StageNode)
        return node.inputs[0].fields

    def _of_file(
        self, path: str, source: str, schema: pa.Schema, span: TimeRange, keys: Sequence[Key] | None
    ) -> Iterator[tuple[list[str], Records, list[tuple[int, int]]]]:
        """Yield a source's records in one file, by row group; only of the keys' buckets, if `keys` is given."""
        file = parquet_file(path)
        description = described(file.metadata)
        width = KEY_SPACE // description.buckets
        buckets = None if keys is None else {key_hash(key) // width for key in keys}
        for place, (bucket, _) in enumerate(description.row_groups):
            if buckets is not None and bucket not in buckets:
                continue
            table = file.read_row_group(place)
            at, own = table[EVENT_TIME], pc.starts_with(table[PARTITION], f"{source}/")
            table = table.filter(pc.and_(own, pc.and_(pc.greater_equal(at, span.first), pc.less(at, span.end))))
            if not len(table):
                continue
            for name in set(schema.names) - set(table.column_names):  # the file is from before a deployment
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
            (batch,) = table.select(schema.names).cast(schema).combine_chunks().to_batches()
            yield self._records(batch)

    def _records(self, batch: pa.RecordBatch) -> tuple[list[str], Records, list[tuple[int, int]]]:
        times, watermarks = (
            pc.fill_null(batch.column(name), INSTANT_MIN).to_numpy(zero_copy_only=False)
            for name in (EVENT_TIME, WATERMARK)
        )
        places = list(zip(batch.column(SEQ).to_pylist(), batch.column(ORDINAL).to_pylist(), strict=True))
        values = batch.select(self._record_type.schema.names)
        records = Records(self._record_type, times, watermarks=watermarks, batch=values)
        return batch.column(PARTITION).to_pylist(), records, places

    def _conclude(self, window: _Window, found: Recomputation) -> None:
        """Add what is to be added in order, and compare the results with the row."""
        if window.row is None:
            if not window.records:
                found.merged += window.ids
                return
            why = f"its window has no row, but the archive has {window.records:,} records of it: {NO_ROW_HINT}"
            found.refused.update(dict.fromkeys(window.ids, why))
            return
        why = ""
        if window.content.unclear:
            why = "the archive cannot tell which of its records came too late: late records of its time are not stored"
        elif self._by_arrival and len(window.partitions) > 1:
            why = "its aggregates need the order of arrival, which the archive of several partitions does not have"
        why = why or self._difference(window, window.row)
        window.in_order.clear()
        if not why:
            values = stored_form(self._accumulators, window.content.values)
            if len(values) <= RECOMPUTED_BYTES_MAX and found.stored_bytes + len(values) <= STORED_BYTES_MAX:
                found.stored_bytes += len(values)
                document = f'{{"values": {values.decode()}, "row": {window.row}}}'
                found.recomputed.update(dict.fromkeys(window.ids, document))
                return
            why = f"its accumulators take {len(values):,} bytes, more than the {RECOMPUTED_BYTES_MAX:,} of a request"
            if len(values) <= RECOMPUTED_BYTES_MAX:
                why = "the accumulators of the others take too many bytes: ask again for those that are left"
        found.refused.update(dict.fromkeys(window.ids, why))

    def _difference(self, window: _Window, row: str) -> str:
        """Add the records that are in order; say how the results differ from the row, or why there are none."""
        try:
            for _, record, at in sorted(window.in_order, key=lambda entry: entry[0]):
                window.content.add(record, at)
            results = self._accumulators.results(window.content.values)
        except BaseException as error:  # user code
            if not (self._accumulators.calls_user and is_user_error(error)):
                raise
            return f"your code fails with its records: {error_text(error)}"
        difference = difference_of(self._columns, results, read_row(row, self._result_types))
        return difference and f"the archive does not give the row as it is: {difference} ({NOT_GIVEN_HINT})"


def _ahead_us(source: InjectorNode) -> int:
    return source.event_time.max_disorder_us + source.event_time.future_tolerance_us


_PLACES = (
    pa.field(PARTITION, pa.string()),
    pa.field(SEQ, pa.int64()),
    pa.field(ORDINAL, pa.int32()),
    pa.field(EVENT_TIME, pa.int64()),
    pa.field(WATERMARK, pa.int64()),
)
