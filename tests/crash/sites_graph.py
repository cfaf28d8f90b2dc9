"""Readings of sites whose clocks and connections differ, windowed by the watermark of each site."""

from __future__ import annotations

import os

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, Sum, seconds
from millpy.ingest.protocol import Source


class Reading(msgspec.Struct):
    site: str
    device: str
    at: int
    number: int


def graph_of(source: Source, watermark_by: str | None = "site") -> Graph:
    graph = Graph("sites")
    event_time = EventTime("at", unit="s", max_disorder=seconds(20), watermark_by=watermark_by)
    readings = graph.inject("readings", source, schema=Reading, event_time=event_time)
    keyed = readings.filter(lambda reading: reading.number % 50 != 0).key_by("site", "device")
    keyed.window(FixedWindows(seconds(10)), intervals=3, name="panes").aggregate(
        n=Count(), total=Sum("number")
    ).to_table("panes")
    return graph


if "CRASH_INPUT" in os.environ:
    graph = graph_of(File(os.environ["CRASH_INPUT"]))
