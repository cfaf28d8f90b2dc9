"""Windows by a Computation: the meaning of `logic.py`, said record by record with cells and timers.

The slow and obvious execution: any Python combiner and, later, any trigger fit here. A property test holds the two
equal. They differ where meaning allows it: here each late record makes a pane of its own, there one a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from millpy.computation import Computation, Context, MapCell
from millpy.model.record import RecordType
from millpy.model.time import microseconds, to_datetime
from millpy.model.timer import Timer
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.calendar_windows import CalendarBounds, CalendarWindows
from millpy.windowing.panes import output_type
from millpy.windowing.session_gaps import Gaps
from millpy.windowing.window import AlignedWindows, SessionWindows

# Due at the same time when no lateness is allowed: timers fire by name then, and a window fires before it is over.
FIRE, OVER = "fire", "over"
ABSORBED = "absorbed"
"""The timing of a pane that is produced once more, because its session was merged into another."""


class KeyedPane(msgspec.Struct):
    """One key's window; as `OpenPane`, with accumulators as JSON can hold them."""

    end: int
    values: list[Any]
    pane_index: int = 0
    late_count: int = 0
    emitted: bool = False


class KeyedWindows(Computation):
    """What both have.

    Args:
        allowed_lateness: how long past a window's end late records still amend it.
        aggregates: result column -> what it holds.
        record: class of the records.
        key_fields: their key.
        to: output stream of the panes, if there are several.
        late_to: output stream of records too late for their window; without it they are dropped.
    """

    panes = MapCell(int, KeyedPane)

    def __init__(
        self,
        allowed_lateness: timedelta,
        aggregates: Mapping[str, Aggregate],
        record: type[msgspec.Struct],
        key_fields: Sequence[str],
        *,
        to: str | None = None,
        late_to: str | None = None,
    ) -> None:
        record_type = RecordType(record)
        self.output = output_type(record_type, key_fields, dict(aggregates)).struct
        self._allowed_us = microseconds(allowed_lateness)
        self._accumulators = AccumulatorSet(aggregates, record_type)
        self._to = to
        self._late_to = late_to

    def _too_late(self, context: Context, record: Any) -> None:
        if self._late_to is not None:
            context.produce(record, to=self._late_to)

    def _empty(self, end: int) -> KeyedPane:
        return KeyedPane(end, self._accumulators.to_stored(self._accumulators.empty()))

    def _watch(self, context: Context, start: int, end: int) -> None:
        """Set the timers of a window."""
        context.set_timer(f"{start} {OVER}", at=end + self._allowed_us, hold=False)
        if context.input_watermark_us < end:
            context.set_timer(f"{start} {FIRE}", at=end, event_time=end - 1)

    def _add(self, context: Context, start: int, pane: KeyedPane, record: Any) -> None:
        """Add the record to a window; a late one amends the result at once."""
        values = self._accumulators.from_stored(pane.values)
        self._accumulators.add(values, record, context.event_time_us)
        pane.values = self._accumulators.to_stored(values)
        if context.input_watermark_us >= pane.end:
            pane.late_count += 1
            self._emit(context, start, pane)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Emit a window's on-time pane, or forget the window."""
        start, _, what = timer.name.partition(" ")
        panes = context[KeyedWindows.panes]
        if what == FIRE:
            self._emit(context, int(start), panes[int(start)])
        else:
            del panes[int(start)]

    def _emit(self, context: Context, start: int, pane: KeyedPane, timing: str = "") -> None:
        keys = context.key if isinstance(context.key, tuple) else (context.key,)
        results = self._accumulators.results(self._accumulators.from_stored(pane.values))
        window = (to_datetime(start), to_datetime(pane.end))  # type: ignore[arg-type]
        panes = (pane.pane_index, timing or ("late" if pane.late_count else "on_time"), pane.late_count)
        context.produce(self.output(*keys, *window, *results, *panes), to=self._to, at=pane.end - 1)
        pane.pane_index += 1
        pane.emitted = True


class WindowedComputation(KeyedWindows):
    """Aggregates by key and fixed, sliding or calendar window.

    Args:
        windows: where records are grouped; for the others see its base.
    """

    def __init__(self, windows: AlignedWindows | CalendarWindows, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._windows = windows

    def _spans(self, at: int) -> list[tuple[int, int]]:
        """Return the windows of an event time, the newest first."""
        windows = self._windows
        if isinstance(windows, CalendarWindows):
            start, end = CalendarBounds(windows).between(at, at + 1)[:2]
            return [(start, end)]
        size, every = windows.size_us, windows.every_us
        return [(s, s + size) for s in range(at - (at - windows.offset_us) % every, at - size, -every)]

    def process_record(self, context: Context, record: Any) -> None:
        """Add the record to its windows; where it is late it amends the result at once."""
        panes = context[KeyedWindows.panes]
        for start, end in self._spans(context.event_time_us):
            if context.input_watermark_us >= end + self._allowed_us:
                self._too_late(context, record)
                continue
            pane = panes.get(start)
            if pane is None:
                pane = panes[start] = self._empty(end)
                self._watch(context, start, end)
            self._add(context, start, pane, record)


class SessionComputation(KeyedWindows):
    """Aggregates by key and session.

    Args:
        windows: the gap, or gaps; for the others see its base.
    """

    def __init__(self, windows: SessionWindows, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._gaps = Gaps(windows)
        self._field = windows.by_field

    def process_record(self, context: Context, record: Any) -> None:
        """Open a session of one record, merge it with those it intersects, then judge whether that is too late."""
        panes = context[KeyedWindows.panes]
        at: int = context.event_time_us
        gap = getattr(record, self._field) if self._field else None
        start, end = at, at + (self._gaps.gap_of(context.key) if gap is None else round(gap * 1_000_000))
        met = sorted((other, pane) for other, pane in panes.items() if other < end and at < pane.end)
        if not met and context.input_watermark_us >= end + self._allowed_us:
            self._too_late(context, record)
            return
        start = min([start, *(other for other, _ in met)])
        end = max([end, *(pane.end for _, pane in met)])
        if [(other, pane.end) for other, pane in met] == [(start, end)]:
            self._add(context, start, met[0][1], record)
            return
        grown = self._empty(end)
        for other, pane in met:
            values = self._accumulators.merge(
                self._accumulators.from_stored(grown.values), self._accumulators.from_stored(pane.values)
            )
            grown.values = self._accumulators.to_stored(values)
            grown.late_count += pane.late_count
            if pane.emitted:
                self._emit(context, other, pane, ABSORBED)
            self._forget(context, other)
        panes[start] = grown
        self._watch(context, start, end)
        self._add(context, start, grown, record)

    def _forget(self, context: Context, start: int) -> None:
        del context[KeyedWindows.panes][start]
        for what in (FIRE, OVER):
            context.delete_timer(f"{start} {what}")
