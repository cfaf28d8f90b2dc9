"""Whether a source is still worth reading: the share of its newest records that was set aside."""

from __future__ import annotations

from collections import deque

from millpy.injectors.settings import Rate
from millpy.model.checkpoint import Pause


class Health:
    """The newest bundles of one source partition, as far as `limit.minimum` records need them; soft state."""

    def __init__(self, limit: Rate | None) -> None:
        self._limit = limit
        self._bundles: deque[tuple[int, int]] = deque()
        self._records = 0
        self._set_aside = 0

    def count(self, records: int, set_aside: int) -> Pause | None:
        """Count a bundle; a pause when more was set aside than is bearable. Counting begins anew behind a pause."""
        limit = self._limit
        if limit is None or not records:
            return None
        self._bundles.append((records, set_aside))
        self._records += records
        self._set_aside += set_aside
        while self._records - self._bundles[0][0] >= limit.minimum:
            old_records, old_set_aside = self._bundles.popleft()
            self._records -= old_records
            self._set_aside -= old_set_aside
        if self._records < limit.minimum or self._set_aside <= limit.share * self._records:
            return None
        reason = f"{self._set_aside} of its last {self._records} records were set aside, more than {limit.share:.0%}"
        self._bundles.clear()
        self._records = self._set_aside = 0
        return Pause(reason)
