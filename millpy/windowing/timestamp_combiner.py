"""The event time of a pane, and the low watermark that an open window holds for it.

    end of window   the last µs of the window; it holds that
    earliest        the least event time of the records that the pane is made for; it holds that
    latest          the greatest

A pane is made for the records since the pane before it. Only those count that were on time, which is not behind the
watermark when they arrived: the watermark is held at them until the pane leaves, so that no consumer gets it too late.
A late record joins its window without holding anything. A pane for late records only has the end of its window.

The rules are those of Beam's `TimestampCombiner` and `WatermarkHold`. Beam compares a record with the watermark of its
output, which the holds of other keys keep back; this compares it with that of its input, because a result must not
depend on other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

import numpy as np

from millpy.model.record import Instants, Mask
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.group_by import Groups
from millpy.windowing.pane_codec import NO_TIME, OpenPane

Item = TypeVar("Item", bound=Hashable)
_OUTDATED_MIN = 1_000


class TimestampCombiner(Enum):
    """The event time of a pane: see `KeyedStream.window`.

    Attributes:
        END_OF_WINDOW: the last µs of the window.
        EARLIEST: the least event time of the records since the pane before that were on time. The step holds its
            watermark there, so that steps behind it wait for the pane.
        LATEST: the greatest one.
    """

    END_OF_WINDOW = "end_of_window"
    EARLIEST = "earliest"
    LATEST = "latest"

    def __repr__(self) -> str:
        return f"TimestampCombiner.{self.name}"

    def combined(self, one: int, other: int) -> int:
        """Return the time of two parts of a pane; NO_TIME is that of a part without records that were on time."""
        if self is TimestampCombiner.EARLIEST:
            return min(one, other)
        return max(one, other) if NO_TIME not in (one, other) else min(one, other)

    def of_records(self, times: Sequence[int], watermarks: Sequence[int]) -> int:
        """Return the time of records, given the watermark that judges each; NO_TIME if all are late."""
        on_time = [at for at, watermark in zip(times, watermarks, strict=True) if at >= watermark]
        if not on_time or self is TimestampCombiner.END_OF_WINDOW:
            return NO_TIME
        return min(on_time) if self is TimestampCombiner.EARLIEST else max(on_time)

    def of_groups(self, groups: Groups, watermarks: Instants) -> Instants | None:
        """Return the time of each group of rows, given the watermark that judges each row.

        None says that times are not combined.
        """
        if self is TimestampCombiner.END_OF_WINDOW:
            return None
        times = groups.records.event_times
        on_time: Mask = times >= watermarks
        if self is TimestampCombiner.EARLIEST:
            return groups.reduced(np.minimum, np.where(on_time, times, NO_TIME))
        latest = groups.reduced(np.maximum, np.where(on_time, times, INSTANT_MIN))
        return np.where(latest == INSTANT_MIN, NO_TIME, latest)


class PaneHolds(Generic[Item]):
    """The times at which open panes hold the low watermark.

    A heap with one entry for each pane that holds, at or before its time: a pane whose time has grown since is put back
    when its entry is the first.

    Args:
        hold_of: returns the time at which a pane holds the watermark; NO_TIME if it does not, or is not open.
    """

    def __init__(self, hold_of: Callable[[Item], int]) -> None:
        self._hold_of = hold_of
        self._heap: list[tuple[int, int, Item]] = []
        self._due: dict[Item, int] = {}
        self._added = 0  # breaks ties, so that the heap never compares items

    def add(self, item: Item) -> None:
        """Note that a pane may hold the watermark, or hold it earlier than before."""
        at = self._hold_of(item)
        if at == NO_TIME or self._due.get(item, NO_TIME) <= at:
            return
        self._added += 1
        self._due[item] = at
        heappush(self._heap, (at, self._added, item))
        if len(self._heap) > 2 * len(self._due) + _OUTDATED_MIN:
            self._heap = [entry for entry in self._heap if self._due.get(entry[2]) == entry[0]]
            heapify(self._heap)

    def oldest(self) -> Instant:
        """Return the first time that is held; INSTANT_MAX without one."""
        while self._heap:
            due, _, item = self._heap[0]
            if self._due.get(item) == due:
                if self._hold_of(item) == due:
                    return Instant(due)
                del self._due[item]
            heappop(self._heap)
            self.add(item)
        return INSTANT_MAX


def hold_of(pane: OpenPane, *, retracts: bool) -> int:
    """Return the time at which an open pane holds the low watermark; NO_TIME if it does not.

    A pane holds until it leaves. A retracting window also holds for its newest pane, until the watermark has passed its
    end: the retraction of that pane has the pane's time.
    """
    firing = pane.firing
    if firing is None:
        return NO_TIME if pane.emitted else pane.at
    if firing.passed and not firing.holds:
        return NO_TIME
    return min(pane.at, pane.newest_at) if retracts and not firing.trigger[0] else pane.at


def time_of(pane: OpenPane, end: int) -> int:
    """Return the event time of the pane that an open window emits next; `end` is that of the window."""
    return end - 1 if pane.at == NO_TIME else pane.at


def newest_time_of(pane: OpenPane, end: int) -> int:
    """Return the event time of the newest pane that a window has emitted; `end` is that of the window."""
    return end - 1 if pane.newest_at == NO_TIME else pane.newest_at
