"""Kafka through windows while workers are killed and the broker crashes: every window, exactly."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import psycopg
from aiokafka import AIOKafkaProducer

from tests.crash.harness import Worker, await_true
from tests.kafka_server import KafkaServer
from tests.kafka_topics import add_partitions, make_topic

GRAPH = Path(__file__).with_name("kafka_graph.py")
TOPIC = "crash"
PARTITIONS = 3
START_MS = 1_767_225_600_000
RECORDS = 12_000
Record = tuple[str, int, int]
"""Device, event time in ms, value."""


def workload(seed: int) -> list[Record]:
    """Records in the order in which they are published, up to 4 s out of order."""
    rng = random.Random(seed)
    return [
        (f"d{rng.randrange(20)}", START_MS + 10 * number - rng.randrange(4_000), rng.randrange(1_000))
        for number in range(RECORDS)
    ]


def oracle(records: list[Record]) -> dict[tuple[str, int], tuple[int, int, int]]:
    """(Device, window start) -> count, sum, maximum."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for device, at_ms, value in records:
        found[device, at_ms - at_ms % 10_000].append(value)
    return {window: (len(values), sum(values), max(values)) for window, values in found.items()}


async def publish_plainly(address: str, topic: str, records: list[tuple[int, Record]]) -> None:
    """(Partition, record) each."""
    producer = AIOKafkaProducer(bootstrap_servers=address)
    await producer.start()
    try:
        for place, (device, at_ms, value) in records:
            payload = b'{"value":%d}' % value
            await producer.send_and_wait(topic, payload, key=device.encode(), partition=place, timestamp_ms=at_ms)
    finally:
        await producer.stop()


async def publish(address: str, records: list[Record], transactional_id: str) -> None:
    """A part of the records as committed transactions, each after an aborted one whose records must not count."""
    producer = AIOKafkaProducer(bootstrap_servers=address, transactional_id=transactional_id)
    await producer.start()
    try:
        for start in range(0, len(records), 1_000):
            part = records[start : start + 1_000]
            for aborted in (True, False):
                await producer.begin_transaction()
                for device, at_ms, value in part[:50] if aborted else part:
                    place = int(device[1:]) % PARTITIONS
                    payload = b'{"value":%d}' % value
                    await producer.send(TOPIC, payload, key=device.encode(), partition=place, timestamp_ms=at_ms)
                await (producer.abort_transaction() if aborted else producer.commit_transaction())
    finally:
        await producer.stop()


def injected(url: str) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT coalesce(sum(injected), 0) FROM millpy.accounting").fetchone()
    return int(row[0]) if row else 0


def stored(url: str) -> dict[tuple[str, int], tuple[int, int, int]]:
    select = (
        "SELECT device, (extract(epoch FROM window_start) * 1000)::bigint, n, total, high FROM kafka_crash.sums"
        " WHERE device <> 'end'"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        return {(device, start): (n, total, high) for device, start, n, total, high in connection.execute(select)}


def low_watermark(url: str) -> int:
    select = (
        "SELECT min(low_watermark) FROM mill.intervals JOIN mill.computations USING (computation_id)"
        " WHERE name = 'sums'"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(select).fetchone()
    return int(row[0]) // 1_000 if row else 0


def test_windows_are_exact_when_workers_and_broker_are_killed(
    tmp_path: Path, database_url: str, kafka: KafkaServer
) -> None:
    records = workload(seed=5)
    asyncio.run(make_topic(kafka.address, TOPIC, PARTITIONS))
    source = Path(f"{kafka.address},{TOPIC},{PARTITIONS},earliest")

    def worker() -> Worker:
        return Worker(tmp_path, database_url, source, graph=GRAPH, poll_s_max=0.05)

    third = RECORDS // 3
    with worker() as first, worker() as second:
        asyncio.run(publish(kafka.address, records[:third], "one"))
        first.await_while_running(lambda: injected(database_url) > third // 4, "a quarter of the first third", 60)
        first.kill()
        with worker() as third_worker:
            asyncio.run(publish(kafka.address, records[third : 2 * third], "two"))
            await_true(lambda: injected(database_url) > third, "more than the first third", 60)
            kafka.kill()
            second.kill()
            kafka.start()
            asyncio.run(publish(kafka.address, records[2 * third :], "three"))
            with worker() as fourth:
                await_true(lambda: injected(database_url) > 2 * third, "more than two thirds", 60)
                third_worker.kill()
                closing = [(place, ("end", START_MS + 20 * RECORDS, 0)) for place in range(PARTITIONS)]
                asyncio.run(publish_plainly(kafka.address, TOPIC, closing))
                fourth.await_while_running(
                    lambda: low_watermark(database_url) >= START_MS + 10 * RECORDS, "all windows are closed", 60
                )
                fourth.drain()
                fourth.await_finished()

    assert injected(database_url) == RECORDS + PARTITIONS
    assert stored(database_url) == oracle(records)


def begun(url: str) -> bool:
    select = "SELECT max(bundle) > 0 FROM mill.intervals JOIN mill.computations USING (computation_id) WHERE name = %s"
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(select, ["readings"]).fetchone()
    return bool(row and row[0])


def test_partitions_added_later_are_read_from_their_beginning_by_the_workers_that_run(
    tmp_path: Path, database_url: str, kafka: KafkaServer
) -> None:
    topic = "growing"
    asyncio.run(make_topic(kafka.address, topic, 1))
    first = [("d1", START_MS + 1_000 * second, 1) for second in range(60)]
    second = [("d2", START_MS + 60_000 + 1_000 * second, 1) for second in range(60)]
    asyncio.run(publish_plainly(kafka.address, topic, [(0, ("d0", START_MS, 1))]))  # before it began with "latest"

    def worker(only: str = "") -> Worker:
        source = Path(f"{kafka.address},{topic},1,latest")
        return Worker(tmp_path, database_url, source, graph=GRAPH, only=only)

    with worker() as reading, worker(only="sums") as following:
        reading.await_while_running(lambda: begun(database_url), "where it begins is committed", 60)
        asyncio.run(publish_plainly(kafka.address, topic, [(0, record) for record in first]))
        reading.await_while_running(lambda: injected(database_url) == 60, "the only partition is read", 60)
        asyncio.run(add_partitions(kafka.address, topic, 2))
        asyncio.run(publish_plainly(kafka.address, topic, [(1, record) for record in second]))
        reading.await_while_running(lambda: injected(database_url) == 120, "the new partition is read", 60)
        closing = [(place, ("end", START_MS + 600_000, 0)) for place in range(2)]
        asyncio.run(publish_plainly(kafka.address, topic, closing))
        reading.await_while_running(
            lambda: low_watermark(database_url) >= START_MS + 120_000, "all windows are closed", 60
        )
        for running in (reading, following):
            running.drain()
            running.await_finished()

    assert stored(database_url) == oracle([*first, *second])
