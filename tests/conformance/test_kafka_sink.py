"""Messages to a topic, against a real broker: each once for readers of committed messages, whatever is late or lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import socket
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import NewPartitions
from aiokafka.structs import OffsetAndMetadata

from millpy.clock import SystemClock
from millpy.errors import SinkUnavailableError
from millpy.model.finding import Severity
from millpy.sinks.kafka import connection as connection_module
from millpy.sinks.kafka.connection import KafkaConnection
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sources.kafka.source import KafkaBrokers
from millpy.testing import SinkSuite
from tests.kafka_proxy import END_TXN, TXN_OFFSET_COMMIT, KafkaProxy, RequestFault
from tests.kafka_server import KafkaServer
from tests.kafka_topics import admin_of, committed_messages, make_topic

_numbers = itertools.count(1)


class Place:
    """A fresh topic, and an interval of a sink that sends there."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self.topic = f"sink-{next(_numbers)}"
        self.setup = SinkSetup("plant", self.topic, 0, 1, 1, SystemClock())
        self.refusals: list[str] = []

    async def make(self, partitions: int = 1, **settings: str) -> None:
        await make_topic(self.server.address, self.topic, partitions, **settings)

    @asynccontextmanager
    async def connection(self, address: str = "", **settings: Any) -> AsyncIterator[KafkaConnection]:
        """A connection, not yet open."""
        sink = KafkaTopic(self.topic, brokers=KafkaBrokers(address or self.server.address), **settings)
        connection = KafkaConnection(sink, self.setup, sink._cluster())
        try:
            yield connection
        finally:
            await connection.close()

    async def deliver(self, until: int, address: str = "", tries: int = 10) -> None:
        """Send messages up to a position, ten at a time, as a worker does: from where the topic ends, again."""
        for _ in range(tries):
            try:
                async with self.connection(address) as connection:
                    position = await connection.open()
                    while position < until:
                        await connection.send(numbered(position, min(until, position + 10)))
                        position = min(until, position + 10)
                    return
            except SinkUnavailableError as error:
                self.refusals.append(error.message)
        raise AssertionError(self.refusals)

    async def read(self, partition: int = 0) -> list[int]:
        """The numbers of the committed messages of a partition."""
        messages = await committed_messages(self.server.address, self.topic, [partition])
        return [int(message.value[-9:]) for message in messages]


def numbered(lo: int, hi: int, size: int = 0) -> SinkMessages:
    values: Sequence[bytes | None] = [b"%0*d" % (size, number) for number in range(lo, hi)]
    return SinkMessages(lo, [b"d"] * (hi - lo), list(values), [0] * (hi - lo))


@pytest.fixture(scope="module")
def used_kafka(kafka: KafkaServer) -> KafkaServer:
    """A broker that has created the internal topics that a first transaction waits for."""

    async def send_nothing() -> None:
        place = Place(kafka)
        await place.make()
        await place.deliver(0)

    asyncio.run(send_nothing())
    return kafka


@pytest.fixture
async def place(used_kafka: KafkaServer) -> Place:
    return Place(used_kafka)


@pytest.mark.parametrize("api", [END_TXN, TXN_OFFSET_COMMIT])
@pytest.mark.parametrize("fault", list(RequestFault))
async def test_a_request_that_is_lost_or_late_loses_and_doubles_nothing(
    place: Place, api: int, fault: RequestFault
) -> None:
    """A late one arrives in the midst of the next transaction: the end of the one before must not end that."""
    await place.make()
    with KafkaProxy(place.server) as proxy:
        async with place.connection(place.server.proxied) as first:
            await first.open()
            await first.send(numbered(0, 10))
            proxy.arm(api, fault)
            position = 20
            try:
                await first.send(numbered(10, 20))
            except SinkUnavailableError:
                await first.close()
                position = await first.open()
            assert proxy.struck == 1
            producer = first._producer
            assert producer is not None
            step = "send_offsets_to_transaction" if api == END_TXN else "commit_transaction"
            undisturbed = getattr(producer, step)

            async def behind_a_late_request(*arguments: Any) -> None:
                await producer.flush()
                await asyncio.to_thread(proxy.land)
                if api == END_TXN:
                    raise SinkUnavailableError("the worker is killed before it sends the position")
                await undisturbed(*arguments)

            setattr(producer, step, behind_a_late_request)
            with suppress(SinkUnavailableError):
                await first.send(numbered(position, position + 10))
        # The worker is killed here: what the database knows is older, so the position at the broker decides.
        await place.deliver(50)
    assert await place.read() == list(range(50)), place.refusals


