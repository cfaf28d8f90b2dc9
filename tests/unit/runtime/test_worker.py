"""The worker's own books and its waiting, on the in-memory store."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from millpy.clock import SystemClock, fresh_identity
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.runtime.ownership import Lease
from millpy.runtime.plan import plan
from millpy.runtime.probe import NoProbe
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryDatabase, MemoryStore
from tests.crash.memory_world import readings, two_stages


async def started(graph: Graph, database: MemoryDatabase, limits: Limits, only: Sequence[str] = ()) -> Worker:
    store = MemoryStore(database)
    await store.open()
    deployment = await store.deploy(graph.spec())
    clock = SystemClock()
    worker = Worker(
        store,
        plan(graph, deployment, limits),
        fresh_identity(),
        limits=limits,
        clock=clock,
        probe=NoProbe(),
        lease=Lease(limits, clock),
        rng=random.Random(1),
        only=only,
    )
    await worker.start()
    return worker


class CountingWorker:
    """Runs a worker and counts its steps."""

    def __init__(self, worker: Worker) -> None:
        self.steps = 0
        self._step = worker.step
        worker.step = self.step  # type: ignore[method-assign]

    async def step(self) -> bool:
        self.steps += 1
        return await self._step()


async def test_a_worker_without_intervals_sleeps_also_after_a_hint(tmp_path: Path) -> None:
    graph = two_stages(tmp_path / "in", readings(10))
    worker = await started(graph, MemoryDatabase(), Limits(), only=("nothing of this graph",))
    counting, stop = CountingWorker(worker), asyncio.Event()
    running = asyncio.create_task(worker.run(stop))

    await asyncio.sleep(0.1)
    worker.wake.set()
    await asyncio.sleep(0.1)
    stop.set()
    await running

    assert counting.steps < 10


async def test_a_bundle_that_was_in_flight_during_a_fold_is_folded_later(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await started(two_stages(tmp_path / "in", readings(100)), database, Limits(lease_ttl_s=60))
    while worker._in_flight is None:
        await worker.step()
    (source,) = [i for i in worker.holdings.intervals.values() if i.intake is not None]

    await worker.housekeeping.fold_one(source)
    await worker._settle()
    worker.housekeeping.apply_folds()

    header = database.headers[source.interval_id]
    assert header.folded_bundle < header.bundle
    assert source.unfolded_bytes > 0, "nobody would fold it once the stream is quiet, and its slot is never freed"

    await worker.housekeeping.fold_one(source)
    worker.housekeeping.apply_folds()

    assert header.folded_bundle == header.bundle
    assert source.unfolded_bytes == 0
    await worker._abandon()
