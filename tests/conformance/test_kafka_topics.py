"""Topics of tests are made in time, even if the broker is not ready yet."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from millpy.embedded import free_port
from tests import kafka_topics
from tests.kafka_server import KafkaServer
from tests.kafka_topics import add_partitions, admin_of, make_topic
from tests.tcp_proxy import TcpProxy

_numbers = itertools.count(1)


async def partitions_of(address: str, topic: str) -> int:
    async with admin_of(address) as admin:
        (found,) = await admin.describe_topics([topic])
    return len(found["partitions"])


async def test_a_topic_is_made_once_and_may_get_more_partitions(kafka: KafkaServer) -> None:
    topic = f"made-{next(_numbers)}"

    await make_topic(kafka.address, topic, 2)
    await make_topic(kafka.address, topic, 2)
    assert await partitions_of(kafka.address, topic) == 2

    await add_partitions(kafka.address, topic, 3)
    await add_partitions(kafka.address, topic, 3)
    assert await partitions_of(kafka.address, topic) == 3


async def test_a_broker_that_is_not_ready_is_tried_again(kafka: KafkaServer) -> None:
    topic, port = f"made-{next(_numbers)}", free_port()
    host, _, number = kafka.address.rpartition(":")
    proxy = TcpProxy(host, int(number))
    refusals = 0

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refusals
        if refusals < 2:
            refusals += 1
            return writer.transport.abort()
        await proxy.take(reader, writer)

    async with await asyncio.start_server(connect, "127.0.0.1", port):
        await make_topic(f"127.0.0.1:{port}", topic)
        proxy.cut()

    assert refusals == 2
    assert await partitions_of(kafka.address, topic) == 1


async def test_a_topic_that_cannot_be_made_fails_with_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_topics, "MAKE_S_MAX", 0.5)

    with pytest.raises(AssertionError, match=r"not within 0.5 s: KafkaConnectionError"):
        await make_topic(f"127.0.0.1:{free_port()}", "nowhere")
