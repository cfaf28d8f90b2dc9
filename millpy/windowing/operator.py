"""One step of a key interval of windows. `fixed.py`, `sliding.py` and `session.py` add what depends on the windows.

    join the arrived rows -> dead-letter rows that cannot be stored -> add rows to windows, collect late records
    -> emit due panes -> return the changes

User code (a `Combiner`) is called before anything changes. Rows for which it raises become dead letters, and the other
rows are added without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from millpy.errors import RefusedValueError
from millpy.model.arrivals import joined_keys, judging_watermarks
from millpy.model.checkpoint import DeadLetter, Entries, Kind, LateRows
from millpy.model.dead_letter import dead_letter_of, key_problem, payload_of, unstorable_keys
from millpy.model.delta import encode_value
from millpy.model.keys import Key, key_text, key_texts
from millpy.model.record import (
    SMALL_RECORDS_MAX,
    Instants,
    Mask,
    Records,
    column_of,
    concat,
    getter,
    retractions_of,
)
from millpy.model.stage import ResidentInterval, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, YEARS_HI, YEARS_LO, Instant, microseconds
from millpy.windowing.accumulation import Accumulation, PaneMerger
from millpy.windowing.accumulator import RowsRefusedError
from millpy.windowing.corrections import Corrections
from millpy.windowing.firing import PaneTriggers
from millpy.windowing.group_by import Integers
from millpy.windowing.pane_codec import DuePane
from millpy.windowing.panes import Emission, next_pane, records_in_order, result_rows
from millpy.windowing.percentile_trigger import PercentileWatermark
from millpy.windowing.session_gaps import Gaps
from millpy.windowing.timestamp_combiner import PaneHolds, TimestampCombiner
from millpy.windowing.window import SessionWindows, Windows, assigner_of
from millpy.windowing.window_function import WindowFunction
from millpy.windowing.window_memory import REASON as ROOM_REASON
from millpy.windowing.window_memory import NoRoomError, Openings, Weights
from millpy.windowing.window_spec import WindowSpec


@dataclass(slots=True)
class JoinedRows:
    """The rows of all bundles of a turn, in order of arrival.

    Attributes:
        records: the rows.
        codes: per row, the index of its key in `keys`.
        keys: the distinct keys.
        hashes: the hash of each key.
        watermarks: per row, the watermark that judges its lateness.
        inputs: per row, the index of its input; None if the stage has one input.
    """

    records: Records
    codes: Integers
    keys: list[Key]
    hashes: list[int]
    watermarks: Instants
    inputs: Integers | None = None

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: npt.NDArray[np.int64]) -> JoinedRows:
        """Return the given rows, in the given order."""
        inputs = None if self.inputs is None else self.inputs[rows]
        columns = (self.records.take(rows), self.codes[rows], self.keys, self.hashes, self.watermarks[rows])
        return JoinedRows(*columns, inputs)

    def by_input(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Return (input, its rows) for the inputs of the given rows."""
        if self.inputs is None:
            return [(0, rows)] if len(rows) else []
        inputs = self.inputs[rows]
        return [(place, rows[inputs == place]) for place in np.unique(inputs).tolist()]

    def input_of(self, row: int) -> int:
        """Return the index of a row's input."""
        return 0 if self.inputs is None else int(self.inputs[row])


@dataclass(frozen=True, slots=True)
class DroppedLate:
    """The records of a turn that are too late for their windows.

    Attributes:
        rows: for each input, one row per record and window that it missed.
        records: input -> number of records that missed all of their windows (I8).
    """

    rows: list[LateRows]
    records: dict[int, int]


