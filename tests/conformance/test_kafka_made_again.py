"""A Kafka topic that is deleted and made again while its messages wait for something."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import msgspec

from millpy.formats import Message, SchemaPendingError
from tests.conformance.test_kafka import Feed, records_of, values
from tests.kafka_server import KafkaServer


async def test_position_is_one_of_the_new_topic_while_its_first_message_waits_for_a_schema(kafka: KafkaServer) -> None:
    feed = await Feed(kafka).make()
    await feed.send(0, 1, 2)
    schema: Future[None] = Future()
    schema.set_result(None)

    def decode(message: Message) -> Any:
        if not schema.done():
            raise SchemaPendingError(schema, "the registry is away")
        return [msgspec.json.decode(message.payload)]

    async with feed.reader(lost="continue", decode=decode) as reader:
        assert values(await reader.records(3)) == [0, 1, 2]
        schema = Future()
        await feed.make_again()
        await feed.send(*range(10, 20))
        while not reader.injector._inbox:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert records_of(await reader.take()) == []

    async with feed.reader(reader.position, lost="continue") as successor:
        assert values(await successor.records(1))[0] == 10
