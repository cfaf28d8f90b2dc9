"""Open aligned windows whose trigger decides pane by pane: the counterpart of `fixed_state.py` for early firings.

A window holds the low watermark at end - 1 µs until the watermark has reached its end and the trigger has been asked
about each of its panes; after that, until its on-time records are emitted. The state of the trigger is stored with the
pane; alarms are not, because they follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from millpy.model.checkpoint import Entries
from millpy.model.keys import Key, key_from_text
from millpy.model.stage import UNBOUNDED, StoredInterval
from millpy.model.stored_windows import PaneNeed
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.closed_windows import ClosedWindows
from millpy.windowing.firing import Alarms, PaneTriggers, firing_of, needs_only_records
from millpy.windowing.fixed_state import OpenWindows, PanesByKey, WindowStarts
from millpy.windowing.pane_codec import DuePane, FiringState, OpenPane
from millpy.windowing.unfired_windows import places_of
from millpy.windowing.unread_panes import UnreadPanes
from millpy.windowing.window import WindowAssigner
from millpy.windowing.window_memory import FIRING_BYTES


class ClosedPanes(ClosedWindows):
    """The closed windows of a trigger with a state: those of their panes may leave memory that do not wait.

    Attributes:
        awake: window start -> the keys of panes that may be due without another record.
        finished: window start -> the keys whose trigger is finished.
    """

    awake: Mapping[int, Collection[Key]]
    finished: Mapping[int, set[Key]]

    def needs_fold(self, first_open_end: int) -> bool:
        """Tell whether panes that could leave memory exceed the bound."""
        return self._exceeds(self._bytes_max, first_open_end)

    def _scope(self, first_open_end: int) -> tuple[int, ...]:
        return *super()._scope(first_open_end), sum(map(len, self.awake.values()))

    def _exceeds_by_half(self, first_open_end: int) -> bool:
        return self._exceeds(self._bytes_max * 3 // 2, first_open_end)

    def _exceeds(self, bytes_max: int, first_open_end: int) -> bool:
        if self._weights.total <= bytes_max:
            return False
        closed = sum(self._count(start) for start in self._panes if self._end_of(start) < first_open_end)
        return closed * self._weights.each > bytes_max

    def _count(self, start: int) -> int:
        return len(self._panes[start]) - len(self.awake.get(start, ()))

    def _forget(self, start: int, keys: Sequence[Key]) -> None:
        if start in self.finished:
            self.finished[start].difference_update(keys)


class TriggeredWindows(OpenWindows):
    """The open windows of one key interval.

    Attributes:
        closed: window start -> the keys whose trigger is finished.
        alarms: when panes are due without a record.
    """

    _closed_type = ClosedPanes
    _unfired_type = UnreadPanes

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
        self._awake: dict[int, set[Key]] = {}
        self._waiting_in: tuple[dict[int, list[Key]], ...] = ({}, {}, {})

    def finish_recovery(self) -> None:
        """Build the queues and alarms, after all stored panes have been loaded."""
        self.weights.panes = sum(map(len, self.panes.values()))
        for start, panes in self.panes.items():
            passed = all(firing_of(pane).passed for pane in panes.values())
            self._queue(start, emitted=passed and not self._has_unread(start, PaneNeed.END))
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
        if self._triggers.note_waiting(pane):
            self._awake.setdefault(start, set()).add(key)
        elif start in self._awake:
            self._awake[start].discard(key)
        if firing.holds:
            self._holding.setdefault(start, {})[key] = None
        elif start in self._holding:
            self._holding[start].pop(key, None)
            if not self._holding[start]:
                del self._holding[start]

    def _swept(
        self, queue: WindowStarts, until: Instant, which: Callable[[FiringState], bool], panes_max: int
    ) -> list[tuple[int, Key]]:
        """Return up to `panes_max` panes of the windows in a queue that are due by `until`, and have not changed.

        Which panes of a window wait is decided by the hashes of their keys, so that a new owner decides as the owner
        before it, wherever the panes are.
        """
        found: list[tuple[int, Key]] = []
        starts: list[int] = []
        waiting = self._waiting_in[2 if queue is self._unexpected else queue is self._unclosed]
        need = PaneNeed.END if queue is self._unfired else PaneNeed.EXPIRY
        while len(found) < panes_max and (start := queue.first(until)) is not None:
            panes, known, changed = self.panes[start], waiting.pop(start, None), self.changed(start)
            room = panes_max - len(found)
            is_last = True
            keys = list(panes) if known is None else [key for key in known if key in panes]  # others have left memory
            keys = [key for key in keys if which(firing_of(panes[key])) and key not in changed]
            if self._has_unread(start, need):
                assert isinstance(self.spilled, UnreadPanes), start
                keys, is_last = self.spilled.next_panes(start, keys, room, need)
            elif len(keys) > room:
                if known is None:
                    keys = [key for _, key in sorted(places_of(keys, self._hasher).items(), reverse=True)]
                waiting[start] = keys[:-room]
                keys = keys[-room:]
            changed.update((key, panes[key]) for key in keys)
            found += [(start, key) for key in keys]
            if is_last:
                queue.pop()
                starts.append(start)
        for start in starts:  # they stay until `_pop_done`
            queue.add(self._assigner.end_of(start) + (self._allowed_us if queue is self._unclosed else 0), None, start)
        return found

    def _pop_done(self, queue: WindowStarts, until: Instant, done: Callable[[FiringState], bool]) -> None:
        """Remove the due windows of a queue, up to the first one with panes that have to wait."""
        need = PaneNeed.END if queue is self._unfired else PaneNeed.EXPIRY
        while (start := queue.first(until)) is not None:
            if self._has_unread(start, need) or not all(done(firing_of(p)) for p in self.panes[start].values()):
                return
            queue.pop()

    def _has_unread(self, start: int, need: PaneNeed) -> bool:
        """Tell whether panes of a window that need something may be only in the store."""
        return isinstance(self.spilled, UnreadPanes) and self.spilled.has_unread(start, need)

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
        if start in self._awake:
            self._awake[start].difference_update(panes)
        if start not in self.panes:
            self.closed.pop(start, None)
            self._awake.pop(start, None)
            for waiting in self._waiting_in:
                waiting.pop(start, None)

    def has_left(self, pane: OpenPane) -> bool:
        """Tell whether a pane of a closed window needs nothing more but late records."""
        return needs_only_records(pane)

    def spill_to(
        self,
        key_types: tuple[type, ...],
        bytes_max: int,
        recovered: StoredInterval,
        unfired_bytes_max: int | None = None,
    ) -> None:
        """Let panes leave memory: without a bound on the others, those that do not wait; see `OpenWindows.spill_to`."""
        super().spill_to(key_types, bytes_max, recovered, unfired_bytes_max)
        assert isinstance(self.spilled, ClosedPanes | UnreadPanes), self.spilled
        self.spilled.awake, self.spilled.finished = self._awake, self.closed

    def open_bytes(self) -> int:
        """Return the memory of the panes that are not closed, or wait for something else than late records."""
        first_end, weights, end_of = self.first_open_end(), self.weights, self._assigner.end_of
        awake = [(start, keys) for start, keys in self._awake.items() if end_of(start) < first_end]
        beyond = 0
        if weights.large:
            beyond = sum(weights.large.get(id(self.panes[start][key]), 0) for start, keys in awake for key in keys)
        return super().open_bytes() + sum(len(keys) for _, keys in awake) * weights.each + beyond

    def _add_loaded(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        super()._add_loaded(entries, key_types)
        for text, subkey in zip(entries.keys, entries.subkeys, strict=True):
            start, key = int(subkey.partition("/")[0]), key_from_text(text, key_types)
            self._follow(start, key, self.panes[start][key])

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
