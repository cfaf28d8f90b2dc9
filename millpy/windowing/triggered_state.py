"""Open aligned windows whose trigger decides pane by pane: the counterpart of `fixed_state.py` for early firings.

A window holds the low watermark at end - 1 µs until the watermark has reached its end and the trigger has been asked
about each of its panes; after that, until its on-time records are emitted. The state of the trigger is stored with the
pane; alarms are not, because they follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millpy.model.keys import Key
from millpy.model.stage import UNBOUNDED
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.firing import Alarms, PaneTriggers, firing_of
from millpy.windowing.fixed_state import OpenWindows, PanesByKey, WindowStarts
from millpy.windowing.pane_codec import DuePane, FiringState, OpenPane
from millpy.windowing.window import WindowAssigner
from millpy.windowing.window_memory import FIRING_BYTES


class TriggeredWindows(OpenWindows):
    """The open windows of one key interval.

    Attributes:
        closed: window start -> the keys whose trigger is finished.
        alarms: when panes are due without a record.
    """

    def __init__(
        self, accumulators: AccumulatorSet, assigner: WindowAssigner, allowed_lateness_us: int, triggers: PaneTriggers
    ) -> None:
        super().__init__(accumulators, assigner, allowed_lateness_us)
        self._triggers = triggers
        self.weights.each += FIRING_BYTES
        self.closed: dict[int, set[Key]] = {}
        self.alarms: Alarms[tuple[int, Key]] = Alarms()
        self._unclosed, self._unexpected = WindowStarts(), _OpenStarts(self.panes)
        self._by_percentile = triggers.by_percentile
        self._holding: dict[int, dict[Key, None]] = {}
        self._waiting_in: tuple[dict[int, list[Key]], ...] = ({}, {}, {})

    def finish_recovery(self) -> None:
        """Build the queues and alarms, after all stored panes have been loaded."""
        self.weights.panes = sum(map(len, self.panes.values()))
        for start, panes in self.panes.items():
            self._queue(start, emitted=all(firing_of(pane).passed for pane in panes.values()))
            for key, pane in panes.items():
                self._follow(start, key, pane)
        self._recover_holds()

    def _queue(self, start: int, *, emitted: bool) -> None:
        super()._queue(start, emitted=emitted)
        self._unclosed.add(self._assigner.end_of(start) + self._allowed_us, None, start)
        panes = self.panes[start].values()
        if self._by_percentile and not (panes and all(firing_of(pane).expected for pane in panes)):
            self._unexpected.add(self._assigner.end_of(start), None, start)

    def due(self, latest_end: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Return the panes to emit at a watermark: of those that have changed, and of up to `panes_max` others."""
        asked = [(start, key) for start, panes in self._changed.items() for key in panes]
        most, waits = panes_max + len(asked), self._triggers.waits_for_the_end
        asked += self.alarms.due(self._triggers.now_us, panes_max)
        asked += self._swept(self._unfired, latest_end, lambda f: not f.passed, most - len(asked))
        asked += self._swept(self._unclosed, latest_end, waits, most - len(asked))
        expected_end = self._triggers.expected_end
        if self._by_percentile:
            asked += self._swept(self._unexpected, expected_end, lambda f: not f.expected, most - len(asked))
        found: list[DuePane] = []
        for start, key in dict.fromkeys(asked):
            pane, end = self.panes[start][key], self._assigner.end_of(start)
            due = (start, end, key, pane)
            if self._triggers.ask(due, ended=end <= latest_end, over=end + self._allowed_us <= latest_end):
                found.append(due)
            self.changed(start)[key] = pane
            self._follow(start, key, pane)
        self._pop_done(self._unfired, latest_end, lambda f: f.passed)
        self._pop_done(self._unclosed, latest_end, lambda f: not waits(f))
        self._pop_done(self._unexpected, expected_end, lambda f: f.expected)
        return found

    def _follow(self, start: int, key: Key, pane: OpenPane) -> None:
        """Set what follows from the state of a pane's trigger: its alarm, its hold, and whether it is closed."""
        firing = firing_of(pane)
        self.alarms.set((start, key), self._triggers.alarm_of(pane))
        if firing.trigger[0]:
            self.closed.setdefault(start, set()).add(key)
        if firing.holds:
            self._holding.setdefault(start, {})[key] = None
        elif start in self._holding:
            self._holding[start].pop(key, None)
            if not self._holding[start]:
                del self._holding[start]

    def _swept(
        self, queue: WindowStarts, until: Instant, which: Callable[[FiringState], bool], panes_max: int
    ) -> list[tuple[int, Key]]:
        """Return up to `panes_max` panes of the windows in a queue that are due by `until`.

        Which panes of a window wait is decided by their keys, so that a new owner decides as the owner before it.
        """
        found: list[tuple[int, Key]] = []
        starts: list[int] = []
        waiting = self._waiting_in[2 if queue is self._unexpected else queue is self._unclosed]
        while len(found) < panes_max and (start := queue.first(until)) is not None:
            queue.pop()
            starts.append(start)
            panes, known = self.panes[start], waiting.pop(start, None)
            keys = [key for key in (panes if known is None else known) if which(firing_of(panes[key]))]
            room = panes_max - len(found)
            if len(keys) > room:
                if known is None:
                    keys.sort(reverse=True)
                waiting[start] = keys[:-room]
                keys = keys[-room:]
            found += [(start, key) for key in keys]
        for start in starts:  # they stay until `_pop_done`
            queue.add(self._assigner.end_of(start) + (self._allowed_us if queue is self._unclosed else 0), None, start)
        return found

    def _pop_done(self, queue: WindowStarts, until: Instant, done: Callable[[FiringState], bool]) -> None:
        """Remove the due windows of a queue, up to the first one with panes that have to wait."""
        while (start := queue.first(until)) is not None:
            if not all(done(firing_of(pane)) for pane in self.panes[start].values()):
                return
            queue.pop()

    def _waits(self, start: int) -> bool:
        """Tell whether a window that is over still has panes to emit."""
        return super()._waits(start) or self._assigner.end_of(start) + self._allowed_us >= self._unclosed.next_due()

    def _without_pane(self, panes: PanesByKey) -> int:
        """Return how many panes have records that were not emitted."""
        return sum(firing_of(pane).since > 0 for pane in panes.values())

    def _forget(self, start: int, panes: PanesByKey) -> None:
        """Forget the alarms of panes that have expired, and that their triggers were finished."""
        for key in panes:
            self.alarms.set((start, key), INSTANT_MAX)
        if start not in self.panes:
            self.closed.pop(start, None)
            for waiting in self._waiting_in:
                waiting.pop(start, None)

    def is_expected(self) -> bool:
        """Tell whether the percentile watermark has reached a window that has to be asked."""
        return self._unexpected.next_due() <= self._triggers.expected_end

    def oldest_end(self) -> Instant:
        """Return the end of the oldest window that holds the low watermark; INSTANT_MAX without one."""
        held = min(self._holding, default=None)
        return self.next_end() if held is None else min(self.next_end(), Instant(self._assigner.end_of(held)))


class _OpenStarts(WindowStarts):
    """The starts of windows that may expire before they are due."""

    __slots__ = ("_open",)

    def __init__(self, open_windows: Mapping[int, object]) -> None:
        super().__init__()
        self._open = open_windows

    def is_current(self, key: Key | None, item: int) -> bool:
        """Tell whether the window is open."""
        return item in self._open
