"""Archived windows that Spark can compute by itself, and some that it cannot, over FEED files beside this graph."""

from pathlib import Path

import msgspec

from millpy import (
    AfterAny,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    Every,
    Files,
    FixedWindows,
    Graph,
    Last,
    Max,
    Mean,
    Min,
    Repeatedly,
    SessionWindows,
    SlidingWindows,
    StandardDeviation,
    Sum,
    seconds,
)
from millpy.windowing.aggregates.numeric import Variance


class Place(msgspec.Struct):
    hall: int


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float | None
    n: int
    place: Place


def positive(reading: Reading) -> bool:
    return reading.n > 0


FEED = sorted(str(path) for path in Path(__file__).parent.glob("feed*.ndjson"))
graph = Graph("natively")
at = EventTime("at", unit="s", max_disorder=seconds(5))
readings = graph.inject("readings", Files(*FEED, partitions=len(FEED)), schema=Reading, event_time=at)
keyed = readings.key_by("device", "place.hall")
readings.key_by("device").archive(buckets=4)
fixed = keyed.window(
    FixedWindows(seconds(20), offset=seconds(5)), allowed_lateness=seconds(4), intervals=2, name="fixed"
)
fixed.aggregate(
    n=Count(),
    values=Count("value"),
    total=Sum("n"),
    value=Sum("value"),
    mean=Mean("n"),
    low=Min("value"),
    high=Max("n"),
    variance=Variance("value"),
    spread=StandardDeviation("value", population=True),
    last=Last("n"),
).to_table("fixed")
early = AfterWatermark(early=Repeatedly(AfterAny(AfterCount(3), Every(seconds(0.02)))))
sliding = keyed.window(SlidingWindows(seconds(10), every=seconds(3), offset=seconds(1)), trigger=early, name="sliding")
sliding.aggregate(n=Count(), mean=Mean("value")).to_table("sliding")
keyed.window(SessionWindows(seconds(3)), name="sessions").aggregate(n=Count()).to_table("sessions")
filtered = readings.filter(positive).key_by("device").window(FixedWindows(seconds(20)), name="filtered")
filtered.aggregate(n=Count()).to_table("filtered")
