"""The graph of the crash tests: a file with disorder, duplicates and rubbish; windows; Computations in a row."""

from __future__ import annotations

import os
from datetime import datetime

import msgspec

from millpy.computation import Computation, Context, MapCell, Value
from millpy.graph import Graph
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import hours, milliseconds, seconds
from millpy.model.timer import Timer
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count, Max, Min, Sum
from millpy.windowing.window import FixedWindows

INTERVALS = 2
EVERY = 10
QUIET_US = 1_000_000
PERIOD_US = 10_000_000
GRACE_US = 5_000_000


class Reading(msgspec.Struct):
    device: str
    group: int
    seq: int
    at: datetime
    value: float


class Mark(msgspec.Struct):
    device: str
    group: int
    kind: str
    number: int
    total: float


class Total(msgspec.Struct):
    group: int
    period: int
    marks: int


class Seen(msgspec.Struct):
    group: int = 0
    number: int = 0
    total: float = 0.0
    last_us: int = 0


class Watcher(Computation):
    """Marks every tenth record of a device, and each time that it falls silent."""

    seen = Value(Seen)

    def process_record(self, context: Context, record: Reading) -> None:
        seen = context[Watcher.seen]
        seen.group = record.group
        seen.number += 1
        seen.total += record.value
        seen.last_us = max(seen.last_us, context.event_time_us)
        if seen.number % EVERY == 0:
            context.produce(Mark(record.device, record.group, "every", seen.number, seen.total))
        if not context.late:
            context.set_timer("quiet", at=seen.last_us + QUIET_US)

    def process_timer(self, context: Context, timer: Timer) -> None:
        seen = context[Watcher.seen]
        context.produce(Mark(context.key, seen.group, "quiet", seen.number, seen.total))


class Tally(Computation):
    """Counts a group's marks per period, and produces the number well after the period."""

    marks = MapCell(int, int)

    def process_record(self, context: Context, record: Mark) -> None:
        period = context.event_time_us // PERIOD_US
        marks = context[Tally.marks]
        marks[period] = marks.get(period, 0) + 1
        context.set_timer(f"over/{period}", at=(period + 1) * PERIOD_US + GRACE_US)

    def process_timer(self, context: Context, timer: Timer) -> None:
        period = int(timer.name.removeprefix("over/"))
        context.produce(Total(context.key, period, context[Tally.marks].pop(period)))


graph = Graph("crash")
readings = graph.inject(
    "readings",
    File(os.environ["CRASH_INPUT"]),
    schema=Reading,
    event_time=EventTime("at", max_disorder=milliseconds(500)),
    dedupe=Dedupe("seq", within=seconds(5), time="at"),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(2)), allowed_lateness=milliseconds(300), intervals=INTERVALS)
    .aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value"))
    .to_table("per_window")
)
marks = readings.key_by("device").process(Watcher(), name="watcher", output=Mark, intervals=INTERVALS)
marks.to_table("marks")
(
    marks.key_by("group")
    .window(FixedWindows(seconds(10)), allowed_lateness=hours(1), intervals=INTERVALS)
    .aggregate(n=Count(), total=Sum("number"))
    .to_table("per_group")
)
marks.key_by("group").process(Tally(), name="tally", output=Total, intervals=INTERVALS).to_table("totals")
