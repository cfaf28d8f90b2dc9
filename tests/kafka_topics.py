"""Topics of a broker for tests: made when they can be used, and read as far as their transactions have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAlreadyExistsError
from aiokafka.structs import ConsumerRecord

READ_S_MAX = 60


@asynccontextmanager
async def admin_of(address: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A client that changes topics."""
    client = AIOKafkaAdminClient(bootstrap_servers=address)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def make_topic(address: str, topic: str, partitions: int = 1, **settings: str) -> None:
    """Create a topic with a replica on each broker, and wait until a broker knows it."""
    async with admin_of(address) as admin:
        replicas = len(address.split(","))
        new = NewTopic(topic, partitions, replicas, topic_configs=settings)
        while (await admin.create_topics([new])).topic_errors[0][1] not in (0, TopicAlreadyExistsError.errno):
            pass  # a broker that gets no processor time counts as dead
        while topic not in await admin.list_topics():
            pass


@asynccontextmanager
async def _reader(address: str, isolation: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(bootstrap_servers=address, isolation_level=isolation, auto_offset_reset="earliest")
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def committed_messages(address: str, topic: str, partitions: Sequence[int]) -> list[ConsumerRecord]:
    """Return the committed messages of partitions, once no transaction is open there: its end is written behind it."""
    places = [TopicPartition(topic, number) for number in partitions]
    found: list[ConsumerRecord] = []
    async with (
        _reader(address, "read_committed") as consumer,
        _reader(address, "read_uncommitted") as plain,
        asyncio.timeout(READ_S_MAX),
    ):
        consumer.assign(places)
        while (ends := await consumer.end_offsets(places)) != await plain.end_offsets(places):
            pass
        for place in places:
            while await consumer.position(place) < ends[place]:
                found += (await consumer.getmany(place, timeout_ms=200)).get(place, ())
    return found
