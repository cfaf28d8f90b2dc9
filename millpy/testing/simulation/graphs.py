"""The simulated graphs: branches behind one source of one or several partitions, results in tables.

The seed draws the branches (`Shape`): windows of each kind, Computations in a row, operators, a
deduplicating step, and Computations that fail for a while, whose records wait (park) or are dead-lettered.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import msgspec
import pyarrow.compute as pc

from millpy.computation import Computation, Context, MapCell, Value
from millpy.graph import Graph
from millpy.graph.streams import Stream
from millpy.ingest.protocol import Source, SourceSetup
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.time import hours, milliseconds
from millpy.model.timer import Timer
from millpy.sources.files.source import FileInjector, Files
from millpy.testing.simulation.broker import Log, Topic
from millpy.testing.simulation.lookup_table import add_lookup
from millpy.testing.simulation.loop import LANE
from millpy.testing.simulation.other_side import SENT, add_sink
from millpy.testing.simulation.per_key import TOOLS, add_tool
from millpy.testing.simulation.windowed import WINDOWED, WindowedBranch
from millpy.windowing.aggregates.numeric import Count, Max, Min, Sum
from millpy.windowing.window import FixedWindows

Feed = Literal["topic", "log", "file"]
Branch = Literal[
    "fixed",
    "sliding",
    "session",
    "operators",
    "unique",
    "parks",
    "rejects",
    "watcher",
    "levels",
    "visits",
    "early",
    "early_visits",
    "phased",
    "user_visits",
    "full",
    "earliest",
    "latest",
    "counted",
    "enough",
    "punctual",
    "discarded",
    "topped",
    "changes",
    "rates",
    "grid",
    "matches",
    "absences",
    "looked_up",
    "pairs",
    "sent",
]
BRANCHES: tuple[Branch, ...] = ("fixed", "sliding", "session", "operators", "unique", "parks", "rejects")
"""The branches that work with any number of partitions; the watcher's marks depend on the order of all readings."""
MORE: tuple[Branch, ...] = (
    "phased",
    "user_visits",
    "full",
    "earliest",
    "latest",
    "counted",
    "enough",
    "punctual",
    "discarded",
    "topped",
    *TOOLS,
    "looked_up",
)
"""Branches that take the place of others in some schedules."""
MERGED: frozenset[Branch] = frozenset(("session", "visits", "early_visits", "user_visits", "full"))
"""The branches whose windows merge."""
LEVELS: tuple[Branch, ...] = ("levels", "visits", "early", "early_visits")
"""The branches with windows over panes that are retracted: fixed windows and sessions, without and with early panes."""

NAME = "simulated"
EVERY = 3
QUIET_US = 700_000
PING_US = 250_000
PERIOD_US = 5_000_000
GRACE_US = 2_000_000
GROUP_WINDOW_US = 4_000_000
GROUP_LATENESS = hours(10)
GROUP_LATENESS_US = GROUP_LATENESS // timedelta(microseconds=1)
DISORDER_US = 300_000
UNIQUE_US = 400_000
BEFORE_US, AFTER_US = 100_000, 300_000
"""How far the right record of a pair may be before and after the left one."""
TOP = 2
"""How many devices of a window are ranked."""
GROUPS, SITES = 2, 5
"""The number of values of `group`, and of devices."""
SITE_LAG_US = 1_500_000
"""How far each site is behind the one before it in event time."""
MAX_SKEW_US = 1_500_000
SHORT_US = 400_000
"""A dedupe horizon that many duplicates exceed, and some meet exactly."""
FAILS = 7
"""During trouble, Computations fail at a reading with this value modulo 11."""
IDLE_US = 300_000
CANCELS = 7
PINGS = 5
REFUSED = 13
DROPPED, RAISED = 5, 500
SOURCE, MORE_SOURCE = "readings", "more"
"""The source, and the one that a deployment adds."""
ADDED = "per_added"
"""The table of windows that a deployment adds."""
CHANGEABLE: tuple[Branch, ...] = (
    "fixed",
    "sliding",
    "session",
    "phased",
    "user_visits",
    "counted",
    "enough",
    "punctual",
)
"""Branches whose lateness and input deployments change: nothing is computed from their windows."""
DOUBLED: tuple[Branch, ...] = ("fixed", "sliding", "phased", "counted", "enough", "punctual")
"""Those whose results do not depend on the order in which the two inputs are read."""
"""In graphs with `poison`, a reading with this value modulo 33 makes a mark that the database refuses."""