async def test_the_broker_refuses_hardly_a_request_of_transactions_that_follow_one_another(place: Place) -> None:
    """Two at a time: while one verifies its batches, the broker keeps what the other wants verified."""
    await place.make(3)
    requests, refused = Counter[str](), Counter[str]()

    def counting(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def sent(node_id: Any, request: Any, **options: Any) -> Any:
            answer = await send(node_id, request, **options)
            requests[type(request).__name__] += 1
            refused[type(request).__name__] += bool(re.search("error_code=[1-9]", repr(answer)))
            return answer

        return sent

    async def deliver(number: int) -> None:
        place.setup = SinkSetup("plant", place.topic, number, number, 1, SystemClock())
        async with place.connection() as connection:
            await connection.open()
            assert connection._producer is not None
            client = connection._producer.client
            keys = [b"%d" % key for key in range(9)]
            for transaction in range(31):
                await connection.send(SinkMessages(transaction * 9, keys, list(keys), [0] * 9))
                if not transaction:  # a broker may refuse the first, of partitions that it does not lead yet
                    client.send = counting(client.send)

    await asyncio.gather(deliver(1), deliver(2))

    assert requests["TxnOffsetCommitRequest"] == requests["EndTxnRequest"] == 60, requests
    # Two have been seen on a busy machine; more than a hundred without the order of requests.
    assert refused["ProduceRequest"] + refused["TxnOffsetCommitRequest"] <= 10, refused


async def test_a_server_that_hangs_does_not_keep_a_connection_from_the_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen node accepts connections and answers nothing; the connection has time for the next one."""
    await place.make()
    monkeypatch.setattr(random, "shuffle", lambda _: None)  # the order in which servers are asked
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        await place.deliver(10, f"127.0.0.1:{hanging.getsockname()[1]},{place.server.address}", tries=1)
    assert await place.read() == list(range(10))


async def test_batches_are_no_larger_than_the_topic_allows(place: Place) -> None:
    await place.make(**{"max.message.bytes": "10000"})
    async with place.connection(message_bytes_max=10_000) as connection:
        assert await connection.open() == 0
        await connection.send(numbered(0, 300, size=100))
        await connection.send(numbered(300, 301, size=9_900))
    assert await place.read() == list(range(301))


async def test_a_larger_message_of_an_older_graph_leaves_if_the_broker_takes_it(place: Place) -> None:
    """What waits in the outbox was measured by the limit of its time; the limit of today must not hold it back."""
    await place.make()
    async with place.connection(message_bytes_max=1_000) as connection:
        await connection.open()
        await connection.send(numbered(0, 3, size=5_000))
    assert await place.read() == [0, 1, 2]


async def test_a_batch_that_the_broker_refuses_is_named_with_the_setting(place: Place) -> None:
    await place.make(**{"max.message.bytes": "1000"})
    async with place.connection() as connection:
        await connection.open()
        with pytest.raises(SinkUnavailableError, match="refuses a batch of up to 1,000,000 bytes"):
            await connection.send(numbered(0, 1, size=2_000))


async def test_a_missing_topic_is_named_at_once_and_not_created(place: Place) -> None:
    async with place.connection() as connection:
        async with asyncio.timeout(5):
            with pytest.raises(SinkUnavailableError, match="does not exist"):
                await connection.open()
    async with admin_of(place.server.address) as admin:
        assert place.topic not in await admin.list_topics()


async def test_a_connection_follows_the_number_of_partitions(place: Place) -> None:
    """More of them get keys without a new connection; fewer, of a topic made again, must not stop it for ever."""
    await place.make()
    async with place.connection() as connection, admin_of(place.server.address) as admin:
        await connection.open()
        await connection.send(numbered(0, 10))
        await admin.create_partitions({place.topic: NewPartitions(2)})
        producer = connection._producer
        assert producer is not None
        while connection._count < 2:
            await producer.client.force_metadata_update()
            connection._count_partitions(producer)
        of_key = connection._partition_of(b"d")
        await connection.send(numbered(10, 20))
        found = await place.read(of_key)
        assert found == (list(range(10, 20)) if of_key else list(range(20)))
        await admin.delete_topics([place.topic])
        while place.topic in await admin.list_topics():
            pass
        await producer.client.force_metadata_update()
        with pytest.raises(SinkUnavailableError, match="does not exist"):
            await connection.send(numbered(20, 30))


async def test_a_topic_that_is_deleted_meanwhile_is_named_soon(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the producer knows of the topic is minutes old, and it waits for the partitions to come back."""
    monkeypatch.setattr(connection_module, "LOOK_S", 0.2)
    await place.make()
    async with place.connection() as connection, admin_of(place.server.address) as admin:
        await connection.open()
        await connection.send(numbered(0, 10))
        await admin.delete_topics([place.topic])
        while place.topic in await admin.list_topics():
            pass
        async with asyncio.timeout(30):
            with pytest.raises(SinkUnavailableError, match="does not exist"):
                await connection.send(numbered(10, 20))


async def test_a_function_chooses_the_partition_and_holds_up_its_interval_while_it_fails(place: Place) -> None:
    await place.make(3)
    for_kind = {b"d": 2}
    async with place.connection(partitioner=lambda key, count: for_kind[key]) as connection:
        position = await connection.open()
        await connection.send(numbered(position, 10))
        for_kind.clear()
        connection._partitions.clear()
        with pytest.raises(SinkUnavailableError, match=r"the partitioner failed for key b'd': KeyError"):
            await connection.send(numbered(10, 20))
    async with place.connection(partitioner="crc32") as connection:
        assert await connection.open() == 10
        await connection.send(numbered(10, 20))

    assert await place.read(2) == list(range(10))
    assert await place.read(zlib.crc32(b"d") % 3) == list(range(10, 20))


@pytest.mark.parametrize("offset", [0, 10, 13])
async def test_an_offset_that_somebody_has_set_is_no_position(place: Place, offset: int) -> None:
    """As `kafka-consumer-groups.sh --reset-offsets` does: set forward, messages would be left out in silence."""
    await place.make()
    await place.deliver(10)
    async with place.connection() as connection:
        await set_offset(place, connection.id, OffsetAndMetadata(offset, ""))
        with pytest.raises(SinkUnavailableError, match=f"has set the offset of .* to {offset}\n") as refused:
            await connection.open()
        assert "delete the group's offsets" in refused.value.hint
        await set_offset(place, connection.id, OffsetAndMetadata(10, "millpy 10"))
    await place.deliver(20)
    assert await place.read() == list(range(20))


async def set_offset(place: Place, group: str, offset: OffsetAndMetadata) -> None:
    """Set the offset of a group without members, as an administrator does."""
    consumer = AIOKafkaConsumer(bootstrap_servers=place.server.address, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        partition = TopicPartition(place.topic, 0)
        consumer.assign([partition])
        await consumer.commit({partition: offset})
    finally:
        await consumer.stop()


async def test_the_doctor_says_what_the_topic_does_not_take(place: Place) -> None:
    sink = KafkaTopic(place.topic, brokers=KafkaBrokers(place.server.address), message_bytes_max=50_000)
    (missing,) = [finding async for finding in sink.examine("plant", "out")]
    assert (missing.severity, "does not exist" in missing.found) == (Severity.ERROR, True)
    await place.make(**{"max.message.bytes": "10000"})
    (too_small,) = [finding async for finding in sink.examine("plant", "out")]
    assert too_small.severity is Severity.WARNING
    assert "takes batches of 10,000 bytes, and messages may have 50,000" in too_small.found
    fitting = KafkaTopic(place.topic, brokers=KafkaBrokers(place.server.address), message_bytes_max=10_000)
    (fine,) = [finding async for finding in fitting.examine("plant", "out")]
    assert (fine.severity, "has 1 partitions" in fine.found) == (Severity.OK, True)


async def test_a_topic_that_refuses_old_times_is_named_with_its_setting(place: Place) -> None:
    await place.make(**{"message.timestamp.before.max.ms": "1000"})
    async with place.connection() as connection:
        await connection.open()
        with pytest.raises(SinkUnavailableError, match="refuses the time of a message") as refused:
            await connection.send(numbered(0, 1))
    assert "before.max.ms" in str(refused.value.hint)


async def test_transaction_begins_with_one_exchange_of_messages(place: Place) -> None:
    """Its partitions and our group are added at once: each exchange of a transaction is a part of its latency."""
    await place.make(3)
    steps: list[tuple[str, str]] = []
    async with place.connection() as connection:
        await connection.open()
        assert connection._producer is not None
        client = connection._producer.client
        ask = client.send

        async def noting(node_id: Any, request: Any, **options: Any) -> Any:
            steps.append(("sent", type(request).__name__))
            answer = await ask(node_id, request, **options)
            steps.append(("answered", type(request).__name__))
            return answer

        client.send = noting
        await connection.send(numbered(0, 10))

    begin = [step for step in steps if step[1].startswith("Add")]
    assert begin[:2] == [("sent", "AddPartitionsToTxnRequest"), ("sent", "AddOffsetsToTxnRequest")]
    assert begin[2:] == [("answered", "AddPartitionsToTxnRequest"), ("answered", "AddOffsetsToTxnRequest")]
    assert [await place.read(partition) for partition in range(3)].count([]) == 2


class TestKafkaTopic(SinkSuite):
    """The promises of every sink; the tests above are those of Kafka alone."""

    seeds = 2
    send_s = 0.05
    test_a_place_that_is_away_is_unavailable = test_refused_messages_are_named = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _with_broker(self, used_kafka: KafkaServer) -> None:
        self.server = used_kafka

    async def sink(self) -> KafkaTopic:
        self.place = Place(self.server)
        await self.place.make(2)
        return KafkaTopic(self.place.topic, brokers=KafkaBrokers(self.server.address))

    async def delivered(self) -> list[int]:
        found = await committed_messages(self.server.address, self.place.topic, [0, 1])
        return [json.loads(message.value)["number"] for message in found]
