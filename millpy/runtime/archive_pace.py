"""When a worker's archives take input, so that their files are not small, and a place that is away stops no one else.

An archive that keeps up takes what waits for it every `every_s` seconds, in segments. It takes it earlier if enough for
a file waits, or if the input has ended. A large bundle of a local producer goes to it in memory, like to any consumer.

When the place of the archives cannot be written, they take nothing until it can (`hold`, `resume`). What is for them
waits in segments, and the other computations of the worker continue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from millpy.hosting.interval_state import IntervalState
from millpy.hosting.plan import Plan
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX
from millpy.store.protocol import PollResult, SegmentQuery


class ArchivePace:
    """Decides when the archives among a worker's intervals take input.

    Args:
        plan: the deployed graph.
        limits: `archive_bytes_min` is the size of a bundle, and of what waits, that is enough for a file.
        every_s: seconds between two polls of archives that keep up.

    Attributes:
        held: why the place of the archives cannot be written, so that they take nothing; None if it can.
    """

    def __init__(self, plan: Plan, limits: Limits, every_s: float) -> None:
        self._archives = frozenset(interval.interval_id for c in plan if c.archives for interval in c.intervals)
        self._bytes_min = limits.archive_bytes_min
        self._every_s = every_s
        self._due_at = float("-inf")
        self._heads: dict[tuple[int, int], int] = {}
        self.held: str | None = None

    @property
    def exists(self) -> bool:
        """Whether the graph has archives."""
        return bool(self._archives)

    def hold(self, why: str) -> None:
        """Let the archives take nothing from the next turn on."""
        self.held = why

    def resume(self) -> None:
        """Let the archives take what waits for them."""
        self.held, self._due_at = None, float("-inf")

    def apply(self, intervals: Mapping[int, IntervalState]) -> None:
        """Tell the archives among these intervals which bundles reach them in memory."""
        for interval_id in self._archives & intervals.keys():
            intervals[interval_id].memory_bytes_min = self._bytes_min if self.held is None else sys.maxsize

    def due(
        self, queries: Sequence[SegmentQuery], intervals: Mapping[int, IntervalState], now: float
    ) -> list[SegmentQuery]:
        """Return the queries without those of archives, if these do not take input now."""
        of_archives = [query for query in queries if query.consumer in self._archives]
        if not of_archives or self._is_due(of_archives, intervals, now):
            return list(queries)
        return [query for query in queries if query.consumer not in self._archives]

    def due_at(self) -> float:
        """Return when the archives take input if nothing else makes them, in seconds on the monotonic clock."""
        return float("inf") if self.held is not None else self._due_at

    def polled(self, answers: Iterable[PollResult], intervals: Mapping[int, IntervalState], now: float) -> None:
        """Learn from a poll how far the producers of archives are."""
        heads = {
            (answer.query.consumer, answer.query.producer): answer.head_seq
            for answer in answers
            if answer.query.consumer in self._archives
        }
        if not heads:
            return
        self._heads, self._due_at = heads, now + self._every_s
        for consumer, _ in heads:
            intervals[consumer].waiting_bytes = 0

    def _is_due(self, queries: Sequence[SegmentQuery], intervals: Mapping[int, IntervalState], now: float) -> bool:
        if self.held is not None:
            return False
        return now >= self._due_at or any(
            query.after < self._heads.get((query.consumer, query.producer), 0)
            or intervals[query.consumer].waiting_bytes >= self._bytes_min
            or ((producer := intervals.get(query.producer)) is not None and producer.low_watermark >= INSTANT_MAX)
            for query in queries
        )
