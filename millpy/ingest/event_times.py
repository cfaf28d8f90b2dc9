"""Event times of a batch's rows: of a field, or of their arrival; and the count of local times that are not unique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.ingest.dead_letters import DeadLetterCollector
from millpy.ingest.decode import DecodeResult
from millpy.ingest.local_times import LocalTimeCounts, TimeReader
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import Unit
from millpy.ingest.timestamps import DATETIME_HI, DATETIME_LO, instants_of_numbers
from millpy.model.checkpoint import Request
from millpy.model.record import Instants, Mask, column_of, getter
from millpy.model.time import INSTANT_MIN, instant


class LocalTimeCounters:
    """The records of a source whose local time comes twice in the night of a change, or is skipped there.

    Args:
        reader: reads and counts them.
    """

    def __init__(self, reader: TimeReader) -> None:
        self._reader = reader
        self.counts = {"repeated_times": 0, "skipped_times": 0}

    def absorb(self, name: str, count: int) -> None:
        """Continue a stored count."""
        if name in self.counts:
            self.counts[name] = count

    def take(self, *, replayed: bool) -> None:
        """Add what the reader has counted since the last call, unless it was of replayed records."""
        found, self._reader.counts = self._reader.counts, LocalTimeCounts()
        if not replayed:
            self.counts["repeated_times"] += found.repeated
            self.counts["skipped_times"] += found.skipped


def rising_arrivals(letters: DeadLetterCollector, fresh: Mask, floor: int) -> Instants:
    """Return the arrivals of all decoded rows. They never fall, nor are they below `floor`; those of replays stay."""
    assert letters.arrivals is not None
    times: Instants = letters.arrivals[letters.decoded.rows]
    if letters.requests or not len(times):
        return times
    # Rows that are not accepted leave no trace, so that results do not depend on the bundle that they are in (I9).
    before = np.maximum.accumulate(np.where(fresh, times, INSTANT_MIN))
    return np.maximum(np.maximum(times, before), floor)


def arrivals_of(taken: SourceBatch, requests: Sequence[Request] = ()) -> Instants:
    """Return the time at which each row of a batch arrived, in µs; of a replay, when it arrived first."""
    if requests:
        known = [request.event_time for request in requests]
        return np.array([taken.arrived_at if at is None else at for at in known], np.int64)
    count = len(taken.batch) if taken.batch is not None else len(taken.payloads) or taken.block.count(b"\n") + 1
    if taken.arrivals is None:
        return np.full(count, taken.arrived_at, np.int64)
    found = taken.arrivals()
    return np.where(found < 0, taken.arrived_at, np.minimum(found, taken.arrived_at))


def field_times(decoded: DecodeResult, name: str, unit: Unit | None) -> tuple[Instants, Mask]:
    """Return the times in a field of all decoded rows, and which of them are valid; invalid ones are 0."""
    if decoded.objects is not None:
        values: list[Any] = list(map(getter(name), decoded.objects))
        timed = np.array([v is not None for v in values], bool)
        if unit is None:
            moments = [0 if v is None else instant(v) for v in values]
            return np.array(moments, np.int64), timed
        kind = np.float64 if any(isinstance(v, float) for v in values) else np.int64
        numbers: Any = np.array([0 if v is None else v for v in values], kind)
    else:
        assert decoded.batch is not None
        column = column_of(decoded.batch, name)
        timed = column.is_valid().to_numpy(zero_copy_only=False)
        if unit is None:
            times = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            return times, timed & (times >= DATETIME_LO) & (times <= DATETIME_HI)
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
    times, possible = instants_of_numbers(numbers, unit)
    return times, timed & possible
