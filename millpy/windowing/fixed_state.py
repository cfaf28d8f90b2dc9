"""Open aligned windows of one interval: their state between bundles, and when each is due.

    a window opens     with its first record that is not too late
    it fires           when its trigger says so; until then it holds the low watermark at end - 1 µs
    it fires again     for a bundle that adds late records to it
    it expires         once the watermark has reached end + allowed lateness; it emits nothing after that (I7)

Its panes may be only in the store: between firing and expiry (`closed_windows.py`), or before (`unfired_windows.py`).

The store has one entry per (key, window): kind WINDOW, subkey "<start>/<end>", fire time the time of expiry.
"""

from __future__ import annotations

from itertools import compress, repeat
from operator import is_not, itemgetter

from millpy.model.checkpoint import Entries, Kind
from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key, KeyHasher, key_from_text, key_texts
from millpy.model.stage import UNBOUNDED, StoredInterval
from millpy.model.stored_windows import span_of
from millpy.model.time import Instant
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.closed_windows import ClosedWindows
from millpy.windowing.pane_codec import NO_TIME, DuePane, OpenPane, decode_panes, encode_panes
from millpy.windowing.timestamp_combiner import PaneHolds, hold_of
from millpy.windowing.unfired_windows import HASHES_MAX, NextPanes, UnfiredWindows, is_unread, places_of
from millpy.windowing.window import WindowAssigner
from millpy.windowing.window_memory import HOLD_BYTES, PANE_BYTES, Weights

PanesByKey = dict[Key, OpenPane]


