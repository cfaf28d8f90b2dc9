"""Readings of a file or a broker, whose source learns its disorder bound; `late_records` has those that are late."""

from __future__ import annotations

import os

import msgspec

from millpy import (
    AdvanceWithClock,
    Count,
    Dedupe,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Kafka,
    KafkaBrokers,
    Mqtt,
    MqttSession,
    Wait,
    hours,
    milliseconds,
    seconds,
)
from millpy.ingest.protocol import Source

TOPIC = "disorder"


class Reading(msgspec.Struct):
    device: str
    at: int
    number: int


def source(place: str) -> Source:
    kind, _, address = place.partition(",")
    if kind == "mqtt":
        return Mqtt(TOPIC, host="127.0.0.1", port=int(address), session=MqttSession(client_id="disorder"))
    if kind == "kafka":
        return Kafka(TOPIC, partitions=1, start="earliest", brokers=KafkaBrokers(address))
    return File(place)


if "CRASH_INPUT" in os.environ:
    graph = Graph("disorder")
    readings = graph.inject(
        "readings",
        source(os.environ["CRASH_INPUT"]),
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=seconds(20), percentile=0.9),
        dedupe=Dedupe("number", within=hours(1)),
        idle=AdvanceWithClock(seconds(0.3)) if "DISORDER_IDLE" in os.environ else Wait(),
    )
    readings.key_by("device").window(FixedWindows(milliseconds(1))).aggregate(n=Count()).to_table("by_ms")
