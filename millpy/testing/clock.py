"""Clocks that a test moves.

ManualClock   elapsed time, moved by hand; sleepers wake when it has moved far enough
SkewedClock   one machine's view of it: the wall clock may jump, the machine may run slow or fast
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
        """Return the wall time, µs since the epoch."""
        return Instant(self._start_us + self._elapsed_us)

    def monotonic(self) -> float:
        """Return the seconds since the start."""
        return self._elapsed_us / 1e6

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has advanced by `seconds`."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self.monotonic() + seconds, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_at(self, when_s: float, callback: Callable[[], None]) -> None:
        """Call `callback` when the clock reaches `when_s`. Callbacks of one time run in the order of these calls."""
        heappush(self._alarms, (max(self._elapsed_us, round(when_s * 1e6)), next(self._order), callback))

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`; run the callbacks that fall due, each at its own time."""
        until = self._elapsed_us + round(seconds * 1e6)
        while self._alarms and self._alarms[0][0] <= until:
            self._ring()
        self._elapsed_us = until

    def advance_to_next(self) -> bool:
        """Advance to the next callback and run all callbacks of that time. Return False if there is none."""
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
    """The clocks of one machine, which deviate from a ManualClock.

    Args:
        true: the clock that all machines share.
        rate: the seconds that this machine counts in a true second.
        offset_us: how far its wall clock is ahead.
    """

    def __init__(self, true: ManualClock, rate: float = 1.0, offset_us: int = 0) -> None:
        self._true = true
        self._rate = rate
        self._offset_us = offset_us
        self._since = true.monotonic()
        self._counted = 0.0

    def now_us(self) -> Instant:
        """Return this machine's wall time."""
        return Instant(self._true.now_us() + self._offset_us + round((self.monotonic() - self._true.monotonic()) * 1e6))

    def monotonic(self) -> float:
        """Return this machine's seconds, which never run backwards."""
        return self._counted + (self._true.monotonic() - self._since) * self._rate

    async def sleep(self, seconds: float) -> None:
        """Wait for seconds of this machine."""
        await self._true.sleep(max(0.0, seconds) / self._rate)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back."""
        self._offset_us += round(seconds * 1e6)

    def drift(self, rate: float) -> None:
        """Change the rate from now on."""
        self._counted = self.monotonic()
        self._since = self._true.monotonic()
        self._rate = rate
