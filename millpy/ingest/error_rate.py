"""The share of dead letters among a source's newest records, which may pause the source."""

from __future__ import annotations

from collections import deque

from millpy.ingest.settings import ErrorRate
from millpy.model.checkpoint import Pause


class RecentErrorRate:
    """Counts dead letters among the newest bundles of a source partition that hold `limit.minimum` records; soft state.

    Without a limit, it never asks for a pause.
    """

    def __init__(self, limit: ErrorRate | None) -> None:
        self._limit = limit
        self._bundles: deque[tuple[int, int]] = deque()
        self._records = 0
        self._dead_letters = 0

    def count(self, records: int, dead_letters: int) -> Pause | None:
        """Count a bundle. If the share of dead letters now exceeds the limit, return a pause and forget all bundles."""
        limit = self._limit
        if limit is None or not records:
            return None
        self._bundles.append((records, dead_letters))
        self._records += records
        self._dead_letters += dead_letters
        while self._records - self._bundles[0][0] >= limit.minimum:
            old_records, old_letters = self._bundles.popleft()
            self._records -= old_records
            self._dead_letters -= old_letters
        if self._records < limit.minimum or self._dead_letters <= limit.share * self._records:
            return None
        reason = (
            f"{self._dead_letters} of the last {self._records} records are dead letters, more than {limit.share:.0%}"
        )
        self._bundles.clear()
        self._records = self._dead_letters = 0
        return Pause(reason)
