"""Columnar windows: built-in aggregates over fixed windows, as group-bys over whole bundles.

What arrives in a turn is one group-by on (window, key). A group whose window has no open pane and expires within the
turn is emitted as columns and never touches the state; every other group is merged into its open pane. A handful of
records takes a plain-Python path to the same effect, because a one-row column call costs 0.1 ms.

Lateness is judged row by row, at the row's own watermark capped by the other producers' (I9). Panes of a window are
coalesced: at most one a turn.

Seams for what comes later: other windows assign several starts a row before the group-by; other triggers replace
`OpenWindows.due`; a session merges panes before lateness is judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from millpy.errors import RefusedValueError
from millpy.model.arrivals import joined_keys, judging_watermarks
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import DeadLetter, Entries, Kind, LateRows
from millpy.model.keys import Key, key_text, key_texts
from millpy.model.quarantine import dead_letter_of, payload_of, unstorable_keys
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Records, RecordType, column_of, concat, getter
from millpy.model.stage import Binding, Recovered, StepResult, Work
from millpy.model.time import INSTANT_MAX, Instant, microseconds
from millpy.windowing.aggregate import Aggregate, ExtremeFold, Fold
from millpy.windowing.emission import Emission, output_type, records_of, result_rows
from millpy.windowing.grouping import Groups, Integers
from millpy.windowing.open_windows import OpenPane, OpenWindows
from millpy.windowing.window import FixedWindows

Mask = npt.NDArray[np.bool_]


class WindowedLogic:
    """Aggregates by key and window, as a graph holds them.

    Args:
        windows: where records are grouped.
        allowed_lateness: how long past a window's end late records still amend it.
        aggregates: result column -> what it holds.
        few_records_max: up to so many records a turn take the plain-Python path; the effect is the same.
    """

    def __init__(
        self,
        windows: FixedWindows,
        allowed_lateness: timedelta,
        aggregates: Mapping[str, Aggregate],
        few_records_max: int = SMALL_RECORDS_MAX,
    ) -> None:
        self.windows = windows
        self.allowed_lateness = allowed_lateness
        self.aggregates = dict(aggregates)
        self.few_records_max = few_records_max

    def columns(self) -> tuple[str, ...]:
        """Names of the aggregate columns."""
        return tuple(self.aggregates)

    def output_type(self, record_type: RecordType, key_fields: Sequence[str]) -> RecordType:
        """The record type of the stream of panes.

        Raises:
            SchemaError: an aggregate does not fit its field.
        """
        return output_type(record_type, key_fields, self.aggregates)

    def bind(self, binding: Binding) -> WindowedStage:
        """The stage, ready to open intervals."""
        return WindowedStage(self, binding)

    def meaning(self) -> str:
        """Windows and aggregates; allowed lateness may change under stored state only with a new generation."""
        aggregates = ", ".join(f"{name}={aggregate!r}" for name, aggregate in self.aggregates.items())
        return f"{self.windows!r} allowed_lateness={self.allowed_lateness!r} {aggregates}"


class WindowedStage:
    """A windowed aggregation in a deployed graph."""

    def __init__(self, logic: WindowedLogic, binding: Binding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: Recovered) -> WindowedInterval:
        """Build the soft state of one interval from what is stored."""
        return WindowedInterval(self.logic, self.binding, recovered)


class WindowedInterval:
    """Soft state of one key interval: its open windows, all in memory."""

    immediate = True

    def __init__(self, logic: WindowedLogic, binding: Binding, recovered: Recovered) -> None:
        assert len(binding.inputs) == 1, binding.inputs
        self._binding = binding
        self._input = binding.inputs[0]
        self._windows = logic.windows
        self._size_us = logic.windows.size_us
        self._few_records_max = logic.few_records_max
        self._allowed_us = microseconds(logic.allowed_lateness)
        self._folds: list[Fold] = [a.bind(self._input.record_type) for a in logic.aggregates.values()]
        self._texts = sorted({f.field for f in self._folds if isinstance(f, ExtremeFold) and f.kind is str and f.field})
        ((self._stream, self._output),) = binding.outputs.items()
        self._open = OpenWindows(self._folds, self._size_us, self._allowed_us)
        for entries in recovered.entries:
            if entries.kind is Kind.WINDOW:
                self._open.recover(entries, self._input.key_types)

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
        emission = Emission(self._folds, len(self._input.key_fields), self._size_us)
        arrived = [arrival for arrival in work.arrived if len(arrival.bundle)]
        if arrived:
            records = concat([arrival.bundle.records for arrival in arrived])
            codes, keys, _ = joined_keys(arrived)
            watermarks = np.concatenate([judging_watermarks(arrival, work) for arrival in arrived])
            taken = self._set_aside(result, records, codes, keys, watermarks)
            if taken is not None:
                records, codes, watermarks = records.take(taken), codes[taken], watermarks[taken]
            if len(records) <= self._few_records_max:
                self._take_few(records, codes.tolist(), keys, watermarks.tolist())
            else:
                self._take_many(emission, records, codes, keys, watermarks, work.watermark)
        emission.add_open(self._open.due(work.watermark))
        self._emit(result, emission)
        entries = self._open.take_entries(work.watermark, work.bundle)
        if entries is not None:
            result.delta = (entries,)
        return result

    def _set_aside(
        self, result: StepResult, records: Records, codes: Integers, keys: list[Key], watermarks: Instants
    ) -> npt.NDArray[np.int64] | None:
        """Rows that go on, None for all: without those that are too late or cannot be stored."""
        starts = self._windows.starts_of(records.event_times)
        too_late: Mask = watermarks >= starts + (self._size_us + self._allowed_us)
        refused = self._refused(result, records, codes, keys)
        if not too_late.any() and refused is None:
            return None
        if refused is not None:
            too_late &= ~refused
        rows = np.flatnonzero(too_late)
        if len(rows):
            result.late.append(self._late_rows(records.take(rows), codes[rows], keys, watermarks[rows], starts[rows]))
            result.late_by_input[0] = len(rows)
        return np.flatnonzero(~too_late if refused is None else ~(too_late | refused))

    def _late_rows(
        self, records: Records, codes: Integers, keys: list[Key], watermarks: Instants, starts: Instants
    ) -> LateRows:
        return LateRows(
            stream=self._input.stream,
            computation=self._binding.computation,
            keys=[key_text(keys[code]) for code in codes.tolist()],
            payloads=[payload_of(record) for record in records.objects()],
            event_times=records.event_times.tolist(),
            watermarks=watermarks.tolist(),
            window_starts=starts.tolist(),
            window_ends=(starts + self._size_us).tolist(),
        )

    def _refused(self, result: StepResult, records: Records, codes: Integers, keys: list[Key]) -> Mask | None:
        """Rows whose key or text could not be stored, set aside as dead letters; None for none."""
        mask: Mask = np.zeros(len(records), np.bool_)
        bad_keys = unstorable_keys(key_texts(keys))
        if bad_keys:
            mask |= np.isin(codes, bad_keys)
        for field in self._texts:
            if len(records) <= SMALL_RECORDS_MAX:
                mask |= np.array(["\x00" in (getter(field)(o) or "") for o in records.objects()], np.bool_)
            else:
                found = pc.fill_null(pc.match_substring(column_of(records.batch(), field), "\x00"), False)
                mask |= found.to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(mask)
        if not len(rows):
            return None
        taken = records.take(rows)
        for record, code, at in zip(taken.objects(), codes[rows].tolist(), taken.event_times.tolist(), strict=True):
            result.dead_letters.append(self._dead_letter(record, keys[code], code in bad_keys, at))
        result.quarantined_by_input[0] = len(rows)
        return mask

    def _dead_letter(self, record: object, key: Key, bad_key: bool, event_time: int) -> DeadLetter:
        stream, computation = self._input.stream, self._binding.computation
        if bad_key:
            detail = "the key has a character that cannot be stored"
            return DeadLetter("key", detail, payload_of(record), stream, computation, event_time=event_time)
        return dead_letter_of(
            RefusedValueError("text with a NUL character cannot be stored"),
            payload_of(record),
            stream=stream,
            computation=computation,
            event_time=event_time,
            key=key_text(key),
        )

    def _take_few(self, records: Records, codes: list[int], keys: list[Key], watermarks: list[int]) -> None:
        """One record after the other, in plain Python."""
        open_windows, folds, size_us = self._open, self._folds, self._size_us
        rows = zip(records.objects(), records.event_times.tolist(), codes, watermarks, strict=True)
        for record, event_time, code, watermark in rows:
            start = event_time // size_us * size_us
            key = keys[code]
            panes = open_windows.of(start)
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane([fold.empty() for fold in folds])
            values = pane.values
            for place, fold in enumerate(folds):
                value = fold.value_of(record)
                if value is not None:
                    values[place] = fold.add(values[place], value)
            if watermark >= start + size_us:
                pane.late_count += 1
            open_windows.touch(start, key, pane)

    def _take_many(
        self,
        emission: Emission,
        records: Records,
        codes: Integers,
        keys: list[Key],
        watermarks: Instants,
        watermark: Instant,
    ) -> None:
        """One group-by; then groups that open and close here are emitted, the others merged."""
        starts = self._windows.starts_of(records.event_times)
        groups = Groups(starts, self._size_us, codes, len(keys), records.batch)
        is_late: Mask = watermarks >= starts + self._size_us
        late = groups.counts_where(is_late) if is_late.any() else np.zeros(len(groups), np.int64)
        partials = [fold.partial(groups) for fold in self._folds]
        expiring = groups.starts + (self._size_us + self._allowed_us) <= watermark
        kept = self._kept(groups, expiring, keys)
        emission.add_direct(groups, partials, late, np.flatnonzero(~kept), keys)
        picks = np.flatnonzero(kept)
        if not len(picks):
            return
        accumulators = [partial.accumulators(picks) for partial in partials]
        folds, open_windows = self._folds, self._open
        last = -1
        panes: dict[Key, OpenPane] = {}
        rows = zip(
            groups.starts[picks].tolist(),
            groups.codes[picks].tolist(),
            late[picks].tolist(),
            zip(*accumulators, strict=True),
            strict=True,
        )
        for start, code, late_count, values in rows:
            if start != last or not panes:
                last, panes = start, open_windows.of(start)
            key = keys[code]
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(list(values))
            else:
                pane.values = [f.merge(a, b) for f, a, b in zip(folds, pane.values, values, strict=True)]
            pane.late_count += late_count
            open_windows.touch(start, key, pane)

    def _kept(self, groups: Groups, expiring: Mask, keys: list[Key]) -> Mask:
        """Groups that go through the state: their window stays open, or has a pane there already."""
        kept = ~expiring
        places = np.flatnonzero(expiring)
        if not len(places) or not self._open.panes:
            return kept
        known = [start for start in np.unique(groups.starts[places]).tolist() if start in self._open.panes]
        for place in places[np.isin(groups.starts[places], known)].tolist():
            panes = self._open.panes[int(groups.starts[place])]
            kept[place] = keys[int(groups.codes[place])] in panes
        return kept

    def _emit(self, result: StepResult, emission: Emission) -> None:
        count = len(emission)
        if not count:
            return
        columns, first = emission.take()
        table_id = self._binding.tables.get(self._stream)
        if table_id is not None:
            result.results = result_rows(table_id, columns, count, first)
        if self._stream in self._binding.subscribed:
            keys = len(self._input.key_fields)
            result.productions[self._stream] = records_of(self._output, columns, count, keys)
