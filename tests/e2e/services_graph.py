"""Readings from a directory that is watched: the source never ends, and the clock closes windows."""

from __future__ import annotations

import os

import msgspec

from millpy import AdvanceWithClock, Count, Dedupe, Directory, EventTime, FixedWindows, Graph, hours, seconds


class Reading(msgspec.Struct):
    device: str
    id: int
    at: int


graph = Graph("yard")
(
    graph.inject(
        "readings",
        Directory(os.environ["YARD_INPUT"], every=seconds(0.1)),
        schema=Reading,
        event_time=EventTime("at", unit="s", max_disorder=seconds(1)),
        dedupe=Dedupe("id", within=hours(1)),
        idle=AdvanceWithClock(after=seconds(1)),
    )
    .key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count())
    .to_table("per_device")
)
