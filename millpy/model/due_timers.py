"""The timers of one key during a step, in due order.

The queues are made when a timer may be due; timers that calls set meanwhile are added. A timer that is deleted or moved
is outdated.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpy.model.due_queue import DueQueue
from millpy.model.keys import Key
from millpy.model.time import Instant
from millpy.model.timer import Timer, TimerId


class DueTimers:
    """The event timers and the processing timers of one key, each in due order."""

    __slots__ = ("_event", "_processing")

    def __init__(self, pending: Mapping[TimerId, Timer]) -> None:
        self._event: _TimersOfKey | None = None
        self._processing: _TimersOfKey | None = None
        for timer in pending.values():
            self.add(timer)

    def add(self, timer: Timer) -> None:
        """Add a timer that a call has set."""
        if timer.domain == "event":
            queue = self._event = self._event or _TimersOfKey()
        elif timer.domain == "processing":
            queue = self._processing = self._processing or _TimersOfKey()
        else:
            return
        queue.add(timer.at_us, None, timer, timer.name)

    def next_to_fire(
        self, pending: Mapping[TimerId, Timer], watermark: Instant, now_us: Instant | None
    ) -> Timer | None:
        """Return the first timer that is due; None if no timer is.

        Event timers up to `watermark` come first, then processing timers up to `now_us`. If `now_us` is None, no
        processing timer is due. `pending` has the key's timers at this moment.
        """
        timer = None if self._event is None else self._event.first_of(pending, watermark)
        if timer is None and now_us is not None and self._processing is not None:
            return self._processing.first_of(pending, now_us)
        return timer


class _TimersOfKey(DueQueue[Timer]):
    __slots__ = ("_pending",)

    def first_of(self, pending: Mapping[TimerId, Timer], until: Instant) -> Timer | None:
        """Return the first timer of those that are set if it is due by `until`, else None."""
        self._pending = pending
        return self.first(until)

    def is_current(self, key: Key | None, item: Timer) -> bool:
        """Tell whether the key still has that timer."""
        return self._pending.get(item.id) is item
