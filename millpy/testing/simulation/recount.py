"""The expected results of each branch, by plain loops over its consumer's input; `oracle.py` has the source.

`Follower` knows what one consumer has consumed, and between which watermarks each reading was judged. Behind one
source partition the two are one (I9). Behind several, which partition was consumed first within a bundle is not fixed:
a reading whose fate depends on it makes its key unsure, and that key is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from millpy.testing.simulation.graphs import UNIQUE_US
from millpy.testing.simulation.input import Truth
from millpy.testing.simulation.oracle import BEGINNING, END, SourceOracle
from millpy.testing.simulation.windowed import (
    EVERY_US,
    FULL_RECORDS,
    GAP_US,
    LARGE,
    LENGTH_US,
    OFFSET_US,
    PHASE_US,
    SLIDING_US,
    WINDOW_US,
)
from millpy.windowing.timestamp_combiner import TimestampCombiner

Cursors = Mapping[int, tuple[int, int]]
Consumed = tuple[Truth, int, int]
"""A reading, and the watermarks between which it was judged."""
MERGING = ("session", "user_visits", "full")
PaneName = tuple[Any, int, int]
"""(key, start, end)."""


@dataclass(slots=True)
class Follower:
    """Follows the input of one consumer behind the source.

    Attributes:
        sources: the oracle of each source partition, by interval.
        watermark: the watermark of the input.
        places: (source, bundle) of each reading that was consumed last.
    """

    sources: Mapping[int, SourceOracle]
    at: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    watermark: int = BEGINNING
    places: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, cursors: Cursors) -> None:
        """Begin behind these positions."""
        self.at = {source: seq for source, (seq, _) in cursors.items()}
        self.marks = {source: watermark for source, (_, watermark) in cursors.items()}
        self.watermark = min(self.marks.values())

    def advance(self, cursors: Cursors) -> list[Consumed]:
        """Consume up to these positions, partition by partition."""
        consumed: list[Consumed] = []
        self.places = []
        before = {source: self.marks.get(source, self.sources[source].begun) for source in cursors}
        after = {s: self.sources[s].watermark_after(seq) for s, (seq, _) in cursors.items()}
        for source, (seq, _) in cursors.items():
            least = min((mark for other, mark in before.items() if other != source), default=END)
            most = min((mark for other, mark in after.items() if other != source), default=END)
            for number in range(self.at.get(source, 0) + 1, seq + 1):
                for truth, watermark in self.sources[source].by_bundle[number][0]:
                    consumed.append((truth, min(watermark, least), min(watermark, most)))
                    self.places.append((source, number))
            self.at[source] = max(seq, self.at.get(source, 0))
        self.marks = after
        self.watermark = min(after.values())
        return consumed

    def watermark_of(self, key: Any) -> int:
        """Return the watermark that the windows of a device or group have reached at least."""
        return self.watermark

    def highest_of(self, key: Any) -> int:
        """Return the watermark that they have reached at most."""
        return self.watermark


@dataclass(slots=True)
class RecountedPane:
    """The expected content of one window.

    Attributes:
        unsure: whether `late` depends on the order of partitions.
        earliest, latest: of the records that were not behind the watermark.
        unsure_time: whether these depend on the order of partitions.
        last: the latest of all records.
    """

    n: int = 0
    total: int = 0
    low: int = 2**62
    high: int = -(2**62)
    late: int = 0
    unsure: bool = False
    earliest: int | None = None
    latest: int | None = None
    unsure_time: bool = False
    last: int = BEGINNING

    def add(self, value: int, at: int, least: int, most: int) -> None:
        """Add a record that was judged by a watermark between these two."""
        self.unsure_time |= least <= at < most
        if at >= least:
            self.earliest = at if self.earliest is None else min(self.earliest, at)
            self.latest = at if self.latest is None else max(self.latest, at)
        self.last = max(self.last, at)
        self.n += 1
        self.total += value
        self.low, self.high = min(self.low, value), max(self.high, value)

    def combined_time(self, combiner: TimestampCombiner) -> int | None:
        """Return the time of the first or the last record that was not behind the watermark; None without any."""
        return self.earliest if combiner is TimestampCombiner.EARLIEST else self.latest

    def absorb(self, other: RecountedPane) -> None:
        """Add the records of another window."""
        self.n, self.total, self.late = self.n + other.n, self.total + other.total, self.late + other.late
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.unsure |= other.unsure
        self.last = max(self.last, other.last)

    def agrees(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a row has this content; `late_count` may differ if it depends on the order of partitions."""
        found = (row["n"], row["total"], row["low"], row["high"])
        return found == (self.n, self.total, self.low, self.high) and (self.unsure or row["late_count"] == self.late)


