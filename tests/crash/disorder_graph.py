"""A file of readings whose source learns its disorder bound; every record that is late is in `late_records`."""

from __future__ import annotations

import os

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, milliseconds, seconds


class Reading(msgspec.Struct):
    device: str
    at: int


graph = Graph("disorder")
readings = graph.inject(
    "readings",
    File(os.environ["CRASH_INPUT"]),
    schema=Reading,
    event_time=EventTime("at", unit="us", max_disorder=seconds(20), percentile=0.9),
)
readings.key_by("device").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("by_ms")
