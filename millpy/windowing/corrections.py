"""Add late records to finished windows, at an operator's request.

A finished window has no state: its row in the result table is all that is left. The owner of its key rebuilds the
accumulators from that row (`rebuilding.py`), or has them from an archive (`recomputation.py`), adds the records, and
emits one more pane: the row is replaced, a history gets the pane, and consumers get what any late pane brings them, in
the commit that settles the requests (I2).

The commit compares the row with the one that was read, so that a row which somebody else changed meanwhile is read
again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from millpy.model.checkpoint import DeletedRows, PastWindow, ResultRows
from millpy.model.dead_letter import error_text
from millpy.model.deployment import PANE_INFO
from millpy.model.keys import Key, key_from_text
from millpy.model.record import Records, concat
from millpy.model.stage import StageBinding, StepResult, WindowCorrection
from millpy.model.step_progress import is_user_error
from millpy.model.time import Instant, instant
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.panes import Column, records_in_order, result_rows
from millpy.windowing.rebuilding import NotRebuiltError, Rebuilder, read_row
from millpy.windowing.recomputation import restored
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.window import SessionWindows
from millpy.windowing.window_function import WindowFunction
from millpy.windowing.window_spec import WindowSpec

_LATE = "late"


class Corrections:
    """The rows that finished windows get from late records.

    Args:
        spec: the definition of the windows.
        binding: what the stage knows of the graph.
        accumulators: the operations of the aggregates.
        over_by: the windows that end by it are over; None if windows that are over have yet to leave.
        corrections: the records.
        intersects_open: tells whether a session of a key, from start to end, would be one with an open session.
    """

    def __init__(
        self,
        spec: WindowSpec,
        binding: StageBinding,
        accumulators: AccumulatorSet,
        over_by: Instant | None,
        corrections: Sequence[WindowCorrection],
        intersects_open: Callable[[Key, int, int], bool],
    ) -> None:
        self._spec = spec
        self._binding = binding
        self._accumulators = accumulators
        self._input = binding.inputs[0]
        ((self._stream, self._output),) = binding.outputs.items()
        self._subscribed = self._stream in binding.subscribed
        self._rebuilder = Rebuilder(accumulators, spec.columns(), self._input.record_type)
        self._width = len(self._input.key_fields)
        self._panes: list[list[Any]] = []
        self._first: list[list[Any]] = []
        self._gone: list[list[Any]] = []
        self._taken_back: list[list[Any]] = []
        self._given: list[list[Any]] = []
        self._corrected: dict[int, str | None] = {}
        self._windows: dict[int, PastWindow] = {}
        self._intersects_open = intersects_open
        by_window: dict[tuple[bytes, int, int], list[WindowCorrection]] = {}
        for correction in corrections:
            if isinstance(self._spec.windows, SessionWindows):
                found = self._of_session(correction, by_window)
                if not isinstance(found, WindowCorrection):
                    self._corrected[correction.request_id] = found
                    continue
                correction = found
            window = correction.window
            by_window.setdefault((window.key, window.start, window.end), []).append(correction)
        for of_window in by_window.values():
            answer = self._correct(of_window, over_by)
            for correction in of_window:
                self._corrected.setdefault(correction.request_id, answer)

    def add_to(self, result: StepResult) -> None:
        """Add the panes to the result of a step, before those of other windows."""
        result.corrected, result.corrected_windows = self._corrected, self._windows
        made = len(self._panes) + len(self._first)
        table_id = self._binding.tables.get(self._stream)
        if table_id is None or not (made or self._gone):
            return
        counts = result.emitted_by_table
        counts[table_id] = counts.get(table_id, 0) + made
        result.emitted_by_stream[self._stream] += made + len(self._taken_back)
        rows: list[ResultRows] = []
        for panes, is_first in ((self._first, True), (self._panes, False)):
            if panes:
                rows += result_rows(table_id, _columns(panes), len(panes), len(panes) if is_first else 0)
        result.results = [*rows, *result.results]
        if self._gone:
            names = _columns([pane[: self._width + 2] for pane in self._gone])
            result.deleted = [DeletedRows(table_id, names, len(self._gone)), *result.deleted]
        if self._subscribed:
            self._produce(result)

    def _produce(self, result: StepResult) -> None:
        """Give consumers the retractions of the panes before, then the new panes."""
        produced: list[Records] = []
        for panes, retracts in ((self._taken_back, True), (self._given, False)):
            if panes:
                columns, count = _columns(panes), len(panes)
                produced.append(records_in_order(self._output, columns, count, self._width, retracts=retracts))
        if (others := result.productions.get(self._stream)) is not None:
            produced.append(others)
        if produced:
            result.productions[self._stream] = concat(produced)

    def _of_session(
        self, correction: WindowCorrection, taken: Iterable[tuple[bytes, int, int]]
    ) -> WindowCorrection | str | None:
        """Return a correction for the session that contains the record, or that it is alone; else as `_correct`.

        Args:
            correction: the correction, for the session that the record would have opened.
            taken: the sessions that this turn corrects already.
        """
        window = correction.window
        if self._spec.windows.max_records is not None:  # type: ignore[union-attr]
            return "sessions that are full with max_records depend on the order of their records: use millpy.correct()"
        if window.row is not None:
            return correction
        if window.overlapping:
            row, newest = window.overlapping[0]
            start, end = _bounds(row)
            if len(window.overlapping) > 1 or not start <= window.start <= window.end <= end:
                return (
                    "it would make a session longer, or one of two: only a record within the span of a session can be"
                    " added to it. Put the row right with millpy.correct()"
                )
            window = replace(window, start=start, end=end, row=row, newest_pane=newest, overlapping=())
            self._windows[correction.request_id] = window
            return replace(correction, window=window)
        key = key_from_text(window.key, self._input.key_types)
        if self._intersects_open(key, window.start, window.end):
            return "it would be one with a session that is still open: it can be decided once that is over"
        name = (window.key, window.start, window.end)
        if any(
            other != name and other[0] == window.key and other[1] < window.end and window.start < other[2]
            for other in taken
        ):
            return None
        return correction

    def _correct(self, corrections: Sequence[WindowCorrection], over_by: Instant | None) -> str | None:
        """Compute the new pane of a window. Return "", why there is none, or None if a later turn has to decide.

        A record with which user code fails gets an answer of its own, and is not in the pane.
        """
        window = corrections[0].window
        if (why := self._refusal()) is not None:
            return why
        if over_by is None:
            return None
        if window.end > over_by:
            return "its window is still open, although its trigger has finished: it can be corrected once it is over"
        if window.row is None and self._may_be_dropped(window):
            return "its row was dropped, because it was older than the retention of the result table"
        key = key_from_text(window.key, self._input.key_types)
        row = None if window.row is None else self._read(window.row)
        try:
            values = self._accumulators.empty() if row is None else self._accumulators_of(row, corrections)
        except NotRebuiltError as error:
            return f"{error} ({error.hint})" if error.hint else str(error)
        own = self._accumulators.empty()[: len(values)]
        added = 0
        for correction in corrections:
            try:
                values, own = self._add(correction, values, own)
            except BaseException as error:
                if not (self._accumulators.calls_user and is_user_error(error)):
                    raise
                self._corrected[correction.request_id] = f"your code fails with it: {error_text(error)}"
            else:
                added += 1
        if self._accumulators.retracts and values[0] < 0:
            return "its window has no record that the retraction could take back"
        if added:
            self._emit(key, window, row, values, own, added)
        return ""

    def _may_be_dropped(self, window: PastWindow) -> bool:
        """Tell whether the row of this window, or of a session that ends in it, may have been dropped."""
        ends_after = window.start if isinstance(self._spec.windows, SessionWindows) else window.end
        return ends_after < window.dropped_to

    def _add(self, correction: WindowCorrection, values: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return accumulators with one record more, or less; what user code gets are copies, because it may fail."""
        found = []
        for target in (values, own):
            changed = self._accumulators.copied(target) if self._accumulators.calls_user else target
            change = self._accumulators.subtract if correction.retracts else self._accumulators.add
            change(changed, correction.record, correction.event_time)
            self._accumulators.check(changed)
            found.append(changed)
        return found[0], found[1]

    def _accumulators_of(self, row: Mapping[str, Any], corrections: Sequence[WindowCorrection]) -> list[Any]:
        """Return the accumulators of a window with this row: from the row, else as an archive has given them.

        Raises:
            NotRebuiltError: neither tells.
        """
        try:
            return self._rebuilder.accumulators_of(row)
        except NotRebuiltError:
            given = next((c.window for c in corrections if c.window.recomputed_fits), None)
            if given is None and all(c.window.recomputed is None for c in corrections):
                raise
        if given is None or given.recomputed is None:
            raise NotRebuiltError("its row has changed since an archive was read", hint="ask again")
        return restored(self._accumulators, self._spec.columns(), row, given.recomputed)

    def _refusal(self) -> str | None:
        """Return why no window of this stage can be corrected."""
        windows = self._spec.windows
        if isinstance(windows, WindowFunction) and windows.merges:
            return "windows of a function that merge cannot be corrected by a record: use millpy.correct()"
        if self._binding.tables.get(self._stream) is None:
            return "the windows have no result table, and so nothing stores them once they are over"
        if not self._subscribed:
            return None
        if self._spec.accumulation is not Accumulation.DISCARDING and not self._spec.panes_repeat:
            return (
                "another computation reads these windows, and counts on one pane of each: allowed_lateness is 0."
                " Correct its results, too, by millpy.correct(), or give the windows an allowed_lateness"
            )
        if (
            self._spec.accumulation is Accumulation.RETRACTING
            and self._spec.timestamps is not TimestampCombiner.END_OF_WINDOW
        ):
            return "another computation reads these windows, and the event times of their panes are not stored"
        return None

    def _emit(
        self, key: Key, window: PastWindow, row: Mapping[str, Any] | None, values: list[Any], own: list[Any], added: int
    ) -> None:
        """Emit the next pane of a window that has this row; `own` are the accumulators of the `added` records alone."""
        keys = [key] if self._width == 1 else list(key)  # type: ignore[arg-type]
        names = [*keys, window.start, window.end]
        is_empty = self._accumulators.is_empty(values)
        gives_part = self._subscribed and self._spec.accumulation is Accumulation.DISCARDING
        # User code may raise here, so nothing is emitted before.
        results = [] if is_empty else self._accumulators.results(values)
        part = self._accumulators.results(own) if gives_part else []
        old = None if row is None else [*names, *(row[name] for name in self._result_names())]
        retracting = self._subscribed and self._spec.accumulation is Accumulation.RETRACTING
        if retracting and old is not None:
            self._taken_back.append(old)
        if is_empty:
            if old is not None:
                self._gone.append(names)
            return
        index = 0 if row is None else max(int(row["pane_index"]), window.newest_pane) + 1
        late = added if row is None else int(row["late_count"]) + added
        info: list[Any] = []
        if self._spec.info_columns():
            info = [0 if row is None else int(row[PANE_INFO[0]]) + 1, True]
        pane = [*names, *results, *info, index, _LATE, late]
        (self._first if row is None else self._panes).append(pane)
        if gives_part:
            pane = [*names, *part, *info, index, _LATE, added]
        self._given.append(pane)

    def _result_names(self) -> tuple[str, ...]:
        return (*self._spec.columns(), *self._spec.info_columns(), "pane_index", "pane_timing", "late_count")

    def _read(self, row: bytes) -> dict[str, Any]:
        """Read a stored row, with results as a record has them."""
        return read_row(row, {name: self._output.annotations_along(name)[-1] for name in self._result_names()})


def _bounds(row: bytes) -> tuple[int, int]:
    """Return start and end of the window of a row, in µs."""
    found = json.loads(row)
    start, end = (found[name] for name in ("window_start", "window_end"))
    if isinstance(start, str):
        start, end = (instant(msgspec.convert(text, datetime)) for text in (start, end))
    return start, end


def _columns(panes: Sequence[Sequence[Any]]) -> list[Column]:
    return [list(column) for column in zip(*panes, strict=True)]
