"""The graph of `spark_run`: windows over files that arrive in the directory that SPARK_INPUT names, and an archive."""

import os
from datetime import timedelta

import msgspec

from millpy import Count, Directory, EventTime, FixedWindows, Graph, Sum

WINDOW_US = 10_000_000


class Reading(msgspec.Struct):
    device: str
    at: int
    n: int


graph = Graph("crashed")
readings = graph.inject(
    "readings",
    Directory(os.environ.get("SPARK_INPUT", "."), pattern="*.ndjson", settle=timedelta(0)),
    schema=Reading,
    event_time=EventTime("at", unit="us", max_disorder=timedelta(seconds=1)),
)
keyed = readings.key_by("device")
keyed.archive(buckets=4)
keyed.window(FixedWindows(timedelta(microseconds=WINDOW_US)), intervals=2, name="sums").aggregate(
    n=Count(), total=Sum("n")
).to_table("sums")