def spans(kind: str, device: Any, at: int, value: int) -> Iterator[tuple[int, int]]:
    """Return the windows of a record, which do not merge."""
    size, every, phase = WINDOW_US, WINDOW_US, 0
    if kind == "sliding":
        size, every = SLIDING_US, EVERY_US
    elif kind == "offset":
        phase = OFFSET_US
    elif kind == "phased":
        if value % 14 == 7:
            return
        phase = int(device[1:]) * PHASE_US
    start = (at - phase) // every * every + phase
    if kind == "phased" and value < LARGE:
        yield start, start + (WINDOW_US // 2 if at - start < WINDOW_US // 2 else 2 * WINDOW_US)
    while start > at - size:
        yield start, start + size
        start -= every


@dataclass(slots=True)
class Windows:
    """The expected windows of one kind, for one consumer.

    Attributes:
        panes: the content of each window; for sessions, of those that no other has absorbed.
        late: late records, by key and by the start of the missed window (None for a session).
        unsure: windows whose records depend on the order of partitions; None for a whole key.
        closed: windows whose trigger is finished.
        floor: the windows that end by it were over when the lateness last grew.
        unproven: windows that were not yet seen closed in the result table.
    """

    kind: str
    allowed_us: int
    panes: dict[PaneName, RecountedPane] = field(default_factory=dict)
    late: Counter[tuple[Any, int | None]] = field(default_factory=Counter)
    unsure: set[tuple[Any, int | None]] = field(default_factory=set)
    unproven: set[PaneName] = field(default_factory=set)
    sessions: dict[Any, list[PaneName]] = field(default_factory=dict)
    closed: set[PaneName] = field(default_factory=set)
    floor: int = BEGINNING

    @property
    def merges(self) -> bool:
        """Whether windows merge."""
        return self.kind in MERGING

    def is_sure(self, key: Any, start: int | None) -> bool:
        """Tell whether a window may be compared."""
        return (key, start) not in self.unsure and (key, None) not in self.unsure

    def change(self, allowed_us: int, watermark: int) -> None:
        """Change the lateness at a watermark: windows that are over stay over."""
        if allowed_us > self.allowed_us:  # a shorter one needs none, and an interval by site has no one watermark
            self.floor = max(self.floor, watermark - self.allowed_us)
        self.allowed_us = allowed_us

    def is_over(self, end: int, watermark: int) -> bool:
        """Tell whether a window takes no more records at a watermark."""
        return watermark >= end + self.allowed_us or end <= self.floor

    def take(self, key: Any, at: int, value: int, least: int, most: int) -> None:
        """Take a record that was judged by a watermark between these two."""
        if self.kind == "full":
            self._into_full(key, at, value, least, most)
        elif self.merges:
            self._into_session(key, at, value, least, most)
        for start, end in () if self.merges else spans(self.kind, key, at, value):
            if self.is_over(end, least) or (key, start, end) in self.closed:
                self.late[key, start] += 1
            elif self.is_over(end, most):
                self.unsure.add((key, start))
            else:
                pane = self.panes.get((key, start, end))
                if pane is None:
                    pane = self.panes[key, start, end] = RecountedPane()
                    self.unproven.add((key, start, end))
                pane.add(value, at, least, most)
                pane.late += least >= end
                pane.unsure |= (least >= end) != (most >= end)

    def _into_session(self, key: Any, at: int, value: int, least: int, most: int) -> None:
        open_sessions = self.sessions.setdefault(key, [])
        start, end, merged = at, at + GAP_US, RecountedPane()
        if self.kind == "user_visits":
            end = min(at + GAP_US * (1 if value < LARGE else 2), (at // LENGTH_US + 1) * LENGTH_US)
        near = [name for name in open_sessions if name[1] < end and at < name[2]]
        if any(self.is_over(name[2], most) != self.is_over(name[2], least) for name in [*near, (key, start, end)]):
            self.unsure.add((key, None))
        met = [name for name in near if not self.is_over(name[2], least)]
        for name in met:
            start, end = min(start, name[1]), max(end, name[2])
        if self.is_over(end, least):
            self.late[key, None] += 1
            return
        for name in met:
            merged.absorb(self._close(name))
        merged.add(value, at, least, most)
        merged.late += least >= end
        merged.unsure |= (least >= end) != (most >= end)
        self._open((key, start, end), merged)

    def _open(self, name: PaneName, pane: RecountedPane) -> None:
        self.panes[name] = pane
        self.sessions[name[0]].append(name)
        self.unproven.add(name)

    def _close(self, name: PaneName) -> RecountedPane:
        """Remove a session that becomes part of another one, or changes its bounds."""
        self.sessions[name[0]].remove(name)
        self.unproven.discard(name)
        return self.panes.pop(name)

    def _into_full(self, key: Any, at: int, value: int, least: int, most: int) -> None:
        """Add a record to a session that is cut at a length, and full with a number of records."""
        sessions = self.sessions.setdefault(key, [])
        if least != most:
            self.unsure.add((key, None))
        live = [name for name in sessions if least < name[2] + self.allowed_us]
        full = [name for name in live if self.panes[name].n >= FULL_RECORDS]
        for name in full:
            if name[1] <= at < name[2]:
                self.panes[name].add(value, at, least, most)
                self.panes[name].late += least >= name[2]
                self.unproven.add(name)
                return
        end = min([at + GAP_US, (at // LENGTH_US + 1) * LENGTH_US, *(name[1] for name in full if name[1] > at)])
        met = [name for name in live if name not in full and name[1] < end and at < name[2]]
        if not met and least >= end + self.allowed_us:
            self.late[key, None] += 1
            return
        start, pane = at, RecountedPane()
        for name in met:
            start, end = min(start, name[1]), max(end, name[2])
            pane.absorb(self._close(name))
        pane.add(value, at, least, most)
        if pane.n >= FULL_RECORDS:
            end = min(end, max(pane.last, least) + 1)
        pane.late += least >= end
        self._open((key, start, end), pane)


@dataclass(slots=True)
class Unique:
    """The first readings of each (device, kind), for one consumer.

    Attributes:
        accepted: id -> (event time, number of the reading).
    """

    accepted: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    late: Counter[tuple[str, int]] = field(default_factory=Counter)
    unsure: set[tuple[str, int]] = field(default_factory=set)

    def take(self, truth: Truth, least: int, most: int) -> None:
        """Take a reading."""
        name = (truth.device, truth.kind)
        if truth.at < least - UNIQUE_US:
            self.late[name] += 1
            return
        if truth.at < most - UNIQUE_US:
            self.unsure.add(name)
        known = self.accepted.setdefault(name, [])
        if all(abs(truth.at - at) > UNIQUE_US for at, _ in known):
            known.append((truth.at, truth.seq))


def operated(truth: Truth) -> Iterator[int]:
    """Return the values that operators make of a reading."""
    if truth.value % 4 != 1:
        for _ in range(truth.value % 3):
            yield truth.value if truth.value < 50 else truth.value + 1_000
