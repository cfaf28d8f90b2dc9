"""The progress of a worker, shown on a terminal: records, their rate, and the event time reached."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from millpy.clock import Clock
from millpy.errors import MillError
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, describe
from millpy.runtime.observer import TurnTimes
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker

EVERY_S = 0.5
RATE_OVER_S = 5.0


class RecordRate:
    """The records per second over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, records: int, now: float) -> float:
        """Return the rate, given the number of records by now; 0 until it is known."""
        if self._seen and records < self._seen[-1][1]:
            self._seen.clear()  # a turn has failed, or intervals have moved away
        self._seen.append((now, records))
        while self._seen[-1][0] - self._seen[0][0] > RATE_OVER_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0


class ProgressReporter:
    """Watches one worker and reports its progress twice a second; an `Observer`. It adds nothing to a turn.

    Args:
        clock: the clock for rates.
        say: the function that shows a line.
    """

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._rate = RecordRate()
        self._worker: Worker | None = None
        self._next: asyncio.TimerHandle | None = None

    def waiting(self, error: MillError) -> None:
        """Show why there is no worker."""
        self._say(f"{error.message}; waiting")

    def begun(self, worker: Worker) -> None:
        """Report this worker's progress from now on."""
        self._worker = worker
        self._tick()

    def ended(self) -> None:
        """Report once more, then stop."""
        if self._next is not None:
            self._next.cancel()
        self._show()
        self._worker = None

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Do nothing: the next report reads the intervals."""

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Do nothing: the next report reads the counts."""

    def failed(self, error: MillError) -> None:
        """Do nothing: the log has the error."""

    def _tick(self) -> None:
        self._show()
        self._next = asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _show(self) -> None:
        intervals = self._worker.owned.intervals if self._worker is not None else {}
        if not intervals:
            return
        records = records_in(intervals.values())
        rate = self._rate.update(records, self._clock.monotonic())
        watermark = min((interval.low_watermark for interval in intervals.values()), default=INSTANT_MIN)
        self._say(described(records, rate, watermark))


def records_in(intervals: Iterable[OwnedInterval]) -> int:
    """Count the records that the sources among the intervals have read; without sources, the records consumed."""
    own = list(intervals)
    intakes = [interval.intake for interval in own if interval.intake is not None]
    if intakes:
        return sum(intake.counts["injected"] for intake in intakes)
    return sum(count for interval in own for (what, _), count in interval.counters.items() if what == "consumed")


def described(records: int, rate: float, watermark: Instant) -> str:
    """Describe progress in one line. The most important comes first, because a narrow terminal cuts the rest."""
    if watermark >= INSTANT_MAX:
        upto = "every source has ended"
    elif watermark <= INSTANT_MIN:
        upto = "event time not known yet"
    else:
        whole = Instant(watermark // 1_000_000 * 1_000_000)
        upto = "event time up to " + describe(whole).replace("+00:00", "Z")
    return f"{records:,} records, {rate:,.0f}/s, {upto}"
