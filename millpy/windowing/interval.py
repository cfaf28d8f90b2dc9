"""What one key interval of windows does in a turn, whatever its windows are; `aligned.py` and `sessions.py` fill it in.

    join what arrived -> set aside what cannot be stored -> bring rows into windows, set aside what is too late
    -> emit what is due -> say what has changed

Code of the user (a `Combiner`) may raise. Then nothing has changed yet: its rows become dead letters, and the rest is
brought in without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from millpy.errors import RefusedValueError
from millpy.model.arrivals import joined_keys, judging_watermarks
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Entries, Kind, LateRows
from millpy.model.delta import encode_value
from millpy.model.deployment import Meaning
from millpy.model.keys import Key, key_text, key_texts
from millpy.model.quarantine import dead_letter_of, key_problem, payload_of, unstorable_keys
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Records, RecordType, column_of, concat, getter
from millpy.model.stage import Binding, Recovered, StepResult, Work
from millpy.model.time import INSTANT_MAX, Instant, microseconds
from millpy.windowing.emission import Emission, output_type, records_of, result_rows
from millpy.windowing.fold import Aggregate, Folds, RowsRefusedError
from millpy.windowing.grouping import Integers
from millpy.windowing.pane import DuePane
from millpy.windowing.room import REASON as ROOM_REASON
from millpy.windowing.room import NoRoomError, Openings, Weights
from millpy.windowing.window import Assigner, Gaps, SessionWindows, SlidingWindows, Windows

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Windowing:
    """What a windowed step does: windows, lateness, aggregates.

    Attributes:
        windows: where records are grouped.
        allowed_lateness: how long past a window's end late records still amend it.
        aggregates: result column -> what it holds.
        few_records_max: up to so many records a turn take the plain-Python path; the effect is the same.
    """

    windows: Windows
    allowed_lateness: timedelta
    aggregates: Mapping[str, Aggregate]
    few_records_max: int = SMALL_RECORDS_MAX

    def output_type(self, record_type: RecordType, key_fields: Sequence[str]) -> RecordType:
        """The record type of the stream of panes.

        Raises:
            SchemaError: an aggregate does not fit its field.
        """
        return output_type(record_type, key_fields, dict(self.aggregates))

    def columns(self) -> tuple[str, ...]:
        """Names of the aggregate columns."""
        return tuple(self.aggregates)

    @property
    def sliced(self) -> bool:
        """Whether windows are kept as slices; half slices would be more than windows, and slices keep no order."""
        windows = self.windows
        if not isinstance(windows, SlidingWindows) or any(aggregate.in_order for aggregate in self.aggregates.values()):
            return False
        return windows.size_us % windows.every_us == 0 and windows.size_us > windows.every_us

    def meaning(self) -> Meaning:
        """Windows, how they are kept, and aggregates; none of it may change under stored windows."""
        return {
            "windows": repr(self.windows),
            "stored_form": "slices" if self.sliced else "whole windows",
            "allowed_lateness": repr(self.allowed_lateness),
            "aggregates": [(name, aggregate.identity()) for name, aggregate in self.aggregates.items()],
        }


@dataclass(slots=True)
class Rows:
    """What arrived in a turn, joined.

    Attributes:
        records: all records, in order of arrival.
        codes: per row, the place of its key in `keys`.
        keys: distinct keys.
        watermarks: per row, what judges it.
        inputs: per row, the input on which it came; None for one input.
    """

    records: Records
    codes: Integers
    keys: list[Key]
    watermarks: Instants
    inputs: Integers | None = None

    def __len__(self) -> int:
        return len(self.records)

    def take(self, rows: npt.NDArray[np.int64]) -> Rows:
        """Some rows, in the order given."""
        inputs = None if self.inputs is None else self.inputs[rows]
        return Rows(self.records.take(rows), self.codes[rows], self.keys, self.watermarks[rows], inputs)

    def by_input(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Some of the rows by the input on which they came; inputs without any are left out."""
        if self.inputs is None:
            return [(0, rows)] if len(rows) else []
        inputs = self.inputs[rows]
        return [(place, rows[inputs == place]) for place in np.unique(inputs).tolist()]

    def input_of(self, row: int) -> int:
        """The input on which a row came."""
        return 0 if self.inputs is None else int(self.inputs[row])


