"""The expected watermarks of sites, by plain loops: at the source, and at the windows behind several partitions.

A site is a value of a field; here it is named by that value. At a source partition a site begins with its first
reading, and the sites beyond the bound share one watermark. Behind several partitions a site has the least watermark of
those that have heard of it. As the order in which partitions are consumed within a bundle is not fixed, neither is that
watermark: `SiteFollower` keeps between which two it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from millpy.testing.simulation.graphs import DISORDER_US, Shape, group_of
from millpy.testing.simulation.history import CommittedBundle
from millpy.testing.simulation.input import Truth
from millpy.testing.simulation.oracle import BEGINNING, END, Judged, SourceOracle
from millpy.testing.simulation.recount import Consumed, Cursors, Follower

OTHERS = "others"
"""All sites beyond the bound."""


@dataclass(slots=True)
class SiteSourceOracle(SourceOracle):
    """The expected watermark of each site of a source partition.

    Attributes:
        by_device: whether a site is a device; else it is a group.
        sites_max: the number of sites that do not share a watermark.
        marks: site, or `OTHERS`, -> its watermark.
        by_site: bundle number -> the watermarks after it.
    """

    by_device: bool = False
    sites_max: int = 1_000
    marks: dict[Any, int] = field(default_factory=dict)
    by_site: dict[int, dict[Any, int]] = field(default_factory=lambda: {0: {}})

    def site_of(self, key: Any) -> Any:
        """Return the site of a device or group."""
        return key if self.by_device or isinstance(key, int) else group_of(key)

    def place_of(self, key: Any) -> Any:
        """Return under which name the site of a device or group has its watermark."""
        site = self.site_of(key)
        known = self.marks.keys() - {OTHERS}
        return OTHERS if site not in known and len(known) >= self.sites_max else site

    def mark_of(self, truth: Truth) -> int:
        """Return the watermark of its site before a reading."""
        return END if self.watermark == END else self.marks.get(self.place_of(truth.device), BEGINNING)

    def mark_again(self, truth: Truth, arrived_at: int) -> int:
        """Return the watermark of its site for a replayed reading, with which a site may begin."""
        before = self.mark_of(truth)
        if self.place_of(truth.device) not in self.marks:
            self.move(truth, min(truth.at, arrived_at))
        return before

    def move(self, truth: Truth, happened: int) -> None:
        """Move the watermark of its site behind an accepted reading."""
        self._raise(self.place_of(truth.device), happened - DISORDER_US)

    def follow_clock(self, bundle: int, stored: Mapping[Any, int], allowed: int) -> None:
        """Let sites move as far as the clock allows, if their stored watermarks say that they did in this bundle."""
        for place, watermark in stored.items():
            if place in self.marks:
                self._raise(place, min(watermark, allowed))
        if bundle in self.by_bundle:
            self.end_bundle(bundle, self.by_bundle[bundle][0])

    def _raise(self, place: Any, watermark: int) -> None:
        self.marks[place] = max(self.marks.get(place, BEGINNING), watermark)

    def end_bundle(self, bundle: int, judged: list[Judged]) -> None:
        """Keep what a bundle has accepted, and the watermarks after it; the end of the source is that of all sites."""
        if self.watermark == END:
            self.marks = dict.fromkeys(self.marks, END)
        elif self.marks:
            self.watermark = max(self.watermark, min(self.marks.values()))
        self.by_site[bundle] = dict(self.marks)
        self.by_bundle[bundle] = (judged, self.watermark)


@dataclass(slots=True)
class SiteFollower(Follower):
    """Follows the input of one consumer behind a source with sites.

    Attributes:
        reached: site -> between which watermarks it is.
        reached_before: the same before the newest bundle.
    """

    reached: dict[Any, tuple[int, int]] = field(default_factory=dict)
    reached_before: dict[Any, tuple[int, int]] = field(default_factory=dict)

    @property
    def sited(self) -> Mapping[int, SiteSourceOracle]:
        """The oracles of the source partitions."""
        return cast("Mapping[int, SiteSourceOracle]", self.sources)

    def watermark_of(self, key: Any) -> int:
        """Return the watermark that the site of a device or group has reached at least."""
        return self.between(key)[0]

    def highest_of(self, key: Any) -> int:
        """Return the watermark that the site of a device or group has reached at most."""
        return self.between(key)[1]

    def between(self, key: Any, *, before: bool = False) -> tuple[int, int]:
        """Return the watermarks between which the site of a device or group is, or was before the newest bundle."""
        place = next(iter(self.sited.values())).place_of(key)
        return (self.reached_before if before else self.reached).get(place, (BEGINNING, BEGINNING))

    def advance(self, cursors: Cursors) -> list[Consumed]:
        """Consume up to these positions, partition by partition."""
        sited = self.sited
        self.places = []
        before = {source: sited[source].by_site[self.at.get(source, 0)] for source in sited}
        after = {source: sited[source].by_site[seq] for source, (seq, _) in cursors.items()}
        self.reached_before = dict(self.reached)
        consumed: list[Consumed] = []
        for source, (seq, _) in cursors.items():
            others = [other for other in sited if other != source]
            for number in range(self.at.get(source, 0) + 1, seq + 1):
                for truth, watermark in sited[source].by_bundle[number][0]:
                    place = sited[source].place_of(truth.device)
                    least, most = self.reached.get(place, (BEGINNING, BEGINNING))
                    if place not in before[source]:  # the others may have moved it before
                        most = max(most, _highest(place, others, before, after))
                    low = min((self._lowest(place, other, cursors[other][0]) for other in others), default=END)
                    caps = (after[o][place] if place in before[o] else END for o in others)
                    high = min(caps, default=END)
                    consumed.append((truth, max(min(watermark, low), least), max(min(watermark, high), most)))
                    self.places.append((source, number))
        for place in set().union(*after.values()):
            least, most = self.reached.get(place, (BEGINNING, BEGINNING))
            now = min(marks[place] for marks in after.values() if place in marks)
            self.reached[place] = (max(least, now), max(most, _highest(place, list(sited), before, after)))
        self.at.update({source: max(seq, self.at.get(source, 0)) for source, (seq, _) in cursors.items()})
        return consumed

    def _lowest(self, place: Any, source: int, seq: int) -> int:
        """Return the least that a partition says of a site in a bundle; END if it has not heard of it."""
        by_site = self.sited[source].by_site
        numbers = range(self.at.get(source, 0), seq + 1)
        return next((by_site[number][place] for number in numbers if place in by_site[number]), END)


def _highest(
    place: Any, sources: list[int], before: Mapping[int, dict[Any, int]], after: Mapping[int, dict[Any, int]]
) -> int:
    """Return the greatest watermark that a site may have in a bundle by what these partitions say of it."""
    old = [after[source][place] for source in sources if place in before[source]]
    new = [after[source][place] for source in sources if place in after[source]]
    return min(old) if old else max(new, default=BEGINNING)


def sites_in(commit: CommittedBundle) -> dict[Any, int]:
    """Return the watermarks of sites that a source has stored in a bundle."""
    stored = {
        subkey: change[0]["watermark"]
        for (kind, _, _, subkey), change in commit.changes.items()
        if kind == "site" and change is not None and isinstance(change[0], dict)
    }
    return {name if name == OTHERS else json.loads(name): watermark for name, watermark in stored.items()}


def source_oracle(truths: Mapping[bytes, Truth | None], shape: Shape) -> SourceOracle:
    """Return the oracle of a source partition."""
    if not shape.sites:
        return SourceOracle(truths, shape.by_arrival, shape.within_us)
    return SiteSourceOracle(
        truths,
        shape.by_arrival,
        shape.within_us,
        by_device=shape.sites == "device",
        sites_max=shape.sites_max,
    )
