"""Sessions of a bounded number of records: what is known of their size, and which records they take.

A session that has `max_records` is full. It ends behind its last record, or behind the watermark if that is later, and
does not grow any more: it takes only records inside its span, so that windows of a key never intersect. Records around
it open other sessions, which end where it begins at the latest. Which records fill a session depends on the order in
which they arrive, as far as they are out of order; it does not depend on bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millpy.model.record import Mask
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.accumulator import Accumulator, PartialAggregate
from millpy.windowing.group_by import Groups, Integers
from millpy.windowing.session_assign import ReplayedSession, SessionSpan


class SessionSize(Accumulator):
    """Keeps [number of records, event time of the last one in µs] of a session."""

    result = int
    memory_bytes = 150
    is_small = True

    def __init__(self) -> None:
        super().__init__(None, int)

    def empty(self) -> list[int]:
        """Return the size of no records."""
        return [0, INSTANT_MIN]

    def add(self, accumulator: list[int], value: Any, at: int) -> list[int]:
        """Count a record."""
        return [accumulator[0] + 1, max(accumulator[1], at)]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        """Add up two sizes."""
        return [one[0] + other[0], max(one[1], other[1])]

    def result_of(self, accumulator: list[int]) -> int:
        """Return the number of records."""
        return accumulator[0]

    def aggregate(self, groups: Groups) -> PartialAggregate:
        """Return the size of each group."""
        columns = (groups.counts.tolist(), groups.last_times().tolist())
        return PartialAggregate([[count, last] for count, last in zip(*columns, strict=True)])


@dataclass(slots=True, eq=False)
class _FillingSession(ReplayedSession):
    count: int = 0
    last: int = INSTANT_MIN


@dataclass(frozen=True, slots=True)
class SizeBound:
    """The bound on the records of a session.

    Attributes:
        records_max: number of records with which a session is full.
        size_of: takes an open session; returns [number of records, event time of the last one].
    """

    records_max: int
    size_of: Callable[[Any], Sequence[int]] = field(default=lambda session: session.pane.values[0])

    def may_fill(self, codes: Integers, keys: int, open_sessions: Iterable[tuple[int, Sequence[SessionSpan]]]) -> Mask:
        """Return by key code whether a session of the key may become full, or is."""
        counts = np.bincount(codes, minlength=keys)
        for code, sessions in open_sessions:
            counts[code] += sum(self.size_of(session)[0] for session in sessions)
        found: Mask = counts >= self.records_max
        return found

    def replay(
        self,
        rows: Iterable[tuple[int, int, int, int]],
        allowed_us: int,
        open_sessions: Sequence[SessionSpan],
        floor: Instant = INSTANT_MIN,
    ) -> tuple[list[ReplayedSession], list[int]]:
        """Assign the rows of one key to sessions one by one; see `session_assign.replay`."""
        live = [_FillingSession(span.start, span.end, [span], [], *self.size_of(span)) for span in open_sessions]
        over: list[_FillingSession] = []
        late: list[int] = []
        for row, at, watermark, gap_us in rows:
            over_by = max(watermark - allowed_us, floor)
            if any(session.end <= over_by for session in live):
                over.extend(session for session in live if session.end <= over_by)
                live = [session for session in live if session.end > over_by]
            found = next((one for one in live if one.start <= at < one.end and one.count >= self.records_max), None)
            if found is None:
                full = (session.start for session in live if session.count >= self.records_max)
                end = min(at + gap_us, min((start for start in full if start > at), default=INSTANT_MAX))
                met = [s for s in live if at < s.end and s.start < end and s.count < self.records_max]
                if not met and end <= over_by:
                    continue
                found = self._merged(live, met, at, end)
                found.count, found.last = found.count + 1, max(found.last, at)
                if found.count >= self.records_max:
                    found.end = min(found.end, max(found.last, watermark) + 1)
            found.rows.append(row)
            if found.end <= watermark:
                late.append(row)
        return [session for session in over + live if session.rows], late

    @staticmethod
    def _merged(live: list[_FillingSession], met: list[_FillingSession], at: int, end: int) -> _FillingSession:
        """Merge the sessions that a row meets, in `live`, and return the session that takes the row."""
        if not met:
            live.append(found := _FillingSession(at, end))
            return found
        found = met[0]
        for other in met[1:]:
            found.start, found.end = min(found.start, other.start), max(found.end, other.end)
            found.open += other.open
            found.rows += other.rows
            found.count += other.count
            found.last = max(found.last, other.last)
            live.remove(other)
        found.start, found.end = min(found.start, at), max(found.end, end)
        return found
