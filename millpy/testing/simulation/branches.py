"""Checks I9 behind the source: compares each consumer's results with a recount of its input.

`Branches` has a judge for each interval behind the source. A judge receives every committed bundle, advances its
recount to the bundle's cursors, and yields the differences; it judges once more at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpy.model.time import INSTANT_MAX
from millpy.store.memory.tables import Row
from millpy.testing.simulation.deployments import BRANCH_OF, WindowReadings
from millpy.testing.simulation.graphs import (
    ADDED,
    CHANGEABLE,
    GROUP_LATENESS_US,
    GROUP_WINDOW_US,
    TOP,
    Shape,
    home_of,
)
from millpy.testing.simulation.histories import HistoryJudge
from millpy.testing.simulation.history import CommittedBundle, ObservedInterval, RunHistory
from millpy.testing.simulation.levels import InnerRows, LevelJudge, whole_totals
from millpy.testing.simulation.lookup_table import LOOKED_UP
from millpy.testing.simulation.lookups import Contents, LookupJudge, whole_lookup
from millpy.testing.simulation.oracle import END, SourceOracle
from millpy.testing.simulation.other_side import SENT
from millpy.testing.simulation.pairs import PairJudge, whole_pairs
from millpy.testing.simulation.per_key import TOOLS
from millpy.testing.simulation.recount import Follower, PaneName, RecountedPane, Unique, Windows, operated
from millpy.testing.simulation.repairs import corrections_of, window_of
from millpy.testing.simulation.sent import SentJudge, whole_sink
from millpy.testing.simulation.sites import SiteFollower
from millpy.testing.simulation.tools import ORDERS, OrderJudge, ToolJudge, late_for_tool, whole_ranking, whole_tool
from millpy.testing.simulation.windowed import BY_TABLE, CLOSING_RECORDS, CLOSING_TOTAL, TOTALS, WINDOWED
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.timestamp_combiner import TimestampCombiner

KINDS = {branch.table: branch.kind for branch in WINDOWED.values()} | {"per_op": "fixed", ADDED: "fixed"}
"""The windowed tables behind the source, and their windows."""
CLOSES: dict[str, Callable[[RecountedPane], bool]] = {
    "per_count": lambda pane: pane.n >= CLOSING_RECORDS,
    "per_enough": lambda pane: pane.total >= CLOSING_TOTAL,
    "per_punctual": lambda pane: False,
}
"""Tells whether the records of a window finish its trigger, which closes it."""
AT_THE_END = "per_punctual"
"""The table of windows that are closed at their end."""
ECHOES = ("parks", "rejects")


@dataclass(slots=True)
class WindowJudge:
    """Judges one interval of windows.

    Attributes:
        emitted: window -> its newest row, even if users have deleted it since.
        homes: keys that are known to belong to this interval.
        readings: what the windows read.
        added: the numbers of the late records that were added to finished windows.
    """

    table: str
    key: str
    follower: Follower
    windows: Windows
    readings: WindowReadings
    emitted: dict[PaneName, Row] = field(default_factory=dict)
    homes: set[Any] = field(default_factory=set)
    added: set[int] = field(default_factory=set)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in."""
        yield from self._add_late(commit)
        consumed = self.follower.advance(commit.observed.cursors)
        for (truth, least, most), place in zip(consumed, self.follower.places, strict=True):
            if self.table == "per_op":
                for value in operated(truth):
                    self.windows.take(truth.group, truth.at, value, least, most)
                continue
            for value in self.readings.values(self.branch, place, truth.value):
                self.windows.take(truth.device, truth.at, value, least, most)
        self.homes.update(home_of(name[2]) for name in commit.changes if name[0] == "window")
        for row in commit.rows.get(self.table, ()):
            name = (row[self.key], row["window_start"], row["window_end"])
            self.homes.add(name[0])
            self.emitted[name] = row
            expected = self.windows.panes.get(name)
            if self.windows.is_sure(*name[:2]) and (expected is None or not expected.agrees(row)):
                yield f"window {name} has {_shown(row)} instead of {expected}"
        yield from self._due()
        yield from self._held(commit)

    def _add_late(self, commit: CommittedBundle) -> Iterator[str]:
        """Add late records to finished windows, as operators want."""
        for request, window in corrections_of(commit):
            if request.id in self.added:
                yield f"late record {request.id} is added to its window again"
            self.added.add(request.id)
            reading = json.loads(request.payload)
            pane = self.windows.panes.setdefault(window_of(window), RecountedPane())
            pane.add(reading["value"], reading["at"], END, END)
            pane.late += 1

    def correct(self, row: Row) -> None:
        """Expect the values that an operator has given to the row of a finished window."""
        name = (row[self.key], row["window_start"], row["window_end"])
        if name in self.windows.panes:
            self.windows.panes[name].total = row["total"]

    def _held(self, commit: CommittedBundle) -> Iterator[str]:
        """Yield the windows for which the low watermark should wait: their panes have the time of a record."""
        combiner, low = self.combiner, commit.observed.low_watermark
        if combiner is TimestampCombiner.END_OF_WINDOW or low == commit.low_before:
            return
        for name in self.windows.unproven:
            pane = self.windows.panes[name]
            at = pane.combined_time(combiner)
            waits = name[0] in self.homes and name not in self.emitted and not pane.unsure_time
            if waits and at is not None and low > at:
                yield f"the low watermark is at {low}, and window {name} at {at}"

    def _due(self) -> Iterator[str]:
        """Yield the windows that the watermark has passed without a row."""
        reached, waits = self.follower.watermark_of, self.table in CLOSES and self.table != AT_THE_END
        for name in [name for name in self.windows.unproven if name[2] <= reached(name[0])]:
            is_over = self.windows.is_over(name[2], reached(name[0]))
            if waits and not is_over:
                continue
            if is_over:
                self.windows.unproven.discard(name)
            if name[0] not in self.homes or not self.windows.is_sure(*name[:2]):
                continue
            row, expected = self.emitted.get(name), self.windows.panes[name]
            if row is None or not expected.agrees(row):
                yield f"window {name} should have {expected} by now, it has {None if row is None else _shown(row)}"

    def finished(self) -> Iterator[str]:
        """Yield the differences between the newest rows and those of the recount."""
        mine = {name for name in self.windows.panes if name[0] in self.homes}
        for name in mine | {name for name in self.emitted if not self.windows.merges}:
            if not self.windows.is_sure(*name[:2]):
                continue
            row, expected = self.emitted.get(name), self.windows.panes.get(name)
            if row is None or expected is None or not expected.agrees(row):
                yield f"{self.table}: {name} has {None if row is None else _shown(row)} instead of {expected}"

    @property
    def branch(self) -> str:
        """The name of the branch."""
        return BRANCH_OF[self.table]

    @property
    def combiner(self) -> TimestampCombiner:
        """What the event time of a pane is."""
        return BY_TABLE[self.table].combiner if self.table in BY_TABLE else TimestampCombiner.END_OF_WINDOW

    def time_of(self, row: Row) -> int | None:
        """Return the event time of the pane in a row; None if it depends on the order of partitions."""
        pane = self.windows.panes.get((row[self.key], row["window_start"], row["window_end"]))
        combiner = self.combiner
        if combiner is TimestampCombiner.END_OF_WINDOW or pane is None or row["pane_index"] > 0:
            return int(row["window_end"]) - 1
        if pane.unsure_time:
            return None
        at = pane.combined_time(combiner)
        return int(row["window_end"]) - 1 if at is None else at

    def left(self) -> dict[PaneName, Row]:
        """Return the rows that the table must have, unless a user deletes them."""
        if not self.windows.merges:
            return self.emitted
        return {
            n: row for n, row in self.emitted.items() if n in self.windows.panes or not self.windows.is_sure(*n[:2])
        }


