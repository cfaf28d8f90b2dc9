"""The graphs that are simulated: branches behind one source of one or several partitions, results in tables.

Which branches there are is drawn from the seed (`Shape`): windows of each kind, Computations in a row, operators, a
deduplicating step, and Computations that fail for a while, whose records wait (park) or are set aside (quarantine).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Literal

import msgspec
import pyarrow.compute as pc

from millpy.computation import Computation, Context, MapCell, Value
from millpy.graph import Graph
from millpy.graph.streams import Stream
from millpy.injectors.files import FileInjector, Files
from millpy.injectors.protocol import Source, SourceSetup
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.time import hours, milliseconds
from millpy.model.timer import Timer
from millpy.testing.simulation.broker import Log, Topic
from millpy.testing.simulation.loop import LANE
from millpy.windowing.aggregate import Count, Max, Min, Sum
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows

Feed = Literal["topic", "log", "file"]
Branch = Literal["fixed", "sliding", "session", "operators", "unique", "parks", "sets_aside", "watcher"]
BRANCHES: tuple[Branch, ...] = ("fixed", "sliding", "session", "operators", "unique", "parks", "sets_aside")
"""Those that go with any number of partitions; the watcher's marks depend on the order of all readings."""

NAME = "simulated"
EVERY = 3
QUIET_US = 700_000
PING_US = 250_000
PERIOD_US = 5_000_000
GRACE_US = 2_000_000
WINDOW_US = 1_000_000
GROUP_WINDOW_US = 4_000_000
DISORDER_US = 300_000
SLIDING_US, EVERY_US = 1_200_000, 400_000
GAP_US = 200_000
UNIQUE_US = 400_000
MAX_SKEW_US = 1_500_000
SHORT_US = 400_000
"""A horizon of dedupe ids that many a duplicate leaves, and some meet exactly."""
FAILS = 7
"""A reading whose value is this, of 11, is one for which Computations fail until they are mended."""
IDLE_US = 300_000
CANCELS = 7
PINGS = 5
REFUSED = 13
"""A reading whose value is this, of 33, makes a mark that the database refuses, where it refuses any."""


class Reading(msgspec.Struct):
    """What comes in. `at` is µs since the epoch."""

    device: str
    group: int
    seq: int
    at: int
    value: int
    kind: int


class Mark(msgspec.Struct):
    """What the watcher says: every third record, silence, and pings by the clock. "ghost" must never be seen."""

    device: str
    group: int
    kind: str
    number: int
    total: int


class Total(msgspec.Struct):
    """Marks of a group in a period."""

    group: int
    period: int
    marks: int


class Seen(msgspec.Struct):
    """A device so far."""

    group: int = 0
    number: int = 0
    total: int = 0
    last_us: int = 0
    armed: bool = False
    asked: int = 0
    pinged: int = 0


class Watcher(Computation):
    """Counts, and says when a device has fallen silent: timers set, moved and deleted."""

    immediate = True
    seen = Value(Seen)

    def __init__(self, *, marks_refused: bool, pings: bool) -> None:
        self._marks_refused = marks_refused
        self._pings = pings

    def process_record(self, context: Context, record: Reading) -> None:
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
        """Say so."""
        seen = context[Watcher.seen]
        if timer.name == "ping":
            seen.pinged += 1
            context.produce(Mark(context.key, seen.group, "ping", seen.pinged, 0))
            return
        kind = "quiet" if seen.armed else "ghost"
        seen.armed = False
        context.produce(Mark(context.key, seen.group, kind, seen.number, seen.total))


