"""The only reader of time and entropy.

Values receive times; only services hold clocks. `now_us` may jump (it is the wall), `monotonic` may not.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Protocol

from millpy.model.time import Instant


class Clock(Protocol):
    """What a service asks for time."""

    def now_us(self) -> Instant:
        """Wall time, µs since the epoch, UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_us(self) -> Instant:
        """Wall time, µs since the epoch, UTC."""
        return Instant(time.time_ns() // 1000)

    def monotonic(self) -> float:
        """Seconds that never run backwards."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for that many seconds."""
        await asyncio.sleep(seconds)


def fresh_identity() -> uuid.UUID:
    """Identity of a process: never the host name, which two processes can share."""
    return uuid.uuid4()