@dataclass(slots=True)
class ClosingJudge(WindowJudge):
    """Judges one interval of windows that a trigger closes: their first pane is the last one, and the rest is late."""

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in. The trigger is asked at its end."""
        yield from WindowJudge.follow(self, commit)
        windows = self.windows
        for row in commit.rows.get(self.table, ()):
            name = (row[self.key], row["window_start"], row["window_end"])
            reached = self.follower.highest_of(name[0])
            over = name[2] <= reached if self.table == AT_THE_END else windows.is_over(name[2], reached)
            if windows.is_sure(*name[:2]) and not over and not self._closes(name):
                yield f"window {name} has {_shown(row)}, too little for its trigger"
        for name in [name for name in windows.panes if name not in windows.closed and self._closes(name)]:
            windows.closed.add(name)
            windows.unproven.discard(name)
            if name[0] in self.homes and windows.is_sure(*name[:2]) and name not in self.emitted:
                yield f"window {name} has {windows.panes[name]}, enough for its trigger, and no row"

    def _closes(self, name: PaneName) -> bool:
        """Tell whether the trigger of a window is finished."""
        if self.table == AT_THE_END:
            if self.follower.watermark_of(name[0]) < name[2] <= self.follower.highest_of(name[0]):
                self.windows.unsure.add(name[:2])
            return name[2] <= self.follower.watermark_of(name[0])
        return CLOSES[self.table](self.windows.panes[name])


@dataclass(slots=True)
class UniqueJudge:
    """Judges one interval of the deduplicating step. `found` has the readings that it let through, by id."""

    follower: Follower
    unique: Unique = field(default_factory=Unique)
    found: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in."""
        for consumed in self.follower.advance(commit.observed.cursors):
            self.unique.take(*consumed)
        touched = set()
        for row in commit.rows.get("uniques", ()):
            name = (row["device"], row["kind"])
            self.found.setdefault(name, []).append(row["seq"])
            touched.add(name)
        for name in touched - self.unique.unsure:
            yield from self._compared(name)

    def _compared(self, name: tuple[str, int]) -> Iterator[str]:
        found = self.found.get(name, [])
        expected = [seq for _, seq in self.unique.accepted.get(name, ())]
        if found != expected:
            yield f"of {name} the readings {found[-5:]} were let through instead of {expected[-5:]}"

    def finished(self) -> Iterator[str]:
        """Yield the readings that should have been let through and were not."""
        for name in self.found.keys() - self.unique.unsure:
            yield from self._compared(name)


