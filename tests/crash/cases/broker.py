"""A broker that dies with and without its queue, says everything twice, or has saved up ten minutes of messages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import psycopg
from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from millpy.embedded import EmbeddedBroker, mosquitto_program
from millpy.hosting.failpoints import Failpoint
from tests.crash.harness import Worker, await_true
from tests.crash.message_load import MessageLoad
from tests.crash.workload import START_US
from tests.crash.world import Case, Skipped, World

GRAPH = Path(__file__).resolve().parents[1] / "message_graph.py"
TOPIC = "bench/ping"  # where the publisher of the benchmarks sends, too
MESSAGES = 3_000
PIECE = 50
QUEUED = 300
IDLE_S = 2.0
BACKLOG_US = 600_000_000
TOLD_S_MAX = 30.0  # within 10 s on a machine that is not busy with tests


def cases() -> Iterator[Case]:
    """The broker alone, then with a worker."""
    yield Case("broker killed, its queue saved", "", partial(_killed, worker_too=False))
    yield Case("broker killed, its queue saved", "worker too", partial(_killed, worker_too=True))
    yield Case("broker killed, its queue not saved", "", _killed_without_persistence)
    yield Case("broker's queue too short", "", _queue_too_short)
    yield Case("broker stopped and started", "", _stopped)
    yield Case("every message published twice", "a worker killed meanwhile", _twice)
    yield Case("ten minutes of messages after an outage", "", _backlog)


class Publisher:
    """Publishes with QoS 1 in order, through any outage of the broker.

    The client library sends what it could not send before together with what is new; so a piece waits for the
    acknowledgement of the one before it, else their order would be lost.
    """

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.acknowledged = self.sent = 0
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.reconnect_delay_set(1, 1)
        self.client.max_inflight_messages_set(200)
        self.client.on_publish = self._published
        self.client.connect(broker.host, broker.port)
        self.client.loop_start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def _published(self, *_: object) -> None:
        self.acknowledged += 1

    def publish(self, payloads: Sequence[bytes]) -> None:
        """Hand them to the client, once everything before them is acknowledged."""
        self.await_acknowledged()
        for payload in payloads:
            self.client.publish(TOPIC, payload, qos=1)
        self.sent += len(payloads)

    def await_acknowledged(self) -> None:
        """Wait until the broker has acknowledged everything."""
        await_true(lambda: self.acknowledged >= self.sent, "the broker has everything", 60)


class Scene:
    """A broker, workers that listen to it, and a publisher."""

    def __init__(
        self,
        world: World,
        load: MessageLoad,
        *,
        saves: bool,
        queued_max: int = 1_000_000,
        idle_s: float = 0.0,
        settings: Mapping[str, float] | None = None,
        graph: Path = GRAPH,
        horizon_s: float = 0.0,
    ) -> None:
        if mosquitto_program() is None:
            raise Skipped("mosquitto is not installed")
        self.world, self.load, self.graph = world, load, graph
        broker = EmbeddedBroker(world.directory / "broker", save_always=saves, queued_max=queued_max)
        self.broker = world.stack.enter_context(broker)
        self.environment = {
            "LOAD_TOPIC": TOPIC,
            "LOAD_PORT": str(self.broker.port),
            "LOAD_EVERY": str(load.every),
            "LOAD_IDLE_S": str(idle_s),
            "LOAD_HORIZON_S": str(horizon_s),
        }
        self.publisher = world.stack.enter_context(Publisher(self.broker))
        self.workers: list[Worker] = []
        self.settings = settings or {}

    def start_worker(self, **options: str) -> Worker:
        worker = self.world.worker(graph=self.graph, environment=self.environment, **self.settings, **options)
        self.workers.append(worker)
        return worker

    def await_listening(self) -> None:
        """Something that is no record has become a dead letter: the subscription stands."""
        before = self.count("mill.dead_letters")

        def heard() -> bool:
            self.publisher.publish([b"hello"])
            time.sleep(0.1)
            return self.count("mill.dead_letters") > before

        self.workers[-1].await_while_running(heard, "listens", 60)

    def count(self, table: str) -> int:
        with psycopg.connect(self.world.url, autocommit=True) as connection:
            try:
                row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            except psycopg.errors.UndefinedTable:
                return 0  # the worker has not deployed yet
        return row[0] if row else 0

    def await_marked(self, number: int) -> None:
        """Wait until this number of records is counted."""
        worker = self.workers[-1]
        try:
            worker.await_while_running(lambda: self.count("messages.marks") >= number, f"{number} counted", 60)
        except AssertionError as error:
            raise AssertionError(f"{self.count('messages.marks')} of {error}") from None

    def publish(self, first: int, last: int, *, twice: bool = False) -> None:
        """Publish messages [first, last), at a pace that leaves time for faults."""
        for start in range(first, last, PIECE):
            piece = [self.load.payload(seq) for seq in range(start, min(last, start + PIECE))]
            self.publisher.publish(piece * 2 if twice else piece)
            time.sleep(0.01)

    def finish(self, sent: np.ndarray, *, ends: bool = True) -> None:
        """Close every window, let all workers leave, and set the expected results."""
        after = int(sent.max()) + 1
        if ends:
            self.publisher.publish([self.load.end(after)])
        self.publisher.await_acknowledged()
        over = self.load.end_us(after)
        self.workers[-1].await_while_running(lambda: self.low_watermark() >= over, "every window is closed", 60)
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.drain()
                worker.await_finished()
        self.world.oracle = partial(self.load.faults, self.world.url, sent)

    def low_watermark(self, kind: str = "stage") -> int:
        with psycopg.connect(self.world.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT min(low_watermark) FROM mill.intervals JOIN mill.computations USING (computation_id)"
                " WHERE kind = %s",
                [kind],
            ).fetchone()
        return row[0] if row else 0

    def await_connection(self, state: str, why: str | None) -> None:
        """The views show the source's state, and why, within TOLD_S_MAX."""
        asked = "SELECT 1 FROM millpy.sources WHERE state = %s AND (%s::text IS NULL OR disconnected_because LIKE %s)"
        with psycopg.connect(self.world.url, autocommit=True) as connection:
            await_true(lambda: bool(connection.execute(asked, [state, why, why]).fetchone()), state, TOLD_S_MAX)

    def kill_broker(self) -> None:
        self.broker.kill()
        self.world.kills += 1


