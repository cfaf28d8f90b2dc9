"""Judges what has left by a sink: each reading once, in the interval of its device, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.other_side import SENT, SIDE
from millpy.testing.simulation.recount import Follower


@dataclass(slots=True)
class SentJudge:
    """Judges one interval of the sink.

    Attributes:
        interval_id: the interval.
        consumed: device -> its readings that have passed the interval, which takes only those of its own devices.
    """

    interval_id: int
    follower: Follower
    consumed: dict[str, Counter[int]] = field(default_factory=dict)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in; yield what has arrived under a wrong number."""
        for truth, _, _ in self.follower.advance(commit.observed.cursors):
            self.consumed.setdefault(truth.device, Counter())[truth.seq] += 1
        yield from SIDE.get().faults()

    def arrived(self) -> dict[str, Counter[int]]:
        """Return device -> its readings at the other side."""
        found: dict[str, Counter[int]] = {}
        for reading in SIDE.get().inbox(self.interval_id).readings:
            found.setdefault(reading.device, Counter())[reading.seq] += 1
        return found

    def finished(self) -> Iterator[str]:
        """Yield the readings that have not arrived, and those that came twice."""
        for device, found in self.arrived().items():
            expected = self.consumed.get(device, Counter())
            for what, wrong in (("lost", expected - found), ("doubled", found - expected)):
                if wrong:
                    yield f"{SENT} {self.interval_id}: {wrong.total()} of {device} were {what}: {sorted(wrong)[:5]}"


def whole_sink(judges: Sequence[SentJudge]) -> Iterator[str]:
    """Yield the devices of which nothing has arrived."""
    arrived: set[str] = set().union(*(judge.arrived() for judge in judges))
    for device in sorted({device for judge in judges for device in judge.consumed} - arrived):
        yield f"{SENT}: no reading of {device} has arrived"
