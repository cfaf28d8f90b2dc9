"""What a type checker finds in a user's graph. No test runs this: `make types` fails if an expected error is absent."""

from __future__ import annotations

from datetime import datetime
from typing import Any, assert_type

import msgspec
import pyarrow as pa

import millpy
from millpy import Computation, Context, Count, EventTime, File, FixedWindows, Graph, Mean, Stream, minutes, seconds
from millpy.graph.streams import KeyedStream


class Reading(msgspec.Struct):
    device: str
    at: datetime
    celsius: float


class Alarm(msgspec.Struct):
    device: str
    fahrenheit: float


class Spike(Computation):
    def process(self, context: Context, record: Any) -> None: ...


def to_alarm(reading: Reading) -> Alarm:
    return Alarm(reading.device, reading.celsius * 1.8 + 32)


def of_columns(batch: pa.RecordBatch) -> Any: ...


graph = Graph("plant")
at = EventTime("at", max_disorder=seconds(10))
readings = graph.inject("readings", File("readings.ndjson"), schema=Reading, event_time=at)
keyed = readings.key_by("device")
assert_type(readings, Stream[Reading])
assert_type(keyed, KeyedStream[Reading])
assert_type(readings.filter(lambda r: r.celsius > 100), Stream[Reading])
assert_type(readings.filter(of_columns, columns=True, immediate=True), Stream[Reading])
assert_type(readings.map(to_alarm, Alarm), Stream[Alarm])
assert_type(readings.map(lambda r: Alarm(r.device, r.celsius), Alarm).filter(lambda a: a.fahrenheit), Stream[Alarm])
assert_type(readings.map(of_columns, Alarm, columns=True), Stream[Alarm])
assert_type(readings.map(lambda r: r), Stream[Reading])
assert_type(readings.flat_map(lambda r: [Alarm(r.device, 1.0)], Alarm), Stream[Alarm])
assert_type(readings.split(lambda r: r.device, into=["a"]), dict[str, Stream[Reading]])
assert_type(readings.union(readings), Stream[Reading])
assert_type(readings.deduplicate("device", minutes(1), name="once"), Stream[Reading])
assert_type(keyed.process(Spike(), name="spikes", output=Alarm), Stream[Alarm])
assert_type(graph.process(Spike(), name="more", inputs=[keyed], output=Alarm), Stream[Alarm])
hourly: Stream = keyed.window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
hourly.filter(lambda pane: pane.n > 1)  # no type names the columns of aggregates
plain: Stream[Reading] = hourly

readings.filter(lambda r: r.celsus > 100)  # type: ignore[attr-defined]
readings.map(lambda r: Alarm(r.devise, r.celsius), Alarm)  # type: ignore[attr-defined]
readings.flat_map(lambda r: [Alarm(r.device, r.fahrenheit)], Alarm)  # type: ignore[attr-defined]
readings.split(lambda r: r.room, into=["a"])  # type: ignore[attr-defined]
readings.map(to_alarm, Alarm).filter(lambda alarm: alarm.celsius)  # type: ignore[attr-defined]
keyed.stream.filter(lambda r: r.room)  # type: ignore[attr-defined]
readings.map(lambda r: Alarm(r.device), Alarm)  # type: ignore[call-arg]
readings.map(to_alarm)  # type: ignore[arg-type]
readings.union(readings.map(to_alarm, Alarm))  # type: ignore[arg-type]
readings.key_by(lambda r: r.device)  # type: ignore[arg-type]
keyed.window(FixedWindows(minutes(1))).aggregate(mean=Mean)  # type: ignore[arg-type]
readings.window(FixedWindows(minutes(1)))  # type: ignore[attr-defined]
millpy.Grph("plant")  # type: ignore[attr-defined]
