"""The markers that Kafka writes behind the records of a transaction, which no fetch returns."""

from __future__ import annotations

import msgspec

from tests.conformance.test_kafka import Feed, values
from tests.kafka_server import KafkaServer


async def test_the_marker_behind_records_that_are_taken_late_is_committed_with_them(kafka: KafkaServer) -> None:
    feed = await Feed(kafka).make()
    async with feed.producer(transactional_id=feed.topic) as producer, producer.transaction():
        await producer.send_and_wait(feed.topic, b'{"value":1}')

    async with feed.reader() as reader:
        await reader.take()  # where it begins
        while not reader.injector._moved:  # a busy worker takes nothing, and the end is proven meanwhile
            reader.setup.ready.clear()
            await reader.setup.ready.wait()
        assert values(await reader.records(1)) == [1]

    assert msgspec.json.decode(reader.position or b"")["offset"] == 2, "retention may delete the marker"