@dataclass(slots=True)
class WindowCounts:
    """Counts of the records that a turn adds to windows (I8).

    Attributes:
        records: input -> records that belong to at least one window.
        entries: (record, window) pairs to be added.
        applied: pairs that have reached the state, or a pane that is emitted at once; counted where they do.
    """

    records: dict[int, int] = field(default_factory=dict)
    entries: int = 0
    applied: int = 0

    def consumed(self) -> dict[int, int]:
        """Return input -> number of consumed records; wrong by the number of entries that were lost or added twice."""
        if self.applied == self.entries:
            return self.records
        place = min(self.records, default=0)
        return {**self.records, place: self.records.get(place, 0) + self.applied - self.entries}


class WindowState(Protocol):
    """The open windows of a key interval, all in memory.

    Attributes:
        weights: their memory.
        holds: the event times at which panes hold the low watermark, apart from the ends of windows; None if they hold
            it nowhere else.
    """

    weights: Weights
    holds: PaneHolds[Any] | None

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Load stored windows; called for each part of the stored state."""
        ...

    def finish_recovery(self) -> None:
        """Finish the recovery, after all stored windows have been loaded."""
        ...

    def due(self, latest_end: Instant, panes_max: int) -> list[DuePane]:
        """Return the panes to emit, of windows that end by `latest_end`: changed ones, and about `panes_max` others."""
        ...

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int) -> Entries | None:
        """Expire about `panes_max` panes, and return the changes of this bundle as entries; None without any."""
        ...

    def next_end(self) -> Instant:
        """Return the end of the oldest window that has not fired; INSTANT_MAX without one."""
        ...

    def oldest_end(self) -> Instant:
        """Return the end of the oldest window that holds the low watermark; INSTANT_MAX without one."""
        ...

    def next_expiry(self) -> Instant:
        """Return when the next window expires; INSTANT_MAX without one."""
        ...

    def take_expired_without_pane(self) -> int:
        """Return how many panes have expired without being emitted since the last call: each is a fault (I8)."""
        ...


OpenT = TypeVar("OpenT", bound=WindowState)


def event_time_range(windows: Windows) -> tuple[int, int]:
    """Return the first and last event time, in µs, whose windows lie in the years 1 to 9999."""
    if isinstance(windows, WindowFunction):
        longest = microseconds(windows.length_max)
        return YEARS_LO + longest, YEARS_HI - longest
    where = Gaps(windows) if isinstance(windows, SessionWindows) else assigner_of(windows)
    return where.event_time_range()


class WindowedInterval(ResidentInterval, Generic[OpenT]):
    """Soft state of one key interval: its windows that have not expired, as far as they are in memory."""

    _open: OpenT
    _windows_per_record = 1
    """The most windows (or slices) that a record can open."""

    def __init__(self, windowing: WindowSpec, binding: StageBinding) -> None:
        self._binding = binding
        self._windowing = windowing
        self._input = binding.inputs[0]
        self._allowed_us = microseconds(windowing.allowed_lateness)
        self._trigger = windowing.trigger
        self._over_floor = INSTANT_MIN  # the windows that end by it are over since a change of the lateness
        self._latest_end = INSTANT_MIN  # the windows that end by it fire in this turn
        self._earliest, self._latest = event_time_range(windowing.windows)
        self._simple, self._mode = windowing.simple, windowing.accumulation
        self._rules = windowing.rules
        self._expected: PercentileWatermark | None = None
        self._triggers = (
            PaneTriggers(windowing.trigger, windowing.rules, self._next_pane) if windowing.by_pane else None
        )
        self._accumulators = windowing.accumulators(self._input.record_type)
        self._timestamps = windowing.timestamps
        self._combines = self._timestamps is not TimestampCombiner.END_OF_WINDOW
        self._merger = PaneMerger(self._accumulators, self._mode, self._timestamps)
        self._accumulators.report_to(binding.progress)
        self._bytes_max = binding.limits.open_windows_bytes_max // binding.windowed_intervals
        self._few_records_max = -1 if self._accumulators.calls_user else windowing.few_records_max
        ((self._stream, self._output),) = binding.outputs.items()
        self._tally = WindowCounts()
        self._made = 0  # panes of the turn, counted where they are made

    def _recover(self, recovered: StoredInterval) -> None:
        """Load the open windows from the stored state."""
        self._over_floor = recovered.horizon_floor
        for percentile in self._trigger.percentiles:
            self._expected = PercentileWatermark(percentile, recovered.entries)
            assert self._triggers is not None, "such a trigger has a state in each pane"
            self._triggers.expected_end = self._expected.reached
        progress = self._binding.progress
        run = progress.run
        for entries in recovered.entries:
            if entries.kind is Kind.WINDOW:
                self._open.recover(entries, self._input.key_types)
                entries.clear()  # free the stored form
                progress.count_unit(run)  # millions of windows take long
        self._open.finish_recovery()

    @property
    def immediate(self) -> bool:
        """Whether neither an aggregate nor the trigger is user code, which must not run on the event loop."""
        return not (self._accumulators.calls_user or self._trigger.calls_user)

    @property
    def open_bytes(self) -> int:
        """The memory of the open windows, in bytes."""
        return self._open.weights.total

    def share_memory(self, used: int) -> None:
        """Leave `used` bytes of the interval's memory to other windows."""
        limits = self._binding.limits
        self._bytes_max = max(limits.open_windows_bytes_max // self._binding.windowed_intervals - used, 0)

    def oldest_work(self) -> Instant:
        """Return the least event time that the next pane can have; INSTANT_MAX without one."""
        end = self._open.oldest_end()
        last_us = end if end == INSTANT_MAX else Instant(end - 1)
        holds = self._open.holds
        return last_us if holds is None else min(last_us, holds.oldest())

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (watermark at which the next window fires or expires, processing time of the next alarm)."""
        end = self._open.next_end()
        fires = end if end == INSTANT_MAX else self._trigger.due_at(end)
        expected = INSTANT_MIN if self._is_expected() else INSTANT_MAX
        return min(fires, self._open.next_expiry(), expected), self._next_alarm()

    def _over_by(self, watermarks: Instants) -> Instants:
        """Return, for the watermark of each row, the time by which windows that end are over for the row."""
        return np.maximum(watermarks - self._allowed_us, self._over_floor)

    def _is_expected(self) -> bool:
        """Tell whether a percentile has reached a window that has to be asked."""
        return False

    def _next_alarm(self) -> Instant:
        """Return the processing time at which a pane is due; INSTANT_MAX without one."""
        return INSTANT_MAX

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the open windows and return the result to commit."""
        result = StepResult()
        reached = work.watermark
        self._tally, self._made = WindowCounts(), 0
        subscribed = self._stream in self._binding.subscribed
        mode = self._mode if subscribed else Accumulation.ACCUMULATING  # the table is the same in every mode
        over_by = Instant(max(self._trigger.latest_end(work.watermark) - self._allowed_us, INSTANT_MIN))
        width = len(self._input.key_fields)
        emission = Emission(self._accumulators, width, self._trigger, mode, self._timestamps, self._rules, over_by)
        rows: JoinedRows | None = None
        corrections = self._corrections(work) if work.corrections else None
        arrived = [arrival for arrival in work.arrived if len(arrival.bundle)]
        if arrived:
            records = concat([arrival.bundle.records for arrival in arrived])
            codes, keys, hashes = joined_keys(arrived)
            watermarks = np.concatenate([judging_watermarks(arrival, work) for arrival in arrived])
            inputs = None
            if len(self._binding.inputs) > 1:
                inputs = np.concatenate([np.full(len(a.bundle), a.bundle.input, np.int64) for a in arrived])
            joined = JoinedRows(records, codes, keys, hashes, watermarks, inputs)
            rows = self._with_room(result, self._storable(result, joined), work)
        work = self._limit_panes(work, rows)
        self._latest_end = self._trigger.latest_end(work.watermark)
        learned: tuple[Entries, ...] = ()
        if self._expected is not None and rows is not None and len(rows):
            learned = self._expected.learn(rows.records.event_times, work.now_us)
        if self._triggers is not None:
            self._triggers.now_us, self._triggers.latest_end = work.now_us, self._latest_end
            if self._expected is not None:
                self._triggers.expected_end = self._expected.reached
        if rows is not None:
            self._add_rows(result, emission, rows, work)
        self._add_due(emission, work)
        self._emit(result, emission)
        failed = emission.failed + ([] if self._triggers is None else self._triggers.take_failed())
        result.dead_letters += [self._letter_of(due, error) for due, error in failed]
        entries = self._open.take_entries(work.watermark, work.bundle, work.panes_max)
        result.delta = learned if entries is None else (entries, *learned)
        result.consumed_by_input = self._tally.consumed()
        self._made += self._open.take_expired_without_pane()
        result.emitted_by_stream[self._stream] = self._made + emission.retracted - len(emission.withheld)
        if (table_id := self._binding.tables.get(self._stream)) is not None:
            result.emitted_by_table[table_id] = self._made
        due, alarm = self.next_due()
        result.unfinished = (due <= reached and due < INSTANT_MAX) or alarm <= work.now_us
        if corrections is not None:
            corrections.add_to(result)
        return result

    def _corrections(self, work: Work) -> Corrections:
        """Compute the rows that finished windows get from late records of an operator's choice."""
        due = self.next_due()[0]
        over_by = Instant(max(work.watermark_before - self._allowed_us, self._over_floor))
        have_left = due > work.watermark_before or due == INSTANT_MAX
        of = (self._windowing, self._binding, self._accumulators, over_by if have_left else None, work.corrections)
        return Corrections(*of, partial(self._intersects_open, over_by))

    def _intersects_open(self, over_by: Instant, key: Key, start: int, end: int) -> bool:
        """Tell whether a session of a key would be one with a session that is not over; other windows never are."""
        return False

    def _with_room(self, result: StepResult, rows: JoinedRows, work: Work) -> JoinedRows:
        """Dead-letter the rows that would open windows beyond the bound on their memory. Return the other rows."""
        weights, bytes_max = self._open.weights, self._bytes_max
        opened = len(rows) * self._windows_per_record * weights.each
        if not len(rows) or self._held_bytes() + opened <= bytes_max * 3 // 4:
            return rows
        used = self._counted_bytes()
        out = self._openings(rows, work).rows_without_room(used, weights.each, bytes_max)
        if not len(out):
            return rows
        full = NoRoomError(
            f"no room for another open window: {used // weights.each:,} windows and those of this turn exceed"
            f" {bytes_max:,} bytes, the key interval's share of MILLPY_OPEN_WINDOWS_BYTES_MAX"
        )
        self._dead_letter(result, rows, out, dict.fromkeys(out.tolist(), full))
        return rows.take(np.setdiff1d(np.arange(len(rows)), out))

    def _held_bytes(self) -> int:
        """Return a bound on `_counted_bytes`, without counting windows."""
        return self._open.weights.total

    def _counted_bytes(self) -> int:
        """Return the memory that counts against the bound."""
        return self._open.weights.total

    def _openings(self, rows: JoinedRows, work: Work) -> Openings:
        """Return the windows of the rows, and which of them the turn would open."""
        raise NotImplementedError

    def _limit_panes(self, work: Work, rows: JoinedRows | None) -> Work:
        """Return the work unchanged: `WindowState.due` bounds the panes. Slices need a lower watermark instead."""
        return work

    def _add_rows(self, result: StepResult, emission: Emission, rows: JoinedRows, work: Work) -> None:
        """Add rows to their windows, and collect late records. Repeat it without rows that user code refuses."""
        while len(rows):
            self._tally = WindowCounts()
            try:
                too_late = self._take_rows(emission, rows, work)
            except RowsRefusedError as refused:
                rows = self._without_refused(result, rows, refused)
                continue
            if too_late is not None:
                result.late.extend(too_late.rows)
                result.late_by_input.update(too_late.records)
            return

    def _expect(self, rows: JoinedRows, inside: npt.NDArray[np.int64] | None, entries: int) -> None:
        """Record which rows will be added (`inside`; None for all), and in how many entries."""
        if rows.inputs is None:
            self._tally.records = {0: len(rows) if inside is None else len(inside)}
        else:
            places = rows.inputs if inside is None else rows.inputs[inside]
            self._tally.records = dict(enumerate(np.bincount(places).tolist()))
        self._tally.entries = entries

    def _take_rows(self, emission: Emission, rows: JoinedRows, work: Work) -> DroppedLate | None:
        """Add rows to their windows, and count them. Return the late records, None without any.

        Raises:
            RowsRefusedError: user code raised for some rows; nothing has changed.
        """
        raise NotImplementedError

    def _add_due(self, emission: Emission, work: Work) -> None:
        """Emit panes of open windows that fire, about `panes_max`."""
        self._made += emission.add_open(self._open.due(self._latest_end, work.panes_max))

    def _emit(self, result: StepResult, emission: Emission) -> None:
        """Add the emitted panes to the result: as rows of the result table, and as productions for consumers."""
        table_id = self._binding.tables.get(self._stream)
        subscribed = self._stream in self._binding.subscribed
        produced = emission.retractions(self._output) if subscribed else []
        if table_id is not None:
            result.deleted = emission.deleted_rows(table_id)
        count = len(emission)
        if count:
            columns, given, first = emission.take_columns()
            if table_id is not None:
                result.results = result_rows(table_id, columns, count, first)
            if subscribed and (count := count - len(emission.withheld)):
                keys = len(self._input.key_fields)
                produced.append(records_in_order(self._output, given, count, keys, emission.times))
        if produced:
            result.productions[self._stream] = concat(produced)

    def _missed(
        self, rows: JoinedRows, starts: Instants, ends: Instants, at: Integers | None, over: Mask
    ) -> DroppedLate:
        """Return the late records, given the windows of rows (`at`; None if row n has window n) and which are over."""
        entries = np.flatnonzero(over)
        missed = np.asarray(entries if at is None else at[entries], np.int64)
        whole, nowhere = None, missed
        if at is not None:
            whole = ~np.isin(missed, at[~over])
            whole[np.setdiff1d(np.arange(len(missed)), np.unique(missed, return_index=True)[1])] = False
            nowhere = missed[whole]
        late = self._late_rows(rows.take(missed), starts[entries], ends[entries], whole)
        return DroppedLate(late, {place: len(mine) for place, mine in rows.by_input(nowhere)})

    def _late_rows(
        self, rows: JoinedRows, starts: Instants, ends: Instants, whole: Mask | None = None
    ) -> list[LateRows]:
        """Return rows for `mill.late_records` by input, one for each record and the window that it missed."""
        found = []
        for place, mine in rows.by_input(np.arange(len(rows))):
            late = rows.take(mine)
            found.append(
                LateRows(
                    stream=self._binding.inputs[place].stream,
                    computation=self._binding.computation,
                    input=place,
                    keys=[key_text(late.keys[code]) for code in late.codes.tolist()],
                    payloads=[payload_of(record) for record in late.records.objects()],
                    event_times=late.records.event_times.tolist(),
                    watermarks=late.watermarks.tolist(),
                    window_starts=starts[mine].tolist(),
                    window_ends=ends[mine].tolist(),
                    whole=[] if whole is None else whole[mine].tolist(),
                    retracts=[] if late.records.retracts is None else late.records.retracts.tolist(),
                )
            )
        return found

    def _storable(self, result: StepResult, rows: JoinedRows) -> JoinedRows:
        """Dead-letter the rows whose key, text or window cannot be stored. Return the other rows."""
        records, times = rows.records, rows.records.event_times
        outside = np.zeros(len(rows), np.bool_)
        if int(times.min()) < self._earliest or int(times.max()) > self._latest:
            outside = (times < self._earliest) | (times > self._latest)
        mask = outside.copy()
        bad_keys = unstorable_keys(key_texts(rows.keys))
        if bad_keys:
            mask |= np.isin(rows.codes, list(bad_keys))
        for name in self._accumulators.texts:
            if len(records) <= SMALL_RECORDS_MAX:
                mask |= np.array(["\x00" in (getter(name)(o) or "") for o in records.objects()], np.bool_)
            else:
                found = pc.fill_null(pc.match_substring(column_of(records.batch(), name), "\x00"), False)
                mask |= found.to_numpy(zero_copy_only=False)
        if not mask.any():
            return rows
        out = np.flatnonzero(mask)
        nul = RefusedValueError("text with a NUL character cannot be stored")
        far = RefusedValueError("a window of the record is outside the years 1 to 9999")
        errors: dict[int, BaseException | None] = {
            row: None if int(rows.codes[row]) in bad_keys else far if outside[row] else nul for row in out.tolist()
        }
        self._dead_letter(result, rows, out, errors)
        return rows.take(np.flatnonzero(~mask))

    def _next_pane(self, due: DuePane, timing: str) -> Any:
        """Return the record that the next pane of a window would be."""
        width = len(self._input.key_fields)
        return next_pane(self._output, self._accumulators, width, self._rules, due, timing)

    def _letter_of(self, due: DuePane, error: BaseException) -> DeadLetter:
        """Return a dead letter for a pane without a result, or on which a predicate raises.

        It has the pane as JSON, and cannot be replayed.
        """
        start, end, key, pane = due
        values = [msgspec.Raw(encode_value(value)) for value in self._accumulators.to_stored(pane.values)]
        payload = {"window_start": start, "window_end": end, "key": msgspec.Raw(key_text(key)), "values": values}
        computation = self._binding.computation
        return dead_letter_of(
            error,
            msgspec.json.encode(payload),
            stream="",
            computation=computation,
            event_time=end - 1,
            key=key_text(key),
        )

    def _without_refused(self, result: StepResult, rows: JoinedRows, refused: RowsRefusedError) -> JoinedRows:
        """Dead-letter the rows that user code refuses. Return the other rows."""
        out = np.array(sorted(refused.errors), np.int64)
        self._dead_letter(result, rows, out, refused.errors)
        return rows.take(np.setdiff1d(np.arange(len(rows)), out))

    def _dead_letter(
        self,
        result: StepResult,
        rows: JoinedRows,
        out: npt.NDArray[np.int64],
        errors: Mapping[int, BaseException | None],
    ) -> None:
        """Add dead letters for the rows `out` to the result; the error None means that the key cannot be stored."""
        records = rows.records.take(out)
        columns = (out.tolist(), records.objects(), records.event_times.tolist(), retractions_of(records).tolist())
        for row, record, at, retracts in zip(*columns, strict=True):
            place = rows.input_of(row)
            stream, computation = self._binding.inputs[place].stream, self._binding.computation
            error, payload = errors[row], payload_of(record)
            where = {"event_time": at, "input": place, "retracts": retracts}
            if isinstance(error, NoRoomError):
                key = key_text(rows.keys[int(rows.codes[row])])
                letter = DeadLetter(ROOM_REASON, str(error), payload, stream, computation, key=key, **where)
            elif error is None:
                detail = key_problem(key_text(rows.keys[int(rows.codes[row])]))
                letter = DeadLetter("key", detail, payload, stream, computation, **where)
            else:
                key = key_text(rows.keys[int(rows.codes[row])])
                letter = dead_letter_of(error, payload, stream=stream, computation=computation, key=key, **where)
            result.dead_letters.append(letter)
        counts = result.dead_lettered_by_input
        for place, mine in rows.by_input(out):
            counts[place] = counts.get(place, 0) + len(mine)
