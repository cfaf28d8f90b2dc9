"""Every kind of work that has a limit, in one graph: windows that close at once, state in bytes, timers of one key."""

from __future__ import annotations

import os
import time
from datetime import datetime

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import minutes, seconds
from millpy.model.timer import Timer
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows

WINDOWS = {
    "fixed": FixedWindows(minutes(1)),
    "sliding": SlidingWindows(minutes(1), every=seconds(30)),
    "session": SessionWindows(seconds(30)),
}
CALL_S = float(os.environ["GRID_CALL_S"])
TIMERS = int(os.environ["GRID_TIMERS"])


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: int
    text: str


class Told(msgspec.Struct):
    device: str
    timer: str
    total: int


class Marks(Computation):
    """Keeps the texts of a key, and produces its sum at each timer; the key d0 has many timers at one time."""

    total = Value(int, default=0)
    texts = Value(str, default="")
    output = Told

    def process_record(self, context: Context, record: Reading) -> None:
        time.sleep(CALL_S)
        context[Marks.total] += record.value
        context[Marks.texts] += record.text
        for number in range(TIMERS if record.device == "d0" else 1):
            context.set_timer(f"t{number}", at=context.event_time + minutes(2))

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Told(str(context.key), timer.name, context[Marks.total]))


graph = Graph("sizes")
readings = graph.inject(
    "readings", File(os.environ["CRASH_INPUT"]), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1))
).key_by("device")
(
    readings.window(WINDOWS[os.environ["SIZES_WINDOWS"]], intervals=2, allowed_lateness=minutes(5))
    .aggregate(n=Count(), total=Sum("value"))
    .to_table("windows")
)
readings.process(Marks(), name="marks", output=Told, intervals=2).to_table("told")
