"""Clocks that stand still until somebody moves them.

ManualClock   elapsed time, moved by hand; whoever sleeps on it wakes when it has moved far enough
SkewedClock   what one machine reads of it: its wall clock may jump, its quartz may be slow or fast
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from millpy.model.time import Instant


class ManualClock:
    """A Clock for tests: time passes only by `advance` and `advance_to_next`.

    Args:
        start_us: wall time at the beginning, µs since the epoch.
    """

    def __init__(self, start_us: int = 1_700_000_000_000_000) -> None:
        self._start_us = start_us
        self._elapsed_us = 0
        self._alarms: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def now_us(self) -> Instant:
        """Wall time, µs since the epoch."""
        return Instant(self._start_us + self._elapsed_us)

    def monotonic(self) -> float:
        """Seconds since the beginning."""
        return self._elapsed_us / 1e6

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved that far."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self.monotonic() + seconds, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call when the clock reaches a time; those of the same time in the order in which they asked."""
        heappush(self._alarms, (max(self._elapsed_us, round(when_s * 1e6)), next(self._order), callback))

    def advance(self, seconds: float) -> None:
        """Let time pass; alarms on the way ring in order, each at its own time."""
        until = self._elapsed_us + round(seconds * 1e6)
        while self._alarms and self._alarms[0][0] <= until:
            self._ring()
        self._elapsed_us = until

    def advance_to_next(self) -> bool:
        """Go to the next alarm and ring all of that moment; False when there is none."""
        if not self._alarms:
            return False
        moment = self._alarms[0][0]
        while self._alarms and self._alarms[0][0] <= moment:
            self._ring()
        return True

    def _ring(self) -> None:
        at, _, callback = heappop(self._alarms)
        self._elapsed_us = max(self._elapsed_us, at)
        callback()


class SkewedClock:
    """One machine's reading of a ManualClock.

    Args:
        true: the clock that everybody's time comes from.
        rate: seconds that this machine counts in a true second.
        offset_us: how far its wall clock is ahead.
    """

    def __init__(self, true: ManualClock, rate: float = 1.0, offset_us: int = 0) -> None:
        self._true = true
        self._rate = rate
        self._offset_us = offset_us
        self._since = true.monotonic()
        self._counted = 0.0

    def now_us(self) -> Instant:
        """This machine's wall time."""
        return Instant(self._true.now_us() + self._offset_us + round((self.monotonic() - self._true.monotonic()) * 1e6))

    def monotonic(self) -> float:
        """This machine's seconds; never run backwards."""
        return self._counted + (self._true.monotonic() - self._since) * self._rate

    async def sleep(self, seconds: float) -> None:
        """Wait for that many of this machine's seconds."""
        await self._true.sleep(max(0.0, seconds) / self._rate)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._offset_us += round(seconds * 1e6)

    def drift(self, rate: float) -> None:
        """Run slower or faster from now on."""
        self._counted = self.monotonic()
        self._since = self._true.monotonic()
        self._rate = rate
