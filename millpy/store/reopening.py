"""How far the end of a source partition, and of the intervals behind it, is set back when the partition is read on.

An interval has reached the end when its input watermark is INSTANT_MAX. The partition continues at the watermark that
it had before its end; so do the intervals behind it that have reached the end. A step with other inputs that have not
ended has a finite watermark, which never goes back (I5), so the partition begins at that if it is later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millpy.model.time import INSTANT_MAX, Instant, describe


@dataclass(frozen=True, slots=True)
class IntervalBehind:
    """The watermarks of an interval of a computation behind the partition."""

    interval_id: int
    computation: str
    input_watermark: Instant
    low_watermark: Instant


@dataclass(frozen=True, slots=True)
class ReopenedPartition:
    """From where the partition continues, and the intervals behind it whose end is set back with it."""

    watermark: Instant
    intervals: Sequence[IntervalBehind]

    def described(self, ends: Mapping[str, Instant]) -> dict[str, object]:
        """Describe it for an event, with the closed end of each step."""
        steps = sorted({one.computation for one in self.intervals} & ends.keys())
        closed = {step: describe(ends[step]) for step in steps}
        return {"watermark": describe(self.watermark), "windows_are_closed_to": closed}


def reopened(watermark: Instant, behind: Sequence[IntervalBehind]) -> ReopenedPartition | None:
    """Return how a partition continues, given its watermark before the end; None if the end is not processed yet."""
    ended = [one for one in behind if one.input_watermark >= INSTANT_MAX]
    if any(one.low_watermark < INSTANT_MAX for one in ended):
        return None
    others = [one.input_watermark for one in behind if one.input_watermark < INSTANT_MAX]
    return ReopenedPartition(max([watermark, *others]), ended)
