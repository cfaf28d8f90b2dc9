"""Avro messages with a registry through a worker: what is refused is not deployed, and a registry may be away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from millpy import Avro, Graph, KafkaBrokers, KafkaTopic, SchemaRegistry
from millpy.errors import ConfigError
from millpy.formats import schema_registry as registries
from millpy.formats.schema_registry import unframed
from millpy.process.assembly import deploy, run_worker
from tests.crash.graph_files import rows
from tests.crash.test_lookups import until
from tests.crash.test_sinks import Copies, Reading, reading, readings, working
from tests.feed import Feed
from tests.kafka_server import KafkaServer
from tests.kafka_topics import committed_messages, make_topic
from tests.schema_registry_server import RegistryServer, schema_registry


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    with schema_registry() as server:
        yield server


def graph_of(feed: Feed, address: str, topic: str, registry: RegistryServer) -> Graph:
    graph = Graph("plant")
    source = readings(graph, feed)
    format = Avro(registry=SchemaRegistry(url=registry.url))
    source.to_sink(
        KafkaTopic(topic, format=format, brokers=KafkaBrokers(address)), key="device", name="out", intervals=1
    )
    source.key_by("device").process(Copies(), name="copies", output=Reading).to_table("copies")
    return graph


async def test_a_schema_that_the_registry_refuses_is_not_deployed(database_url: str, registry: RegistryServer) -> None:
    registry.refuses = (409, "READER_FIELD_MISSING_DEFAULT_VALUE")
    graph = graph_of(Feed(), "localhost:1", "refused", registry)
    with pytest.raises(ConfigError, match="refuses the schema of subject 'refused-value'"):
        await deploy(graph, database_url)
    with pytest.raises(ConfigError, match="READER_FIELD_MISSING"):
        await run_worker(graph, database_url)
    assert rows(database_url, "SELECT count(*) FROM millpy.graphs") == [(0,)]


async def test_a_step_takes_no_input_before_the_registry_answers_and_nothing_else_waits(
    database_url: str, kafka: KafkaServer, registry: RegistryServer
) -> None:
    await make_topic(kafka.address, "avro")
    registry.fails = 503
    feed = Feed()
    async with working(database_url, partial(graph_of, feed, kafka.address, "avro", registry)):
        feed.push(*[reading("a", float(value)) for value in range(3)])
        await until(database_url, "SELECT count(*) FROM plant.copies", [(3,)])
        why = "SELECT state, disconnected_because LIKE '%registry does not answer%' FROM millpy.sinks"
        await until(database_url, why, [("disconnected", True)])
        await until(database_url, "SELECT sum(records)::int FROM millpy.backlog WHERE consumer = 'out'", [(3,)])
        registry.fails = 0
        await until(database_url, "SELECT sum(delivered)::int FROM millpy.sinks", [(3,)])
    async with asyncio.timeout(60):
        messages = await committed_messages(kafka.address, "avro", [0])
    assert [unframed(message.value)[0] for message in messages] == [1, 1, 1]
    assert registry.subjects == {"avro-value": [1]}


@pytest.mark.parametrize(("status", "words"), [(401, "refuses our login"), (409, "refuses the schema")])
async def test_a_worker_of_a_deployed_graph_starts_though_the_registry_refuses_and_only_the_step_waits(
    database_url: str, kafka: KafkaServer, registry: RegistryServer, monkeypatch: Any, status: int, words: str
) -> None:
    """It would end, and end again for the same reason whenever it is started."""
    topic, feed = f"restarted-{status}", Feed()
    await make_topic(kafka.address, topic)
    build = partial(graph_of, feed, kafka.address, topic, registry)
    await deploy(build(), database_url)
    monkeypatch.setattr(registries, "_CACHES", {})  # as in the process of a worker
    registry.fails = status
    async with working(database_url, build):
        feed.push(*[reading("a", float(value)) for value in range(3)])
        await until(database_url, "SELECT count(*) FROM plant.copies", [(3,)])
        why = f"SELECT state, disconnected_because LIKE '%{words}%' FROM millpy.sinks"
        await until(database_url, why, [("disconnected", True)])
        registry.fails = 0
        await until(database_url, "SELECT sum(delivered)::int FROM millpy.sinks", [(3,)])
