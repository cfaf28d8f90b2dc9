"""W1: a file of readings through exactly-once windows into a table.

With BENCH_DEDUPE, dedupe ids on; with BENCH_ARCHIVE, an archive beside them; with BENCH_TRIGGER=early, early panes.
"""

import os

import msgspec

from millpy import (
    AfterWatermark,
    Count,
    Dedupe,
    EventTime,
    Every,
    File,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Min,
    SessionWindows,
    SlidingWindows,
    minutes,
    seconds,
)

WINDOWS = {
    "fixed": FixedWindows(seconds(10)),
    "sliding": SlidingWindows(seconds(10), every=seconds(2.5)),
    "session": SessionWindows(seconds(3)),
}

TRIGGERS = {"default": AfterWatermark(), "early": AfterWatermark(early=Every(seconds(1)))}


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int


graph = Graph("w1")
readings = graph.inject(
    "readings",
    File(os.environ["BENCH_FILE"]),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
    dedupe=Dedupe("device", "seq", within=minutes(10)) if os.environ.get("BENCH_DEDUPE") else None,
)
(
    readings.key_by("device")
    .window(
        WINDOWS[os.environ.get("BENCH_WINDOWS", "fixed")],
        trigger=TRIGGERS[os.environ.get("BENCH_TRIGGER", "default")],
        intervals=int(os.environ.get("BENCH_INTERVALS", "4")),
    )
    .aggregate(n=Count(), mean=Mean("temperature"), low=Min("temperature"), high=Max("temperature"))
    .to_table("temperature_10s")
)
if os.environ.get("BENCH_ARCHIVE"):
    readings.key_by("device").archive()
