"""Aggregates over windows, as group-bys over whole bundles.

The records of a turn are grouped by (window, key). A group whose window has no open pane and expires within the turn is
emitted as columns and never touches the state. Every other group is merged into its open pane. A handful of records
takes a plain-Python path with the same effect, because a column call for one row costs 0.1 ms.

Lateness is judged row by row, by the row's own watermark capped by the other producers' (I9). A window emits at most
one pane per turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millpy.model.stage import UNBOUNDED, StageBinding, StageInterval, StoredInterval
from millpy.model.stored_windows import ClosedKind
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.fixed import AlignedInterval
from millpy.windowing.interval_by_site import IntervalBySite
from millpy.windowing.operator import WindowedInterval
from millpy.windowing.session import SessionInterval
from millpy.windowing.sliding import SlicedInterval
from millpy.windowing.user_windows import UserInterval
from millpy.windowing.window import SessionWindows, SlidingWindows, assigner_of
from millpy.windowing.window_function import WindowFunction
from millpy.windowing.window_memory import PANE_BYTES, SESSION_BYTES
from millpy.windowing.window_spec import WindowSpec


@dataclass(frozen=True, slots=True, eq=False)
class WindowedLogic(WindowSpec):
    """The logic of a windowed step in a graph: aggregates by key and window."""

    def bind(self, binding: StageBinding) -> WindowedStage:
        """Return the stage of this step in a deployed graph."""
        return WindowedStage(self, binding)


@dataclass(frozen=True, slots=True)
class WindowedStage:
    """A windowed aggregation in a deployed graph."""

    logic: WindowedLogic
    binding: StageBinding

    @property
    def closed_rows_max(self) -> int:
        """The most stored windows of an interval of which a new owner reads all."""
        spills = self.logic.spills or self.logic.sessions_spill
        if not spills or self.binding.inputs[0].site or self.binding.is_taken:
            return UNBOUNDED
        limits, bytes_max = self.binding.limits, self.binding.limits.closed_windows_bytes_max
        if self.logic.unfired_spill(self._accumulators()):
            bytes_max = min(bytes_max, limits.unfired_bytes_max)
        each = PANE_BYTES
        if self.logic.sessions_spill:
            each += SESSION_BYTES + self._accumulators().memory_bytes
        return bytes_max // self.binding.windowed_intervals // each

    @property
    def closed_kind(self) -> ClosedKind:
        """The kind of its windows for a new owner that leaves some of them in the store."""
        unfired = self.logic.unfired_spill(self._accumulators())
        if self.logic.sessions_spill:
            return ClosedKind.UNFIRED_SESSIONS if unfired else ClosedKind.SESSIONS
        if unfired:
            return ClosedKind.UNFIRED_PANES if self.logic.by_pane else ClosedKind.UNFIRED
        return ClosedKind.PANES if self.logic.by_pane else ClosedKind.WINDOWS

    def _accumulators(self) -> AccumulatorSet:
        return self.logic.accumulators(self.binding.inputs[0].record_type)

    def open(self, recovered: StoredInterval) -> StageInterval:
        """Build the soft state of one interval from its stored state."""
        if self.binding.inputs[0].site:
            return IntervalBySite(self._open, self.binding, recovered)
        return self._open(self.binding, recovered)

    def _open(self, binding: StageBinding, recovered: StoredInterval) -> WindowedInterval[Any]:
        windows = self.logic.windows
        if isinstance(windows, SessionWindows):
            return SessionInterval(self.logic, windows, binding, recovered)
        if isinstance(windows, WindowFunction):
            return UserInterval(self.logic, windows, binding, recovered)
        if isinstance(windows, SlidingWindows) and self.logic.sliced:
            return SlicedInterval(self.logic, windows, binding, recovered)
        return AlignedInterval(self.logic, assigner_of(windows), binding, recovered)
