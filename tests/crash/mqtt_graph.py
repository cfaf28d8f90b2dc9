"""Readings of sites and floors over MQTT, two source partitions, several readings a message."""

from __future__ import annotations

import os

import msgspec

from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime, IdlePolicy, Wait
from millpy.model.time import hours, seconds
from millpy.sources.mqtt.source import Mqtt, MqttSession
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.window import FixedWindows

FILTERS = ("north/{site}/{floor}", "south/{site}/{floor}")
TABLE = "per_site_10s"


class Reading(msgspec.Struct):
    site: str
    floor: int
    id: int
    at: int
    value: int


def source(port: int, protocol: int = 5) -> Mqtt:
    return Mqtt(*FILTERS, host="127.0.0.1", port=port, protocol=protocol, session=MqttSession(client_id="floors"))  # type: ignore[arg-type]


def counts(port: int, idle: IdlePolicy | None = None, *, disorder_s: float = 3_600, protocol: int = 5) -> Graph:
    graph = Graph("floors")
    readings = graph.inject(
        "readings",
        source(port, protocol),
        schema=Reading,
        event_time=EventTime("at", unit="us", max_disorder=seconds(disorder_s)),
        dedupe=Dedupe("id", within=hours(1)),
        idle=idle or Wait(),
    )
    (
        readings.key_by("site", "floor")
        .window(FixedWindows(seconds(10)))
        .aggregate(n=Count(), total=Sum("value"))
        .to_table(TABLE)
    )
    return graph


if "FLOORS_PORT" in os.environ:
    graph = counts(
        int(os.environ["FLOORS_PORT"]), AdvanceWithClock(seconds(0.5)), protocol=int(os.environ["FLOORS_PROTOCOL"])
    )
