"""W3: readings from MQTT through windows into a table, as in W1 otherwise; with BENCH_DEDUPE, dedupe ids on."""

import os

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Max, Mean, Min, Mqtt, minutes, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int


DEDUPE = bool(os.environ.get("BENCH_DEDUPE"))

graph = Graph("w3_dedupe" if DEDUPE else "w3")
readings = graph.inject(
    "readings",
    Mqtt("bench/ping", host="127.0.0.1", port=int(os.environ["BENCH_PORT"])),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
    dedupe=Dedupe("device", "seq", within=minutes(10)) if DEDUPE else None,
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), mean=Mean("temperature"), low=Min("temperature"), high=Max("temperature"))
    .to_table("temperature_10s")
)