class OpenWindows:
    """The open windows of one key interval.

    Attributes:
        panes: window start -> key -> pane.
        weights: the memory of the panes; code that adds a pane to `panes` must count it here.
        holds: the times at which panes hold the low watermark, if they combine the times of their records; code that
            adds records to a pane must add it here.
        spilled: the windows that are only in the store; None if all windows are in memory.
    """

    _closed_type: type[ClosedWindows] = ClosedWindows
    _unfired_type: type[UnfiredWindows] = UnfiredWindows

    def __init__(self, accumulators: AccumulatorSet, assigner: WindowAssigner, allowed_lateness_us: int) -> None:
        self._accumulators = accumulators
        self._assigner = assigner
        self._allowed_us = allowed_lateness_us
        self.panes: dict[int, PanesByKey] = {}
        self._unfired = WindowStarts()
        self._unexpired = WindowStarts()
        self._opened: dict[int, PanesByKey] = {}
        self._changed: dict[int, PanesByKey] = {}
        self._waiting: dict[int, list[Key]] = {}
        self._leaving_by_key: int | None = None
        self._hasher = KeyHasher()
        self._expired_without_pane = 0
        self.holds: PaneHolds[tuple[int, Key]] | None = None
        self.spilled: ClosedWindows | None = None
        self.weights = Weights(PANE_BYTES + accumulators.memory_bytes)

    def hold_times(self, *, retracts: bool) -> None:
        """Let panes hold the low watermark at their event time; `retracts` says whether they are retracted."""
        none: PanesByKey = {}

        def hold(window: tuple[int, Key]) -> int:
            pane = self.panes.get(window[0], none).get(window[1])
            return NO_TIME if pane is None else hold_of(pane, retracts=retracts)

        self.holds = PaneHolds(hold)
        self.weights.each += HOLD_BYTES

    def spill_to(
        self,
        key_types: tuple[type, ...],
        bytes_max: int,
        recovered: StoredInterval,
        unfired_bytes_max: int | None = None,
    ) -> None:
        """Let windows wait in the store; call it before `recover`.

        Args:
            key_types: the Python types of the fields of keys.
            bytes_max: the bound on closed windows in memory.
            recovered: the stored state of the interval.
            unfired_bytes_max: the bound on other windows in memory; None if these must stay there.
        """

        def absorb(entries: Entries) -> None:
            self._add_loaded(entries, key_types)

        end_of, folded = self._assigner.end_of, recovered.folded_bundle
        of_closed = self.panes, self.weights, end_of, self.has_left, absorb, bytes_max, folded
        if unfired_bytes_max is None:
            self.spilled = self._closed_type(*of_closed)
        else:
            self._hasher = KeyHasher(HASHES_MAX)
            self.spilled = self._unfired_type(
                *of_closed,
                unfired_bytes_max=unfired_bytes_max,
                key_types=key_types,
                hasher=self._hasher,
                recovered_bundle=recovered.bundle,
            )
            for start, end in map(span_of, recovered.unfired_windows):
                self._assigner.pin(start, end)
                self.panes[start] = {}
                self.spilled.recover_window(start, closed=False)
        for subkey in recovered.closed_windows:
            start, end = span_of(subkey)
            # Until the low watermark has passed its end and lateness, panes of it may wait.
            if end + self._allowed_us <= recovered.low_watermark and not self.spilled.reads_before_expiry:
                self.spilled.expired.append((subkey, recovered.bundle))
                continue
            self._assigner.pin(start, end)
            self.panes[start] = {}
            self.spilled.recover_window(start, closed=True)

    def _add_loaded(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Add panes that were loaded from the store."""
        self.recover(entries, key_types)
        self.weights.panes += len(entries)

    def open_bytes(self) -> int:
        """Return the memory of the windows that are not closed."""
        first_end, weights, end_of = self.first_open_end(), self.weights, self._assigner.end_of
        found = [panes for start, panes in self.panes.items() if panes and end_of(start) >= first_end]
        beyond = (
            sum(weights.large.get(id(pane), 0) for panes in found for pane in panes.values()) if weights.large else 0
        )
        return sum(map(len, found)) * weights.each + beyond

    def first_open_end(self) -> Instant:
        """Return the end of the first window that is not closed: those that end before it have fired."""
        return self.next_end()

    def has_left(self, pane: OpenPane) -> bool:
        """Tell whether a pane of a closed window needs nothing more but late records."""
        return pane.emitted

    def recover(self, entries: Entries, key_types: tuple[type, ...]) -> None:
        """Load stored panes; called for each part of the stored state."""
        if isinstance(self.spilled, UnfiredWindows) and None in entries.values:
            self.spilled.note_deleted(entries)
        values = [value for value in entries.values if value is not None]
        stored = list(map(is_not, entries.values, repeat(None)))
        texts, subkeys = list(compress(entries.keys, stored)), list(compress(entries.subkeys, stored))
        keys = {text: key_from_text(text, key_types) for text in set(texts)}
        of_window: dict[str, PanesByKey] = {}
        for subkey in dict.fromkeys(subkeys):
            start, _, end = subkey.partition("/")
            if int(start) not in self.panes:
                self.panes[int(start)] = {}
                self._assigner.pin(int(start), int(end))
            of_window[subkey] = self.panes[int(start)]
        taken = decode_panes(values, self._accumulators)
        for text, subkey, pane in zip(texts, subkeys, taken, strict=True):
            of_window[subkey][keys[text]] = pane
        self.weights.weigh(taken, texts, values)

    def finish_recovery(self) -> None:
        """Build the queues by due time, after all stored panes have been loaded."""
        self.weights.panes = sum(map(len, self.panes.values()))
        for start, panes in self.panes.items():
            emitted = all(pane.emitted for pane in panes.values()) and not is_unread(self.spilled, start)
            self._queue(start, emitted=emitted)
        self._recover_holds()

    def _recover_holds(self) -> None:
        if self.holds is not None:
            for start, panes in self.panes.items():
                for key in panes:
                    self.holds.add((start, key))

    def get_or_open(self, start: int) -> PanesByKey:
        """Return the panes of a window. Open the window if it is not open."""
        panes = self.panes.get(start)
        if panes is None:
            panes = self.panes[start] = {}
            self._queue(start, emitted=False)
        return panes

    def open(self, start: int, panes: PanesByKey, emitted: bool) -> int:
        """Open a window with its first panes; `emitted` tells whether they fire in this turn. Return their number."""
        self.panes[start] = panes
        self.weights.panes += len(panes)
        self._opened[start] = dict(panes)
        self._queue(start, emitted=emitted)
        return len(panes)

    def _queue(self, start: int, *, emitted: bool) -> None:
        end = self._assigner.end_of(start)
        if not emitted:
            self._unfired.add(end, None, start)
        self._unexpired.add(end + self._allowed_us, None, start)

    def changed(self, start: int) -> PanesByKey:
        """Return the mapping of a window's panes that have changed in this bundle; callers add to it."""
        return self._changed.setdefault(start, {})

    def due(self, latest_end: Instant, panes_max: int = UNBOUNDED) -> list[DuePane]:
        """Return the panes to emit, of windows that end by `latest_end`: changed ones, and up to `panes_max` others.

        A window with panes that wait for a later turn has not fired: it holds the low watermark and does not expire.
        Which of its panes wait is decided by the hashes of their keys, so that a new owner decides as the owner before
        it, wherever the panes are.
        """
        while panes_max > 0 and (start := self._unfired.first(latest_end)) is not None:
            keys, is_last = self._next_panes(start, panes_max)
            panes = self.panes[start]
            self.changed(start).update((key, panes[key]) for key in keys)
            panes_max -= len(keys)
            if is_last:
                self._unfired.pop()
        while (start := self._unfired.first(latest_end)) is not None and self._leaves_whole(start):
            self._unfired.pop()
            self._waiting.pop(start, None)
        return [
            (start, end, key, pane)
            for start, panes in self._changed.items()
            if (end := self._assigner.end_of(start)) <= latest_end
            for key, pane in panes.items()
        ]

    def _next_panes(self, start: int, panes_max: int) -> NextPanes:
        """Return up to `panes_max` panes of a window that have neither been emitted nor changed in this turn."""
        panes, changed, known = self.panes[start], self._changed.get(start, {}), self._waiting.pop(start, None)
        if isinstance(self.spilled, UnfiredWindows) and start in self.spilled.unread:
            waiting = [key for key, pane in panes.items() if not pane.emitted and key not in changed]
            return self.spilled.next_panes(start, waiting, panes_max)
        waiting = [key for key in known or panes if not panes[key].emitted and key not in changed]
        if len(waiting) > panes_max and known is None:
            waiting = [key for _, key in sorted(places_of(waiting, self._hasher).items(), reverse=True)]
        if left := waiting[:-panes_max]:
            self._waiting[start] = left
        return NextPanes(waiting[-panes_max:], not left)

    def _leaves_whole(self, start: int) -> bool:
        """Tell whether every pane of a window has been emitted, or is emitted in this turn because it has changed."""
        changed, panes = self._changed.get(start, {}), self.panes[start]
        in_memory = all(pane.emitted or key in changed for key, pane in panes.items())
        return in_memory and not is_unread(self.spilled, start)

    def take_entries(self, watermark: Instant, bundle: int, panes_max: int = UNBOUNDED) -> Entries | None:
        """Expire windows, up to `panes_max` panes, and return the changes of this bundle as entries; None without any.

        A window that opened and expired within the bundle leaves no entry.
        """
        opened, self._opened = self._opened, {}
        changed, self._changed = self._changed, {}
        gone: list[tuple[int, list[Key]]] = []
        while panes_max > 0 and (start := self._unexpired.first(watermark)) is not None:
            waits = self._waits(start)  # its panes have to be emitted first
            if waits and not is_unread(self.spilled, start):
                break
            expired = self._take_emitted(start) if waits else self._take_expired(start, panes_max)
            for touched_panes in (opened.get(start, {}), changed.get(start, {})):
                for key in expired if touched_panes else ():
                    touched_panes.pop(key, None)
            panes_max -= len(expired)
            self.weights.drop(list(expired.values()))
            self._expired_without_pane += self._without_pane(expired)
            self._forget(start, expired)
            gone.append((start, [key for key, pane in expired.items() if pane.bundle]))
            if self.spilled is not None and start not in self.panes:
                self.spilled.expire(start, bundle)
            if waits:
                break
        if isinstance(self.spilled, UnfiredWindows):
            self.spilled.end_turn()
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
        values = encode_panes(touched, self._accumulators)
        self.weights.weigh(touched, entries.keys, values)
        entries.values = [*values, *([None] * (len(entries.keys) - len(touched)))]
        return entries

    def _take_expired(self, start: int, panes_max: int) -> PanesByKey:
        """Remove up to `panes_max` panes of a window that has expired; of many, those of the last keys."""
        panes = self.panes[start]
        if len(panes) <= panes_max:
            self._unexpired.pop()
            return self.panes.pop(start)
        if start != self._leaving_by_key:
            panes = self.panes[start] = dict(sorted(panes.items(), key=itemgetter(0)))
            self._leaving_by_key = start
        return dict(panes.popitem() for _ in range(panes_max))

    def _take_emitted(self, start: int) -> PanesByKey:
        """Remove the panes of an unread window that have come up to be emitted in this turn: the window is over.

        Those that a record has made due stay until the window expires: its other panes are still read, and their rows
        with them.
        """
        assert isinstance(self.spilled, UnfiredWindows), start
        panes = self.panes[start]
        return {key: panes.pop(key) for key in self.spilled.take_passed(start)}

    def _waits(self, start: int) -> bool:
        """Tell whether a window that is over still has panes to emit."""
        return self._assigner.end_of(start) >= self._unfired.next_due()

    def take_expired_without_pane(self) -> int:
        """Return how many panes have expired without being emitted since the last call."""
        expired, self._expired_without_pane = self._expired_without_pane, 0
        return expired

    def _without_pane(self, panes: PanesByKey) -> int:
        """Return how many panes have not been emitted."""
        return sum(not pane.emitted for pane in panes.values())

    def _forget(self, start: int, panes: PanesByKey) -> None:
        """Do nothing: nothing else is known of panes that have expired."""

    def _name(self, entries: Entries, keys: list[Key], start: int, of_window: list[Key]) -> None:
        """Add the keys of a window to `keys`, and its subkeys and fire times to `entries`."""
        keys += of_window
        end = self._assigner.end_of(start)
        entries.subkeys += [f"{start}/{end}"] * len(of_window)
        entries.fire_ats += [end + self._allowed_us] * len(of_window)

    def next_end(self) -> Instant:
        """Return the end of the oldest window that has not fired; INSTANT_MAX without one."""
        return self._unfired.next_due()

    def oldest_end(self) -> Instant:
        """Return the end of the oldest window that holds the low watermark; INSTANT_MAX without one."""
        return self.next_end()

    def next_expiry(self) -> Instant:
        """Return when the next window expires; INSTANT_MAX without one."""
        return self._unexpired.next_due()


class WindowStarts(DueQueue[int]):
    """The starts of windows by the watermark at which they are due."""

    __slots__ = ()

    def is_current(self, key: Key | None, item: int) -> bool:
        """Return True: a window leaves the queue when it fires or expires."""
        return True
