"""Clocks: the only module that reads time and entropy.

Values receive times; only services hold clocks. `now_us` is wall time and may jump; `monotonic` never runs backwards.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Protocol

from millpy.model.time import Instant


class Clock(Protocol):
    """The clocks of a service: wall time, monotonic time and sleep."""

    def now_us(self) -> Instant:
        """Return wall time in µs since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds of a clock that never runs backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class SystemClock:
    """The clocks of this machine."""

    def now_us(self) -> Instant:
        """Return wall time in µs since the epoch, UTC."""
        return Instant(time.time_ns() // 1000)

    def monotonic(self) -> float:
        """Return seconds of a clock that never runs backwards."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)


def random_id() -> uuid.UUID:
    """Return a random id, for example of a worker: two processes can share a host name or a process number."""
    return uuid.uuid4()
