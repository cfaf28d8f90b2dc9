"""Timers of one interval: all in memory, with what is due next and what holds the low watermark in O(1).

Each order is a heap whose outdated entries stay until they reach the top (or are too many): an entry counts only while
the book still has that very timer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX, Instant
from millpy.model.timer import TimeDomain, Timer, TimerId, decode_timer, encode_timer

KeyTimers = dict[TimerId, Timer]
_OUTDATED_MIN = 1_000


class TimerBook:
    """The timers and holds of all keys of an interval.

    Attributes:
        by_key: key -> its timers; keys without any are absent. Never changed in place: see `replace`.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, KeyTimers] = {}
        self._count = 0
        self._stopped: set[Key] = set()
        stopped = self._stopped
        self._event = _Order(self.by_key, stopped, lambda t: t.at_us if t.domain == "event" else INSTANT_MAX)
        self._processing = _Order(self.by_key, stopped, lambda t: t.at_us if t.domain == "processing" else INSTANT_MAX)
        self._holds = _Order(self.by_key, frozenset(), lambda timer: timer.hold_us)
        self._before: dict[int, tuple[Key, KeyTimers]] = {}

    def __len__(self) -> int:
        """How many timers and holds are set."""
        return self._count

    def absorb(self, key: Key, domain: str, name: str, at_us: int, value: bytes) -> None:
        """Take a stored timer."""
        timer = decode_timer(cast("TimeDomain", domain), name, at_us, value)
        timers = self.by_key.setdefault(key, {})
        self._count += timer.id not in timers
        timers[timer.id] = timer
        self._index(key, timer)

    def replace(self, key: Key, code: int, timers: KeyTimers) -> None:
        """Make `timers` the key's; what differs goes into this turn's entries. O(changes · log n)."""
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
        """Let none of a key's timers become due; they hold what they hold."""
        self._stopped.add(key)

    def go_on(self, key: Key) -> None:
        """Let a key's timers become due again."""
        self._stopped.discard(key)
        for timer in self.by_key.get(key, {}).values():
            self._index(key, timer)

    def oldest_hold(self) -> Instant:
        """Smallest time at which a timer or hold keeps the low watermark back."""
        return self._holds.first()

    def next_due(self) -> tuple[Instant, Instant]:
        """(event time, processing time) of the next timers."""
        return self._event.first(), self._processing.first()

    def due_keys(self, watermark: Instant, now_us: Instant) -> list[Key]:
        """Keys with a due timer, in due order of their first one. Nothing is taken out."""
        found = dict.fromkeys(self._event.due(watermark))
        found.update(dict.fromkeys(self._processing.due(now_us)))
        return list(found)

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> list[Entries]:
        """This turn's changes, one `Entries` a domain."""
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
        for order in (self._event, self._processing, self._holds):
            order.add(key, timer, self._count)


class _Order:
    """Timers by one of their times; those at INSTANT_MAX and those of stopped keys are left out."""

    def __init__(
        self, by_key: Mapping[Key, KeyTimers], stopped: Container[Key], time_of: Callable[[Timer], Instant]
    ) -> None:
        self._by_key = by_key
        self._stopped = stopped
        self._time_of = time_of
        self._heap: list[tuple[Instant, str, int, Key, Timer]] = []
        self._added = 0

    def add(self, key: Key, timer: Timer, live: int) -> None:
        """Index a timer that the book has."""
        time = self._time_of(timer)
        if time >= INSTANT_MAX:
            return
        self._added += 1  # keeps the comparison away from keys and timers
        heappush(self._heap, (time, timer.name, self._added, key, timer))
        if len(self._heap) > 2 * live + _OUTDATED_MIN:
            self._heap = [item for item in self._heap if self._counts(item[3], item[4])]
            heapify(self._heap)

    def first(self) -> Instant:
        """The smallest time, INSTANT_MAX without any."""
        heap = self._heap
        while heap and not self._counts(heap[0][3], heap[0][4]):
            heappop(heap)
        return heap[0][0] if heap else INSTANT_MAX

    def due(self, until: Instant) -> Iterator[Key]:
        """Keys of the timers at or before `until`, in order."""
        kept = []
        while self._heap and self._heap[0][0] <= until:
            item = heappop(self._heap)
            if self._counts(item[3], item[4]):
                kept.append(item)
        for item in kept:
            heappush(self._heap, item)
        return iter([item[3] for item in kept])

    def _counts(self, key: Key, timer: Timer) -> bool:
        timers = self._by_key.get(key)
        return timers is not None and timers.get(timer.id) is timer and key not in self._stopped
