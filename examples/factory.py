"""Temperatures of a factory's sensors, per device in windows of five seconds. `make demo` runs this graph.

The broker is told by FACTORY_BROKER_HOST and FACTORY_BROKER_PORT; FACTORY_MQTT_PROTOCOL is "5" or "3.1.1".
"""

import os
from datetime import datetime

import msgspec

from millpy import (
    AdvanceWithClock,
    Count,
    Dedupe,
    EventTime,
    FixedWindows,
    Graph,
    Max,
    Mean,
    Mqtt,
    minutes,
    seconds,
)


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float
    id: str


graph = Graph("factory")
readings = graph.inject(
    "readings",
    Mqtt(
        "sensors/+/reading",
        host=os.environ.get("FACTORY_BROKER_HOST", "127.0.0.1"),
        port=int(os.environ.get("FACTORY_BROKER_PORT", "1883")),
        protocol=os.environ.get("FACTORY_MQTT_PROTOCOL", "5"),
    ),
    schema=Reading,
    event_time=EventTime("at", max_disorder=seconds(2)),
    dedupe=Dedupe("id", within=minutes(10)),
    idle=AdvanceWithClock(after=seconds(10)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(5)), allowed_lateness=seconds(10))
    .aggregate(n=Count(), mean=Mean("temperature"), high=Max("temperature"))
    .to_table("temperature_5s")
)
