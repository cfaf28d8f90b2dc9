"""Sessions of a bounded number of records: what is known of their size, and which records they take.

A session that has `max_records` is full. It ends behind its last record, or behind the watermark if that is later, and
does not grow any more: it takes only records inside its span, so that windows of a key never intersect. Records around
it open other sessions, which end where it begins at the latest. Which records fill a session depends on the order in
which they arrive, as far as they are out of order; it does not depend on bundles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millpy.model.record import Mask
from millpy.model.time import INSTANT_MIN, Instant
from millpy.windowing.accumulator import Accumulator, PartialAggregate
from millpy.windowing.group_by import Groups, Integers
from millpy.windowing.session_assign import END, START, ReplayedSession, SessionSpan, join_neighbors, take_over


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

    def take(self, other: ReplayedSession) -> None:
        assert isinstance(other, _FillingSession), other
        ReplayedSession.take(self, other)
        self.count += other.count
        self.last = max(self.last, other.last)


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
        rows = list(rows)
        begin = max(rows[0][2] - allowed_us, floor)
        spans = (span for span in open_sessions if span.end > begin)
        live = [_FillingSession(span.start, span.end, [span], [], *self.size_of(span)) for span in spans]
        over: list[_FillingSession] = []
        late: list[int] = []
        for row, at, watermark, gap_us in rows:
            over_by = max(watermark - allowed_us, floor)
            over += take_over(live, over_by)
            first, behind = bisect_right(live, at, key=END), bisect_left(live, at + gap_us, key=START)
            full = next((place for place in range(first, behind) if live[place].count >= self.records_max), None)
            if full is not None and live[full].start <= at:
                found = live[full]
            else:
                end = at + gap_us if full is None else min(at + gap_us, live[full].start)
                behind = behind if full is None else full
                if first < behind:
                    found = join_neighbors(live, first, behind, at, end)
                elif end <= over_by:
                    continue
                else:
                    live.insert(first, found := _FillingSession(at, end))
                found.count, found.last = found.count + 1, max(found.last, at)
                if found.count >= self.records_max:
                    found.end = min(found.end, max(found.last, watermark) + 1)
            found.rows.append(row)
            if found.end <= watermark:
                late.append(row)
        return [session for session in over + live if session.rows], late
