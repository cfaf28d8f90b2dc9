"""The graph of the fuzz test: flat records (the fast path) and nested ones, windows, state, results in every type."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from millpy.computation import Computation, Context, MapCell, Value
from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.model.time import minutes, seconds
from millpy.model.timer import Timer
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, Sum
from millpy.windowing.window import FixedWindows
from tests.feed import Feed


class Flat(msgspec.Struct):
    id: int
    device: str
    at: datetime
    count: int
    value: float
    flag: bool
    note: str | None = None


class Inner(msgspec.Struct):
    name: str
    values: list[float]


class Nested(msgspec.Struct):
    id: int
    device: str
    at: datetime
    value: float
    inner: Inner | None = None
    count: int = 0
    note: dict[str, float] | None = None


class Seen(msgspec.Struct):
    device: str
    value: float
    last: str
    inner: Inner | None = None


class Remember(Computation):
    """State, a map cell with a key from the record, a timer, and a mistake for some values."""

    total = Value(float, default=0.0)
    notes = MapCell(str, int)

    def process_record(self, context: Context, record: Any) -> None:
        if record.count == 3:
            raise ValueError(f"three: {record!r}")
        context[Remember.total] += record.value
        note = str(getattr(record, "note", None))
        context[Remember.notes][note] = record.id
        context.set_timer("quiet", at=context.event_time_us + 60_000_000)
        context.produce(Seen(record.device, context[Remember.total], note, getattr(record, "inner", None)))

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Seen(context.key, context[Remember.total], timer.name))


HEADER = ("id", "device", "at", "count", "value", "flag", "note")


def a_graph(flat: Feed, nested: Feed, table: Feed) -> Graph:
    graph = Graph("fuzz")
    event_time = EventTime("at", max_disorder=seconds(30))
    idle = AdvanceWithClock(after=minutes(10))
    first = graph.inject(
        "flat", flat, schema=Flat, event_time=event_time, dedupe=Dedupe("id", "device", within=minutes(5)), idle=idle
    )
    second = graph.inject("nested", nested, schema=Nested, event_time=event_time, idle=idle)
    third = graph.inject("table", table, schema=Flat, event_time=event_time, idle=idle)
    for name, stream in (("flat", first), ("nested", second), ("table", third)):
        (
            stream.key_by("device")
            .window(FixedWindows(minutes(1)), allowed_lateness=minutes(1), intervals=2)
            .aggregate(n=Count(), total=Sum("count"), mean=Mean("value"), low=Min("value"), high=Max("device"))
            .to_table(f"{name}_1m")
        )
        stream.key_by("device").process(Remember(), name=f"{name}_seen", output=Seen, intervals=2).to_table(
            f"{name}_results"
        )
    return graph
