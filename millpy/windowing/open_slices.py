"""Open sliding windows of one interval, as slices: what has to be remembered between bundles, a record once.

A slice is what lies between two starts of windows; a window is a row of slices. A record is kept in its slice alone,
however many windows it is in, and a window's pane is merged from its slices when it is due.

    a slice opens      with its first record that is not too late for all of its windows
    a window fires     once the input watermark has reached its end; its pane is first if no slice had a record before
    late panes         after that, for a bundle that has brought it late records
    a slice expires    with the last window that it is in: the one that begins with it

Stored like other windows, under the name of the window that begins with the slice: its `values` are those of the slice,
[] for none; `pane_index` and `late_count` are the window's own, and 0 unless it has had a late pane.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.ahead import KeysAhead
from millpy.windowing.fold import Folds
from millpy.windowing.open_windows import OpenWindows, Panes
from millpy.windowing.pane import OpenPane


class OpenSlices(OpenWindows):
    """Slices by start, then key.

    Attributes:
        watermark: windows that end by then have fired.
        ahead: keys of which more have.
    """

    def __init__(self, folds: Folds, size_us: int, every_us: int, allowed_lateness_us: int, watermark: Instant) -> None:
        super().__init__(folds, size_us, allowed_lateness_us)
        self._every_us = every_us
        self.watermark = watermark
        self.ahead = KeysAhead()
        self._leaving: tuple[int, list[Key]] | None = None

    def recovered(self) -> None:
        """All stored slices are here."""
        super().recovered()
        self.advance(self.watermark)

    def firing(self, watermark: Instant, fired: Instant | None = None) -> range:
        """Starts of windows that end by a watermark and have not fired, or do not end by `fired`."""
        every_us = self._every_us
        first = ((self.watermark if fired is None else fired) - self._size_us) // every_us * every_us + every_us
        return range(first, watermark - self._size_us + 1, every_us)

    def bounded(self, watermark: Instant, panes_max: int) -> tuple[Instant, dict[Key, Instant]]:
        """What leaves in a turn, about panes_max panes: all windows that end by (an instant), and more of some keys.

        These are of a window that alone has too many.
        """
        if sum(map(len, self.panes.values())) * (self._size_us // self._every_us) <= panes_max:
            return watermark, {}
        firing = self.firing(watermark)
        keys_of: dict[int, int] = {}
        for start, panes in self.panes.items() if firing else ():
            first = max(start - self._size_us + self._every_us, firing.start)
            for window in range(first, min(start, firing.stop - 1) + 1, self._every_us):
                keys_of[window] = max(keys_of.get(window, 0), len(panes))
        reached, left = self.watermark, panes_max
        for window in sorted(keys_of):
            end = Instant(window + self._size_us)
            if keys_of[window] > left:
                keys = self._part_of(window, panes_max) if left == panes_max else []
                if keys or left < panes_max:
                    return reached, dict.fromkeys(keys, end)
            left -= keys_of[window]
            reached = end
        return watermark, {}

    def _part_of(self, window: int, panes_max: int) -> list[Key]:
        """Keys of the next window that leave now, where it has too many; else []."""
        end = Instant(window + self._size_us)
        if self._leaving is None or self._leaving[0] != window:
            slices = (self.panes.get(start, {}) for start in range(window, end, self._every_us))
            keys = dict.fromkeys(key for panes in slices for key, pane in panes.items() if pane.values)
            self._leaving = (window, [key for key in keys if self.ahead.of(key, self.watermark) < end])
        keys_left = self._leaving[1]
        if len(keys_left) <= panes_max:
            return []
        leaving = keys_left[-panes_max:]
        del keys_left[-panes_max:]
        return leaving

    def advance(self, watermark: Instant) -> None:
        """All windows that end by a watermark have fired."""
        if self.ahead and watermark > self.watermark:
            self.ahead.forget(watermark)
        self.watermark = watermark
        while self._unfired and self._unfired[0] + self._size_us <= watermark:
            heappop(self._unfired)

    def add(self, start: int, keys: Sequence[Key], values: Sequence[list[Any]], counts: Sequence[int]) -> int:
        """Bring accumulators into a slice; how many of their records, which are counted by key, are in it now."""
        panes = self.panes.get(start)
        if panes is None:
            opened = self.open(start, dict(zip(keys, map(OpenPane, values), strict=True)), emitted=False)
            return sum(counts[:opened])
        changed, merge, added, before = self.changed(start), self._folds.merge, 0, len(panes)
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
        """A window that has fired has had late records."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            heappush(self._unexpired, start)
            heappush(self._unfired, start)  # for other keys it may not have fired
        pane = panes.get(key)
        if pane is None:
            pane = panes[key] = OpenPane([])
            self.weights.panes += 1
        pane.pane_index, pane.late_count = pane_index, late_count
        if key not in self._opened.get(start, ()):
            self.changed(start)[key] = pane

    def _without_pane(self, panes: Panes) -> int:
        """None: a slice emits nothing itself."""
        return 0

    def oldest_hold(self) -> Instant:
        """Output time of the oldest window that has a record and has not fired."""
        fires = self._next_fire()
        return INSTANT_MAX if fires == INSTANT_MAX else Instant(fires - 1)

    def next_due(self) -> Instant:
        """When the next window fires or slice expires; at once when something is stored that says nothing any more."""
        expires = self._unexpired[0] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX
        stale = min(self.watermark, INSTANT_MAX - 1) if self.ahead.stale else INSTANT_MAX
        return Instant(min(self._next_fire(), expires, stale))

    def _next_fire(self) -> int:
        """The end of the oldest window that has not fired and has the first slice of those that are in any."""
        if not self._unfired:
            return INSTANT_MAX
        oldest = self._unfired[0] + self._every_us
        return max(oldest, self.firing(self.watermark).start + self._size_us)
