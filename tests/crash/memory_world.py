"""Several real workers over one in-memory database, on a file of readings; crashed, cut off and started again."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from millpy.clock import Clock, SystemClock, random_id
from millpy.computation import Computation, Context, Value
from millpy.errors import TransientError
from millpy.graph import Graph
from millpy.graph.streams import Stream
from millpy.hosting.failpoints import NoFailpoints
from millpy.hosting.plan import plan
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.runtime.context import WorkerContext
from millpy.runtime.lease import Lease
from millpy.runtime.worker import Worker
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.waiting import WITHIN_S

LIMITS = Limits(
    lease_ttl_s=0.5,
    bundle_records_max=100,
    progress_every_s=0.01,
    fold_every_s=0.05,
    retry_s_min=0.002,
    closed_windows_bytes_max=10_000,
    unfired_windows_bytes_max=10_000,
)

MAX_DISORDER_US, WINDOW_US = 5_000, 100_000


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class Total(msgspec.Struct):
    device: str
    number: int
    total: int
    value: int


class Running(msgspec.Struct):
    number: int = 0
    total: int = 0


class Totals(Computation):
    running = Value(Running)

    def process_record(self, context: Context, record: Reading) -> None:
        running = context[Totals.running]
        running.number += 1
        running.total += record.value
        context.produce(Total(record.device, running.number, running.total, record.value))


class Largest(Computation):
    largest = Value(int, default=0)

    def process_record(self, context: Context, record: Total) -> None:
        context[Largest.largest] = max(context[Largest.largest], record.total)
        context.produce(Total(record.device, record.number, context[Largest.largest], record.value))


def readings(count: int, seed: int = 1) -> list[Reading]:
    rng = random.Random(seed)
    return [Reading(f"dev-{rng.randrange(20)}", 1_000 * n, rng.randrange(100)) for n in range(count)]


def two_stages(path: Path, records: Sequence[Reading]) -> Graph:
    graph = Graph("world")
    source = source_of(graph, "readings", path, records)
    totals = source.key_by("device").process(Totals(), name="totals", output=Total)
    largest = totals.key_by("device").process(Largest(), name="largest", output=Total)
    largest.to_table("largest")
    return graph


def windows_over_several(directory: Path, records: Sequence[Reading], partitions: int) -> Graph:
    """Counts of windows over several source partitions; all readings of a device are in one."""
    graph = Graph("world")
    sources = []
    for n in range(partitions):
        mine = [record for record in records if int(record.device.removeprefix("dev-")) % partitions == n]
        sources.append(source_of(graph, f"in_{n}", directory / f"{n}.ndjson", mine))
    keyed = sources[0].union(*sources[1:]).key_by("device")
    windows = FixedWindows(timedelta(microseconds=WINDOW_US))
    keyed.window(windows, name="windows").aggregate(n=Count()).to_table("windows")
    return graph


def source_of(graph: Graph, name: str, path: Path, records: Sequence[Reading]) -> Stream:
    """These records in a file, read into a graph."""
    path.write_text("".join(json.dumps(msgspec.to_builtins(r)) + "\n" for r in records))
    event_time = EventTime("at", unit="us", max_disorder=timedelta(microseconds=MAX_DISORDER_US))
    return graph.inject(name, File(str(path)), schema=Reading, event_time=event_time)


def expected(records: Sequence[Reading]) -> list[tuple[str, int, int]]:
    running: dict[str, tuple[int, int]] = {}
    rows = []
    for record in records:
        number, total = running.get(record.device, (0, 0))
        running[record.device] = (number + 1, total + record.value)
        rows.append((record.device, *running[record.device]))
    return sorted(rows)


async def started(
    store: MemoryStore, graph: Graph, limits: Limits, clock: Clock, lease: Lease | None = None, **more: Any
) -> Worker:
    """Start a worker with its own store on the deployed graph."""
    await store.open()
    deployment = await store.deploy(graph.spec())
    worker = Worker(
        WorkerContext(
            store=store,
            plan=plan(graph, deployment, limits),
            worker_id=random_id(),
            limits=limits,
            host_clock=clock,
            failpoints=NoFailpoints(),
            lease=lease or Lease(limits, clock),
            rng=random.Random(1),
            **more,
        )
    )
    await worker.start()
    return worker


class World:
    """Workers come and go; the database stays."""

    def __init__(self, graph: Graph, limits: Limits = LIMITS) -> None:
        self.graph = graph
        self.limits = limits
        self.database = MemoryDatabase()
        self.clock = SystemClock()
        self.stop = asyncio.Event()
        self.running: list[asyncio.Task[None]] = []
        self.graph_id = 0
        self.deployed = asyncio.Event()

    def start(self, only: Sequence[str] = ()) -> asyncio.Task[None]:
        task = asyncio.create_task(self._work(tuple(only)))
        self.running.append(task)
        return task

    async def _work(self, only: tuple[str, ...]) -> None:
        store = MemoryStore(self.database)
        lease = Lease(self.limits, self.clock)
        while True:  # as a service, which is patient
            with suppress(TransientError):
                worker = await started(store, self.graph, self.limits, self.clock, lease, only=only)
                break
            await asyncio.sleep(self.limits.retry_s_min)
        self.graph_id = worker.context.plan.deployment.graph_id
        self.deployed.set()
        beating = asyncio.create_task(self._beat(worker, store, lease))
        try:
            await worker.run(self.stop)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _beat(self, worker: Worker, store: MemoryStore, lease: Lease) -> None:
        while True:
            await asyncio.sleep(self.limits.heartbeat_s)
            started = self.clock.monotonic()
            try:
                renewal = await store.heartbeat(worker.context.worker_id, self.limits.lease_ttl_s)
                if renewal is None:
                    lease.lost()
                    continue
                lease.renewed(started)
                lease.drain_requested |= renewal.drain_requested
            except TransientError:
                continue

    async def crash(self, task: asyncio.Task[None]) -> None:
        """The process is gone: nothing is drained or released."""
        self.running.remove(task)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def finish(self) -> None:
        """Wait until every running worker has ended by itself."""
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*self.running)

    def results(self) -> list[tuple[str, int, int]]:
        return sorted((row["device"], row["number"], row["total"]) for row in self.database.rows("largest"))

    def adds_up(self) -> bool:
        return self.database.accounting(self.graph_id).balanced


@asynccontextmanager
async def running_world(graph: Graph, limits: Limits = LIMITS) -> AsyncIterator[World]:
    """A world with a worker, which drains at the end."""
    world = World(graph, limits)
    world.start()
    await world.deployed.wait()
    try:
        yield world
    finally:
        world.stop.set()
        landing = asyncio.create_task(land_for_ever(world))  # who leaves waits for commits in flight
        await asyncio.gather(*world.running, return_exceptions=True)
        landing.cancel()


async def land_for_ever(world: World) -> None:
    while True:
        world.database.faults.land_lost_commits()
        await asyncio.sleep(0.01)


async def until(world: World, holds: Callable[[], bool], what: str) -> None:
    """Wait for a condition; a worker that ends first raises its error."""
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            for task in world.running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.005)
    assert holds(), what
