"""The graphs that are simulated: windows and two Computations in a row behind one source, results in tables."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Literal

import msgspec

from millpy.computation import Computation, Context, MapCell, Value
from millpy.graph import Graph
from millpy.injectors.files import FileInjector, Files
from millpy.injectors.protocol import Source, SourceSetup
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.time import hours, milliseconds
from millpy.model.timer import Timer
from millpy.testing.simulation.broker import Topic
from millpy.testing.simulation.loop import LANE
from millpy.windowing.aggregate import Count, Max, Min, Sum
from millpy.windowing.window import FixedWindows

Feed = Literal["topic", "file"]

EVERY = 3
QUIET_US = 700_000
PING_US = 250_000
PERIOD_US = 5_000_000
GRACE_US = 2_000_000
WINDOW_US = 1_000_000
GROUP_WINDOW_US = 4_000_000
DISORDER_US = 300_000
DEDUPE_US = {False: 4_000_000, True: 600_000_000}
"""The horizon: short, so that ids leave it; longer than any run where nothing may be late."""
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

    def __init__(self, *, marks_refused: bool) -> None:
        self._marks_refused = marks_refused

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
        if record.value % PINGS == 0 and not context.late and context.timer("ping", processing=True) is None:
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


class SimulatedFile(Files):
    """A file that is closed when the simulated process that reads it is killed."""

    __slots__ = ()

    def connect(self, setup: SourceSetup) -> FileInjector:
        """A reader, not yet open."""
        injector = super().connect(setup)
        LANE.get().process.closers.append(injector._reading.close)
        return injector


@cache
def build(feed: Feed, path: str, lateness_us: int, by_arrival: bool, idle: bool, deep: bool, poison: bool) -> Graph:
    """A graph; it holds no state, so runs share it.

    Args:
        feed: the broker's topic, or a file.
        path: where the file is.
        lateness_us: allowed lateness of the windows behind the source.
        by_arrival: whether the dedupe clock is the time of arrival; else that of the record.
        idle: whether the clock advances the watermark of a silent source.
        deep: whether the watcher's marks are processed further.
        poison: whether some readings make marks that the database refuses.
    """
    graph = Graph("simulated")
    source: Source = Topic() if feed == "topic" else SimulatedFile(path)
    readings = graph.inject(
        "readings",
        source,
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(DISORDER_US // 1000)),
        dedupe=Dedupe("seq", within=timedelta(microseconds=DEDUPE_US[idle]))
        if by_arrival
        else Dedupe("seq", within=timedelta(microseconds=DEDUPE_US[idle]), time="at", unit="us"),
        idle=AdvanceWithClock(after=timedelta(microseconds=IDLE_US)) if idle else None,
    )
    (
        readings.key_by("device")
        .window(
            FixedWindows(timedelta(microseconds=WINDOW_US)),
            allowed_lateness=timedelta(microseconds=lateness_us),
            intervals=2,
        )
        .aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value"))
        .to_table("per_window")
    )
    marks = readings.key_by("device").process(Watcher(marks_refused=poison), name="watcher", output=Mark, intervals=2)
    marks.to_table("marks")
    if deep:
        (
            marks.key_by("group")
            .window(FixedWindows(timedelta(microseconds=GROUP_WINDOW_US)), allowed_lateness=hours(10), intervals=1)
            .aggregate(n=Count())
            .to_table("per_group")
        )
        marks.key_by("group").process(Tally(), name="tally", output=Total, intervals=2).to_table("totals")
    return graph
