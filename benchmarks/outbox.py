"""OUTBOX: readings leave for a Kafka topic of three partitions by the outbox, exactly once.

    python -m benchmarks.outbox [--records 600000] [--seconds 20] [--rate 1000] [--warm-up-s 60]

`records_per_s`: a file of W1's readings, from the source's claim to the worker's end, when all of them are in
transactions that have ended. `p50_ms, p99_ms`: 1,000 records/s from another topic, from the moment before they are
published to the moment when a read-committed consumer has them. The first minute is left out, in which the broker's
Java compiles itself, for a third of its time. `lost` and `doubled` compare both topics with what was sent, by device
and number.

`bare_p50_ms, bare_p99_ms`: the same records at the same rate by aiokafka's transactional producers alone, one for each
interval of the sink, without a source, a worker and a database. Each transaction has what has come meanwhile, and the
offset of a group. They come last, when the broker is warm; their first second is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

import msgspec
import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks.harness import Bench, arguments
from benchmarks.readings import START_MS, write_readings
from tests.kafka_server import KafkaServer

PARTITIONS, DEVICES, INTERVALS = 3, 1_000, 2
RUN_S_MAX = 600.0
TICK_S = 0.005
RETRY_MS = 10
LINE = b'{"device":"dev-%06d","event_ms":%d,"temperature":21.5,"humidity":50.0,"seq":%d,"sent_ns":%d}'


class Copy(msgspec.Struct):
    """What is read back of a reading."""

    device: str
    seq: int
    sent_ns: int = 0


async def make_topics(servers: str) -> None:
    """Create both topics."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic("readings", 1, 1), NewTopic("copies", PARTITIONS, 1)])
    finally:
        await admin.close()


def consumer_of(servers: str) -> AIOKafkaConsumer:
    """Return a consumer of committed messages."""
    return AIOKafkaConsumer(
        bootstrap_servers=servers,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        fetch_max_wait_ms=500,
        max_partition_fetch_bytes=8_000_000,
    )


Publish = Callable[[str, int, float], Coroutine[Any, Any, int]]
PLACES = [TopicPartition("copies", partition) for partition in range(PARTITIONS)]


async def read_all(servers: str) -> list[Copy]:
    """Read the whole topic of copies."""
    consumer, decoder = consumer_of(servers), msgspec.json.Decoder(Copy)
    await consumer.start()
    found: list[Copy] = []
    try:
        consumer.assign(PLACES)
        ends = await consumer.end_offsets(PLACES)
        for place in PLACES:
            while await consumer.position(place) < ends[place]:
                messages = (await consumer.getmany(place, timeout_ms=200)).get(place, ())
                found += [decoder.decode(message.value) for message in messages]
    finally:
        await consumer.stop()
    return found


async def paced(rate: int, seconds: float) -> AsyncIterator[bytes]:
    """Yield lines at a steady rate."""
    sent, started = 0, time.monotonic()
    while (passed := time.monotonic() - started) < seconds:
        while sent < passed * rate:
            yield LINE % (sent % DEVICES, START_MS + sent, sent, time.monotonic_ns())
            sent += 1
        await asyncio.sleep(TICK_S)


async def publish(servers: str, rate: int, seconds: float) -> int:
    """Publish at a steady rate; return the number of records."""
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    sent = 0
    try:
        async for line in paced(rate, seconds):
            await producer.send("readings", line, partition=0)
            sent += 1
    finally:
        await producer.stop()
    return sent


async def publish_bare(servers: str, rate: int, seconds: float) -> int:
    """Publish at a steady rate in transactions, as the intervals of a sink do; return the number of records."""
    waiting: list[list[bytes]] = [[] for _ in range(INTERVALS)]
    ended = asyncio.Event()

    async def deliver(name: str, lines: list[bytes]) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=servers, transactional_id=name, retry_backoff_ms=RETRY_MS)
        await producer.start()
        done = 0
        try:
            while lines or not ended.is_set():
                if not lines:
                    await asyncio.sleep(0.001)
                    continue
                taken = lines.copy()
                lines.clear()
                done += len(taken)
                async with producer.transaction():
                    for line in taken:
                        await producer.send("copies", line, key=line[11:21])
                    await producer.send_offsets_to_transaction({TopicPartition("copies", 0): done}, name)
        finally:
            await producer.stop()

    delivering = [asyncio.create_task(deliver(f"bare.{n}", lines)) for n, lines in enumerate(waiting)]
    sent = 0
    async for line in paced(rate, seconds):
        waiting[sent % INTERVALS].append(line)
        sent += 1
    ended.set()
    await asyncio.gather(*delivering)
    return sent


