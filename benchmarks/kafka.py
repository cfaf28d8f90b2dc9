"""Kafka: a backlog of 1 M records in one partition, through exactly-once windows, into a table.

    python -m benchmarks.kafka [--records 1000000]

Compared with an aiokafka consumer that does nothing (benchmarks/bare_kafka.py), on the same partition, one after the
other; publishing is over before either clock starts. Ours is timed from the source's claim, before it connects, to the
commit of the last record. `client_ratio` = our records/s by the bare client's. The position is in our commit, so the
windows are exact without dedupe ids; with them (`dedupe_…`, a second database) also against a producer that sends
twice. All windows that are closed are compared with a recomputation by DuckDB, as in W1, after one more record has
closed them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from benchmarks.bare_kafka import TOPIC
from benchmarks.harness import Bench, Worker, arguments, wait_until
from benchmarks.readings import START_MS, write_readings
from benchmarks.traffic import result_of
from benchmarks.w1_windows import differences
from benchmarks.w3_mqtt import CLOSING, DEVICES, HOUR_MS, RUN_S_MAX, injected, show_run
from tests.kafka_server import KafkaServer

BATCH_BYTES = 500_000


async def publish(servers: str, payloads: list[bytes]) -> None:
    """Publish all payloads to one partition, in batches."""
    producer = AIOKafkaProducer(bootstrap_servers=servers, max_batch_size=BATCH_BYTES)
    await producer.start()
    try:
        batch = producer.create_batch()
        for payload in payloads:
            if batch.append(key=None, value=payload, timestamp=None) is None:
                await producer.send_batch(batch, TOPIC, partition=0)
                batch = producer.create_batch()
                batch.append(key=None, value=payload, timestamp=None)
        await producer.send_batch(batch, TOPIC, partition=0)
    finally:
        await producer.stop()


async def make_topic(servers: str) -> None:
    """Create the topic with one partition."""
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(TOPIC, 1, 1)])
    finally:
        await admin.close()


def run_until(bench: Bench, url: str, servers: str, records: int, *, dedupe: bool) -> Worker:
    """Run a worker from its start until it has committed a number of records."""
    environment = {"BENCH_KAFKA": servers, "BENCH_DEDUPE": "1" if dedupe else ""}
    worker = bench.worker("kafka_windows.py", url, environment=environment)
    worker.wait_claimed()
    wait_until(
        lambda: worker.running() and injected(url) >= records, "all is committed", timeout_s=RUN_S_MAX, every_s=0.1
    )
    worker.drain()
    return worker


def main(options: argparse.Namespace) -> None:
    with Bench("kafka", options) as bench:
        server = KafkaServer(bench.directory / "kafka")
        server.start()
        try:
            measure(bench, server.address, options.records)
        finally:
            server.kill()


def measure(bench: Bench, servers: str, records: int) -> None:
    """Publish, drain in each way, and compare."""
    path: Path = bench.directory / "readings.ndjson"
    bench.show("bytes_per_record", write_readings(path, records, DEVICES, value="temperature"))
    asyncio.run(make_topic(servers))
    asyncio.run(publish(servers, path.read_bytes().splitlines()))
    urls = {dedupe: bench.database() for dedupe in (False, True)}
    child = ("benchmarks.bare_kafka", "--servers", servers, "--records", records)
    first = result_of(bench.child(*child), RUN_S_MAX)  # and the broker's pages are in memory for both
    seconds = {}
    for dedupe, url in urls.items():
        worker = run_until(bench, url, servers, records, dedupe=dedupe)
        seconds[dedupe] = worker.report["committed_at"] - worker.report["claimed_at"]
        show_run(bench, "with dedupe" if dedupe else "ours", url, seconds[dedupe], worker)
    client = result_of(bench.child(*child), RUN_S_MAX)
    bench.show("bare_client", [first, client])
    asyncio.run(publish(servers, [json.dumps(CLOSING | {"event_ms": START_MS + records + HOUR_MS}).encode()]))
    wrong = 0
    for dedupe, url in urls.items():
        run_until(bench, url, servers, records + 1, dedupe=dedupe)
        wrong += differences(url, path, table="kafka.temperature_10s")
    bench.finish(
        records_per_s=records / seconds[False],
        client_ratio=client["seconds"] / seconds[False],
        dedupe_records_per_s=records / seconds[True],
        dedupe_client_ratio=client["seconds"] / seconds[True],
        bare_client_per_s=records / client["seconds"],
        differences=wrong,
    )


if __name__ == "__main__":
    main(arguments(__doc__, "differences<=0", records=1_000_000).parse_args())
