"""Rooms and sensors of a flat: irregular readings, days of silence."""

from __future__ import annotations

import msgspec

from millpy.graph import Graph
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import days, minutes
from millpy.windowing.window import FixedWindows, SessionWindows
from tests.feeds.sources import all_of, kept, mode, source


class Reading(msgspec.Struct):
    room: str
    sensor: str
    event_s: int
    value: float


graph = Graph("open_smart_home")
readings = graph.inject(
    "readings",
    source("home/{room}/{sensor}", "readings.csv.gz"),
    schema=Reading,
    event_time=EventTime("event_s", unit="s", max_disorder=minutes(1)),
    dedupe=Dedupe("room", "sensor", "event_s", within=days(1)),
)
by_sensor = kept(readings.key_by("room", "sensor"))
for name, windows in {
    "tumbling_10min": FixedWindows(minutes(10)),
    "sessions_gap_30min": SessionWindows(minutes(30)),
}.items():
    by_sensor.window(windows, accumulation=mode(), intervals=2).aggregate(**all_of("value")).to_table(name)
