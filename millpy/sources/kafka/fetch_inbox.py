"""The records that were fetched from a Kafka partition and wait to be taken."""

from __future__ import annotations

from collections import deque

import numpy as np

from millpy.ingest.protocol import TakeBound
from millpy.sources.kafka.record_columns import RecordColumns


class FetchInbox:
    """Fetched records in order, in the runs in which they came.

    Attributes:
        records: the number of records that wait.
        bytes: the bytes of their content.
    """

    def __init__(self) -> None:
        self._runs: deque[RecordColumns] = deque()
        self.records = self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def first_offset(self) -> int:
        """The offset of the first record that waits."""
        return self._runs[0].first_offset

    def add(self, run: RecordColumns) -> None:
        """Append records."""
        if len(run):
            self._runs.append(run)
            self._count(run, 1)

    def put_back(self, run: RecordColumns) -> None:
        """Put records that were taken, and did not fit, to the front again."""
        if len(run):
            self._runs.appendleft(run)
            self._count(run, 1)

    def take(self, bound: TakeBound) -> RecordColumns:
        """Remove at most a bundle from the front, at least one record; cut a run that alone is too large."""
        found: list[RecordColumns] = []
        records = size = 0
        while self._runs and records < bound.records and size < bound.bytes:
            run = self._runs[0]
            fits = records + len(run) <= bound.records and size + run.size <= bound.bytes
            if not fits and found:
                break
            self._runs.popleft()
            self._count(run, -1)
            if not fits:
                first = run.rows(0, bound.records)
                count = max(1, int(np.searchsorted(np.cumsum(first.sizes()), bound.bytes, side="right")))
                self.put_back(run.rows(count))
                run = first.rows(0, count)
            found.append(run)
            records, size = records + len(run), size + run.size
        return RecordColumns.joined(found)

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self.records = self.bytes = 0

    def _count(self, run: RecordColumns, sign: int) -> None:
        self.records += sign * len(run)
        self.bytes += sign * run.size
