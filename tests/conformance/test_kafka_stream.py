"""A topic as the source of a streaming query, against a real broker: the tasks are called as Spark calls them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.graph import InjectorNode
from millpy.hosting.host import HostedGraph
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.spark.hand_over import HandOver
from millpy.spark.hosted_rows import BUNDLE
from millpy.spark.job import BatchJob, HostedPlan
from millpy.spark.stream_offsets import OffsetLog
from millpy.spark.stream_tables import StreamTables
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from tests.kafka_server import PASSWORD, USER, KafkaServer
from tests.kafka_topics import make_topic
from tests.property.test_hand_over import MemoryStreamStore
from tests.property.test_hosting import contents
from tests.property.test_spark_stream_tasks import Query, forget
from tests.property.test_spark_tasks import NOW_US

_numbers = itertools.count(1)
TEXT = """
import msgspec
from millpy import Count, EventTime, FieldMapping, FixedWindows, Graph, Kafka, KafkaBrokers, Sasl, Sum, Tls, seconds

class Reading(msgspec.Struct):
    device: str
    at_ms: int
    value: int
    site: str

graph = Graph("streamed")
topic = Kafka(
    {topic!r}, partitions=2, fields=FieldMapping("device", {{"site": "site"}}, "at_ms"), lost={lost!r},
    brokers=KafkaBrokers({servers!r}, sasl=Sasl({user!r}, {password!r}), tls=Tls(ca={authority!r})),
)
at = EventTime("at_ms", unit="ms", max_disorder=seconds(5))
readings = graph.inject("readings", topic, schema=Reading, event_time=at)
windows = readings.key_by("device", "site").window(FixedWindows(seconds(10)), intervals=2, name="sums")
windows.aggregate(n=Count(), total=Sum("value")).to_table("sums")
"""


START_MS = 1_600_000_000_000


class Topic:
    """A fresh topic of two partitions."""

    def __init__(self, server: KafkaServer) -> None:
        self.server, self.name, self.sent = server, f"streamed-{next(_numbers)}", 0

    async def make(self) -> None:
        await make_topic(self.server.address, self.name, 2)

    async def delete_before(self, offset: int) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.server.address)
        await admin.start()
        await admin.delete_records({TopicPartition(self.name, n): RecordsToDelete(offset) for n in (0, 1)})
        await admin.close()

    async def send(self, count: int, *, transactional: bool = False) -> None:
        """Send records that count, among them some that do not decode or have no value, and aborted ones."""
        options = {"transactional_id": self.name} if transactional else {}
        producer = AIOKafkaProducer(bootstrap_servers=self.server.address, **options)
        await producer.start()
        for round_ in range(2 if transactional else 1):
            if transactional:
                await producer.begin_transaction()
            for n in range(self.sent, self.sent + count):
                value = None if n % 17 == 5 else b"{" if n % 19 == 3 else b'{"value":%d}' % n
                headers = [("site", b"ab"[n % 2 :][:1])] if n % 23 else []
                place = {"key": b"d%d" % (n % 5), "partition": n // 2 % 2, "timestamp_ms": START_MS + 500 * n}
                await producer.send(self.name, value, headers=headers, **place)
            if transactional and round_ == 0:
                await producer.flush()
                await producer.abort_transaction()
            elif transactional:
                await producer.commit_transaction()
        await producer.stop()
        self.sent += count

    def job(self, lost: str = "stop") -> BatchJob:
        text = TEXT.format(
            topic=self.name, lost=lost, servers=self.server.login, user=USER, password=PASSWORD,
            authority=str(self.server.authority),
        )  # fmt: skip
        limits = Limits(bundle_records_max=16)
        return BatchJob("graph.py", text, {}, limits, NOW_US, keeps_state=False, streams=True)


@pytest.fixture
def topic(kafka: KafkaServer) -> Iterator[Topic]:
    yield Topic(kafka)
    forget()


async def taken_by_a_worker(job: BatchJob) -> Any:
    """What a hosted graph makes of the batches that a worker's source gives until it is quiet."""
    database = MemoryDatabase()
    host = HostedGraph(job.load_graph(), MemoryState(database), job.limits, NOW_US)
    await read_to_the_end(host, HostedPlan(job))
    found = contents(database)
    letters = sorted((reason, payload) for _, _, reason, payload in found["dead letters"])
    return _plain(found["rows"]["sums"]), letters


async def read_to_the_end(host: HostedGraph, hosted: HostedPlan) -> None:
    """Take what the source gives from the committed positions until it is quiet."""
    job = hosted.job
    (of,) = [computation for computation in hosted.plan if computation.stage is None]
    assert isinstance(of.node, InjectorNode)
    for interval in of.intervals:
        setup = SourceSetup(
            graph="g", stream=of.name, partition=interval.partition, limits=job.limits, clock=SystemClock(),
            ready=asyncio.Event(), record_type=of.node.record_type,
        )  # fmt: skip
        injector = of.node.source.connect(setup)
        intake = host.intervals[interval.interval_id].intake
        assert intake is not None
        await injector.open(intake.position)
        taken: list[SourceBatch] = []
        while not injector.quiet():
            if (batch := await injector.take()) is not None:
                taken.append(batch)
            await asyncio.sleep(0)
        await injector.close()
        for batch in taken:
            batch.total = None
            host.turn({interval.interval_id: batch})


