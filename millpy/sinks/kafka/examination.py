"""Check the cluster of a topic for `millpy doctor`: whether it answers, and whether the topic takes our messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from millpy.model.finding import Finding, Severity
from millpy.sinks.protocol import UNDELIVERED
from millpy.sources.kafka.client import Cluster
from millpy.sources.kafka.examination import risks_of_login, visitor

if TYPE_CHECKING:
    from millpy.sinks.kafka.topic import KafkaTopic

LARGEST = "max.message.bytes"


async def examine(sink: KafkaTopic, cluster: Cluster, graph: str, name: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds at the cluster, by the metadata of the topic. Raises MillError."""
    for finding in risks_of_login(name, cluster):
        yield finding
    topic = f"{name}: topic {sink.topic} at {cluster.servers}"
    async with visitor(cluster, sink.topic, graph) as client:
        there = (await client.topic()).partitions
        largest = await client.setting(LARGEST) if there else None
    if not there:
        yield Finding(
            Severity.ERROR,
            "sink",
            f"{topic} does not exist",
            UNDELIVERED,
            f"create topic {sink.topic}, with as many partitions as its readers need",
        )
    elif largest is not None and int(largest) < sink.message_bytes_max:
        yield Finding(
            Severity.WARNING,
            "sink",
            f"{topic} takes batches of {int(largest):,} bytes, and messages may have {sink.message_bytes_max:,}",
            "a larger batch stops its interval, because what comes behind it must not overtake it",
            f"set message_bytes_max={largest} of the sink, or raise {LARGEST} of the topic",
        )
    else:
        yield Finding(Severity.OK, "sink", f"{topic} has {there} partitions")
