"""Names that pages use without saying what they are: streams, record types and functions of a reader's own."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
import pyarrow as pa

import millpy
from millpy import Computation, Context, EventTime, File, Graph, seconds


class Position(msgspec.Struct):
    cell: str
    speed: float


class Reading(msgspec.Struct):
    device: str
    at: dt.datetime
    temperature: float
    value: float
    id: str
    site: str
    at_ms: int
    fcnt: int
    position: Position


class Celsius(msgspec.Struct):
    device: str
    at: dt.datetime
    celsius: float


class Message(msgspec.Struct):
    at: dt.datetime
    readings: list[Reading]


class MeterReading(msgspec.Struct):
    meter: str
    at: dt.datetime
    kwh: float


class Bill(msgspec.Struct):
    meter: str
    kwh: float


class Balance(Computation):
    def process_record(self, context: Context, record: MeterReading) -> None:
        context.produce(Bill(record.meter, record.kwh))


def to_celsius(reading: Reading) -> Celsius:
    return Celsius(reading.device, reading.at, (reading.temperature - 32) / 1.8)


def is_plausible(reading: Reading) -> bool:
    return -40 < reading.temperature < 120


def place(reading: Reading) -> str:
    return "indoor" if reading.site == "hall" else "outdoor"


def names() -> dict[str, Any]:
    """Return a fresh namespace with millpy's exports and the streams of a graph that is not run."""
    graph = Graph("given")
    event_time = EventTime("at", max_disorder=seconds(10))

    def stream(name: str, schema: type[msgspec.Struct]) -> Any:
        return graph.inject(f"given_{name}", File(f"{name}.ndjson"), schema=schema, event_time=event_time)

    return {
        **{name: getattr(millpy, name) for name in millpy.__all__},
        "__name__": "page",
        "msgspec": msgspec,
        "pa": pa,
        "datetime": dt.datetime,
        "graph": graph,
        "readings": stream("readings", Reading),
        "north": stream("north", Reading),
        "south": stream("south", Reading),
        "messages": stream("messages", Message),
        "meters": stream("meters", MeterReading),
        **{each.__name__: each for each in (Reading, Celsius, Message, Balance, Bill, to_celsius, is_plausible, place)},
    }
