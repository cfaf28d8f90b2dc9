"""Windows of many keys: each kind, with as much in a window as is asked for; nothing closes before the last record."""

from __future__ import annotations

import os
from datetime import datetime

import msgspec

from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import minutes, seconds
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.aggregates.positional import Collect
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows

WINDOWS = {
    "fixed": FixedWindows(minutes(1)),
    "sliding": SlidingWindows(minutes(1), every=seconds(30)),
    "session": SessionWindows(seconds(30)),
}


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: int
    text: str


graph = Graph("sizes")
(
    graph.inject(
        "readings", File(os.environ["CRASH_INPUT"]), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1))
    )
    .key_by("device")
    .window(
        WINDOWS[os.environ.get("SIZES_WINDOWS", "fixed")],
        intervals=int(os.environ.get("SIZES_INTERVALS", "2")),
        allowed_lateness=minutes(5),
    )
    .aggregate(n=Count(), total=Sum("value"), texts=Collect("text", limit=1000))
    .to_table("windows")
)
