"""SIGKILL and SIGSTOP of workers and servers while records leave by sinks: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import kill_server_twice
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import shared_broker, trap
from tests.crash.sinks import BOUND, NUMBER, PARTITIONS, POINTS, TABLE, repeated, sink_faults, write
from tests.crash.world import Case, World
from tests.kafka_server import KafkaServer
from tests.kafka_topics import make_topic

GRAPH = Path(__file__).parents[1] / "sink_graph.py"
SETTINGS = {"graph": GRAPH, "bundle_records_max": 7}


def cases() -> Iterator[Case]:
    """Each point of a worker and of a send, with and without Kafka; and the servers."""
    for point in Failpoint:
        yield Case(f"SIGKILL at {point}, with sinks", "", partial(at_point, point=point))
    for point in POINTS:
        yield Case(f"SIGKILL in a send to Kafka, {point}", "", partial(in_send, point=point))
        yield Case(
            f"SIGSTOP beyond the lease in a send to Kafka, {point}", "", partial(in_send, point=point, frozen=True)
        )
    for point in ("before", "committed"):
        yield Case(f"SIGKILL in a send without memory, {point}", "", partial(in_send, point=point, kafka=False))
    for point in Failpoint:
        yield Case(f"SIGKILL at {point}, with refused messages", "", partial(with_refusals, point=point))
    for point in ("before", "committed"):
        yield Case(f"SIGKILL in a send of refused messages, {point}", "", partial(with_refusals, trapped=point))
    yield Case("Kafka killed and restarted, with sinks", "", broker_killed)
    yield Case("PostgreSQL killed and restarted, with sinks", "", server_killed)


class Scene:
    """The input, the table and the topic of one case."""

    def __init__(self, world: World, kafka: KafkaServer | None, number: int = NUMBER, *, refuses: bool = False) -> None:
        self.world = world
        source, self.lines = world.directory / "readings.ndjson", world.directory / "lines"
        self.lines.mkdir()
        expected = write(source, 1, number)
        self.kafka, self.refuses = "", refuses
        if kafka is not None:
            topic = f"sinks-{uuid4().hex}"
            asyncio.run(make_topic(kafka.address, topic, PARTITIONS))
            self.kafka = f"{kafka.address},{topic}"
        with psycopg.connect(world.url, autocommit=True) as connection:
            connection.execute(TABLE)
        self.how: dict[str, Any] = SETTINGS | {"environment": self.variables(str(source))}
        world.oracle = lambda: sink_faults(world.url, expected, self.lines, self.kafka)

    def variables(self, source: str) -> dict[str, str]:
        return {
            "CRASH_INPUT": source,
            "SINK_LINES": str(self.lines),
            "SINK_KAFKA": self.kafka,
            "SINK_REFUSES": "1" if self.refuses else "",
        }

    def trapped(self, point: str, number: int, *, frozen: bool) -> dict[str, Any]:
        text = f"{point}:{number}:{'stop' if frozen else 'kill'}"
        return self.how | {"environment": {**self.how["environment"], "SINK_TRAP": text}}


def at_point(world: World, point: Failpoint, server: KafkaServer | None = None) -> None:
    """Kill a worker at a point of its cycle."""
    scene = Scene(world, server or shared_broker())
    one = world.worker(**scene.how, failpoint=trap(point))
    spring(one, point)
    recovery = world.await_killed(one)
    again = world.worker(**scene.how)
    recovery.wait(watched=again)
    world.await_finished(again)


def in_send(
    world: World,
    point: str,
    *,
    frozen: bool = False,
    kafka: bool = True,
    server: KafkaServer | None = None,
    number: int = NUMBER,
) -> None:
    """Kill or freeze a worker inside a send; another one takes over."""
    scene = Scene(world, (server or shared_broker()) if kafka else None, number)
    one = world.worker(**scene.trapped(point, 1 if point == "opened" else 5, frozen=frozen))
    world.let_another_finish(one, frozen=frozen, **scene.how)
    again_count = repeated(scene.lines)
    assert again_count <= 2 * BOUND, f"{again_count} messages came again"


def with_refusals(world: World, point: Failpoint | None = None, trapped: str = "", number: int = 400) -> None:
    """Kill a worker whose sink refuses messages, at a point of its cycle or inside its 1st, 6th and 30th `send`."""
    scene = Scene(world, None, number, refuses=True)
    times = 1 if point is not None else 3
    for place in range(times):
        how = (
            scene.how | {"failpoint": trap(point)}
            if point is not None
            else scene.trapped(trapped, (1, 6, 30)[place], frozen=False)
        )
        one = world.worker(**how)
        if point is not None:
            spring(one, point)
        recovery = world.await_killed(one)
        if place + 1 < times:
            continue
        again = world.worker(**scene.how)
        recovery.wait(watched=again)
        world.await_finished(again)
    assert repeated(scene.lines) <= 2 * times * BOUND


def broker_killed(world: World) -> None:
    """Kill the broker in the midst of transactions, twice."""
    server = shared_broker()
    scene = Scene(world, server)
    worker = world.worker(**scene.how)
    for _ in range(2):
        worker.await_reached(Failpoint.AFTER_COMMIT, 20)
        server.kill()
        world.kills += 1
        server.start()
    world.await_finished(worker)


def server_killed(world: World) -> None:
    """Kill PostgreSQL twice under two workers."""
    server = world.own_server()
    kill_server_twice(world, server, **Scene(world, shared_broker()).how)
