"""Readings of a Kafka topic, averaged per device in windows of ten seconds, into another topic: exactly once.

MILLPY_KAFKA_SERVERS names the brokers (default localhost:9092). Both topics must exist.
"""

from datetime import datetime

import msgspec

from millpy import AdvanceWithClock, Count, EventTime, FixedWindows, Graph, Kafka, Max, Mean, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime
    temperature: float


graph = Graph("kafka_averages")
readings = graph.inject(
    "readings",
    Kafka("readings", partitions=3),
    schema=Reading,
    event_time=EventTime("at", max_disorder=seconds(5)),
    idle=AdvanceWithClock(after=seconds(10)),
)
averages = (
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), mean=Mean("temperature"), high=Max("temperature"))
)
averages.to_table("averages")
averages.to_kafka("averages", key="device", name="to_averages")
