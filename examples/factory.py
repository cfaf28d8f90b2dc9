"""Temperatures of a factory's sensors, per device in windows of five seconds. `make demo` runs this graph.

MILLPY_MQTT_URL names the broker (default mqtt://localhost:1883); set FACTORY_MQTT_PROTOCOL=311 for a broker that speaks
only MQTT 3.1.1.
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


OLD_BROKER = os.environ.get("FACTORY_MQTT_PROTOCOL") == "311"

graph = Graph("factory")
readings = graph.inject(
    "readings",
    # amqtt marks messages that it queued for an absent session as retained.
    Mqtt("sensors/+/reading", protocol=311 if OLD_BROKER else 5, retained=OLD_BROKER),
    schema=Reading,
    event_time=EventTime("at", max_disorder=seconds(2)),
    dedupe=Dedupe("id", within=minutes(10)),
    idle=AdvanceWithClock(after=seconds(10)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(5)), allowed_lateness=seconds(20))
    .aggregate(n=Count(), mean=Mean("temperature"), high=Max("temperature"))
    .to_table("temperature_5s")
)
