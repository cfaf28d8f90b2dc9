"""Open sliding windows of one interval as slices: their state between bundles, which holds each record once.

A slice is the time between two window starts; a window is a sequence of slices. A record is kept only in its slice,
however many windows contain it, and a pane is merged from the slices of its window when that fires.

    a slice opens      with its first record that is not too late for all of its windows
    a window fires     when its trigger says so; its pane is first if no slice had a record before
    a window fires     again for a bundle that adds late records to it
    a slice expires    with the last window that contains it: the one that begins with it

Slices are stored like other windows, under the name of the window that begins with the slice. `values` belong to the
slice, [] if it has no records; `pane_index` and `late_count` belong to the window, and are 0 until it has a late pane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.ahead import KeysAhead
from millpy.windowing.fixed_state import OpenWindows, PanesByKey
from millpy.windowing.pane_codec import OpenPane
from millpy.windowing.window import Assigner, SlidingWindows


class OpenSlices(OpenWindows):
    """The open slices of one key interval.

    Attributes:
        panes: slice start -> key -> state.
        position: the end up to which windows have fired.
        ahead: the keys whose windows have fired beyond the position.
    """

    def __init__(
        self, accumulators: AccumulatorSet, windows: SlidingWindows, allowed_lateness_us: int, position: Instant
    ) -> None:
        super().__init__(accumulators, Assigner(windows), allowed_lateness_us)
        self._size_us = windows.size_us
        self._every_us = windows.every_us
        self._before_us = windows.size_us + windows.offset_us
        self.position = position
        self.ahead = KeysAhead()
        self._leaving: tuple[int, list[Key]] | None = None

    def finish_recovery(self) -> None:
        """Build the queues by due time, after all stored slices have been loaded."""
        super().finish_recovery()
        self.advance(self.position)

    def firing(self, latest_end: Instant, fired: Instant | None = None) -> range:
        """Return the starts of windows that end by `latest_end` but not by `fired` (default: the position)."""
        every_us = self._every_us
        passed = ((self.position if fired is None else fired) - self._before_us) // every_us
        first = (passed + 1) * every_us + self._before_us - self._size_us
        return range(first, latest_end - self._size_us + 1, every_us)

    def limit_firing(self, latest_end: Instant, panes_max: int) -> tuple[Instant, dict[Key, Instant]]:
        """Limit the windows that fire in a turn to about `panes_max` panes.

        Returns:
            The end up to which all windows fire. If the next window alone has more panes: the position, and the keys
            for which it fires now -> its end.
        """
        if sum(map(len, self.panes.values())) * (self._size_us // self._every_us) <= panes_max:
            return latest_end, {}
        firing = self.firing(latest_end)
        keys_of: dict[int, int] = {}
        for start, panes in self.panes.items() if firing else ():
            first = max(start - self._size_us + self._every_us, firing.start)
            for window in range(first, min(start, firing.stop - 1) + 1, self._every_us):
                keys_of[window] = max(keys_of.get(window, 0), len(panes))
        reached, left = self.position, panes_max
        for window in sorted(keys_of):
            end = Instant(window + self._size_us)
            if keys_of[window] > left:
                keys = self._part_of(window, panes_max) if left == panes_max else []
                if keys or left < panes_max:
                    return reached, dict.fromkeys(keys, end)
            left -= keys_of[window]
            reached = end
        return latest_end, {}

    def _part_of(self, window: int, panes_max: int) -> list[Key]:
        """Return the keys for which the next window fires now, if it has more than `panes_max` panes; else [].

        The keys decide which are first, so that a new owner decides as the owner before it.
        """
        end = Instant(window + self._size_us)
        if self._leaving is None or self._leaving[0] != window:
            slices = (self.panes.get(start, {}) for start in range(window, end, self._every_us))
            keys = dict.fromkeys(key for panes in slices for key, pane in panes.items() if pane.values)
            self._leaving = (window, sorted(keys))
        keys_left = [key for key in self._leaving[1] if self.ahead.position_of(key, self.position) < end]
        self._leaving = (window, keys_left)
        return keys_left[-panes_max:] if len(keys_left) > panes_max else []

    def advance(self, position: Instant) -> None:
        """Record that windows have fired up to a position; one behind the present position changes nothing."""
        position = max(position, self.position)
        if self.ahead and position > self.position:
            self.ahead.forget(position)
        self.position = position
        while self._unfired.first(position) is not None:
            self._unfired.pop()

    def add(self, start: int, keys: Sequence[Key], values: Sequence[list[Any]], counts: Sequence[int]) -> int:
        """Merge the accumulators of some keys into a slice. Return the number of records added.

        `counts` are the records of each key.
        """
        panes = self.panes.get(start)
        if self._leaving is not None and 0 <= start - self._leaving[0] < self._size_us:
            self._leaving = None  # the window may have got another key
        if panes is None:
            opened = self.open(start, dict(zip(keys, map(OpenPane, values), strict=True)), emitted=False)
            return sum(counts[:opened])
        changed, merge, added, before = self.changed(start), self._accumulators.merge, 0, len(panes)
        for key, accumulators, count in zip(keys, values, counts, strict=True):
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(accumulators)
            else:
                pane.values = merge(pane.values, accumulators) if pane.values else accumulators
            changed[key] = pane
            added += count
        self.weights.panes += len(panes) - before
        return added

    def remember(self, start: int, key: Key, pane_index: int, late_count: int) -> None:
        """Keep the pane index and late count of a fired window with late records."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            self._queue(start, emitted=False)  # for other keys it may not have fired
        pane = panes.get(key)
        if pane is None:
            pane = panes[key] = OpenPane([])
            self.weights.panes += 1
        pane.pane_index, pane.late_count = pane_index, late_count
        if key not in self._opened.get(start, ()):
            self.changed(start)[key] = pane

    def first_open_end(self) -> Instant:
        """Return an end before which all windows have fired: a slice is closed with the window that begins with it."""
        return Instant(self.position + 1)

    def has_left(self, pane: OpenPane) -> bool:
        """Return True: a slice itself emits nothing."""
        return True

    def _without_pane(self, panes: PanesByKey) -> int:
        """Return 0: a slice itself emits nothing."""
        return 0

    def next_end(self) -> Instant:
        """Return the end of the first window with records that has not fired; INSTANT_MAX without one."""
        start = self._unfired.first()
        if start is None:
            return INSTANT_MAX
        return Instant(max(start + self._every_us, self.firing(self.position).start + self._size_us))

    def next_expiry(self) -> Instant:
        """Return the watermark at which the next slice expires; at once if stored entries are to be deleted."""
        deletion = Instant(min(self.position, INSTANT_MAX - 1)) if self.ahead.has_deletions else INSTANT_MAX
        return min(super().next_expiry(), deletion)
