"""JOIN: two files of readings, joined by device and time, into a table."""

import os

import msgspec

from millpy import EventTime, File, Graph, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    seq: int


class Pressure(msgspec.Struct):
    device: str
    event_ms: int
    pressure: float
    seq: int


# No record is late: with two sources, it would depend on their order which ones are.
EVENT_TIME = EventTime("event_ms", unit="ms", max_disorder=seconds(30))

graph = Graph("joined")
readings = graph.inject("readings", File(os.environ["BENCH_LEFT"]), schema=Reading, event_time=EVENT_TIME)
pressures = graph.inject("pressures", File(os.environ["BENCH_RIGHT"]), schema=Pressure, event_time=EVENT_TIME)
(
    readings.key_by("device")
    .join(
        pressures.key_by("device"),
        within=seconds(0.5),
        how=os.environ.get("BENCH_HOW", "inner"),  # type: ignore[arg-type]
        intervals=int(os.environ.get("BENCH_INTERVALS", "4")),
    )
    .to_table("pairs")
)
