"""Bounds that are really reached: the backlog's high mark, and the limit on unfolded deltas. Nothing is dropped."""

import asyncio
import dataclasses
from pathlib import Path

from millpy.graph import Graph
from millpy.runtime.maintenance import Maintenance
from millpy.store.memory.store import MemoryStore
from tests.crash.memory_world import LIMITS, World, expected, readings, source_of, two_stages


async def injected_when_at_rest(world: World, more_than: int = 0, seconds: float = 0.7) -> int:
    """Records that the source has handed in once that number is large enough and no longer moves."""
    async with asyncio.timeout(60):
        before = -1
        while True:
            now = world.database.accounting(world.graph_id).sources[0].injected
            if now == before > more_than:
                return now
            before = now
            await asyncio.sleep(seconds)


async def test_a_source_pauses_at_the_high_mark_and_resumes_below_the_low_one(tmp_path: Path) -> None:
    records = readings(40_000)
    limits = dataclasses.replace(LIMITS, backlog_records_high=1_000)
    world = World(two_stages(tmp_path / "in.ndjson", records), limits)
    world.start(("readings",))
    await world.deployed.wait()

    injected = await injected_when_at_rest(world, 1_000)
    pending = world.database.accounting(world.graph_id).subscriptions[0].pending
    world.start(("totals", "largest"))
    await world.finish()

    assert injected < len(records)
    assert pending == injected
    assert world.results() == expected(records)
    assert world.adds_up()


async def test_a_source_waits_for_the_bytes_of_an_archive_not_for_its_records(tmp_path: Path) -> None:
    records = readings(40_000)
    limits = dataclasses.replace(LIMITS, backlog_records_high=1_000, backlog_bytes_high=200_000)
    graph = Graph("world")
    source_of(graph, "readings", tmp_path / "in.ndjson", records).key_by("device").archive()
    world = World(graph, limits)
    world.start(("readings",))
    await world.deployed.wait()

    injected = await injected_when_at_rest(world, 1_000)
    (backlog,) = (await MemoryStore(world.database).backlog(world.graph_id)).values()
    assert 3_000 < injected == backlog.records < len(records)
    assert backlog.bytes > 200_000

    world.start(("readings_archive",))
    await world.finish()
    assert world.adds_up()
    assert world.database.accounting(world.graph_id).subscriptions[0].consumed == len(records)


async def test_a_worker_that_cannot_fold_stops_taking_input(tmp_path: Path) -> None:
    records = readings(40_000)
    limits = dataclasses.replace(LIMITS, fold_bytes=100_000, unfolded_bytes_max=200_000, fold_every_s=0.05)
    world = World(two_stages(tmp_path / "in.ndjson", records), limits)
    may_fold = asyncio.Event()
    fold = Maintenance.fold

    async def fold_later(self: Maintenance) -> bool:
        await may_fold.wait()
        return await fold(self)

    Maintenance.fold = fold_later  # type: ignore[method-assign]  # a database too slow to fold
    try:
        world.start()
        await world.deployed.wait()
        injected = await injected_when_at_rest(world)
        may_fold.set()
        await world.finish()
    finally:
        Maintenance.fold = fold  # type: ignore[method-assign]

    assert 0 < injected < len(records)
    assert world.results() == expected(records)
