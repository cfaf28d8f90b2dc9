"""bench-late: readings of a watched directory, by minute, with a week of allowed lateness."""

import os
from datetime import timedelta

import msgspec

from millpy import Count, Directory, EventTime, FixedWindows, Graph, Sum, days, minutes, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    value: int


graph = Graph("late")
readings = graph.inject(
    "readings",
    Directory(os.environ["BENCH_DIRECTORY"], settle=timedelta(seconds=0.1), every=timedelta(seconds=0.1)),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
)
(
    readings.key_by("device")
    .window(FixedWindows(minutes(1)), allowed_lateness=days(8), intervals=4)
    .aggregate(n=Count(), total=Sum("value"))
    .to_table("by_minute")
)
