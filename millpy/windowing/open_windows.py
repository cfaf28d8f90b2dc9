"""Open aligned windows of one interval: what has to be remembered between bundles, and when each is due.

    a window opens     with its first record that is not too late
    its on-time pane   once the input watermark has reached its end; until then it holds the low watermark at end - 1 µs
    late panes         after that, for a bundle that has brought it late records
    it expires         once the watermark has reached end + allowed lateness; then it emits nothing any more (I7)

Stored as one entry a (key, window), kind WINDOW, subkey "<start>/<end>", fire time: when it expires.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.fold import Folds
from millpy.windowing.pane import DuePane, OpenPane, decode_pane, encode_panes

PaneName = tuple[int, Key]


class OpenWindows:
    """Panes by window start, then key; starts ordered by when they are due."""

    def __init__(self, folds: Folds, size_us: int, allowed_lateness_us: int) -> None:
        self._folds = folds
        self._size_us = size_us
        self._allowed_us = allowed_lateness_us
        self.panes: dict[int, dict[Key, OpenPane]] = {}
        self._unfired: list[int] = []
        self._unexpired: list[int] = []
        self._touched: dict[PaneName, OpenPane] = {}
        self._hasher = KeyHasher()

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Take stored windows."""
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            if value is None:
                continue
            panes = self.panes.setdefault(int(subkey.partition("/")[0]), {})
            panes[key_from_text(text, key_types)] = decode_pane(value, self._folds)
        self._unexpired = list(self.panes)
        self._unfired = [start for start, panes in self.panes.items() if not all(p.emitted for p in panes.values())]
        heapify(self._unexpired)
        heapify(self._unfired)

    def of(self, start: int) -> dict[Key, OpenPane]:
        """The panes of a window, opened if it was not."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            heappush(self._unfired, start)
            heappush(self._unexpired, start)
        return panes

    def touch(self, start: int, key: Key, pane: OpenPane) -> None:
        """Note that a pane has changed in this bundle."""
        self._touched[start, key] = pane

    def due(self, watermark: Instant) -> list[DuePane]:
        """Panes to emit now: those of windows that the watermark has reached, and those changed since."""
        size_us = self._size_us
        due = {name: pane for name, pane in self._touched.items() if name[0] + size_us <= watermark}
        while self._unfired and self._unfired[0] + size_us <= watermark:
            start = heappop(self._unfired)
            for key, pane in self.panes[start].items():
                if not pane.emitted:
                    due[start, key] = pane
        self._touched.update(due)
        return [(start, start + size_us, key, pane) for (start, key), pane in due.items()]

    def take_entries(self, watermark: Instant, bundle: int) -> Entries | None:
        """Expire what the watermark has passed; changes of this bundle as entries.

        A window that opened and expired within the bundle leaves no trace.
        """
        entries = Entries(Kind.WINDOW, "")
        gone: list[PaneName] = []
        while self._unexpired and self._unexpired[0] + self._size_us + self._allowed_us <= watermark:
            start = heappop(self._unexpired)
            for key, pane in self.panes.pop(start).items():
                self._touched.pop((start, key), None)
                if pane.bundle:
                    gone.append((start, key))
        touched, self._touched = self._touched, {}
        names = [*touched, *gone]
        if not names:
            return None
        for pane in touched.values():
            pane.bundle = bundle
        size, allowed = self._size_us, self._allowed_us
        entries.keys = key_texts([key for _, key in names])
        entries.key_hashes = self._hasher.hashes([key for _, key in names]).tolist()
        entries.subkeys = [f"{start}/{start + size}" for start, _ in names]
        entries.values = [*encode_panes(list(touched.values()), self._folds), *([None] * len(gone))]
        entries.fire_ats = [start + size + allowed for start, _ in names]
        return entries

    def oldest_hold(self) -> Instant:
        """Output time of the oldest window without its on-time pane."""
        return Instant(self._unfired[0] + self._size_us - 1) if self._unfired else INSTANT_MAX

    def next_due(self) -> Instant:
        """When the next window fires or expires."""
        fires = self._unfired[0] + self._size_us if self._unfired else INSTANT_MAX
        expires = self._unexpired[0] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX
        return Instant(min(fires, expires))