def _plain(rows: Sequence[dict[str, Any]]) -> list[str]:
    left_out = ("bundle", BUNDLE, "interval_id")
    return sorted(json.dumps({n: v for n, v in sorted(row.items()) if n not in left_out}, default=int) for row in rows)


def to_the_end(query: Query, chance: random.Random) -> None:
    """Run until the sources are drained, with failures."""
    for _ in range(60):
        commit = query.attempt()
        if chance.random() < 0.4:
            forget()
            commit = query.attempt()
        drained = all(end.news.drained for end in query.ends.values() if end.news.until is not None)
        query.commits.commit(commit)
        query.output.publish(commit.outputs)
        if chance.random() < 0.3:
            query.restart()
            forget()
        if drained and any(end.news.until is not None for end in query.ends.values()):
            return
    raise AssertionError("not drained")


def test_a_topic_is_read_as_a_worker_reads_it_through_repeated_batches_and_restarts(
    topic: Topic, tmp_path: Path
) -> None:
    asyncio.run(topic.make())
    asyncio.run(topic.send(150, transactional=True))
    asyncio.run(topic.send(50))
    query = Query(topic.job(), tmp_path, bundles_max=2)

    to_the_end(query, random.Random(1))

    expected_rows, expected_letters = asyncio.run(taken_by_a_worker(topic.job()))
    found = query.contents()
    assert (_plain(found["rows"]["sums"]), found["dead letters"]) == (expected_rows, expected_letters)
    assert len(expected_rows) > 50
    assert {reason for reason, _ in expected_letters} == {"tombstone", "undecodable"}
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert not any(PASSWORD.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(("until_us", "ends"), [(None, [50, 50]), ((START_MS + 500 * 61) * 1_000 - 1, [30, 31])])
def test_a_hand_over_reads_a_growing_topic_up_to_where_its_end_was_and_workers_continue_there(
    until_us: int | None, ends: list[int], topic: Topic, tmp_path: Path
) -> None:
    asyncio.run(topic.make())
    asyncio.run(topic.send(100))
    job = msgspec.structs.replace(topic.job(), hands_over=True, until_us=until_us)
    query, database = Query(job, tmp_path / "query", bundles_max=2), MemoryDatabase()
    store: Any = MemoryStreamStore(database, query.hosted, lambda: 1.0)
    tables = StreamTables(store, query.hosted, tmp_path / "query" / "out")
    tables.open(query.commits.newest, hands_over=True)
    for _ in range(20):  # it always finds more than it takes
        commit = query.attempt()
        asyncio.run(topic.send(40))
        for interval_id, end in query.ends.items():
            if end.news.until is not None:  # the driver keeps to the first end
                query.until.setdefault(interval_id, end.news.until)
        query.commits.commit(commit)
        query.output.publish(commit.outputs)
        tables.publish(commit)
        if commit.finished:
            break
    assert query.commits.newest.finished
    assert sorted(query.until.values()) == ends

    HandOver(store, query.hosted, query.commits.newest, query.commits.state).run()
    host = HostedGraph(query.hosted.live_graph, MemoryState(database), job.limits, NOW_US)
    asyncio.run(read_to_the_end(host, HostedPlan(job)))

    found, (rows, letters) = contents(database), asyncio.run(taken_by_a_worker(topic.job()))
    assert _plain(found["rows"]["sums"]) == rows
    assert sorted((reason, payload) for _, _, reason, payload in found["dead letters"]) == letters
    assert len(rows) > 40


def test_a_repeated_batch_takes_the_same_records_or_says_that_they_are_gone(topic: Topic, tmp_path: Path) -> None:
    asyncio.run(topic.make())
    asyncio.run(topic.send(40))
    query = Query(topic.job(), tmp_path)
    first = query.attempt()
    asyncio.run(topic.send(40))
    forget()

    again = query.attempt()

    assert {i: (h.bundle, h.low_watermark) for i, h in again.intervals.items()} == {
        i: (h.bundle, h.low_watermark) for i, h in first.intervals.items()
    }
    assert again.left == first.left
    query.restart()  # a driver that was killed
    asyncio.run(topic.delete_before(10))
    forget()
    with pytest.raises(ConfigError, match="of 20 records before offset 20, which this batch has read before"):
        query.attempt()
    query = Query(topic.job(lost="continue"), tmp_path)
    commit = query.attempt()
    assert sum(count for _, of, count in _counters(commit, "injected")) == 20
    assert all("10 are left" in text for end in query.ends.values() for text in end.news.told)
    query.commits.commit(commit)
    assert OffsetLog(tmp_path / "checkpoint").read(commit.batch, 1) is None


def _counters(commit: Any, counter: str) -> list[tuple[str, str, int]]:
    return [entry for left in commit.left.values() for entry in left.counters if entry[0] == counter]
