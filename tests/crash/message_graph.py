"""Messages from a broker: windows, and a running count and sum by device, which depend on the order of arrival."""

from __future__ import annotations

import os

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime, Wait
from millpy.model.time import hours, seconds
from millpy.sources.mqtt.source import Mqtt
from millpy.windowing.aggregates.numeric import Count, Max, Min, Sum
from millpy.windowing.window import FixedWindows

EVERY = int(os.environ.get("LOAD_EVERY", "1"))
IDLE_S = float(os.environ.get("LOAD_IDLE_S", "0"))
HORIZON_S = float(os.environ.get("LOAD_HORIZON_S", "0"))
INTERVALS = int(os.environ.get("LOAD_INTERVALS", "2"))


class Message(msgspec.Struct):
    device: int
    seq: int
    at_us: int
    value: int


class Mark(msgspec.Struct):
    device: int
    number: int
    total: int


class Seen(msgspec.Struct):
    number: int = 0
    total: int = 0


class Marker(Computation):
    """Says how many there were of a device, and their sum, at every so-manieth."""

    seen = Value(Seen)

    def process_record(self, context: Context, record: Message) -> None:
        seen = context[Marker.seen]
        seen.number += 1
        seen.total += record.value
        if seen.number % EVERY == 0:
            context.produce(Mark(record.device, seen.number, seen.total))


graph = Graph("messages")
messages = graph.inject(
    "messages",
    Mqtt(os.environ["LOAD_TOPIC"], host="127.0.0.1", port=int(os.environ["LOAD_PORT"])),
    schema=Message,
    event_time=EventTime("at_us", unit="us", max_disorder=seconds(1)),
    dedupe=Dedupe("seq", time="at_us", unit="us", within=seconds(HORIZON_S))
    if HORIZON_S
    else Dedupe("seq", within=hours(1)),
    idle=AdvanceWithClock(seconds(IDLE_S)) if IDLE_S else Wait(),
).key_by("device")
(
    messages.window(FixedWindows(seconds(2)), intervals=INTERVALS)
    .aggregate(n=Count(), total=Sum("value"), low=Min("value"), high=Max("value"))
    .to_table("per_window")
)
messages.process(Marker(), name="marker", output=Mark, intervals=INTERVALS).to_table("marks")
