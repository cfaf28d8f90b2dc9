"""Checks joins behind the source: the joined readings of a device are those of a loop over all pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millpy.testing.simulation.graphs import AFTER_US, BEFORE_US
from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.input import Truth
from millpy.testing.simulation.recount import Follower

Pair = tuple[int, int | None]
"""(left reading, right reading, or None for a left one without a match)."""


@dataclass(slots=True)
class PairJudge:
    """Judges one interval of the join.

    Attributes:
        sides: device -> its readings that were in time: those with even values, and those with odd ones.
        unsure: devices with a reading whose lateness depends on the order of partitions.
        found: device -> the rows of the table.
    """

    follower: Follower
    allowed_us: int
    sides: dict[str, tuple[list[Truth], list[Truth]]] = field(default_factory=dict)
    late: Counter[str] = field(default_factory=Counter)
    unsure: set[str] = field(default_factory=set)
    found: dict[str, Counter[Pair]] = field(default_factory=dict)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in. A row must be expected by then; a turn that is full leaves rows for the next."""
        for truth, least, most in self.follower.advance(commit.observed.cursors):
            self._take(truth, least, most)
        touched = set()
        for row in commit.rows.get("pairs", ()):
            self.found.setdefault(row["device"], Counter())[row["seq"], row["seq_right"]] += 1
            touched.add(row["device"])
        for device in touched - self.unsure:
            if wrong := self.found[device] - self.expected(device):
                yield f"{device} has the rows {sorted(wrong, key=str)[:5]}, which no pair of its readings makes"

    def _take(self, truth: Truth, least: int, most: int) -> None:
        sides = self.sides.setdefault(truth.device, ([], []))
        if truth.at + self.allowed_us < least:
            self.late[truth.device] += 1
            return
        if truth.at + self.allowed_us < most:
            self.unsure.add(truth.device)
        sides[truth.value % 2].append(truth)

    def expected(self, device: str) -> Counter[Pair]:
        """Return the rows that a device has when all that is due has left."""
        left, right = self.sides.get(device, ([], []))
        rows: Counter[Pair] = Counter()
        for one in left:
            matches = [other.seq for other in right if one.at - BEFORE_US <= other.at <= one.at + AFTER_US]
            rows.update((one.seq, seq) for seq in matches)
            if not matches and one.at + AFTER_US + self.allowed_us < self.follower.watermark:
                rows[one.seq, None] += 1
        return rows

    def finished(self) -> Iterator[str]:
        """Yield the rows that are missing."""
        for device in self.found.keys() - self.unsure:
            if (expected := self.expected(device)) != self.found[device]:
                missing = sorted(expected - self.found[device], key=str)
                yield f"{device} lacks the rows {missing[:5]} of {expected.total()}"


def whole_pairs(judges: Sequence[PairJudge]) -> Iterator[str]:
    """Yield the devices that have no row in any interval, and should have some."""
    homes: set[str] = set().union(*(judge.found for judge in judges))
    for judge in judges:
        for device in judge.sides.keys() - homes - judge.unsure:
            if judge.expected(device):
                yield f"pairs: no reading of {device} had an effect"
