"""A graph with every kind of part that a stored description has."""

from __future__ import annotations

import enum
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from millpy import (
    Accumulation,
    AdvanceWithClock,
    Collect,
    Combiner,
    Computation,
    Context,
    Count,
    Dedupe,
    Directory,
    EventTime,
    FieldMapping,
    Files,
    First,
    FixedWindows,
    Graph,
    Kafka,
    Last,
    ListCell,
    MapCell,
    Max,
    Mean,
    Median,
    Min,
    Mqtt,
    Quantile,
    SessionWindows,
    SlidingWindows,
    StandardDeviation,
    Sum,
    Top,
    Value,
    Variance,
    hours,
    minutes,
    seconds,
)


class Place(msgspec.Struct):
    hall: str
    row: int | None = None


class Reading(msgspec.Struct):
    device: str
    id: UUID
    at: datetime
    seq: int
    value: float | None
    place: Place
    raw: bytes = b""
    tags: dict[str, list[str]] = {}
    note: str = ""


class Named(msgspec.Struct):
    device: str
    site: str
    at: int
    value: float
    good: bool


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Usual(msgspec.Struct, omit_defaults=True):
    mean: float = 0.0
    seen: list[datetime] = []
    next: Usual | None = None


class Range(Combiner[list[float]]):
    accumulator = list[float]
    result_type = float

    def __init__(self, low: float, levels: set[Level]) -> None:
        self.low = low
        self.levels = levels

    def create(self) -> list[float]:
        raise NotImplementedError

    def add(self, accumulator: list[float], record: Any) -> list[float]:
        raise NotImplementedError

    def merge(self, one: list[float], other: list[float]) -> list[float]:
        raise NotImplementedError

    def result(self, accumulator: list[float]) -> float:
        raise NotImplementedError


class Spikes(Computation):
    usual = Value(Usual)
    count = Value(int, default=7)
    level = Value(Level | None)  # type: ignore[arg-type]
    kind = Value(Literal["b", "a"], default="a")  # type: ignore[arg-type]
    last = ListCell(tuple[int, Annotated[str, msgspec.Meta(max_length=8)]])
    by_hall = MapCell(str, Usual)

    def process_record(self, context: Context, record: Any) -> None:
        raise NotImplementedError


def is_good(record: Any, least: float = 0.0) -> bool:
    raise NotImplementedError


def same(record: Any) -> Any:
    raise NotImplementedError


def described_graph() -> Graph:
    graph = Graph("described")
    in_order = EventTime("at", sorted=True)
    behind = EventTime("at", unit="ms", max_disorder=seconds(10), future_tolerance=minutes(1))
    files = graph.inject(
        "files",
        Files("a.csv", "b/*.csv", format="csv", partitions=2),
        schema=Reading,
        event_time=in_order,
        dedupe=Dedupe("device", "seq", within=hours(1)),
    )
    watched = graph.inject("watched", Directory("in", pattern="*.ndjson"), schema=Reading, event_time=in_order)
    topic = graph.inject(
        "topic",
        Kafka("readings", partitions=2, fields=FieldMapping("device", {"site": "site"}), tombstones="skip"),
        schema=Named,
        event_time=behind,
        dedupe=Dedupe("device", within=minutes(5), time="at", unit="ms"),
        idle=AdvanceWithClock(after=seconds(30)),
    )
    broker = graph.inject("broker", Mqtt("s/{site}/+", retained=True), schema=Named, event_time=behind)

    fixed = (
        files.union(watched).key_by("device", "place.hall").window(FixedWindows(minutes(1)), allowed_lateness=hours(2))
    )
    fixed.aggregate(
        n=Count(), seqs=Sum("seq"), mean=Mean("value"), low=Min("value"), high=Max("at"), mid=Median("value")
    ).to_table("per_minute")
    sliding = files.key_by("id").window(SlidingWindows(minutes(10), every=minutes(5)), name="sliding", intervals=2)
    sliding.aggregate(
        some=Count("value"),
        spread=Variance("value", population=True),
        deviation=StandardDeviation("value"),
        most=Quantile("value", 0.99, accuracy=0.02),
    )
    sessions = broker.key_by("device").window(
        SessionWindows(minutes(30), by_key={"slow": hours(2), "fast": minutes(1)}), name="sessions"
    )
    sessions.aggregate(
        begin=First("value"),
        end=Last("good"),
        top=Top("value", n=3, smallest=True),
        all=Collect("at", limit=5),
        range=Range(1.5, {Level.LOW, Level.HIGH}),
    )
    good = topic.filter(partial(is_good, least=0.5)).map(same, Reading, event_time="at").flat_map(same)
    good.deduplicate(["device", "seq"], hours(3), name="once")
    routed = broker.split(same, into=["left", "right"])
    graph.process(
        Spikes(),
        name="spikes",
        inputs=[routed["left"].key_by("device"), topic.key_by("device")],
        output=Reading,
    ).to_table("spikes")
    amended = files.key_by("device").window(
        FixedWindows(minutes(1)),
        allowed_lateness=hours(2),
        accumulation=Accumulation.RETRACTING,
        name="amended",
    )
    panes = amended.aggregate(n=Count())
    panes.key_by("device").window(FixedWindows(hours(1)), name="hourly").aggregate(n=Sum("n"))
    panes.deduplicate("device", hours(3), name="one_pane")
    return graph