class SimulatedReading(msgspec.Struct):
    """The input record. `at` is µs since the epoch."""

    device: str
    group: int
    seq: int
    at: int
    value: int
    kind: int


class Mark(msgspec.Struct):
    """The watcher's output: every third record, silence, pings by the clock, and a "ghost" if a deleted timer fires."""

    device: str
    group: int
    kind: str
    number: int
    total: int


class Total(msgspec.Struct):
    """The marks of a group in a period."""

    group: int
    period: int
    marks: int


class Level(msgspec.Struct):
    """A pane of a device's window, in the group of the device."""

    group: int
    n: int
    total: int


def group_of(device: str) -> int:
    """Return the group of a device."""
    return int(device[1:]) % GROUPS


def home_of(key: Any) -> Any:
    """Return the device or group in a key; the keys of windows by site begin with the group."""
    return key[-1] if isinstance(key, list | tuple) else key


def level_of(pane: Any) -> Level:
    """Return a pane in its group."""
    return Level(group_of(pane.device), pane.n, int(pane.total))


class DeviceState(msgspec.Struct):
    """The state of a device."""

    group: int = 0
    number: int = 0
    total: int = 0
    last_us: int = 0
    armed: bool = False
    asked: int = 0
    pinged: int = 0


class Watcher(Computation):
    """Counts, and reports a silent device: timers are set, moved and deleted."""

    immediate = True
    seen = Value(DeviceState)

    def __init__(self, *, marks_refused: bool, pings: bool) -> None:
        self._marks_refused = marks_refused
        self._pings = pings

    def process_record(self, context: Context, record: SimulatedReading) -> None:
        """Count; arm, move or delete the timer."""
        seen = context[Watcher.seen]
        seen.group = record.group
        seen.number += 1
        seen.total += record.value
        seen.last_us = max(seen.last_us, record.at)
        if seen.number % EVERY == 0:
            context.produce(Mark(record.device, record.group, "every", seen.number, seen.total))
        if self._marks_refused and record.value % 33 == REFUSED:
            context.produce(Mark(record.device, record.group, "refused", seen.number, seen.total))
        if record.value % CANCELS == 0:
            context.delete_timer("quiet", processing=False)
            seen.armed = False
        elif not context.late:
            context.set_timer("quiet", at=seen.last_us + QUIET_US)
            seen.armed = True
        if (
            self._pings
            and record.value % PINGS == 0
            and not context.late
            and context.timer("ping", processing=True) is None
        ):
            seen.asked += 1
            context.set_timer("ping", at=context.now_us + PING_US, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Report silence."""
        seen = context[Watcher.seen]
        if timer.name == "ping":
            seen.pinged += 1
            context.produce(Mark(context.key, seen.group, "ping", seen.pinged, 0))
            return
        kind = "quiet" if seen.armed else "ghost"
        seen.armed = False
        context.produce(Mark(context.key, seen.group, kind, seen.number, seen.total))


class GroupTotals(Computation):
    """Counts a group's marks per period in a map, and reports the number when the period is over."""

    immediate = True
    marks = MapCell(int, int)

    def process_record(self, context: Context, record: Mark) -> None:
        """Count a mark in its period."""
        if record.kind == "ping":
            return
        period = context.event_time_us // PERIOD_US
        marks = context[GroupTotals.marks]
        marks[period] = marks.get(period, 0) + 1
        context.set_timer(f"over/{period}", at=max(context.event_time_us, (period + 1) * PERIOD_US + GRACE_US))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Report the number and delete it."""
        period = int(timer.name.removeprefix("over/"))
        context.produce(Total(context.key, period, context[GroupTotals.marks].pop(period)))


class Echo(msgspec.Struct):
    """A reading that was processed, with its number within its device."""

    device: str
    seq: int
    number: int


class Trouble:
    """Whether Computations fail at some readings at present."""

    def __init__(self) -> None:
        self.lasts = True


TROUBLE: ContextVar[Trouble] = ContextVar("trouble")


class Echoes(Computation):
    """Reports each reading; fails at some while there is trouble."""

    seen = Value(int, default=0)

    def __init__(self, *, immediate: bool) -> None:
        self.immediate = immediate  # type: ignore[misc]

    def process_record(self, context: Context, record: SimulatedReading) -> None:
        """Count, then fail or report."""
        context[Echoes.seen] += 1
        context.produce(Echo(record.device, record.seq, context[Echoes.seen]))
        if record.value % 11 == FAILS and TROUBLE.get().lasts:
            raise ValueError(f"reading {record.seq}")


class SimulatedFile(Files):
    """A file that is closed when the simulated process that reads it is killed."""

    __slots__ = ()

    def connect(self, setup: SourceSetup) -> FileInjector:
        """Return a reader, not yet open."""
        injector = super().connect(setup)
        LANE.get().process.closers.append(injector._reading.close)
        return injector


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the seed decides about a graph.

    Attributes:
        feed: the source: a broker's topics, its logs, or a file.
        partitions: the number of source partitions.
        branches: the branches behind the source.
        lateness_us: the allowed lateness of the windows.
        by_arrival: whether the dedupe clock is the time of arrival; else that of the record.
        within_us: the horizon of the source's dedupe ids.
        idle: whether the clock advances the watermark of a silent source.
        deep: whether the watcher's marks are processed further.
        poison: whether some readings make marks that the database refuses.
        skew: whether no partition reads far ahead of the others.
        pings: whether the watcher sets processing-time timers; a wrong clock delays them.
        columns: whether operators take columns, and Computations run in the step thread.
        sites: the field whose values have a watermark each; "" for one watermark.
        sites_max: the number of sites that have a watermark of their own; later ones share one.
        histories: whether the tables of windows keep a history.
        disorder_us: the disorder that the source promises.
        changed_us: the allowed lateness of the windows of `CHANGEABLE`, if it was changed.
        filtered: whether some readings do not reach the windows of `CHANGEABLE`.
        doubled: whether the windows of `DOUBLED` also read all readings with raised values.
        added: whether there are windows that a deployment has added.
        joined: whether the windows of `DOUBLED` also read a source that a deployment has added.
    """

    feed: Feed
    partitions: int
    branches: tuple[Branch, ...]
    lateness_us: int
    by_arrival: bool
    within_us: int
    idle: bool
    deep: bool
    poison: bool
    skew: bool
    columns: bool
    pings: bool
    sites: Literal["", "group", "device"] = ""
    sites_max: int = 1_000
    histories: bool = False
    disorder_us: int = DISORDER_US
    changed_us: int | None = None
    filtered: bool = False
    doubled: bool = False
    added: bool = False
    joined: bool = False

    def lateness_of(self, branch: str) -> int:
        """Return the allowed lateness of the windows of a branch."""
        return self.lateness_us if self.changed_us is None or branch not in CHANGEABLE else self.changed_us

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of its features, of `SHAPES`."""
        flags = {
            "partitions": self.partitions > 1,
            "idle": self.idle,
            "deep": self.deep,
            "poison": self.poison,
            "skew": self.skew,
            "columns": self.columns,
            "by_arrival": self.by_arrival,
            "pings": self.pings and "watcher" in self.branches,
            "short_horizon": self.within_us == SHORT_US,
            "histories": self.histories,
            "merged_histories": self.histories and not MERGED.isdisjoint(self.branches),
            "sites": self.sites != "",
            "idle_sites": self.sites != "" and self.idle,
            "far_sites": self.sites != "" and self.partitions > 1,
            "shared_sites": self.sites_max < SITES,
        }
        return ("readings", self.feed, *self.branches, *(name for name, has in flags.items() if has))


SHAPES = (
    *("readings", "topic", "log", "file", *BRANCHES, "watcher", *LEVELS, *MORE, "pairs", SENT),
    *("partitions", "idle", "deep", "poison", "skew", "columns", "by_arrival", "pings", "short_horizon"),
    *("sites", "idle_sites", "far_sites", "shared_sites", "histories", "merged_histories"),
)


STEPS = {"looked_up": add_lookup, SENT: add_sink}
"""Branches of one step behind the source."""


@cache
def build(shape: Shape, path: str, generation: int = 1) -> Graph:
    """Build a graph; it holds no state, so runs share it.

    Args:
        shape: the shape of the graph.
        path: the path of the file.
        generation: the number of the generation.
    """
    max_skew = timedelta(microseconds=MAX_SKEW_US) if shape.skew else None
    graph = Graph(NAME, generation=generation, max_skew=max_skew)
    sources: dict[Feed, Source] = {"topic": Topic(shape.partitions), "log": Log(shape.partitions)}
    readings = _inject(graph, SOURCE, sources.get(shape.feed) or SimulatedFile(path), shape)
    kind = Log if shape.feed == "log" else Topic
    more = _inject(graph, MORE_SOURCE, kind(is_more=True), shape) if shape.joined else None
    key = ("group", "device") if shape.sites == "group" else ("device",)
    for branch in shape.branches:
        if (windowed := WINDOWED.get(branch)) is not None:
            panes = _aggregate(read_by(branch, readings, shape, more), key, windowed, shape, shape.lateness_of(branch))
            if windowed.totals and not shape.sites:
                _total(panes, windowed, shape.lateness_us)
            if branch == "topped":
                panes.top_n(TOP, by="total", name="tops", parts=2, intervals=2).to_table("tops")
        elif branch in TOOLS:
            add_tool(readings.key_by("device"), branch)
        elif (add := STEPS.get(branch)) is not None:
            add(readings)
        elif branch == "operators":
            per_op = replace(WINDOWED["fixed"], table="per_op")
            _aggregate(operated(readings, columns=shape.columns), ("group",), per_op, shape, 0)
        elif branch == "unique":
            within = timedelta(microseconds=UNIQUE_US)
            readings.deduplicate(["device", "kind"], within, name="unique", intervals=2).to_table("uniques")
        elif branch == "pairs":
            _join(readings, shape)
        elif branch in ("parks", "rejects"):
            echoes = readings.key_by("device").process(
                Echoes(immediate=not shape.columns),
                name=branch,
                output=Echo,
                intervals=2,
                on_failure="park" if branch == "parks" else "dead_letter",
            )
            echoes.to_table(f"{branch}_echoes")
        else:
            _watch(readings, shape)
    if shape.added:
        _aggregate(readings, ("device",), replace(WINDOWED["fixed"], table=ADDED), shape, shape.lateness_us)
    return graph


def _inject(graph: Graph, name: str, source: Source, shape: Shape) -> Stream:
    within = timedelta(microseconds=shape.within_us)
    return graph.inject(
        name,
        source,
        schema=SimulatedReading,
        event_time=EventTime(
            "at", unit="us", max_disorder=milliseconds(shape.disorder_us // 1000), watermark_by=shape.sites or None
        ),
        dedupe=Dedupe("seq", within=within) if shape.by_arrival else Dedupe("seq", within=within, time="at", unit="us"),
        idle=AdvanceWithClock(after=timedelta(microseconds=IDLE_US)) if shape.idle else None,
    )


def read_by(branch: str, readings: Stream, shape: Shape, more: Stream | None) -> Stream:
    """Return what the windows of a branch read, which deployments change."""
    stream = readings.filter(is_kept, immediate=True) if shape.filtered and branch in CHANGEABLE else readings
    if branch not in DOUBLED:
        return stream
    stream = stream.union(readings.map(raised, immediate=True)) if shape.doubled else stream
    return stream if more is None else stream.union(more)


def is_kept(reading: SimulatedReading) -> bool:
    """Tell whether a reading passes the filter."""
    return reading.value % DROPPED != 0


def raised(reading: SimulatedReading) -> SimulatedReading:
    """Return the second reading that comes of one."""
    return msgspec.structs.replace(reading, value=reading.value + RAISED)


def _aggregate(
    readings: Stream, key: tuple[str, ...], windowed: WindowedBranch, shape: Shape, lateness_us: int
) -> Stream:
    keyed = readings.key_by(*key).window(
        windowed.windows,
        allowed_lateness=timedelta(microseconds=lateness_us),
        accumulation=windowed.mode,
        trigger=windowed.trigger,
        timestamp_combiner=windowed.combiner,
        on_time_pane=windowed.empty,
        final_pane=windowed.empty,
        pane_info=windowed.trigger.per_pane,
        intervals=2,
    )
    panes = keyed.aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value"))
    return panes.to_table(windowed.table, history=shape.histories)


def _total(panes: Stream, windowed: WindowedBranch, lateness_us: int) -> None:
    """Add up panes by group, in larger windows."""
    levels = panes.map(level_of, Level, immediate=True).key_by("group")
    windows = levels.window(
        FixedWindows(timedelta(microseconds=windowed.total_us)),
        allowed_lateness=timedelta(microseconds=lateness_us + windowed.later_us),
        intervals=2,
    )
    windows.aggregate(parts=Count(), n=Sum("n"), total=Sum("total")).to_table(windowed.totals)


def _join(readings: Stream, shape: Shape) -> None:
    """Join the readings of a device with even kinds to those with odd ones."""
    left, right = readings.split(lambda r: ("even", "odd")[r.value % 2], into=["even", "odd"], immediate=True).values()
    within = timedelta(microseconds=BEFORE_US), timedelta(microseconds=AFTER_US)
    lateness = timedelta(microseconds=shape.lateness_us)
    joined = left.key_by("device").join(
        right.key_by("device"), within=within, how="left", allowed_lateness=lateness, intervals=2
    )
    joined.to_table("pairs")


def operated(readings: Stream, *, columns: bool) -> Stream:
    """Pass readings through every operator: filter, flat_map, split into small and large, map, union."""
    if columns:
        kept = readings.filter(lambda batch: pc.not_equal(pc.bit_wise_and(batch["value"], 3), 1), columns=True)
    else:
        kept = readings.filter(lambda reading: reading.value % 4 != 1, immediate=True)
    several = kept.flat_map(lambda reading: [reading] * (reading.value % 3), SimulatedReading, immediate=True)
    small, large = several.split(lambda r: "small" if r.value < 50 else "large", into=["small", "large"]).values()
    raised = large.map(lambda r: msgspec.structs.replace(r, value=r.value + 1_000), immediate=True)
    return small.union(raised)


def _watch(readings: Stream, shape: Shape) -> None:
    watcher = Watcher(marks_refused=shape.poison, pings=shape.pings)
    marks = readings.key_by("device").process(watcher, name="watcher", output=Mark, intervals=2)
    marks.to_table("marks")
    if shape.deep:
        (
            marks.key_by("group")
            .window(FixedWindows(timedelta(microseconds=GROUP_WINDOW_US)), allowed_lateness=GROUP_LATENESS, intervals=1)
            .aggregate(n=Count())
            .to_table("per_group")
        )
        marks.key_by("group").process(GroupTotals(), name="tally", output=Total, intervals=2).to_table("totals")