def _scene(world: World, *, saves: bool = True, queued_max: int = 1_000_000) -> Scene:
    scene = Scene(world, MessageLoad(START_US, 10_000), saves=saves, queued_max=queued_max)
    scene.start_worker()
    scene.await_listening()
    return scene


def _killed(world: World, worker_too: bool) -> None:
    scene = _scene(world)
    third = MESSAGES // 3
    scene.publish(0, third)
    for first in (third, 2 * third):
        scene.publish(first, first + PIECE)
        scene.publisher.await_acknowledged()
        scene.broker.save()  # messages acknowledged since would be lost with it
        died_at = time.monotonic()
        scene.kill_broker()
        if worker_too:
            world.kill(scene.workers[-1])
            scene.start_worker()
        recovery = world.hurt(fenced=False)
        recovery.started = died_at
        recovered = recovery.wait_aside(watched=scene.workers[-1])
        scene.broker.start()
        scene.publish(first + PIECE, first + third)
        recovered.result()
    scene.finish(np.arange(MESSAGES))


def _killed_without_persistence(world: World) -> None:
    """Messages that the broker had acknowledged and not delivered are lost with it. All others are counted."""
    scene = _scene(world, saves=False)
    third = MESSAGES // 3
    scene.publish(0, third)
    scene.await_marked(third)
    world.kill(scene.workers[-1])
    scene.publish(third, 2 * third)
    scene.publisher.await_acknowledged()
    scene.kill_broker()
    scene.broker.start()
    scene.start_worker()
    scene.await_listening()
    scene.publish(2 * third, MESSAGES)
    numbers = np.arange(MESSAGES)
    scene.finish(numbers[(numbers < third) | (numbers >= 2 * third)])
    world.notes.append(f"the broker lost {third} messages that it had acknowledged, and nothing else is missing")


