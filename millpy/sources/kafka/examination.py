"""Check a Kafka cluster for `millpy doctor`: whether it answers, and how many partitions the topic has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from millpy.config.secrets import goes_elsewhere
from millpy.model.finding import Finding, Severity, unencrypted_password

if TYPE_CHECKING:
    from millpy.sources.kafka.client import Client, Cluster
    from millpy.sources.kafka.source import Kafka


def risks_of_login(name: str, cluster: Cluster) -> Iterator[Finding]:
    """Yield a finding if our password travels unencrypted."""
    if cluster.username and not cluster.tls and goes_elsewhere(cluster.servers):
        yield unencrypted_password(f"{name}: the connection to {cluster.servers} is not encrypted", "use tls=True")


@asynccontextmanager
async def visitor(cluster: Cluster, topic: str, graph: str) -> AsyncIterator[Client]:
    """Connect to a topic, for questions only. Raises MillError."""
    from millpy.sources.kafka.client import Client  # cluster() has found the package

    client = Client(cluster, topic, 0, f"millpy-doctor-{graph}")
    try:
        await client.start()
        yield client
    finally:
        await client.stop()


async def examine(source: Kafka, graph: str, stream: str) -> AsyncIterator[Finding]:
    """Yield what `millpy doctor` finds at the cluster, by the metadata of the topic. Raises MillError."""
    cluster = source.cluster()
    for finding in risks_of_login(stream, cluster):
        yield finding
    from millpy.sources.kafka.beginning import PARTITIONS_MAX

    async with visitor(cluster, source.topic, graph) as client:
        there = (await client.topic()).partitions
    text = f"{stream}: topic {source.topic} at {cluster.servers} has {there} partitions, {source.count} are read"
    if there < source.count:
        finding = Finding(
            Severity.ERROR,
            "broker",
            text,
            "the source waits for the missing ones, and holds back every watermark that depends on it",
            "create the missing partitions, or deploy the graph with fewer",
        )
    elif there > source.count and (source.new_partitions == "report" or there > PARTITIONS_MAX):
        finding = Finding(
            Severity.WARNING,
            "broker",
            text,
            "records of the others are missing from the results",
            f"set partitions={there} in the graph and start a worker with it; the other workers follow",
        )
    else:
        finding = Finding(Severity.OK, "broker", text)
    yield finding
