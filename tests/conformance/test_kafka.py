"""Kafka in, against a real broker."""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant, instant
from millpy.sources.kafka.injector import KafkaInjector
from millpy.sources.kafka.records import FieldMapping
from millpy.sources.kafka.source import Kafka, KafkaBrokers
from millpy.testing import SourceSuite
from tests.kafka_server import KafkaServer
from tests.kafka_topics import add_partitions, make_topic

_numbers = itertools.count(1)
MS = 1_767_225_600_000


class Reading(msgspec.Struct):
    device: str | None
    value: int
    site: str | None = None
    published: datetime | None = None


TYPE = RecordType(Reading)


class SteppedClock(SystemClock):
    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class Feed:
    """A fresh topic, and readers of it."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self.topic = f"feed-{next(_numbers)}"
        self.events: list[tuple[str, dict[str, object]]] = []

    async def make(self, partitions: int = 1, **settings: str) -> Feed:
        await make_topic(self.server.address, self.topic, partitions, **settings)
        return self

    async def make_more(self, partitions: int) -> None:
        """Create a topic, or raise its number of partitions."""
        async with self.admin() as admin:
            there = self.topic in await admin.list_topics()
        await (add_partitions if there else make_topic)(self.server.address, self.topic, partitions)

    async def make_again(self) -> None:
        """Delete the topic, and create one of the same name."""
        async with self.admin() as admin:
            await admin.delete_topics([self.topic])
            while self.topic in await admin.list_topics():
                pass
        await make_topic(self.server.address, self.topic)

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        client = AIOKafkaAdminClient(bootstrap_servers=self.server.address)
        await client.start()
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def producer(self, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
        client = AIOKafkaProducer(bootstrap_servers=self.server.address, **options)
        await client.start()
        try:
            yield client
        finally:
            await client.stop()

    async def send(self, *values: int, partition: int = 0, **options: Any) -> None:
        async with self.producer(**options) as producer:
            while partition not in await producer.partitions_for(self.topic):  # a new one takes a while to be seen
                await producer.client.force_metadata_update()
            for value in values:
                await producer.send(
                    self.topic, b'{"value":%d}' % value, key=b"d", partition=partition, timestamp_ms=MS + value
                )

    @asynccontextmanager
    async def reader(
        self,
        position: bytes | None = None,
        *,
        partition: int = 0,
        begin: Instant | None = None,
        clock: SystemClock | None = None,
        limits: Limits | None = None,
        joined: bool = False,
        gained: Callable[[Sequence[str]], bool] = lambda _: False,
        **options: Any,
    ) -> AsyncIterator[Reader]:
        given = {"partitions": 1, "fields": FieldMapping("device"), "brokers": KafkaBrokers(self.server.address)}
        source = Kafka(self.topic, **{**given, **options})
        setup = SourceSetup(
            graph="g", stream="s", partition=f"{self.topic}/{partition}", limits=limits or Limits(),
            clock=clock or SystemClock(), ready=asyncio.Event(), record_type=TYPE, start=begin, joined=joined,
            gained=gained,
            tell=lambda kind, detail: self.events.append((kind, detail)),
        )  # fmt: skip
        reader = Reader(source.connect(setup), setup)
        async with asyncio.timeout(60):
            await reader.injector.open(position)
            try:
                yield reader
            finally:
                await reader.injector.close()


class Reader:
    def __init__(self, injector: KafkaInjector, setup: SourceSetup) -> None:
        self.injector = injector
        self.setup = setup
        self.position: bytes | None = None

    async def take(self) -> SourceBatch:
        while (taken := await self.injector.take()) is None:
            self.setup.ready.clear()
            await self.setup.ready.wait()
        self.position = taken.position
        return taken

    async def records(self, count: int) -> list[Any]:
        """Take this number of records, in any bundles."""
        found: list[Any] = []
        while len(found) < count:
            found += records_of(await self.take())
        return found

    async def until_quiet(self) -> None:
        while not self.injector.quiet():
            if (taken := await self.injector.take()) is not None:
                self.position = taken.position
            await asyncio.sleep(0)


def records_of(taken: SourceBatch) -> list[Any]:
    decoded = Decoder(TYPE).decode(taken)
    return decoded.objects if decoded.objects is not None else TYPE.objects_of(decoded.batch)


def values(records: Sequence[Any]) -> list[int]:
    return [record.value for record in records]


@pytest.fixture
def feed(kafka: KafkaServer) -> Feed:
    return Feed(kafka)


async def test_records_arrive_in_order_with_key_headers_and_timestamp_as_fields(feed: Feed) -> None:
    await feed.make()
    async with feed.producer() as producer:
        for value in range(100):
            await producer.send(
                feed.topic, b'{"value":%d, "device": "not this"}' % value, key=b"d%d" % (value % 3),
                timestamp_ms=MS + value,
                headers=[("site", b"old"), ("site", b"paris")] if value % 2 else [],
            )  # fmt: skip

    async with feed.reader(fields=FieldMapping("device", {"site": "site"}, "published")) as reader:
        found = await reader.records(100)

    assert found == [
        Reading(f"d{v % 3}", v, "paris" if v % 2 else None, datetime.fromtimestamp((MS + v) / 1000, UTC))
        for v in range(100)
    ]


async def test_reading_continues_at_every_committed_offset(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(40))
    async with feed.reader(limits=Limits(bundle_records_max=7)) as reader:
        taken, count = [], 0
        while count < 40:
            taken.append(await reader.take())
            count += len(records_of(taken[-1]))
    assert max(len(t.payloads) for t in taken) == 7

    for place, bundle in enumerate(taken[:-1]):
        rest = values([r for later in taken[place + 1 :] for r in records_of(later)])
        async with feed.reader(bundle.position) as reader:
            assert values(await reader.records(len(rest))) == rest


async def test_consumer_of_the_same_process_still_gets_records_of_aiokafka(feed: Feed) -> None:
    await feed.make()
    await feed.send(1, 2)
    async with feed.reader() as reader:
        assert values(await reader.records(2)) == [1, 2]
        consumer = AIOKafkaConsumer(feed.topic, bootstrap_servers=feed.server.address, auto_offset_reset="earliest")
        async with consumer:
            found = [(await consumer.getone()).value for _ in range(2)]
        await feed.send(3)
        assert values(await reader.records(1)) == [3]

    assert found == [b'{"value":1}', b'{"value":2}']


async def test_start_position_is_committed_before_any_record(feed: Feed) -> None:
    await feed.make()
    await feed.send(1, 2)

    async with feed.reader(start="latest") as reader:
        first = await reader.take()

    assert (first.payloads, msgspec.json.decode(first.position or b"")["offset"]) == ([], 2)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
async def test_compressed_batches_are_read(feed: Feed, compression: str) -> None:
    await feed.make()
    await feed.send(*range(300), compression_type=compression)

    async with feed.reader() as reader:
        assert values(await reader.records(300)) == list(range(300))


async def test_aborted_and_open_transactions_are_skipped_with_their_markers(feed: Feed) -> None:
    await feed.make()
    async with feed.producer(transactional_id=feed.topic) as producer:

        async def send(value: int) -> None:
            await producer.send_and_wait(feed.topic, b'{"value":%d}' % value)

        async with producer.transaction():
            await send(1)
        await producer.begin_transaction()
        await send(2)
        await producer.abort_transaction()
        async with feed.reader() as reader:
            assert values(await reader.records(1)) == [1]
            await reader.until_quiet()
            # 0 record, 1 commit marker, 2 aborted record, 3 abort marker
            assert msgspec.json.decode(reader.position or b"")["offset"] == 4
        await producer.begin_transaction()
        await send(3)
        async with feed.reader(reader.position) as reader:
            await producer.commit_transaction()
            assert values(await reader.records(1)) == [3]


async def test_an_open_transaction_is_not_the_end_and_one_that_stays_open_is_reported(feed: Feed) -> None:
    """Its records, and all behind it, are still to come: the clock must not move a watermark past them."""
    await feed.make()
    clock = SteppedClock()
    async with feed.producer(transactional_id=feed.topic) as producer:
        await producer.begin_transaction()
        await producer.send_and_wait(feed.topic, b'{"value":1}', key=b"d", timestamp_ms=MS)
        await feed.send(2)
        async with feed.reader(clock=clock) as reader:
            connection = reader.setup.connection
            while reader.injector._open_since is None:
                assert not reader.injector.quiet()
                await asyncio.sleep(0)
            clock.ahead = 20.0
            while not connection.held:
                assert not reader.injector.quiet()
                await asyncio.sleep(0)
            assert f"{feed.topic}/0: a transaction is open since offset 0, and 2 offsets wait" in connection.why
            await producer.commit_transaction()
            assert values(await reader.records(2)) == [1, 2]
            await reader.until_quiet()
            assert (connection.is_connected, connection.held) == (True, "")


@pytest.mark.parametrize("policy", ["dead_letter", "skip", "record"])
async def test_tombstones_follow_the_policy(feed: Feed, policy: str) -> None:
    await feed.make(**{"cleanup.policy": "compact"})
    async with feed.producer() as producer:
        await producer.send_and_wait(feed.topic, b'{"value":1}', key=b"a")
        await producer.send_and_wait(feed.topic, None, key=b"a")
        await producer.send_and_wait(feed.topic, b'{"value":2}', key=b"b")

    async with feed.reader(tombstones=policy) as reader:
        taken: list[SourceBatch] = []
        while not taken or b'"value":2' not in taken[-1].payloads[-1]:
            bundle = await reader.take()
            taken += [bundle] if bundle.payloads else []

    payloads = [payload for t in taken for payload in t.payloads]
    refused = [(r.reason, t.describe(r.row)) for t in taken for r in t.refused]
    assert payloads.count(b'{"device":"a"}') == (policy != "skip")
    assert refused == ([("tombstone", f"{feed.topic}/0@1")] if policy == "dead_letter" else [])


async def test_offset_removed_by_retention_stops_the_source(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(10))
    async with feed.admin() as admin:
        await admin.delete_records({TopicPartition(feed.topic, 0): RecordsToDelete(5)})

    with pytest.raises(ConfigError, match="offset 2 is gone, the log holds 5 to 10"):
        async with feed.reader(b'{"offset":2}'):
            pass


async def test_source_continues_at_the_oldest_record_and_reports_it_if_that_is_the_policy(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(10))
    async with feed.admin() as admin:
        await admin.delete_records({TopicPartition(feed.topic, 0): RecordsToDelete(5)})

    async with feed.reader(b'{"offset":2}', lost="continue") as reader:
        assert values(await reader.records(5)) == [5, 6, 7, 8, 9]

    assert [kind for kind, _ in feed.events] == ["source_lost"]


async def test_records_deleted_under_a_reader_stop_it(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(10))
    async with feed.reader(b'{"offset":0}', limits=Limits(bundle_records_max=1)) as reader:
        assert values(await reader.records(1)) == [0]
        async with feed.admin() as admin:
            await admin.delete_records({TopicPartition(feed.topic, 0): RecordsToDelete(10)})

        async with feed.reader(reader.position, lost="continue") as second:
            await feed.send(11)
            assert values(await second.records(1)) == [11]


async def test_recreated_topic_is_detected_when_it_is_shorter(feed: Feed) -> None:
    await feed.make()
    await feed.send(1)
    clock = SteppedClock()

    async with feed.reader(b'{"offset":5}', clock=clock) as reader:
        assert await reader.injector.take() is None  # perhaps the broker has not found all of its log yet
        clock.ahead = 60.0
        with pytest.raises(ConfigError, match="offset 5 is gone"):
            await reader.take()


async def test_topic_made_again_stops_the_source_though_it_has_the_offset(feed: Feed) -> None:
    await feed.make()
    await feed.send(1, 2)
    async with feed.reader() as reader:
        assert values(await reader.records(2)) == [1, 2]
        await feed.make_again()
        await feed.send(3, 4, 5, 6)
        with pytest.raises(ConfigError, match=r"offset 2 is gone, topic 'feed-[0-9]+' was deleted and created again"):
            await reader.records(1)

    with pytest.raises(ConfigError, match="was deleted and created again"):
        async with feed.reader(reader.position):
            pass
    assert feed.events == []


async def test_topic_made_again_is_read_from_its_beginning_if_that_is_the_policy(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(10))
    async with feed.reader(lost="continue", limits=Limits(bundle_records_max=4)) as reader:
        assert values(await reader.records(4)) == [0, 1, 2, 3]
        await feed.make_again()
        await feed.send(*range(20, 40))
        while not feed.events:  # what was read before comes before it
            taken = await reader.take()
            assert values(records_of(taken)) in ([4, 5, 6, 7], [8, 9], [])
        assert values(await reader.records(20)) == list(range(20, 40))

    assert [kind for kind, _ in feed.events] == ["source_recreated"]
    async with feed.reader(reader.position) as again:
        await feed.send(40)
        assert values(await again.records(1)) == [40]


async def test_missing_topic_is_waited_for(feed: Feed) -> None:
    async with feed.reader() as reader:
        while "does not exist" not in reader.setup.connection.why:  # at first the broker may not answer in time
            assert await reader.injector.take() is None
            assert not reader.injector.quiet()
            await asyncio.sleep(0)
        await feed.make()
        await feed.send(1)

        assert values(await reader.records(1)) == [1]


async def test_partitions_added_later_are_announced_by_the_first(feed: Feed) -> None:
    await feed.make()
    await feed.make_more(3)

    async with asyncio.timeout(60):
        while not feed.events:  # the broker's metadata may be a little behind
            async with feed.reader():
                pass

    assert "has 3 partitions, but the graph reads 1" in str(feed.events)


@pytest.mark.parametrize("new", ["read", "report"])
async def test_partitions_added_later_are_given_to_the_worker_if_that_is_the_policy(feed: Feed, new: str) -> None:
    await feed.make(2)
    given: list[Sequence[str]] = []

    async with feed.reader(new_partitions=new, gained=lambda found: not given.append(found)):  # type: ignore[func-returns-value]
        pass

    assert given == ([[f"{feed.topic}/0", f"{feed.topic}/1"]] if new == "read" else [])
    assert [kind for kind, _ in feed.events] == ([] if new == "read" else ["source_grown"])


@pytest.mark.parametrize(
    ("start", "expected"), [("earliest", 0), ("latest", 6), (datetime.fromtimestamp((MS + 3) / 1000, UTC), 3)]
)
async def test_partition_without_a_position_starts_where_the_source_decides(
    feed: Feed, start: Any, expected: int
) -> None:
    await feed.make()
    await feed.send(*range(6))

    async with feed.reader(start=start) as reader:
        first = await reader.take()
        await feed.send(*range(6, 10))
        rest = await reader.records(10 - expected - len(records_of(first)))

    assert values([*records_of(first), *rest]) == list(range(expected, 10))


@pytest.mark.parametrize("there_before", [0, 1])
@pytest.mark.parametrize("restarted", [False, True])
async def test_partition_created_later_is_read_from_its_beginning_even_with_latest(
    feed: Feed, there_before: int, restarted: bool
) -> None:
    # Readers see it only some time after its first records.
    if there_before:
        await feed.make()
    async with feed.reader(partition=1, partitions=2, start="latest") as reader:
        began = await reader.take()
        assert began.payloads == []
        if not restarted:
            await feed.make_more(2)
            await feed.send(*range(6), partition=1)
            assert values(await reader.records(6)) == list(range(6))
    if restarted:
        await feed.make_more(2)
        await feed.send(*range(6), partition=1)
        async with feed.reader(began.position, partition=1, partitions=2, start="latest") as reader:
            assert values(await reader.records(6)) == list(range(6))


async def test_partition_added_to_a_source_is_read_from_its_beginning_even_with_latest(feed: Feed) -> None:
    await feed.make(2)
    await feed.send(*range(6), partition=1)

    async with feed.reader(partition=1, partitions=2, start="latest", joined=True) as reader:
        assert values(await reader.records(6)) == list(range(6))


async def test_record_that_arrives_while_a_start_time_is_looked_up_is_read(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No record had that time; then one arrived; then the end was requested, which is after it.
    await feed.make()
    await feed.send(1)
    look_up = AIOKafkaConsumer.offsets_for_times

    async def with_a_record_behind(consumer: AIOKafkaConsumer, times: Any) -> Any:
        found = await look_up(consumer, times)
        await feed.send(5)
        return found

    monkeypatch.setattr(AIOKafkaConsumer, "offsets_for_times", with_a_record_behind)
    async with feed.reader(start=datetime.fromtimestamp((MS + 4) / 1000, UTC)) as reader:
        await feed.send(6)
        assert values(await reader.records(2)) == [5, 6]


async def test_moving_back_before_a_committed_position_is_refused(feed: Feed) -> None:
    await feed.make()
    await feed.send(*range(10))
    start = instant(datetime.fromtimestamp((MS + 4) / 1000, UTC))

    async with feed.reader(begin=start) as reader:
        assert values(await reader.records(6)) == list(range(4, 10))
    async with feed.reader(reader.position, begin=start):
        pass  # the same command again

    for other in (b'{"offset":3}', reader.position):
        with pytest.raises(ConfigError, match="has been read up to offset"):
            async with feed.reader(other, begin=Instant(start + 1)):
                pass


async def test_reading_continues_after_a_broker_crash_and_the_source_is_not_quiet_meanwhile(feed: Feed) -> None:
    await feed.make()
    await feed.send(1)
    clock = SteppedClock()
    async with feed.reader(clock=clock) as reader:
        assert values(await reader.records(1)) == [1]
        await reader.until_quiet()

        await asyncio.to_thread(feed.server.kill)
        clock.ahead = 10.0  # the proof is old by now
        assert not reader.injector.quiet()
        await asyncio.to_thread(feed.server.start)
        await feed.send(2)

        assert values(await reader.records(1)) == [2]
        await reader.until_quiet()


async def test_a_server_that_hangs_does_not_keep_a_reader_from_the_others(
    feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await feed.make()
    await feed.send(1)
    monkeypatch.setattr(random, "shuffle", lambda _: None)  # the order in which servers are asked
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        servers = f"127.0.0.1:{hanging.getsockname()[1]},{feed.server.address}"
        async with feed.reader(brokers=KafkaBrokers(servers)) as reader:
            assert values(await reader.records(1)) == [1]


async def test_batch_that_would_expand_too_far_is_a_dead_letter_and_its_neighbors_are_read(feed: Feed) -> None:
    # 16.5 kB of zstd became a gigabyte in every reader of the partition, which then never moved again.
    await feed.make()
    async with feed.producer(
        compression_type="zstd", max_request_size=200_000_000, max_batch_size=200_000_000
    ) as sender:
        for value in (b'{"value":1}', bytes(100_000_000), b'{"value":2}', bytes(90_000_000), b'{"value":3}'):
            await sender.send_and_wait(feed.topic, value, partition=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    found, dead_letters, counted = [], [], 0
    async with feed.reader() as reader:
        while values(found) != [1, 2, 3]:
            taken = await reader.take()
            found += records_of(taken)
            dead_letters += [(taken.describe(refused.row), refused.reason) for refused in taken.refused]
            counted += taken.records
        await reader.until_quiet()

    assert dead_letters == [(f"{feed.topic}/0@{offset}", "unreadable") for offset in (1, 3)]
    assert counted == 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


class TestKafka(SourceSuite):
    """The promises of every source; the tests above are those of Kafka alone."""

    record = Reading
    flood = 0  # a fetch is 4 MB; test_kafka_batches.py bounds the memory of any fetch
    seeds = 1
    test_an_end_comes_once_and_stays = test_a_batch_that_was_not_acknowledged_comes_again = None  # type: ignore[assignment]
    test_memory_is_bounded_while_nothing_is_taken = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _with_broker(self, kafka: KafkaServer) -> None:
        self.server = kafka

    async def source(self, count: int) -> Kafka:
        self.feed = await Feed(self.server).make()
        await self.feed.send(*range(count))
        return Kafka(
            self.feed.topic, partitions=1, fields=FieldMapping("device"), brokers=KafkaBrokers(self.server.address)
        )

    async def add(self, first: int, count: int) -> None:
        await self.feed.send(*range(first, first + count))

    def number_of(self, record: Any) -> int:
        return int(record.value)
