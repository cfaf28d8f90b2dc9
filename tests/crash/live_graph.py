"""Windows over a directory, whose graph is changed while it runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import msgspec

from millpy import Count, Directory, EventTime, FixedWindows, Graph, Sum, minutes, seconds

LATENESS_S, FILTERED = 0, False


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


def positive(reading: Reading) -> bool:
    return reading.value > 0


graph = Graph("live")
readings = graph.inject(
    "readings",
    Directory(str(Path(__file__).parent / "feed"), settle=timedelta(0), every=timedelta(seconds=0.05)),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(0)),
)
stream = readings.filter(positive) if FILTERED else readings
windows = stream.key_by("device").window(FixedWindows(minutes(1)), allowed_lateness=seconds(LATENESS_S), intervals=2)
windows.aggregate(n=Count(), total=Sum("value")).to_table("minutes", history=True)
