"""SIGKILL of a broker's reader, at every failpoint: no record is acknowledged or skipped before its commit.

A file cannot tell: there acknowledging does nothing. What is read here waits at the broker when the worker starts, so
every turn has records, and the one that is killed among them. Once the worker is started again the rest is published.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import psycopg
from aiokafka import AIOKafkaProducer

from millpy.hosting.failpoints import Failpoint
from tests.crash import test_kafka as kafka
from tests.crash.cases.broker import GRAPH as MQTT_GRAPH
from tests.crash.cases.broker import Scene
from tests.crash.cases.killing import spring
from tests.crash.checks import Fault, accounting_faults, differences
from tests.crash.harness import Worker
from tests.crash.message_load import MessageLoad
from tests.crash.workload import START_US
from tests.crash.world import Case, Skipped, World
from tests.kafka_server import KafkaServer, NoKafkaError
from tests.kafka_topics import make_topic, started

MESSAGES = 1_000
NTH = {
    Failpoint.AFTER_CLAIM: 1,
    Failpoint.AFTER_SLOT_FREED: 1,
    Failpoint.BEFORE_RELEASE: 1,
    Failpoint.BEFORE_FOLD: 2,
    Failpoint.AFTER_FOLD: 2,
}
"""The how-manieth time; 10 where it is not said."""
CAME_AGAIN = r"skipped (\d+) redelivered messages that are committed"
HORIZON_S = 0.05
"""Of event time, which also dates the ids; a bundle spans four times as much."""
BEYOND_HORIZON = (Failpoint.BEFORE_COMMIT, Failpoint.AFTER_COMMIT, Failpoint.AFTER_ACKNOWLEDGE)
SETTINGS = {"bundle_records_max": 20, "fold_bytes": 1_000, "fold_every_s": 0.05}
_START = threading.Lock()


def cases() -> Iterator[Case]:
    """Each point, on each broker."""
    for point in Failpoint:
        yield mqtt_case(point)
    for point in BEYOND_HORIZON:
        yield mqtt_case(point, horizon_s=HORIZON_S)
    for point in Failpoint:
        yield kafka_case(point)


def mqtt_case(point: Failpoint, graph: Path = MQTT_GRAPH, *, horizon_s: float = 0.0) -> Case:
    """Return a case with one reader of mosquitto; with a horizon, redelivered messages are older than it."""
    variant = "beyond the horizon" if horizon_s else ""
    return Case(
        f"SIGKILL at {point}, reading MQTT", variant, partial(_mqtt, point=point, graph=graph, horizon_s=horizon_s)
    )


def kafka_case(point: Failpoint, graph: Path = kafka.GRAPH, server: KafkaServer | None = None) -> Case:
    """One reader of Kafka; by default of a broker that all cases of this process share."""
    return Case(f"SIGKILL at {point}, reading Kafka", "", partial(_kafka, point=point, graph=graph, server=server))


def is_of_source(point: Failpoint) -> bool:
    """Tell whether an injector reaches the point by itself: only a stage loads state."""
    return point is not Failpoint.AFTER_LOAD


def trap(point: Failpoint) -> str:
    """Return the failpoint of a worker that reads a few thousand records: a kill in the middle of its work."""
    return f"{point}:{NTH.get(point, 10)}:kill"


def _mqtt(world: World, point: Failpoint, graph: Path, horizon_s: float) -> None:
    load = MessageLoad(START_US, 10_000)
    scene = Scene(world, load, saves=False, settings=SETTINGS, graph=graph, horizon_s=horizon_s)
    source, rest = ("messages", "per_window,marker") if is_of_source(point) else ("", "")
    first = scene.start_worker()
    scene.await_listening()
    first.drain()
    first.await_finished()
    scene.publish(0, MESSAGES // 2)
    scene.publisher.await_acknowledged()
    if rest:
        scene.start_worker(only=rest)
    victim = scene.start_worker(only=source, failpoint=trap(point))
    spring(victim, point)
    recovery = world.await_killed(victim)
    again = scene.start_worker(only=source, log_level="INFO")
    recovering = recovery.wait_aside(watched=again)  # all of the first half may be committed already
    scene.publish(MESSAGES // 2, MESSAGES)
    recovering.result()
    scene.finish(np.arange(MESSAGES))
    world.notes.append(f"{sum(map(int, re.findall(CAME_AGAIN, again.log)))} came again")


def _kafka(world: World, point: Failpoint, graph: Path, server: KafkaServer | None) -> None:
    server = server or shared_broker()
    topic = f"crash-{uuid4().hex}"
    records = kafka.workload(seed=11)[:MESSAGES]
    asyncio.run(make_topic(server.address, topic, 1))
    asyncio.run(_send(server.address, topic, records[: MESSAGES // 2]))
    environment = {"CRASH_INPUT": f"{server.address},{topic},1,earliest"}

    def worker(only: str, failpoint: str = "") -> Worker:
        return world.worker(graph=graph, environment=environment, only=only, failpoint=failpoint, **SETTINGS)

    source, rest = ("readings", "sums") if is_of_source(point) else ("", "")
    others = [worker(rest)] if rest else []
    victim = worker(source, trap(point))
    spring(victim, point)
    recovery = world.await_killed(victim)
    again = worker(source)
    recovering = recovery.wait_aside(watched=again)
    asyncio.run(_send(server.address, topic, records[MESSAGES // 2 :]))
    recovering.result()
    asyncio.run(_send(server.address, topic, [("end", kafka.START_MS + 20 * MESSAGES, 0)]))
    over = kafka.START_MS + 10 * MESSAGES
    again.await_while_running(lambda: kafka.low_watermark(world.url) >= over, "every window is closed", 60)
    for left in (again, *others):
        left.drain()
        left.await_finished()
    world.oracle = partial(_kafka_faults, world.url, records)


async def _send(address: str, topic: str, records: Sequence[kafka.Record]) -> None:
    async with started(lambda: AIOKafkaProducer(bootstrap_servers=address, linger_ms=5)) as producer:
        sent = [
            await producer.send(topic, b'{"value":%d}' % value, key=device.encode(), timestamp_ms=at_ms)
            for device, at_ms, value in records
        ]
        await asyncio.gather(*sent)


def _kafka_faults(url: str, records: list[kafka.Record]) -> list[Fault]:
    with psycopg.connect(url, autocommit=True) as connection:
        account = accounting_faults(connection)
    return [*differences("sums", kafka.stored(url), kafka.oracle(records)), *account]


def shared_broker() -> KafkaServer:
    """Return the broker that all cases of this process share, once no case beside has it killed."""
    with _START:  # cases run side by side
        server = _started_broker()
    server.await_running()
    return server


@cache
def _started_broker() -> KafkaServer:
    directory = Path(tempfile.mkdtemp(prefix="millpy-kafka-"))
    server = KafkaServer(directory / "broker", quick=True)
    try:
        server.start()
    except NoKafkaError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise Skipped(str(error)) from None
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(server.kill)
    return server
