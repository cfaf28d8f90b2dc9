"""A topic as the source of a Spark stream and of a worker, while processes are killed: are the tables the same?

    python -m tests.crash.spark_kafka_run [--minutes 3] [--seed 1]        (make crash-spark-kafka)

A producer writes transactions to a topic of three partitions, and aborts some. A worker reads it into one database, a
streaming query into another. The driver with its JVM, Python workers of Spark and the broker are killed at random. In
the end the query runs with `--available-now`, which must end by itself, and all windows and dead letters are compared.
The last line is JSON: minutes, kills, records, differences. Exit status 0 only without differences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tests.crash.harness import ROOT, await_true
from tests.crash.spark_run import Service, kill_python
from tests.databases import fresh_database, passing_server
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic

GRAPH = Path(__file__).with_name("kafka_graph.py")
TOPIC, PARTITIONS, DEVICES, RECORDS = "crashed", 3, 10, 300
START_MS = 1_790_000_000_000
PAUSE_S = (2.0, 7.0)
END_S_MAX = 180.0


class Producer:
    """Writes transactions; the timestamps rise, and the last ones close all windows."""

    def __init__(self, server: KafkaServer, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self.sent = 0

    async def write(self, records: int, *, ahead_ms: int = 0) -> None:
        """Write one transaction, and abort one in four."""
        producer = AIOKafkaProducer(bootstrap_servers=self._server.address, transactional_id="crash")
        await producer.start()
        try:
            await producer.begin_transaction()
            for n in range(self.sent, self.sent + records):
                value = None if n % 101 == 7 else b"{" if n % 103 == 9 else b'{"value":%d}' % n
                place = {"key": b"d%d" % (n % DEVICES), "partition": n % PARTITIONS}
                await producer.send(TOPIC, value, timestamp_ms=START_MS + n * 20 + ahead_ms, **place)
            if not ahead_ms and self._rng.random() < 0.25:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
            self.sent += records
        finally:
            await producer.stop()


def contents(url: str) -> tuple[list[Any], list[Any]]:
    """Return the windows and the dead letters of a database."""
    with suppress(psycopg.Error), psycopg.connect(url, connect_timeout=5) as connection:
        query = "SELECT device, window_start, window_end, n, total, high FROM kafka_crash.sums ORDER BY 1, 2"
        letters = "SELECT reason, source_position, payload FROM millpy.dead_letters ORDER BY 1, 2"
        return connection.execute(query).fetchall(), connection.execute(letters).fetchall()
    return [], []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.crash.spark_kafka_run")
    options.add_argument("--minutes", type=float, default=3)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="millpy-crash-kafka-"))
    rng, kills, broker = random.Random(given.seed), Counter[str](), KafkaServer(directory / "kafka")
    services: list[Service] = []
    broker.start()
    try:
        with (
            passing_server(directory / "postgres") as server,
            fresh_database(server) as one,
            fresh_database(server) as two,
        ):
            urls = server.url(one), server.url(two)
            place = f"{broker.address},{TOPIC},{PARTITIONS},earliest"
            environment = {**os.environ, "CRASH_INPUT": place, "PYTHONPATH": str(ROOT), "MILLPY_LEASE_S": "1"}
            millpy = [sys.executable, "-m", "millpy"]
            stream = [*millpy, "spark", "run", str(GRAPH), "--stream", "--every", "0.5", "--master", "local[2,4]"]
            stream += ["--memory", "1g", "--database", urls[1], "--checkpoint", str(directory / "checkpoint")]
            stream += ["--output", str(directory / "output")]
            run = [*millpy, "run", str(GRAPH), "--database", urls[0]]
            services = [
                Service("worker", run, environment, directory / "worker.log"),
                Service("driver", stream, environment, directory / "driver.log"),
            ]
            producer = Producer(broker, rng)
            asyncio.run(make_topic(broker.address, TOPIC, PARTITIONS))
            _strike(producer, services, broker, given.minutes, rng, kills)
            asyncio.run(producer.write(PARTITIONS * DEVICES, ahead_ms=1_000_000))
            services[1].kill()
            done = subprocess.run(
                [*stream, "--available-now", "--json"],
                env=environment, cwd=directory, capture_output=True, text=True, check=False, timeout=END_S_MAX,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
            with suppress(AssertionError):
                await_true(lambda: contents(urls[0]) == contents(urls[1]), "the worker has read all", END_S_MAX)
            (rows, letters), (others, more) = contents(urls[0]), contents(urls[1])
            assert rows, "no windows"
            differences = len({*rows} ^ {*others}) + len({*letters} ^ {*more}) + abs(len(letters) - len(more))
    finally:
        for service in services:
            service.kill()
        broker.kill()
        if not os.environ.get("MILLPY_KEEP"):
            shutil.rmtree(directory, ignore_errors=True)
    print(dict(kills), f"{len(rows)} windows, {len(letters)} dead letters")
    found = {"minutes": given.minutes, "kills": sum(kills.values()), "records": producer.sent}
    print(json.dumps({**found, "differences": differences}), flush=True)
    return int(bool(differences))


def _strike(
    producer: Producer,
    services: Sequence[Service],
    broker: KafkaServer,
    minutes: float,
    rng: random.Random,
    kills: Counter[str],
) -> None:
    ends, strikes = time.monotonic() + minutes * 60, time.monotonic() + 20.0
    driver = services[1]
    while time.monotonic() < ends:
        for service in services:
            service.keep_running()
        with suppress(KafkaError):
            asyncio.run(producer.write(RECORDS))
        time.sleep(0.3)
        if time.monotonic() < strikes:
            continue
        what = rng.choice(["driver", "python", "python", "broker"])
        if what == "driver":
            driver.kill()
        elif what == "python":
            what = kill_python(driver, rng) or "nothing"
        else:
            broker.kill()
            broker.start()
        kills[what] += 1
        print(f"{minutes * 60 - (ends - time.monotonic()):.0f} s: {what}", flush=True)
        strikes = time.monotonic() + rng.uniform(*PAUSE_S) * (3 if what == "driver" else 1)


if __name__ == "__main__":
    sys.exit(main())
