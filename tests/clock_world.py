"""Real workers whose host, and a database whose server, have clocks of their own: tests set them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any
from uuid import UUID

import msgspec

from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.time import minutes, seconds
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock, SkewedClock
from millpy.testing.simulation.broker import BROKER, PARTITION, Broker, Topic
from millpy.testing.simulation.loop import SimulatedLoop
from millpy.testing.simulation.machine import Machine, Program
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows

HOUR_S = 3_600.0
YEAR_S = 365 * 86_400.0
LIMITS = Limits(progress_every_s=0.5, poll_s_max=0.5, fold_every_s=5)


class Reading(msgspec.Struct):
    """What devices send; `at` is µs since the epoch."""

    id: int
    at: int


def a_graph(**more: Any) -> Graph:
    """Readings counted by minute; punctual ones are never late, however long the source was silent."""
    how: dict[str, Any] = {
        "event_time": EventTime("at", unit="us", max_disorder=seconds(5)),
        "dedupe": Dedupe("id", within=minutes(10)),
        "idle": AdvanceWithClock(after=seconds(10)),
    }
    graph = Graph("clocks")
    readings = graph.inject("readings", Topic(), schema=Reading, **(how | more))
    readings.key_by("id").window(FixedWindows(minutes(1)), intervals=1).aggregate(n=Count()).to_table("counts")
    return graph


class ClockWorld:
    """One database, one broker, workers: each clock is moved by hand, and true time by `pass_time`."""

    def __init__(self, graph: Graph, *, limits: Limits = LIMITS, server_ahead_s: float = 0.0) -> None:
        self.true = ManualClock(1_800_000_000_000_000)
        self.server = SkewedClock(self.true, offset_us=round(server_ahead_s * 1e6))
        self.graph = graph
        self.limits = limits
        self.rng = random.Random(1)
        self.loop = SimulatedLoop(self.true, self.rng)
        self.database = MemoryDatabase(self.server)
        self.graph_id = self.database.deploy(graph.spec()).graph_id
        self.broker = Broker(self.rng)
        self.machines: list[Machine] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is, workers may be started."""
        token = BROKER.set({PARTITION: self.broker})
        try:
            with self.loop.running():
                yield
        finally:
            BROKER.reset(token)

    def start(self, ahead_s: float = 0.0) -> Machine:
        """Start a worker on a host whose clock is so far ahead."""
        store = _Store(self.database)
        store.worker = UUID(int=self.rng.getrandbits(128), version=4)
        clock = SkewedClock(self.true, offset_us=round(ahead_s * 1e6))
        name = f"w{len(self.machines) + 1}"
        program = Program(lambda: self.graph)
        machine = Machine(name, program, self.limits, clock, lambda: store, self.rng, lambda _, __: None)  # type: ignore[arg-type]
        machine.ended = copy_context().run(self.loop.start, machine.process, machine.process.main, machine.live)
        self.machines.append(machine)
        self.pass_time(2)
        return machine

    def kill(self, machine: Machine) -> None:
        """The process is gone; its lease ends later."""
        machine.process.doomed = True
        self.loop.reap(machine.process)

    def pass_time(self, seconds: float) -> None:
        """Let all workers run for some true seconds."""
        rung = False

        def ring() -> None:
            nonlocal rung
            rung = True

        self.true.call_at(self.true.monotonic() + seconds, ring)
        while not rung:
            self.loop.turn()
        for machine in self.machines:
            if machine.ended is not None and machine.ended.done() and not machine.ended.cancelled():
                machine.ended.result()

    def publish(self, *ids: int, ahead_s: float = 0.0) -> None:
        """Readings that happen now, or so far ahead; they are taken at once."""
        at = self.true.now_us() + round(ahead_s * 1e6)
        self.broker.publish([json.dumps({"id": number, "at": at}).encode() for number in ids])
        self.pass_time(1)

    def deliver(self, payloads: Sequence[bytes]) -> None:
        """Publish payloads as they are, and let a second pass."""
        self.broker.publish(payloads)
        self.pass_time(1)

    def counts(self) -> dict[str, int]:
        """Return the counters of the source."""
        (source,) = self.database.accounting(self.graph_id).sources
        return {"accepted": source.accepted, "duplicate": source.duplicate, "dead_lettered": source.dead_lettered}

    def late(self) -> int:
        """Records that were too late for their window."""
        return sum(len(rows) for _, _, rows in self.database.late_records)

    def events(self, kind: str) -> list[dict[str, object]]:
        """Details of the events of a kind, in order."""
        return [dict(event.detail) for _, event in self.database.events if event.kind == kind]


class _Store(MemoryStore):
    worker: UUID
