"""W3: readings from MQTT through exactly-once windows into a table; those of W1 otherwise."""

import os

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, Max, Mean, Min, Mqtt, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int


graph = Graph("w3")
readings = graph.inject(
    "readings",
    Mqtt("bench/ping", host="127.0.0.1", port=int(os.environ["BENCH_PORT"])),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), mean=Mean("temperature"), low=Min("temperature"), high=Max("temperature"))
    .to_table("temperature_10s")
)