async def measure_latency(
    servers: str, rate: int, seconds: float, publish: Publish, warm_up_s: float
) -> tuple[int, list[Copy], np.ndarray]:
    """Publish, and read what leaves; return how many were sent, the copies, and their latencies in ms once warm."""
    seconds += warm_up_s
    consumer, decoder = consumer_of(servers), msgspec.json.Decoder(Copy)
    await consumer.start()
    copies: list[Copy] = []
    latencies: list[float] = []
    try:
        consumer.assign(PLACES)
        await consumer.seek_to_end(*PLACES)
        publishing = asyncio.create_task(publish(servers, rate, seconds))
        until = time.monotonic() + seconds + 20
        while time.monotonic() < until and not (publishing.done() and len(copies) >= publishing.result()):
            found = await consumer.getmany(timeout_ms=50)
            now = time.monotonic_ns()
            for messages in found.values():
                for message in messages:
                    copies.append(decoder.decode(message.value))
                    latencies.append((now - copies[-1].sent_ns) / 1e6)
        return (
            await publishing,
            copies,
            np.array([ms for ms, copy in zip(latencies, copies, strict=True) if copy.seq >= rate * warm_up_s]),
        )
    finally:
        await consumer.stop()


def differences(copies: Iterable[Copy], sent: int) -> tuple[int, int]:
    """Return how many records are lost and doubled."""
    counts = Counter(copy.seq for copy in copies)
    return sent - len(counts), sum(counts.values()) - len(counts)


def main(options: argparse.Namespace) -> None:
    with Bench("outbox", options) as bench:
        server = KafkaServer(bench.directory / "kafka")
        server.start()
        try:
            measure(bench, server.address)
        finally:
            server.kill()


def measure(bench: Bench, servers: str) -> None:
    """Measure rate and latency, one after the other."""
    options, environment = bench.options, {"BENCH_KAFKA": servers}
    asyncio.run(make_topics(servers))
    source = bench.directory / "readings.ndjson"
    write_readings(source, options.records, DEVICES, value="temperature")
    worker = bench.worker("outbox.py", bench.database(), environment=environment | {"BENCH_INPUT": str(source)})
    worker.wait_claimed()
    started = time.monotonic()
    worker.wait(RUN_S_MAX)
    took_s = time.monotonic() - started
    lost, doubled = differences(asyncio.run(read_all(servers)), options.records)
    bench.show("rate", {"took_s": round(took_s, 2), "lost": lost, "doubled": doubled})
    worker = bench.worker("outbox.py", bench.database(), environment=environment)
    worker.wait_claimed()
    time.sleep(1)
    sent, copies, latencies = asyncio.run(
        measure_latency(servers, options.rate, options.seconds, publish, options.warm_up_s)
    )
    worker.drain()
    more_lost, more_doubled = differences(copies, sent)
    p50, p99 = np.percentile(latencies, [50, 99])
    _, _, bare = asyncio.run(measure_latency(servers, options.rate, options.seconds, publish_bare, 1.0))
    bare_p50, bare_p99 = np.percentile(bare, [50, 99])
    bench.finish(
        records_per_s=options.records / took_s, p50_ms=p50, p99_ms=p99, bare_p50_ms=bare_p50, bare_p99_ms=bare_p99,
        lost=lost + more_lost, doubled=doubled + more_doubled,
    )  # fmt: skip


if __name__ == "__main__":
    main(
        arguments(
            __doc__, "lost<=0", "doubled<=0", records=600_000, rate=1_000, seconds=20.0, warm_up_s=60.0
        ).parse_args()
    )
