"""An edge node whose birth nobody has seen is asked for it: by the graph, through the broker that it publishes to."""

from __future__ import annotations

import asyncio
from typing import Any

import aiomqtt
import msgspec
import pytest

from millpy import EventTime, Graph, Login, Mqtt, Sparkplug, SparkplugEvent, SparkplugMessage, hours, sparkplug_rebirth
from millpy.embedded import EmbeddedBroker, mosquitto_program
from tests.crash.graph_files import rows
from tests.crash.test_lookups import until
from tests.crash.test_sinks import working
from tests.unit.test_sparkplug import BY_ALIAS, RPM, Payload, birth, payload

pytestmark = pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")
NAMES = ("press", "mill ü")


class Rebirth(msgspec.Struct):
    group: str
    edge_node: str
    payload: bytes


def rebirth(event: SparkplugEvent) -> Rebirth:
    _, command = sparkplug_rebirth(event.group, event.edge_node, event.at)
    return Rebirth(event.group, event.edge_node, command)


def plant(port: int) -> Graph:
    graph = Graph("plant")
    messages = graph.inject(
        "messages",
        Mqtt("spBv1.0/#", format=Sparkplug(), host="127.0.0.1", port=port, login=Login()),
        schema=SparkplugMessage,
        event_time=EventTime("at", max_disorder=hours(1)),
    )
    metrics, events, _ = messages.sparkplug()
    metrics.to_table("metrics")
    events.filter(lambda event: event.kind == "rebirth_needed").map(rebirth, output=Rebirth).to_mqtt(
        "spBv1.0/{group}/NCMD/{edge_node}",
        key=("group", "edge_node"),
        name="rebirths",
        value="payload",
        host="127.0.0.1",
        port=port,
    )
    return graph


async def edge_node(port: int, name: str, asked: asyncio.Event) -> None:
    """Publish data under an alias; give its birth only when a command asks for it, as the specification has it."""
    async with aiomqtt.Client("127.0.0.1", port) as client:
        await client.subscribe(f"spBv1.0/hall/NCMD/{name}")
        await client.publish(f"spBv1.0/hall/NDATA/{name}", text(payload(5, BY_ALIAS)))
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            (metric,) = Payload.FromString(message.payload).metrics
            assert (metric.name, metric.boolean_value) == ("Node Control/Rebirth", True)
            await client.publish(f"spBv1.0/hall/NBIRTH/{name}", text(birth(0, RPM)))
            await client.publish(f"spBv1.0/hall/NDATA/{name}", text(payload(1, BY_ALIAS)))
            asked.set()
            return


def text(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found


async def test_a_graph_asks_an_edge_node_for_its_birth(broker: EmbeddedBroker, database_url: str) -> None:
    asked = {name: asyncio.Event() for name in NAMES}
    async with working(database_url, lambda: plant(broker.port)):
        await until(database_url, "SELECT bool_and(connected) FROM millpy.sources", [(True,)])
        async with asyncio.timeout(60), asyncio.TaskGroup() as nodes:
            for name, event in asked.items():
                nodes.create_task(edge_node(broker.port, name, event))
        values = "SELECT edge_node, value FROM plant.metrics WHERE name = 'rpm' AND NOT is_birth ORDER BY 1"
        await until(database_url, values, [(name, 11.0) for name in sorted(NAMES)])
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]