@dataclass(frozen=True, slots=True)
class TooLate:
    """What came too late in a turn.

    Attributes:
        rows: one for each window that a record has missed, by input.
        records: input -> how many records missed all of their windows (I8).
    """

    rows: list[LateRows]
    records: dict[int, int]


@dataclass(slots=True)
class Tally:
    """What a turn has brought into windows (I8).

    Attributes:
        records: input -> records that are in a window at least.
        entries, applied: (record, window) pairs that were to be brought in, and those that have reached the state or a
            pane that leaves at once: counted there.
    """

    records: dict[int, int] = field(default_factory=dict)
    entries: int = 0
    applied: int = 0

    def consumed(self) -> dict[int, int]:
        """Input -> records; an entry that was lost, or was brought in twice, is one less or more on some input."""
        if self.applied == self.entries:
            return self.records
        place = min(self.records, default=0)
        return {**self.records, place: self.records.get(place, 0) + self.applied - self.entries}


class Open(Protocol):
    """The open windows of a key interval, ordered by when they are due; all in memory."""

    weights: Weights

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Take stored windows, some of several."""
        ...

    def recovered(self) -> None:
        """All stored windows are here."""
        ...

    def due(self, watermark: Instant, panes_max: int) -> list[DuePane]:
        """Panes that the watermark makes due, about so many."""
        ...

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int) -> Entries | None:
        """What has changed since the last time; about so many windows expire."""
        ...

    def oldest_hold(self) -> Instant:
        """Output time of the oldest window without its on-time pane."""
        ...

    def next_due(self) -> Instant:
        """When the next window fires or expires."""
        ...

    def take_silent(self) -> int:
        """How many windows have expired since the last time without ever having emitted: always 0, or one is lost."""
        ...


OpenT = TypeVar("OpenT", bound=Open)


class WindowedInterval(Generic[OpenT]):
    """Soft state of one key interval: its open windows, all in memory."""

    _open: OpenT
    _most = 1
    """Windows (or slices) that a record may open, at most."""

    def __init__(self, windowing: Windowing, binding: Binding) -> None:
        self._binding = binding
        self._input = binding.inputs[0]
        self._allowed_us = microseconds(windowing.allowed_lateness)
        windows = windowing.windows
        where = Gaps(windows) if isinstance(windows, SessionWindows) else Assigner(windows)
        self._earliest, self._latest = where.lasting()
        self._folds = Folds(windowing.aggregates, self._input.record_type)
        self._folds.report_to(binding.progress)
        self._bytes_max = binding.limits.open_windows_bytes_max // binding.windowed_intervals
        self._few_records_max = -1 if self._folds.calls_user else windowing.few_records_max
        ((self._stream, self._output),) = binding.outputs.items()
        self._tally = Tally()
        self._made = self._retracted = 0  # panes of the turn, where they come into being

    def _recover(self, recovered: Recovered) -> None:
        """Take the windows that were open, out of what was recovered."""
        progress = self._binding.progress
        run = progress.run
        for entries in recovered.entries:
            if entries.kind is Kind.WINDOW:
                self._open.recover(entries, self._input.key_types)
                entries.clear()  # not in memory twice
                progress.done(run)  # millions take long
        self._open.recovered()

    @property
    def immediate(self) -> bool:
        """Whether no code of the user runs here."""
        return not self._folds.calls_user

    def missing(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Nothing: open windows are all in memory."""
        return ()

    def absorb(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Nothing is ever missing."""

    def folded(self, bundle: int) -> None:
        """Nothing leaves but by expiry."""

    def oldest_work(self) -> Instant:
        """Output time of the oldest window without its on-time pane."""
        return self._open.oldest_hold()

    def next_due(self) -> tuple[Instant, Instant]:
        """When the next window fires or expires; nothing goes by the clock."""
        return self._open.next_due(), INSTANT_MAX

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the open windows and say what has to be committed for it."""
        result = StepResult()
        reached = work.watermark
        self._tally, self._made, self._retracted = Tally(), 0, 0
        emission = Emission(self._folds, len(self._input.key_fields))
        rows: Rows | None = None
        arrived = [arrival for arrival in work.arrived if len(arrival.bundle)]
        if arrived:
            records = concat([arrival.bundle.records for arrival in arrived])
            codes, keys, _ = joined_keys(arrived)
            watermarks = np.concatenate([judging_watermarks(arrival, work) for arrival in arrived])
            inputs = None
            if len(self._binding.inputs) > 1:
                inputs = np.concatenate([np.full(len(a.bundle), a.bundle.input, np.int64) for a in arrived])
            rows = self._with_room(result, self._storable(result, Rows(records, codes, keys, watermarks, inputs)), work)
        work = self._bounded(work, rows)
        if rows is not None:
            self._take(result, emission, rows, work)
        self._add_due(emission, work.watermark, work.panes_max)
        self._emit(result, emission)
        result.dead_letters += [self._letter_of(due, error) for due, error in emission.failed]
        entries = self._open.take_entries(work.watermark, work.bundle, work.panes_max)
        if entries is not None:
            result.delta = (entries,)
        result.consumed_by_input = self._tally.consumed()
        self._made += self._open.take_silent()
        result.emitted_by_stream[self._stream] = self._made + self._retracted
        if (table_id := self._binding.tables.get(self._stream)) is not None:
            result.emitted_by_table[table_id] = self._made
        due = self._open.next_due()
        result.unfinished = due <= reached and due < INSTANT_MAX
        return result

    def _with_room(self, result: StepResult, rows: Rows, work: Work) -> Rows:
        """Rows without those that would open more windows than there is room for: these become dead letters."""
        weights, bytes_max = self._open.weights, self._bytes_max
        if not len(rows) or weights.total + len(rows) * self._most * weights.each <= bytes_max * 3 // 4:
            return rows
        out = self._openings(rows, work).refused(weights, bytes_max)
        if not len(out):
            return rows
        full = NoRoomError(
            f"no room for another open window: {weights.panes:,} and those of this turn weigh more than"
            f" {bytes_max:,} bytes, the part of MILLPY_OPEN_WINDOWS_BYTES_MAX that a key interval has"
        )
        self._quarantine(result, rows, out, dict.fromkeys(out.tolist(), full))
        return rows.take(np.setdiff1d(np.arange(len(rows)), out))

    def _openings(self, rows: Rows, work: Work) -> Openings:
        """Which windows rows are in, and which of these would be opened."""
        raise NotImplementedError

    def _bounded(self, work: Work, rows: Rows | None) -> Work:
        """Work whose watermark makes no more panes due at once than it may, where they cannot leave one by one."""
        return work

    def _take(self, result: StepResult, emission: Emission, rows: Rows, work: Work) -> None:
        """Set aside what is too late, and bring the rest into its windows."""
        while len(rows):
            self._tally = Tally()
            try:
                too_late = self._take_rows(emission, rows, work)
            except RowsRefusedError as refused:
                rows = self._without_refused(result, rows, refused)
                continue
            if too_late is not None:
                result.late.extend(too_late.rows)
                result.late_by_input.update(too_late.records)
            return

    def _expect(self, rows: Rows, inside: npt.NDArray[np.int64] | None, entries: int) -> None:
        """Note which rows are to be brought in (None: all), and how many entries they are."""
        if rows.inputs is None:
            self._tally.records = {0: len(rows) if inside is None else len(inside)}
        else:
            places = rows.inputs if inside is None else rows.inputs[inside]
            self._tally.records = dict(enumerate(np.bincount(places).tolist()))
        self._tally.entries = entries

    def _take_rows(self, emission: Emission, rows: Rows, work: Work) -> TooLate | None:
        """Bring rows into their windows, and tally them; those that are too late come back.

        Raises:
            RowsRefusedError: by code of the user, and nothing has changed.
        """
        raise NotImplementedError

    def _add_due(self, emission: Emission, watermark: Instant, panes_max: int) -> None:
        """Emit the panes of open windows that the watermark makes due, about so many."""
        due, failed = self._open.due(watermark, panes_max), len(emission.failed)
        emission.add_open(due)
        self._made += len(due) - (len(emission.failed) - failed)

    def _emit(self, result: StepResult, emission: Emission) -> None:
        table_id = self._binding.tables.get(self._stream)
        subscribed = self._stream in self._binding.subscribed
        produced = emission.retractions(self._output) if subscribed else []
        if table_id is not None:
            result.absorbed = emission.absorbed(table_id)
        count = len(emission)
        if count:
            columns, first = emission.take()
            if table_id is not None:
                result.results = result_rows(table_id, columns, count, first)
            if subscribed:
                produced.append(records_of(self._output, columns, count, len(self._input.key_fields)))
        if produced:
            result.productions[self._stream] = concat(produced)

    def _late_rows(self, rows: Rows, starts: Instants, ends: Instants, whole: Mask | None = None) -> list[LateRows]:
        """Rows for `mill.late_records` by input, each with the window that it has missed; `whole` as there."""
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
                )
            )
        return found

    def _storable(self, result: StepResult, rows: Rows) -> Rows:
        """Rows whose key, text and window can be stored; the others become dead letters."""
        records, times = rows.records, rows.records.event_times
        outside = np.zeros(len(rows), np.bool_)
        if int(times.min()) < self._earliest or int(times.max()) > self._latest:
            outside = (times < self._earliest) | (times > self._latest)
        mask = outside.copy()
        bad_keys = unstorable_keys(key_texts(rows.keys))
        if bad_keys:
            mask |= np.isin(rows.codes, list(bad_keys))
        for name in self._folds.texts:
            if len(records) <= SMALL_RECORDS_MAX:
                mask |= np.array(["\x00" in (getter(name)(o) or "") for o in records.objects()], np.bool_)
            else:
                found = pc.fill_null(pc.match_substring(column_of(records.batch(), name), "\x00"), False)
                mask |= found.to_numpy(zero_copy_only=False)
        if not mask.any():
            return rows
        out = np.flatnonzero(mask)
        nul = RefusedValueError("text with a NUL character cannot be stored")
        far = RefusedValueError("its window is not within the years 1 to 9999")
        errors: dict[int, BaseException | None] = {
            row: None if int(rows.codes[row]) in bad_keys else far if outside[row] else nul for row in out.tolist()
        }
        self._quarantine(result, rows, out, errors)
        return rows.take(np.flatnonzero(~mask))

    def _letter_of(self, due: DuePane, error: Exception) -> DeadLetter:
        """A pane of which a combiner makes no result: what is stored of it. It is no record, and is not replayed."""
        start, end, key, pane = due
        values = [msgspec.Raw(encode_value(value)) for value in self._folds.stored(pane.values)]
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

    def _without_refused(self, result: StepResult, rows: Rows, refused: RowsRefusedError) -> Rows:
        out = np.array(sorted(refused.errors), np.int64)
        self._quarantine(result, rows, out, refused.errors)
        return rows.take(np.setdiff1d(np.arange(len(rows)), out))

    def _quarantine(
        self, result: StepResult, rows: Rows, out: npt.NDArray[np.int64], errors: Mapping[int, BaseException | None]
    ) -> None:
        """Set rows aside, each for its error; None says that its key cannot be stored."""
        records = rows.records.take(out)
        for row, record, at in zip(out.tolist(), records.objects(), records.event_times.tolist(), strict=True):
            place = rows.input_of(row)
            stream, computation = self._binding.inputs[place].stream, self._binding.computation
            error, payload = errors[row], payload_of(record)
            if isinstance(error, NoRoomError):
                key = key_text(rows.keys[int(rows.codes[row])])
                letter = DeadLetter(
                    ROOM_REASON, str(error), payload, stream, computation, event_time=at, key=key, input=place
                )
            elif error is None:
                detail = key_problem(key_text(rows.keys[int(rows.codes[row])]))
                letter = DeadLetter("key", detail, payload, stream, computation, event_time=at, input=place)
            else:
                key = key_text(rows.keys[int(rows.codes[row])])
                letter = dead_letter_of(
                    error, payload, stream=stream, computation=computation, event_time=at, key=key, input=place
                )
            result.dead_letters.append(letter)
        counts = result.quarantined_by_input
        for place, mine in rows.by_input(out):
            counts[place] = counts.get(place, 0) + len(mine)
