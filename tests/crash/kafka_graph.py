"""Readings of a topic in windows; the key is the device, the timestamp is the event time."""

import os

import msgspec

from millpy import Count, EventTime, FieldMapping, FixedWindows, Graph, Kafka, KafkaBrokers, Max, Sum, seconds


class Reading(msgspec.Struct):
    device: str
    at_ms: int
    value: int


address, topic, partitions, start = os.environ["CRASH_INPUT"].split(",")
graph = Graph("kafka_crash")
readings = graph.inject(
    "readings",
    Kafka(
        topic,
        partitions=int(partitions),
        fields=FieldMapping(key="device", timestamp="at_ms"),
        start=start,
        brokers=KafkaBrokers(address),
    ),
    schema=Reading,
    event_time=EventTime("at_ms", unit="ms", max_disorder=seconds(5)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)), intervals=2)
    .aggregate(n=Count(), total=Sum("value"), high=Max("value"))
    .to_table("sums")
)
