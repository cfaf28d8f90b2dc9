"""Check the cluster of a topic for `millpy doctor`: whether it answers, and whether the topic exists."""

from __future__ import annotations

from collections.abc import AsyncIterator

from millpy.config.secrets import goes_elsewhere
from millpy.model.finding import Finding, Severity, unencrypted_password
from millpy.sinks.protocol import UNDELIVERED
from millpy.sources.kafka.client import Client, Cluster


async def examine(topic: str, cluster: Cluster, graph: str, sink: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds at the cluster, by the metadata of the topic. Raises MillError."""
    if cluster.username and not cluster.tls and goes_elsewhere(cluster.servers):
        yield unencrypted_password(f"{sink}: the connection to {cluster.servers} is not encrypted", "use tls=True")
    client = Client(cluster, topic, 0, f"millpy-doctor-{graph}")
    try:
        await client.start()
        there = (await client.topic()).partitions
    finally:
        await client.stop()
    if there:
        text = f"{sink}: topic {topic} at {cluster.servers} has {there} partitions"
        yield Finding(Severity.OK, "sink", text)
    else:
        yield Finding(
            Severity.ERROR,
            "sink",
            f"{sink}: topic {topic} at {cluster.servers} does not exist",
            UNDELIVERED,
            f"create topic {topic}, with as many partitions as its readers need",
        )
