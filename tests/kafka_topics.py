"""Topics of a broker for tests: made when they can be used, and read as far as their transactions have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum
from typing import Protocol, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code
from aiokafka.protocol.admin import CreateAclsRequest
from aiokafka.structs import ConsumerRecord

READ_S_MAX = 60
MAKE_S_MAX = 60
"""A broker that has just been started, or gets no processor time, refuses at first."""
PAUSE_S = 0.05


class Operation(IntEnum):
    """What a user may do with a topic, by its number in Kafka's protocol."""

    READ, WRITE, DESCRIBE = 3, 4, 8


class Client(Protocol):
    """A client of aiokafka."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


C = TypeVar("C", bound=Client)


@asynccontextmanager
async def started(make: Callable[[], C]) -> AsyncIterator[C]:
    """A producer or consumer, made and started again as long as the broker is not ready."""
    deadline = asyncio.get_running_loop().time() + MAKE_S_MAX
    while True:
        client = make()
        try:
            await client.start()
            break
        except (KafkaError, OSError):
            await client.stop()
            if asyncio.get_running_loop().time() > deadline:
                raise
        await asyncio.sleep(PAUSE_S)
    try:
        yield client
    finally:
        await client.stop()


@asynccontextmanager
async def admin_of(address: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A client that changes topics."""
    client = AIOKafkaAdminClient(bootstrap_servers=address)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def make_topic(address: str, topic: str, partitions: int = 1, **settings: str) -> None:
    """Create a topic with a replica on each broker, and wait until each partition has a leader."""
    new = NewTopic(topic, partitions, len(address.split(",")), topic_configs=settings)

    async def make(admin: AIOKafkaAdminClient) -> None:
        ((_, code, *_),) = (await admin.create_topics([new])).topic_errors
        if code not in (0, TopicAlreadyExistsError.errno):  # an attempt whose answer was lost may have made it
            raise for_code(code)(f"topic {topic} is refused")
        await _await_leaders(admin, topic, partitions)

    await _insist(address, make)


async def add_partitions(address: str, topic: str, partitions: int) -> None:
    """Raise the number of a topic's partitions, and wait until each of them has a leader."""

    async def make(admin: AIOKafkaAdminClient) -> None:
        (found,) = await admin.describe_topics([topic])
        if len(found["partitions"]) < partitions:
            await admin.create_partitions({topic: NewPartitions(partitions)})
        await _await_leaders(admin, topic, partitions)

    await _insist(address, make)


async def grant(address: str, topic: str, user: str, operation: Operation) -> None:
    """Let a user do something with a topic, and nothing else that no rule permits."""
    async with admin_of(address) as admin:
        client = admin._client
        of_topic, literal, anywhere, allow = 2, 3, "*", 3
        rule = CreateAclsRequest(of_topic, topic, literal, f"User:{user}", anywhere, operation, allow)
        answer = await client.send(client.get_random_node(), rule)
    assert [code for code, _ in answer.creation_responses] == [0]


async def _await_leaders(admin: AIOKafkaAdminClient, topic: str, partitions: int) -> None:
    while True:
        (found,) = await admin.describe_topics([topic])
        if sum(part["leader"] >= 0 for part in found["partitions"]) >= partitions:
            return
        await asyncio.sleep(PAUSE_S)


async def _insist(address: str, make: Callable[[AIOKafkaAdminClient], Awaitable[None]]) -> None:
    """Try until a broker does it; raise its last refusal when the time is over."""
    refusal: Exception | None = None
    try:
        async with asyncio.timeout(MAKE_S_MAX):
            while True:
                try:
                    async with admin_of(address) as admin:
                        return await make(admin)
                except (KafkaError, OSError) as error:
                    refusal = error
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        raise AssertionError(f"not within {MAKE_S_MAX} s: {refusal!r}") from refusal


@asynccontextmanager
async def _reader(address: str, isolation: str) -> AsyncIterator[AIOKafkaConsumer]:
    options = {"bootstrap_servers": address, "isolation_level": isolation, "auto_offset_reset": "earliest"}
    async with started(lambda: AIOKafkaConsumer(**options)) as consumer:
        yield consumer


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
