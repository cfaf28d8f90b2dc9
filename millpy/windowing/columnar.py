"""Columnar windows: aggregates over fixed, sliding and session windows, as group-bys over whole bundles.

What arrives in a turn is one group-by on (window, key). A group whose window has no open pane and expires within the
turn is emitted as columns and never touches the state; every other group is merged into its open pane. A handful of
records takes a plain-Python path to the same effect, because a one-row column call costs 0.1 ms.

Lateness is judged row by row, at the row's own watermark capped by the other producers' (I9). Panes of a window are
coalesced: at most one a turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpy.model.stage import Binding, Recovered
from millpy.windowing.aligned import AlignedInterval
from millpy.windowing.interval import Windowing
from millpy.windowing.sessions import SessionInterval
from millpy.windowing.sliced import SlicedInterval
from millpy.windowing.window import SessionWindows, SlidingWindows


@dataclass(frozen=True, slots=True, eq=False)
class WindowedLogic(Windowing):
    """Aggregates by key and window, as a graph holds them."""

    def bind(self, binding: Binding) -> WindowedStage:
        """The stage, ready to open intervals."""
        return WindowedStage(self, binding)


@dataclass(frozen=True, slots=True)
class WindowedStage:
    """A windowed aggregation in a deployed graph."""

    logic: WindowedLogic
    binding: Binding

    def open(self, recovered: Recovered) -> AlignedInterval | SessionInterval | SlicedInterval:
        """Build the soft state of one interval from what is stored."""
        windows = self.logic.windows
        if isinstance(windows, SessionWindows):
            return SessionInterval(self.logic, windows, self.binding, recovered)
        if isinstance(windows, SlidingWindows) and self.logic.sliced:
            return SlicedInterval(self.logic, windows, self.binding, recovered)
        return AlignedInterval(self.logic, windows, self.binding, recovered)
