"""The timers of the key in hand, by when they fire: heaps whose outdated entries stay until they reach the top.

Made once a key and step, when something may be due; what calls set meanwhile is added. An entry counts while the key
still has that very timer.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from millpy.model.time import Instant
from millpy.model.timer import Timer, TimerId

Entry = tuple[Instant, str, int, Timer]


class DueTimers:
    """Timers of one key by domain, then in due order."""

    def __init__(self, pending: Mapping[TimerId, Timer]) -> None:
        self._added = len(pending)
        self._event: list[Entry] = []
        self._processing: list[Entry] = []
        for place, timer in enumerate(pending.values()):
            if timer.domain != "hold":
                self._of(timer).append((timer.at_us, timer.name, place, timer))
        heapify(self._event)
        heapify(self._processing)

    def add(self, timer: Timer) -> None:
        """A timer that was set."""
        if timer.domain != "hold":
            self._added += 1  # keeps the comparison away from timers
            heappush(self._of(timer), (timer.at_us, timer.name, self._added, timer))

    def next(self, pending: Mapping[TimerId, Timer], watermark: Instant, now_us: Instant | None) -> Timer | None:
        """The first that is due: event timers before processing timers; without `now_us`, only event timers."""
        timer = _first(self._event, pending)
        if timer is not None and timer.at_us <= watermark:
            return timer
        timer = None if now_us is None else _first(self._processing, pending)
        return timer if timer is not None and now_us is not None and timer.at_us <= now_us else None

    def _of(self, timer: Timer) -> list[Entry]:
        return self._event if timer.domain == "event" else self._processing


def _first(heap: list[Entry], pending: Mapping[TimerId, Timer]) -> Timer | None:
    while heap and pending.get(heap[0][3].id) is not heap[0][3]:
        heappop(heap)
    return heap[0][3] if heap else None
