"""Kafka to Kafka through two stages: a graph, its input, and its worker processes.

The running sum of each device is exact only if each reading counts once, in order. The second stage has state of its
own, by which it sees a sum that comes again. What leaves is compared by `sink_faults`, in a topic and in a table.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import psycopg
from aiokafka import AIOKafkaProducer

from millpy import Computation, Context, EventTime, Graph, Kafka, KafkaBrokers, Value, seconds
from millpy.sinks.protocol import SendBound
from tests.crash.checks import Fault, accounting_faults
from tests.crash.graph_files import rows
from tests.crash.harness import Worker
from tests.crash.sinks import (
    BOUND,
    DEVICES,
    INSERT,
    PARTITIONS,
    TABLE,
    Reading,
    Total,
    Totals,
    TrappedTopic,
    sink_faults,
)
from tests.crash.world import World
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic, started

GRAPH = Path(__file__).with_name("kafka_to_kafka_graph.py")
NUMBER = 900
TRANSACTION_TIMEOUT_S = 2.0
SETTINGS: Mapping[str, float] = {"bundle_records_max": 7, "poll_s_max": 0.05}
LEFT = "SELECT (SELECT count(*) FROM app.totals), coalesce(sum(delivered), 0), coalesce(sum(messages), 0) FROM {}"


class Numbered(Computation):
    """Passes sums on, and checks that they come in order, without a gap."""

    newest = Value(int, default=-1)

    def process_record(self, context: Context, record: Total) -> None:
        assert record.number > context[Numbered.newest], f"{record} comes behind {context[Numbered.newest]}"
        context[Numbered.newest] = record.number
        context.produce(record)


def graph_of(variables: Mapping[str, str]) -> Graph:
    """Return the graph."""
    graph = Graph("plant")
    source = Kafka(variables["FROM_TOPIC"], partitions=PARTITIONS, brokers=KafkaBrokers(variables["FROM_BROKER"]))
    event_time = EventTime("at", unit="s", max_disorder=seconds(5))
    readings = graph.inject("readings", source, schema=Reading, event_time=event_time)
    totals = readings.key_by("device").process(Totals(), name="totals", output=Total, intervals=2)
    numbered = totals.key_by("device").process(Numbered(), name="numbered", output=Total, intervals=2)
    numbered.to_sql(INSERT, key="device", name="to_app", intervals=2)
    sink = TrappedTopic(
        variables["TO_TOPIC"],
        brokers=KafkaBrokers(variables["TO_BROKER"]),
        bound=SendBound(records=BOUND),
        transaction_timeout_s=TRANSACTION_TIMEOUT_S,
    )
    numbered.to_sink(sink, key="device", name="to_topic", intervals=2)
    return graph


class Pipe:
    """The topics of one case, its readings, and its workers; they reach the broker through a proxy if there is one."""

    def __init__(self, world: World, server: KafkaServer, number: int = NUMBER) -> None:
        self.world, self.server, self.number = world, server, number
        name = uuid4().hex
        self.source, self.target = f"from-{name}", f"to-{name}"
        for topic in (self.source, self.target):
            asyncio.run(make_topic(server.address, topic, PARTITIONS))
        rng = random.Random(7)
        self.readings = [Reading(place, f"d{rng.randrange(DEVICES)}", place // 10) for place in range(number)]
        self.expected: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for reading in self.readings:
            before = self.expected[reading.device][-1][1] if self.expected[reading.device] else 0
            self.expected[reading.device].append((reading.number, before + reading.number))
        with psycopg.connect(world.url, autocommit=True) as connection:
            connection.execute(TABLE)
        world.oracle = self.faults

    def publish(self, lo: int, hi: int) -> None:
        """Publish a part of the readings, in transactions of which every third is aborted first."""
        asyncio.run(self._publish(self.readings[lo:hi]))

    async def _publish(self, readings: list[Reading]) -> None:
        options = {"bootstrap_servers": self.server.address, "transactional_id": f"test-{self.source}"}
        async with started(lambda: AIOKafkaProducer(**options)) as producer:
            for place in range(0, len(readings), 30):
                part = readings[place : place + 30]
                for aborted in (True, False) if place % 90 == 0 else (False,):
                    await producer.begin_transaction()
                    sent = [await self._send(producer, reading) for reading in part]
                    await asyncio.gather(*sent)
                    await (producer.abort_transaction() if aborted else producer.commit_transaction())

    async def _send(self, producer: AIOKafkaProducer, reading: Reading) -> asyncio.Future[Any]:
        return await producer.send(  # type: ignore[no-any-return]
            self.source,
            msgspec.json.encode(reading),
            key=reading.device.encode(),
            partition=int(reading.device[1:]) % PARTITIONS,
        )

    def worker(self, trap: str = "", *, address: str = "", **settings: Any) -> Worker:
        """Start a worker; `address` is the broker's for it, `trap` as in `sinks.Trap`."""
        broker = address or self.server.address
        environment = {
            "FROM_BROKER": broker,
            "FROM_TOPIC": self.source,
            "TO_BROKER": broker,
            "TO_TOPIC": self.target,
            "SINK_TRAP": trap,
        }
        return self.world.worker(graph=GRAPH, environment=environment, **{**SETTINGS, **settings})

    def left(self) -> tuple[int, int, int]:
        """How many have left by the table and the topic, and how many messages wait."""
        ((in_table, delivered, waiting),) = rows(
            self.world.url, LEFT.format("(SELECT * FROM millpy.sinks WHERE sink = 'to_topic') AS s")
        )
        return int(in_table), int(delivered), int(waiting)

    def await_sent(self, worker: Worker, number: int, within_s: float = 60.0) -> None:
        """Wait until at least a number of messages are delivered."""
        worker.await_while_running(lambda: self.left()[1] >= number, f"{number} messages delivered", within_s)

    def finish(self, *workers: Worker) -> None:
        """Wait until everything has left, and let the workers end in good order."""
        workers[0].await_while_running(self._is_done, f"all of {self.number} have left", 60)
        workers[0].await_while_running(lambda: bool(workers[0].points_reached), "began")
        for worker in workers:
            worker.drain()
        self.world.await_finished(*workers)

    def _is_done(self) -> bool:
        return self.left() == (self.number, self.number, 0)

    def faults(self) -> list[Fault]:
        """Compare what has left with what must have."""
        found = sink_faults(self.world.url, self.expected, Path(), f"{self.server.address},{self.target}")
        with psycopg.connect(self.world.url, autocommit=True) as connection:
            return [*found, *accounting_faults(connection)]


def graph_here() -> Graph:
    """Return the graph of a worker process, by its environment."""
    return graph_of(os.environ)
