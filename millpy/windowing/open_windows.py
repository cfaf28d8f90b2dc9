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
from millpy.model.stage import UNBOUNDED
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.fold import Folds
from millpy.windowing.pane import DuePane, OpenPane, decode_pane, encode_panes
from millpy.windowing.room import AGGREGATE_BYTES, PANE_BYTES, Weights

Panes = dict[Key, OpenPane]


class OpenWindows:
    """Panes by window start, then key; starts ordered by when they are due.

    Attributes:
        weights: what they weigh; who puts a pane into `panes` counts it there.
    """

    def __init__(self, folds: Folds, size_us: int, allowed_lateness_us: int) -> None:
        self._folds = folds
        self._size_us = size_us
        self._allowed_us = allowed_lateness_us
        self.panes: dict[int, Panes] = {}
        self._unfired: list[int] = []
        self._unexpired: list[int] = []
        self._opened: dict[int, Panes] = {}
        self._changed: dict[int, Panes] = {}
        self._waiting: dict[int, list[Key]] = {}
        self._hasher = KeyHasher()
        self._silent = 0
        self.weights = Weights(PANE_BYTES + AGGREGATE_BYTES * len(folds.folds))

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Take stored windows, some of several."""
        taken: list[OpenPane] = []
        texts: list[bytes] = []
        values: list[bytes] = []
        for text, subkey, value in zip(entries.keys, entries.subkeys, entries.values, strict=True):
            if value is None:
                continue
            panes = self.panes.setdefault(int(subkey.partition("/")[0]), {})
            pane = panes[key_from_text(text, key_types)] = decode_pane(value, self._folds)
            taken.append(pane)
            texts.append(text)
            values.append(value)
        self.weights.weigh(taken, texts, values)

    def recovered(self) -> None:
        """All stored windows are here."""
        self.weights.panes = sum(map(len, self.panes.values()))
        self._unexpired = list(self.panes)
        self._unfired = [start for start, panes in self.panes.items() if not all(p.emitted for p in panes.values())]
        heapify(self._unexpired)
        heapify(self._unfired)

    def of(self, start: int) -> Panes:
        """The panes of a window, opened if it was not."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            heappush(self._unfired, start)
            heappush(self._unexpired, start)
        return panes

    def open(self, start: int, panes: Panes, emitted: bool) -> int:
        """Open a window that nobody has opened, with all its panes, and whether they have left already; how many."""
        self.panes[start] = panes
        self.weights.panes += len(panes)
        self._opened[start] = dict(panes)
        if not emitted:
            heappush(self._unfired, start)
        heappush(self._unexpired, start)
        return len(panes)

    def changed(self, start: int) -> Panes:
        """Where to note panes of a window that have changed in this bundle."""
        return self._changed.setdefault(start, {})

    def due(self, watermark: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Panes to emit now: those changed since, and of windows that the watermark has reached, up to panes_max.

        A window of which some panes wait for a later turn is unfired still: it holds the low watermark, and does not
        expire.
        """
        size_us = self._size_us
        while self._unfired and self._unfired[0] + size_us <= watermark and panes_max > 0:
            start = self._unfired[0]
            panes, waiting = self.panes[start], self._waiting.pop(start, None)
            if waiting is None:
                waiting = [key for key, pane in panes.items() if not pane.emitted]
            leaving, left = waiting[-panes_max:], waiting[:-panes_max]
            self.changed(start).update((key, panes[key]) for key in leaving if not panes[key].emitted)
            panes_max -= len(leaving)
            if left:
                self._waiting[start] = left
            else:
                heappop(self._unfired)
        while self._unfired and self._unfired[0] + size_us <= watermark and self._leaves_whole(self._unfired[0]):
            self._waiting.pop(heappop(self._unfired), None)
        return [
            (start, start + size_us, key, pane)
            for start, panes in self._changed.items()
            if start + size_us <= watermark
            for key, pane in panes.items()
        ]

    def _leaves_whole(self, start: int) -> bool:
        """Whether every pane of a window has left, or leaves in this turn because it has changed."""
        changed = self._changed.get(start, {})
        return all(pane.emitted or key in changed for key, pane in self.panes[start].items())

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire what the watermark has passed, up to panes_max; changes of this bundle as entries.

        A window that opened and expired within the bundle leaves no trace.
        """
        opened, self._opened = self._opened, {}
        changed, self._changed = self._changed, {}
        gone: list[tuple[int, list[Key]]] = []
        while self._unexpired and self._unexpired[0] + self._size_us + self._allowed_us <= watermark and panes_max > 0:
            start = self._unexpired[0]
            if self._unfired and start >= self._unfired[0]:
                break  # its panes have to leave first
            panes = self.panes[start]
            if len(panes) <= panes_max:
                expired = self.panes.pop(heappop(self._unexpired))
                opened.pop(start, None)
                changed.pop(start, None)
            else:
                expired = {}
                while len(expired) < panes_max:
                    key, pane = panes.popitem()
                    expired[key] = pane
                    opened.get(start, {}).pop(key, None)
                    changed.get(start, {}).pop(key, None)
            panes_max -= len(expired)
            self.weights.drop(list(expired.values()))
            self._silent += self._without_pane(expired)
            gone.append((start, [key for key, pane in expired.items() if pane.bundle]))
        touched: list[OpenPane] = []
        entries = Entries(Kind.WINDOW, "")
        keys: list[Key] = []
        for start, panes in (*opened.items(), *changed.items()):
            touched.extend(panes.values())
            self._name(entries, keys, start, list(panes))
        for start, of_window in gone:
            self._name(entries, keys, start, of_window)
        if not keys:
            return None
        for pane in touched:
            pane.bundle = bundle
        distinct = list(dict.fromkeys(keys))
        texts = dict(zip(distinct, key_texts(distinct), strict=True))
        hashes = dict(zip(distinct, self._hasher.hashes(distinct).tolist(), strict=True))
        entries.keys = [texts[key] for key in keys]
        entries.key_hashes = [hashes[key] for key in keys]
        values = encode_panes(touched, self._folds)
        self.weights.weigh(touched, entries.keys, values)
        entries.values = [*values, *([None] * (len(keys) - len(touched)))]
        return entries

    def take_silent(self) -> int:
        """How many windows have expired since the last time without ever having emitted."""
        silent, self._silent = self._silent, 0
        return silent

    def _without_pane(self, panes: Panes) -> int:
        """How many of these have not emitted."""
        return sum(not pane.emitted for pane in panes.values())

    def _name(self, entries: Entries, keys: list[Key], start: int, of_window: list[Key]) -> None:
        end = start + self._size_us
        keys += of_window
        entries.subkeys += [f"{start}/{end}"] * len(of_window)
        entries.fire_ats += [end + self._allowed_us] * len(of_window)

    def oldest_hold(self) -> Instant:
        """Output time of the oldest window without its on-time pane."""
        return Instant(self._unfired[0] + self._size_us - 1) if self._unfired else INSTANT_MAX

    def next_due(self) -> Instant:
        """When the next window fires or expires."""
        fires = self._unfired[0] + self._size_us if self._unfired else INSTANT_MAX
        expires = self._unexpired[0] + self._size_us + self._allowed_us if self._unexpired else INSTANT_MAX
        return Instant(min(fires, expires))