def _queue_too_short(world: World) -> None:
    """The broker drops messages that arrive while its queue is full and no worker reads. All others are counted."""
    scene = _scene(world, saves=False, queued_max=QUEUED)
    third = MESSAGES // 3
    scene.publish(0, third)
    scene.await_marked(third)
    scene.workers[-1].drain()  # in good order, so that all is acknowledged and the queue empty
    scene.workers[-1].await_finished()
    scene.publish(third, 2 * third)
    scene.publisher.await_acknowledged()
    scene.start_worker()
    scene.await_marked(third + QUEUED - 1)
    scene.publish(2 * third, MESSAGES)
    numbers = np.arange(MESSAGES)
    sent_with = [numbers[(numbers < third + kept) | (numbers >= 2 * third)] for kept in (QUEUED, QUEUED - 1)]
    scene.finish(sent_with[0])
    # A marker that the leaving worker publishes to itself may take one place of the queue.
    sent = sent_with[scene.count("messages.marks WHERE device >= 0") == len(sent_with[1])]
    world.oracle = partial(scene.load.faults, world.url, sent)
    world.notes.append(
        f"the broker dropped {MESSAGES - len(sent)} messages beyond its queue, and nothing else is missing"
    )


def _stopped(world: World) -> None:
    scene = _scene(world)
    scene.publish(0, MESSAGES // 2)
    stopped_at = time.monotonic()
    scene.broker.stop()
    recovery = world.hurt(fenced=False)
    recovery.started = stopped_at
    recovered = recovery.wait_aside(watched=scene.workers[-1])
    scene.broker.start()
    scene.publish(MESSAGES // 2, MESSAGES)
    recovered.result()
    scene.finish(np.arange(MESSAGES))


def _twice(world: World) -> None:
    scene = _scene(world, saves=False)  # the broker keeps running
    scene.publish(0, MESSAGES // 2, twice=True)
    recovery = world.kill(scene.workers[-1])
    again = scene.start_worker()
    recovered = recovery.wait_aside(watched=again)
    scene.publish(MESSAGES // 2, MESSAGES, twice=True)
    recovered.result()
    scene.finish(np.arange(MESSAGES))
    row = world.connect().execute("SELECT duplicate FROM millpy.accounting WHERE consumer IS NULL").fetchone()
    assert row is not None and row[0] >= MESSAGES, f"{row} duplicates of {MESSAGES}"


def _backlog(world: World) -> None:
    """The clock advances the watermark of a quiet source; what queued up during an outage must not be late for it."""
    started_us = time.time_ns() // 1_000 - BACKLOG_US - 5_000_000
    load = MessageLoad(started_us - started_us % 1_000_000, BACKLOG_US // MESSAGES)
    scene = Scene(world, load, saves=False, idle_s=IDLE_S)  # `stop` saves its queue
    first = scene.start_worker()
    scene.await_listening()
    scene.publish(0, PIECE)
    scene.await_marked(PIECE)
    world.kill(first)
    scene.publish(PIECE, MESSAGES)
    scene.publisher.await_acknowledged()
    scene.broker.stop()
    again = scene.start_worker()
    again.await_reached(Failpoint.AFTER_CLAIM)
    time.sleep(2 * IDLE_S)
    assert scene.low_watermark("injector") <= load.end_us(PIECE), "the clock moved the watermark without the broker"
    scene.await_connection("disconnected", "%cannot connect%")
    scene.broker.start()
    scene.await_connection("running", None)
    os.kill(scene.broker.pid(), signal.SIGSTOP)
    try:
        scene.await_connection("disconnected", "%does not answer%")
    finally:
        os.kill(scene.broker.pid(), signal.SIGCONT)
    scene.await_connection("running", None)
    scene.finish(np.arange(MESSAGES), ends=False)
    kinds = [("source_disconnected",), ("source_connected",)] * 2
    told = "SELECT kind FROM mill.events WHERE kind IN ('source_disconnected', 'source_connected') ORDER BY event_id"
    assert world.connect().execute(told).fetchall() == kinds, "each outage and its end are one event"