@dataclass(slots=True)
class EchoJudge:
    """Judges one interval of a Computation that fails for a while, and must see each reading once, in order.

    Attributes:
        rows: device -> readings, in the order in which they were seen.
        dead: devices that had readings dead-lettered.
        consumed: device -> readings, in the order of arrival.
    """

    interval_id: int
    computation: str
    history: RunHistory
    follower: Follower
    consumed: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Take a bundle in."""
        touched = {truth.device for truth, _, _ in self._advance(commit.observed)}
        for row in sorted(commit.rows.get(f"{self.computation}_echoes", ()), key=lambda row: row["number"]):
            seen = self.rows.setdefault(row["device"], [])
            seen.append(row["seq"])
            touched.add(row["device"])
            if row["number"] != len(seen):
                yield f"reading {row['seq']} is number {row['number']} of {row['device']} instead of {len(seen)}"
        touched.update(name[2] for name in commit.changes if name[0] == "parked")
        if touched:
            yield from self._compared(commit.observed, touched)

    def _advance(self, observed: ObservedInterval) -> Sequence[tuple[Any, int, int]]:
        found = self.follower.advance(observed.cursors)
        for truth, _, _ in found:
            self.consumed.setdefault(truth.device, []).append(truth.seq)
        return found

    def _compared(self, observed: ObservedInterval, devices: set[str]) -> Iterator[str]:
        """Yield the differences between the input and the readings that were seen, wait, or are dead-lettered."""
        waiting = self._waiting(observed)
        dead = self._dead_lettered(observed)
        self.dead.update(dead)
        for device in devices & (self.rows.keys() | waiting.keys() | dead.keys()):
            expected, rows = self.consumed.get(device, []), self.rows.get(device, [])
            if self.computation == "parks":  # in order: first those that were seen, then those that wait
                gone, left = Counter(dead.get(device, ())), []
                for seq in expected:  # a reading may come twice, behind the horizon, and be dead-lettered once
                    if gone[seq]:
                        gone[seq] -= 1
                    else:
                        left.append(seq)
                agrees = [*rows, *waiting.get(device, ())] == left
            else:
                agrees = sorted([*rows, *dead.get(device, ())]) == sorted(expected)
            if not agrees:
                yield (
                    f"{device}: {expected[-8:]} came last, {rows[-8:]} were seen last, {waiting.get(device, [])[:8]} "
                    f"wait, {dead.get(device, [])[-8:]} are dead-lettered ({len(expected)} came, {len(rows)} were seen)"
                )

    def _waiting(self, observed: ObservedInterval) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        parked = [n for n in observed.keyed if n[0] == "parked" and n[1] != "key"]
        for name in sorted(parked, key=lambda name: name[3]):
            found.setdefault(name[2], []).append(observed.keyed[name][0]["record"]["seq"])
        return found

    def _dead_lettered(self, observed: ObservedInterval) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, interval_id, _, letter in self.history.dead_letters():
            if interval_id == observed.interval_id and letter.computation == self.computation:
                standing = self.history.database.requests.state_of("dead_letters", number)
                if standing.state != "replayed":
                    record = json.loads(letter.payload)
                    found.setdefault(record["device"], []).append(record["seq"])
        return found

    def finished(self) -> Iterator[str]:
        """Yield the readings that are missing."""
        observed = self.history.by_interval[self.interval_id]
        yield from self._compared(observed, set(self.consumed))


Judge = (
    WindowJudge | UniqueJudge | EchoJudge | LevelJudge | PairJudge | OrderJudge | ToolJudge | LookupJudge | SentJudge
)


class Branches:
    """The judges of all intervals behind the source, except the watcher's."""

    def __init__(self, history: RunHistory, sources: Mapping[int, SourceOracle], shape: Shape) -> None:
        self.history = history
        self._sources = sources
        self._lateness_us = shape.lateness_us
        self.shape = shape
        self.readings = WindowReadings(shape)
        self._sites = shape.sites
        self._keeps_history = shape.histories
        self._histories = HistoryJudge(history)
        self._contents = Contents()
        self.judges: dict[int, Judge] = {}
        self._inner = InnerRows(history)
        self._makers: dict[str, Callable[[ObservedInterval], Judge]] = {
            **dict.fromkeys(KINDS, self._windows),
            **dict.fromkeys(ECHOES, self._echoes),
            **dict.fromkeys(TOTALS, self._levels),
            "unique": self._unique,
            "pairs": self._pairs,
            **dict.fromkeys(ORDERS, self._order),
            **dict.fromkeys(TOOLS, self._tool),
            LOOKED_UP: self._lookup,
            SENT: self._sent,
        }
        self._orders: dict[str, list[OrderJudge]] = {tool: [] for tool in TOOLS}
        for observed in history.by_interval.values():
            if (make := self._makers.get(observed.computation)) is not None:
                self.judges[observed.interval_id] = make(observed)

    def _follower(self) -> Follower:
        return SiteFollower(self._sources) if self._sites else Follower(self._sources)

    def _windows(self, observed: ObservedInterval) -> Judge:
        table = observed.computation
        judge = ClosingJudge if table in CLOSES else WindowJudge
        allowed_us = 0 if table == "per_op" else self._lateness_us
        key = "group" if table == "per_op" else "device"
        return judge(table, key, self._follower(), Windows(KINDS[table], allowed_us), self.readings)

    def change(self, bundles: Mapping[int, int], shape: Shape) -> None:
        """Change the meaning of everything behind these bundles of the sources."""
        self.readings.changes.append((bundles, shape))
        self.shape = shape
        for interval_id, judge in self.judges.items():
            if isinstance(judge, WindowJudge) and judge.branch in CHANGEABLE:
                lateness_us = shape.lateness_of(judge.branch)
                if lateness_us != judge.windows.allowed_us:
                    watermark = self.history.by_interval[interval_id].input_watermark
                    judge.windows.change(lateness_us, watermark)

    def begin(self, added: Sequence[ObservedInterval], gone: Sequence[ObservedInterval]) -> None:
        """Judge the intervals that a deployment has added, from their positions on, and forget those that are gone."""
        for observed in gone:
            del self.judges[observed.interval_id]
        self._histories.forget({observed.computation for observed in gone})
        for observed in (one for one in added if one.computation in KINDS):
            judge = self.judges[observed.interval_id] = self._windows(observed)
            assert isinstance(judge, WindowJudge), observed.computation
            judge.follower.begin(observed.cursors)
            judge.windows.allowed_us = self.shape.lateness_of(judge.branch)

    def correct(self, table: str, window: tuple[Any, ...], row: Row) -> None:
        """Expect the row that an operator has corrected."""
        judge = self.judges[row["interval_id"]]
        assert isinstance(judge, WindowJudge), table
        judge.correct(row)
        self._histories.skip(table, window)

    def late_records_added(self) -> set[int]:
        """Return the numbers of the late records that were added to finished windows."""
        return {number for judge in self.judges.values() if isinstance(judge, WindowJudge) for number in judge.added}

    def _echoes(self, observed: ObservedInterval) -> Judge:
        return EchoJudge(observed.interval_id, observed.computation, self.history, Follower(self._sources))

    def _unique(self, observed: ObservedInterval) -> Judge:
        return UniqueJudge(Follower(self._sources))

    def _pairs(self, observed: ObservedInterval) -> Judge:
        return PairJudge(Follower(self._sources), self._lateness_us)

    def _order(self, observed: ObservedInterval) -> Judge:
        judge = OrderJudge(Follower(self._sources))
        self._orders[ORDERS[observed.computation]].append(judge)
        return judge

    def _tool(self, observed: ObservedInterval) -> Judge:
        return ToolJudge(observed.computation, self._orders[observed.computation])

    def _lookup(self, observed: ObservedInterval) -> Judge:
        return LookupJudge(Follower(self._sources), self._contents)

    def _sent(self, observed: ObservedInterval) -> Judge:
        return SentJudge(observed.interval_id, Follower(self._sources))

    def _levels(self, observed: ObservedInterval) -> Judge:
        inner, table = TOTALS[observed.computation], observed.computation
        adds_up = inner.mode is Accumulation.DISCARDING
        return LevelJudge(table, observed, self.history, self._inner, inner.total_us, adds_up)

    def on_committed(self, commit: CommittedBundle) -> Iterator[str]:
        """Yield violations of I9: results are a function of the input up to the consumed position."""
        judge = self.judges.get(commit.observed.interval_id)
        if judge is not None:
            for what in judge.follow(commit):
                observed = commit.observed
                yield f"bundle {commit.bundle} of {observed.computation} {observed.interval_id}: {what}"
        for what in self._histories.follow(commit) if self._keeps_history else ():
            yield f"bundle {commit.bundle} of {commit.observed.computation} {commit.observed.interval_id}: {what}"
        if isinstance(judge, WindowJudge) and (inner := BY_TABLE.get(judge.table)) is not None and inner.totals:
            self._inner.note(commit, judge.time_of, inner.total_us)

    def finished(self) -> Iterator[str]:
        """Yield the differences at the end: results and late records must be those of the recount."""
        late = list(self._late())  # the rows tell the intervals of keys; for these, every record was late
        for judge in self.judges.values():
            yield from judge.finished()
        for table in KINDS:
            judges = [j for j in self.judges.values() if isinstance(j, WindowJudge) and j.table == table]
            if judges:
                yield from self._whole_table(table, judges)
        for computation in ECHOES:
            echoes = [j for j in self.judges.values() if isinstance(j, EchoJudge) and j.computation == computation]
            for device in {device for judge in echoes for device in judge.consumed}:
                if not any(device in judge.rows or device in judge.dead for judge in echoes):
                    yield f"{computation}: no record of {device} had an effect"
        for outer in TOTALS:
            totals = [j for j in self.judges.values() if isinstance(j, LevelJudge) and j.table == outer]
            if totals:
                yield from whole_totals(totals)
        pairs = [judge for judge in self.judges.values() if isinstance(judge, PairJudge)]
        if pairs:
            yield from whole_pairs(pairs)
        yield from self._whole_tools()
        yield from whole_lookup([judge for judge in self.judges.values() if isinstance(judge, LookupJudge)])
        yield from whole_sink([judge for judge in self.judges.values() if isinstance(judge, SentJudge)])
        yield from self._histories.finished()
        yield from late

    def _whole_tools(self) -> Iterator[str]:
        for tool, orders in self._orders.items():
            tools = [judge for judge in self.judges.values() if isinstance(judge, ToolJudge) and judge.tool == tool]
            if tools:
                yield from whole_tool(tools)
                yield from late_for_tool(orders, self._late_in(f"{tool}_in_order"))
        yield from whole_ranking(self.history.rows("tops"), self.history.rows("per_top"), TOP)

    def _late_in(self, computation: str) -> Counter[str]:
        """Count the late records of a computation by key."""
        return Counter(
            json.loads(key)
            for interval_id, rows in self.history.late_records()
            if self.history.by_interval[interval_id].computation == computation
            for key in rows.keys
        )

    def _whole_table(self, table: str, judges: Sequence[WindowJudge]) -> Iterator[str]:
        known = [row for judge in judges for row in judge.left().values()]
        for row in self.history.rows(table):
            if not any(row is other for other in known):
                yield f"{table} has a row that was never committed, or should have been deleted: {row}"
        homeless = {name[0] for judge in judges for name in judge.windows.panes if judge.windows.is_sure(*name[:2])}
        for key in homeless - set().union(*(judge.homes for judge in judges)):
            yield f"{table}: no record of {key} had an effect"

    def _late(self) -> Iterator[str]:
        found: dict[int, Counter[Any]] = {interval_id: Counter() for interval_id in self.judges}
        for interval_id, rows in self.history.late_records():
            judge = self.judges.get(interval_id)
            if isinstance(judge, OrderJudge):
                continue  # `late_for_tool` counts them
            for key, start in zip(map(json.loads, rows.keys), rows.window_starts, strict=True):
                if isinstance(judge, WindowJudge):
                    found[interval_id][home_of(key), None if judge.windows.merges else start] += 1
                    judge.homes.add(home_of(key))
                elif isinstance(judge, UniqueJudge):
                    found[interval_id][tuple(key)] += 1
                elif isinstance(judge, PairJudge):
                    found[interval_id][key, None] += 1
                elif min(rows.watermarks) < _over_at(rows.computation, start):
                    yield f"{len(rows)} records are late for {rows.computation}, which waits for hours"
        for interval_id, judge in self.judges.items():
            seen, expected = _late_by(judge, found[interval_id])
            wrong = [name for name in {**expected, **seen} if expected.get(name) != seen.get(name)]
            for name in wrong[:1]:
                yield (
                    f"late records of {interval_id}: {len(wrong)} differ: {name} has {seen.get(name)} instead of "
                    f"{expected.get(name)}"
                )


