"""Readings of a file, or of a topic, into a Kafka topic, as they are."""

import os

import msgspec

from millpy import EventTime, File, Graph, Kafka, KafkaBrokers, seconds
from millpy.ingest.protocol import Source


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int
    sent_ns: int = 0


servers = KafkaBrokers(os.environ["BENCH_KAFKA"])
given = os.environ.get("BENCH_INPUT", "")
source: Source = File(given) if given else Kafka("readings", partitions=1, brokers=servers)
graph = Graph("outbox")
readings = graph.inject(
    "readings", source, schema=Reading, event_time=EventTime("event_ms", unit="ms", max_disorder=seconds(2))
)
readings.to_kafka("copies", key="device", name="to_copies", brokers=servers, intervals=2)