class Tally(Computation):
    """Counts a group's marks per period, by entries of a map, and says the number when the period is over."""

    immediate = True
    marks = MapCell(int, int)

    def process_record(self, context: Context, record: Mark) -> None:
        """Count into the period."""
        if record.kind == "ping":
            return
        period = context.event_time_us // PERIOD_US
        marks = context[Tally.marks]
        marks[period] = marks.get(period, 0) + 1
        context.set_timer(f"over/{period}", at=max(context.event_time_us, (period + 1) * PERIOD_US + GRACE_US))

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Say the number and forget it."""
        period = int(timer.name.removeprefix("over/"))
        context.produce(Total(context.key, period, context[Tally.marks].pop(period)))


class Echo(msgspec.Struct):
    """One reading went through: the how manieth of its device."""

    device: str
    seq: int
    number: int


class Trouble:
    """Whether Computations fail at what they fail at: until somebody mends them."""

    def __init__(self) -> None:
        self.lasts = True


TROUBLE: ContextVar[Trouble] = ContextVar("trouble")


class Echoes(Computation):
    """Says of each reading that it came; fails at some while there is trouble."""

    seen = Value(int, default=0)

    def __init__(self, *, immediate: bool) -> None:
        self.immediate = immediate  # type: ignore[misc]

    def process_record(self, context: Context, record: Reading) -> None:
        """Count, then fail or say so."""
        context[Echoes.seen] += 1
        context.produce(Echo(record.device, record.seq, context[Echoes.seen]))
        if record.value % 11 == FAILS and TROUBLE.get().lasts:
            raise ValueError(f"reading {record.seq}")


class SimulatedFile(Files):
    """A file that is closed when the simulated process that reads it is killed."""

    __slots__ = ()

    def connect(self, setup: SourceSetup) -> FileInjector:
        """A reader, not yet open."""
        injector = super().connect(setup)
        LANE.get().process.closers.append(injector._reading.close)
        return injector


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A graph.

    Attributes:
        feed: a broker's topics, its logs, or a file.
        partitions: how many source partitions.
        branches: what is behind the source.
        lateness_us: allowed lateness of the windows.
        by_arrival: whether the dedupe clock is the time of arrival; else that of the record.
        within_us: the horizon of the source's dedupe ids.
        idle: whether the clock advances the watermark of a silent source.
        deep: whether the watcher's marks are processed further.
        poison: whether some readings make marks that the database refuses.
        skew: whether no partition reads far ahead of the others.
        pings: whether the watcher sets timers by the clock; one set by a clock that is wrong waits for it.
        columns: whether operators take columns, and Computations run in the thread for steps.
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

    @property
    def features(self) -> tuple[str, ...]:
        """What it has, in words: `SHAPES` has them all."""
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
        }
        return ("readings", self.feed, *self.branches, *(name for name, has in flags.items() if has))


SHAPES = (
    *("readings", "topic", "log", "file", *BRANCHES, "watcher"),
    *("partitions", "idle", "deep", "poison", "skew", "columns", "by_arrival", "pings", "short_horizon"),
)


@cache
def build(shape: Shape, path: str, generation: int = 1) -> Graph:
    """A graph; it holds no state, so runs share it.

    Args:
        shape: what it looks like.
        path: where the file is.
        generation: which of the graph's.
    """
    max_skew = timedelta(microseconds=MAX_SKEW_US) if shape.skew else None
    graph = Graph(NAME, generation=generation, max_skew=max_skew)
    sources: dict[Feed, Source] = {"topic": Topic(shape.partitions), "log": Log(shape.partitions)}
    within = timedelta(microseconds=shape.within_us)
    readings = graph.inject(
        "readings",
        sources[shape.feed] if shape.feed in sources else SimulatedFile(path),
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(DISORDER_US // 1000)),
        dedupe=Dedupe("seq", within=within) if shape.by_arrival else Dedupe("seq", within=within, time="at", unit="us"),
        idle=AdvanceWithClock(after=timedelta(microseconds=IDLE_US)) if shape.idle else None,
    )
    windows: dict[Branch, tuple[Windows, str]] = {
        "fixed": (FixedWindows(timedelta(microseconds=WINDOW_US)), "per_window"),
        "sliding": (
            SlidingWindows(timedelta(microseconds=SLIDING_US), every=timedelta(microseconds=EVERY_US)),
            "per_slide",
        ),
        "session": (SessionWindows(timedelta(microseconds=GAP_US)), "per_session"),
    }
    for branch in shape.branches:
        if branch in windows:
            _aggregate(readings, "device", *windows[branch], shape.lateness_us)
        elif branch == "operators":
            _aggregate(operated(readings, columns=shape.columns), "group", *windows["fixed"][:1], "per_op", 0)
        elif branch == "unique":
            within = timedelta(microseconds=UNIQUE_US)
            readings.deduplicate(["device", "kind"], within, name="unique", intervals=2).to_table("uniques")
        elif branch in ("parks", "sets_aside"):
            echoes = readings.key_by("device").process(
                Echoes(immediate=not shape.columns),
                name=branch,
                output=Echo,
                intervals=2,
                on_failure="park" if branch == "parks" else "quarantine",
            )
            echoes.to_table(f"{branch}_echoes")
        else:
            _watch(readings, shape)
    return graph


def _aggregate(readings: Stream, key: str, windows: Windows, table: str, lateness_us: int) -> None:
    (
        readings.key_by(key)
        .window(windows, allowed_lateness=timedelta(microseconds=lateness_us), intervals=2)
        .aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value"))
        .to_table(table)
    )


def operated(readings: Stream, *, columns: bool) -> Stream:
    """Readings through every operator: some are dropped, some doubled, large and small ones go apart and meet again."""
    if columns:
        kept = readings.filter(lambda batch: pc.not_equal(pc.bit_wise_and(batch["value"], 3), 1), columns=True)
    else:
        kept = readings.filter(lambda reading: reading.value % 4 != 1, immediate=True)
    several = kept.flat_map(lambda reading: [reading] * (reading.value % 3), Reading, immediate=True)
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
            .window(FixedWindows(timedelta(microseconds=GROUP_WINDOW_US)), allowed_lateness=hours(10), intervals=1)
            .aggregate(n=Count())
            .to_table("per_group")
        )
        marks.key_by("group").process(Tally(), name="tally", output=Total, intervals=2).to_table("totals")
