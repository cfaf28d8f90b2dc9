"""Timers of one interval: all in memory; the next due timer and the oldest hold are found in O(1).

A timer in a queue counts only while the book still has that same timer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import cast

from millpy.model.checkpoint import Entries, Kind
from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant
from millpy.model.timer import TimeDomain, Timer, TimerId, decode_timer, encode_timer

KeyTimers = dict[TimerId, Timer]


class TimerBook:
    """The timers and holds of all keys of an interval.

    Attributes:
        by_key: key -> its timers; keys without timers are absent. The values are never changed in place: see `replace`.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, KeyTimers] = {}
        self._count = 0
        self._stopped: set[Key] = set()
        self._event = _TimersOfInterval(self.by_key, self._stopped)
        self._processing = _TimersOfInterval(self.by_key, self._stopped)
        self._holds = _TimersOfInterval(self.by_key, frozenset())
        self._before: dict[int, tuple[Key, KeyTimers]] = {}

    def __len__(self) -> int:
        """Return the number of timers and holds that are set."""
        return self._count

    def absorb(self, key: Key, domain: str, name: str, at_us: int, value: bytes) -> None:
        """Load a stored timer."""
        timer = decode_timer(cast("TimeDomain", domain), name, at_us, value)
        timers = self.by_key.setdefault(key, {})
        self._count += timer.id not in timers
        timers[timer.id] = timer
        self._index(key, timer)

    def replace(self, key: Key, code: int, timers: KeyTimers) -> None:
        """Replace a key's timers; the difference goes into this turn's entries. O(changes · log n)."""
        before = self.by_key.get(key, {})
        self._before.setdefault(code, (key, before))
        if timers:
            self.by_key[key] = timers
        else:
            self.by_key.pop(key, None)
        self._count += len(timers) - len(before)
        for timer_id, timer in timers.items():
            if before.get(timer_id) is not timer:
                self._index(key, timer)

    def stop(self, key: Key) -> None:
        """Keep a key's timers from becoming due; they still hold the low watermark."""
        self._stopped.add(key)

    def resume(self, key: Key) -> None:
        """Let a key's timers become due again."""
        self._stopped.discard(key)
        for timer in self.by_key.get(key, {}).values():
            self._index(key, timer)

    def oldest_hold(self) -> Instant:
        """Return the smallest time at which a timer or hold keeps the low watermark back."""
        return self._holds.next_due()

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (event time, processing time) of the next timers."""
        return self._event.next_due(), self._processing.next_due()

    def due_keys(self, watermark: Instant, now_us: Instant, timers_max: int) -> tuple[list[Key], bool]:
        """Return the keys with a due timer, in due order of their first timer, and whether these are all.

        Of either domain the first `timers_max` timers count.
        """
        event = self._event.due_keys(watermark, timers_max)
        processing = self._processing.due_keys(now_us, timers_max)
        return list(dict.fromkeys([*event, *processing])), max(len(event), len(processing)) < timers_max

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> list[Entries]:
        """Return this turn's changes, one `Entries` per domain, and forget them; texts and hashes are by code."""
        changed, self._before = self._before, {}
        found: dict[TimeDomain, Entries] = {}

        def entries(domain: TimeDomain) -> Entries:
            if domain not in found:
                found[domain] = Entries(Kind.TIMER, domain)
            return found[domain]

        for code, (key, before) in changed.items():
            after = self.by_key.get(key, {})
            for domain, name in before.keys() - after.keys():
                entries(domain).add(texts[code], hashes[code], name, None)
            for timer_id, timer in after.items():
                if before.get(timer_id) != timer:
                    entry = encode_timer(timer)
                    entries(timer.domain).add(texts[code], hashes[code], timer.name, entry, timer.at_us)
        return list(found.values())

    def _index(self, key: Key, timer: Timer) -> None:
        if timer.domain != "hold" and timer.at_us < INSTANT_MAX:
            queue = self._event if timer.domain == "event" else self._processing
            queue.add(timer.at_us, key, timer, timer.name, self._count)
        if timer.hold_us < INSTANT_MAX:
            self._holds.add(timer.hold_us, key, timer, timer.name, self._count)


class _TimersOfInterval(DueQueue[Timer]):
    __slots__ = ("_by_key", "_stopped")

    def __init__(self, by_key: Mapping[Key, KeyTimers], stopped: Container[Key]) -> None:
        super().__init__()
        self._by_key = by_key
        self._stopped = stopped

    def is_current(self, key: Key | None, item: Timer) -> bool:
        """Tell whether the book still has that timer, and its key is not stopped."""
        timers = None if key is None else self._by_key.get(key)
        return timers is not None and timers.get(item.id) is item and key not in self._stopped
