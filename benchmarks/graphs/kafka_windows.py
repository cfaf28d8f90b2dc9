"""Readings from Kafka through windows into a table, as in W1 otherwise; with BENCH_DEDUPE, dedupe ids on."""

import os

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Kafka, KafkaBrokers, Max, Mean, Min, minutes, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int


graph = Graph("kafka")
readings = graph.inject(
    "readings",
    Kafka("bench", partitions=1, brokers=KafkaBrokers(os.environ["BENCH_KAFKA"])),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2)),
    dedupe=Dedupe("device", "seq", within=minutes(10)) if os.environ.get("BENCH_DEDUPE") else None,
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), mean=Mean("temperature"), low=Min("temperature"), high=Max("temperature"))
    .to_table("temperature_10s")
)
