"""Windows by a Computation: the meaning of `columnar.py`, said record by record with cells and timers.

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
from millpy.windowing.aggregate import Aggregate, Fold
from millpy.windowing.emission import TIMINGS, output_type
from millpy.windowing.open_windows import sayable
from millpy.windowing.window import FixedWindows

# Due at the same time when no lateness is allowed: timers fire by name then, and a window fires before it is over.
FIRE, OVER = "fire", "over"


class KeyedPane(msgspec.Struct):
    """One key's window; as `OpenPane`, with accumulators as JSON can hold them."""

    values: list[Any]
    pane_index: int = 0
    late_count: int = 0


class WindowedComputation(Computation):
    """Aggregates by key and fixed window.

    Args:
        windows: where records are grouped.
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
        windows: FixedWindows,
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
        self._windows = windows
        self._allowed_us = microseconds(allowed_lateness)
        self._folds: list[Fold] = [aggregate.bind(record_type) for aggregate in aggregates.values()]
        self._to = to
        self._late_to = late_to

    def process_record(self, context: Context, record: Any) -> None:
        """Add the record to its window; a late one amends the result at once."""
        start = self._windows.start_of(context.event_time_us)
        end = start + self._windows.size_us
        reached = context.input_watermark_us
        if reached >= end + self._allowed_us:
            if self._late_to is not None:
                context.produce(record, to=self._late_to)
            return
        panes = context[WindowedComputation.panes]
        pane = panes.get(start)
        if pane is None:
            pane = panes[start] = KeyedPane([sayable(fold.empty()) for fold in self._folds])
            context.set_timer(f"{start} {OVER}", at=end + self._allowed_us, hold=False)
            if reached < end:
                context.set_timer(f"{start} {FIRE}", at=end, event_time=end - 1)
        for place, fold in enumerate(self._folds):
            value = fold.value_of(record)
            if value is not None:
                pane.values[place] = sayable(fold.add(fold.restored(pane.values[place]), value))
        if reached >= end:
            pane.late_count += 1
            self._emit(context, start, pane)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Emit a window's on-time pane, or forget the window."""
        start, _, what = timer.name.partition(" ")
        panes = context[WindowedComputation.panes]
        if what == FIRE:
            self._emit(context, int(start), panes[int(start)])
        else:
            del panes[int(start)]

    def _emit(self, context: Context, start: int, pane: KeyedPane) -> None:
        end = start + self._windows.size_us
        keys = context.key if isinstance(context.key, tuple) else (context.key,)
        results = [fold.result_of(fold.restored(value)) for fold, value in zip(self._folds, pane.values, strict=True)]
        timing = TIMINGS[pane.late_count > 0]
        window = (to_datetime(start), to_datetime(end))  # type: ignore[arg-type]
        panes = (pane.pane_index, timing, pane.late_count)
        context.produce(self.output(*keys, *window, *results, *panes), to=self._to, at=end - 1)
        pane.pane_index += 1
