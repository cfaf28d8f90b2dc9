"""Checks the lookup behind the source: the version of the table in a commit explains all rows of the bundle.

They are those of one content of the table, and of the same content whenever that version occurs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.lookup_table import CONTENTS, LOOKED_UP, TABLE, hall_of
from millpy.testing.simulation.recount import Follower


@dataclass(slots=True)
class Contents:
    """The contents that each version may be, by the rows of all bundles with that version."""

    of_version: dict[str, set[int]] = field(default_factory=dict)

    def narrow(self, version: str, halls: Sequence[tuple[str, int | None]]) -> Iterator[str]:
        """Leave the contents that explain some rows; yield if there is none, or one that is another version's."""
        known = self.of_version.get(version, set(range(CONTENTS)))
        left = {content for content in known if all(hall_of(content, device) == hall for device, hall in halls)}
        self.of_version[version] = left
        if not left:
            yield f"version {version} of the table does not explain {halls[:3]}: it may be {sorted(known)[:5]}"
        elif len(left) == 1 and sum(other == left for other in self.of_version.values()) > 1:
            yield f"version {version} of the table has the rows {left} of another version"


@dataclass(slots=True)
class LookupJudge:
    """Judges one interval of the lookup.

    Attributes:
        consumed: device -> its readings.
        found: device -> the readings in rows.
    """

    follower: Follower
    contents: Contents
    consumed: dict[str, Counter[int]] = field(default_factory=dict)
    found: dict[str, Counter[int]] = field(default_factory=dict)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in."""
        for truth, _, _ in self.follower.advance(commit.observed.cursors):
            self.consumed.setdefault(truth.device, Counter())[truth.seq] += 1
        rows = commit.rows.get(LOOKED_UP, [])
        for row in rows:
            self.found.setdefault(row["device"], Counter())[row["seq"]] += 1
        if rows:
            stored = commit.observed.keyed.get(("lookup", "", "", TABLE))
            if stored is None:
                yield f"{len(rows)} rows without a version of the table"
            else:
                yield from self.contents.narrow(stored[0]["version"], [(r["device"], r["hall"]) for r in rows])
        yield from self._compared()

    def _compared(self) -> Iterator[str]:
        for device, found in self.found.items():
            if found != (expected := self.consumed.get(device, Counter())):
                wrong = sorted((expected - found) + (found - expected))
                yield f"{device} lacks the readings {wrong[:5]}, or has them twice"

    def finished(self) -> Iterator[str]:
        """Yield nothing more: every bundle was compared."""
        return iter(())


def whole_lookup(judges: Sequence[LookupJudge]) -> Iterator[str]:
    """Yield the devices that have no row in any interval."""
    homes: set[str] = set().union(*(judge.found for judge in judges))
    for device in sorted({device for judge in judges for device in judge.consumed} - homes):
        yield f"{LOOKED_UP}: no reading of {device} had an effect"
