"""How long turns and commits took in the last minute, in bounded memory, for `millpy.workers`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

from millpy.model.lease import WorkerUsage
from millpy.runtime.observer import TurnTimes

SLICE_S = 10
SLICES = 6
"""The slices of a minute; the newest one is not over."""
SHORTEST_S = 0.0001
PER_DOUBLING = 8
"""A bucket ends 9 % above its start, so a quantile, which is shown as the middle of its bucket, is right within 5 %."""
BUCKETS = 25 * PER_DOUBLING
"""The last one begins at 51 minutes, and has all that is longer."""
STATM = Path("/proc/self/statm")


class LatencyHistogram:
    """Counts durations of the last minute in buckets. One thread adds; any may read."""

    def __init__(self) -> None:
        self._slices = [(-SLICES, [0] * BUCKETS)] * SLICES

    def add(self, now: float, seconds: float) -> None:
        """Count a duration that ended at `now`, in seconds on the monotonic clock."""
        number = int(now // SLICE_S)
        at = number % SLICES
        if self._slices[at][0] != number:
            self._slices[at] = (number, [0] * BUCKETS)
        bucket = int(PER_DOUBLING * math.log2(max(seconds, SHORTEST_S) / SHORTEST_S))
        self._slices[at][1][min(bucket, BUCKETS - 1)] += 1

    def quantiles(self, now: float, *shares: float) -> list[float | None]:
        """Return the durations in seconds that these shares of the last minute's do not exceed; None without any."""
        newest = int(now // SLICE_S)
        recent = [counts for number, counts in self._slices if newest - SLICES < number <= newest]
        summed = list(itertools.accumulate(map(sum, zip(*recent, strict=True))))
        if not summed or not summed[-1]:
            return [None] * len(shares)
        buckets = (next(at for at, count in enumerate(summed) if count >= share * summed[-1]) for share in shares)
        return [SHORTEST_S * 2 ** ((bucket + 0.5) / PER_DOUBLING) for bucket in buckets]


class TurnLatencies:
    """The durations of a worker's turns and commits."""

    def __init__(self) -> None:
        self._turns = LatencyHistogram()
        self._commits = LatencyHistogram()

    def add(self, times: TurnTimes) -> None:
        """Count a committed turn."""
        self._turns.add(times.committed, times.committed - times.gathered)
        self._commits.add(times.committed, times.committed - times.sent)

    def usage(self, monotonic: Callable[[], float]) -> WorkerUsage:
        """Return what the worker has used in the last minute, and the memory of this process."""
        now = monotonic()
        return WorkerUsage(
            resident_bytes(), *self._turns.quantiles(now, 0.5, 0.99), *self._commits.quantiles(now, 0.5, 0.99)
        )


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system has no /proc."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