def _over_at(computation: str, start: int | None) -> int:
    """Return when a window that waits for hours is over: clocks may step by years. The others wait for the end."""
    if computation != "per_group" or start is None:
        return INSTANT_MAX
    return start + GROUP_WINDOW_US + GROUP_LATENESS_US


def _late_by(judge: Judge, found: Counter[Any]) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return how many records of each name are late and how many should be, as far as the judge is sure."""
    if isinstance(judge, WindowJudge):
        windows = judge.windows
        expected = {n: c for n, c in windows.late.items() if n[0] in judge.homes and windows.is_sure(*n)}
        return {n: c for n, c in found.items() if windows.is_sure(*n)}, expected
    if isinstance(judge, PairJudge):
        known = judge.found.keys() - judge.unsure
        expected = {(n, None): c for n, c in judge.late.items() if n in known}
        return {n: c for n, c in found.items() if n[0] in known}, expected
    if isinstance(judge, UniqueJudge):
        names = judge.found.keys() - judge.unique.unsure
        return (
            {n: c for n, c in found.items() if n in names},
            {n: c for n, c in judge.unique.late.items() if n in names},
        )
    return {}, {}


def _shown(row: Row) -> list[Any]:
    return [row["n"], row["total"], row["low"], row["high"], row["late_count"]]
