"""How far a worker is, for a person at a terminal: records, their rate, how far event time has come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from millpy.clock import Clock
from millpy.errors import MillError
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, describe
from millpy.runtime.observer import Moments
from millpy.runtime.soft_state import Owned
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker

EVERY_S = 0.5
RATE_OVER_S = 5.0


class Rate:
    """Records a second, over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def of(self, records: int, now: float) -> float:
        """The rate, when there have been so many by now; 0 until that is known."""
        if self._seen and records < self._seen[-1][1]:
            self._seen.clear()  # a turn has failed, or intervals have moved away
        self._seen.append((now, records))
        while self._seen[-1][0] - self._seen[0][0] > RATE_OVER_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0


class Progress:
    """Watches one worker and says twice a second how far it is; an `Observer`. A turn pays nothing for it.

    Args:
        clock: for rates.
        say: shows a line.
    """

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._rate = Rate()
        self._worker: Worker | None = None
        self._next: asyncio.TimerHandle | None = None

    def waiting(self, error: MillError) -> None:
        """There is no worker: why."""
        self._say(f"{error.message}; waiting")

    def begun(self, worker: Worker) -> None:
        """From now on."""
        self._worker = worker
        self._tick()

    def ended(self) -> None:
        """Once more, and no longer."""
        if self._next is not None:
            self._next.cancel()
        self._show()
        self._worker = None

    def holds(self, intervals: Mapping[int, Owned], claimed: int) -> None:
        """Is seen when it is looked at."""

    def committed(self, turn: Turn, at: Moments) -> None:
        """Is seen when it is looked at."""

    def failed(self, error: MillError) -> None:
        """The log says so."""

    def _tick(self) -> None:
        self._show()
        self._next = asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _show(self) -> None:
        intervals = self._worker.holdings.intervals if self._worker is not None else {}
        if not intervals:
            return
        records = records_in(intervals.values())
        rate = self._rate.of(records, self._clock.monotonic())
        watermark = min((interval.low_watermark for interval in intervals.values()), default=INSTANT_MIN)
        self._say(described(records, rate, watermark))


def records_in(intervals: Iterable[Owned]) -> int:
    """How many records the sources among them have brought, else how many the others have taken."""
    own = list(intervals)
    intakes = [interval.intake for interval in own if interval.intake is not None]
    if intakes:
        return sum(intake.counts["injected"] for intake in intakes)
    return sum(count for interval in own for (what, _), count in interval.counters.items() if what == "consumed")


def described(records: int, rate: float, watermark: Instant) -> str:
    """In one line; what matters most comes first, as a narrow terminal cuts the rest."""
    if watermark >= INSTANT_MAX:
        upto = "every source has ended"
    elif watermark <= INSTANT_MIN:
        upto = "event time not known yet"
    else:
        whole = Instant(watermark // 1_000_000 * 1_000_000)
        upto = "event time up to " + describe(whole).replace("+00:00", "Z")
    return f"{records:,} records, {rate:,.0f}/s, {upto}"
