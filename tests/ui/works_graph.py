"""Readings of three sites over MQTT: windows with a history, a step that parks keys, and whatever a device may send."""

from __future__ import annotations

import os

import msgspec

from millpy import (
    AdvanceWithClock,
    Computation,
    Context,
    Count,
    Dedupe,
    EventTime,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Mqtt,
    Value,
    minutes,
    seconds,
)

FAULTY = 13_000.0


class Reading(msgspec.Struct):
    site: str
    device: str
    at: int
    id: int
    value: float
    note: str = ""


class Alarm(msgspec.Struct):
    device: str
    number: int
    value: float


class Alarms(Computation):
    number = Value(int, default=0)

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value >= FAULTY:
            raise ValueError(f"the value of {record.device} cannot be true: {record.note}")
        if record.value >= 100:
            context[Alarms.number] += 1
            context.produce(Alarm(record.device, context[Alarms.number], record.value))


graph = Graph("works")
readings = graph.inject(
    "readings",
    Mqtt("works/{site}/{device}", host="127.0.0.1", port=int(os.environ["WORKS_PORT"])),
    schema=Reading,
    event_time=EventTime("at", unit="ms", max_disorder=seconds(1)),
    dedupe=Dedupe("device", "id", within=minutes(10)),
    idle=AdvanceWithClock(after=seconds(2)),
    device=("site", "device"),
)
(
    readings.key_by("site", "device")
    .window(FixedWindows(seconds(5)), allowed_lateness=seconds(40), name="temperature_5s")
    .aggregate(n=Count(), mean=Mean("value"), high=Max("value"))
    .to_table("temperature_5s", history=True)
)
readings.key_by("device").process(Alarms(), name="alarms", output=Alarm, on_failure="park").to_table("alarms")
