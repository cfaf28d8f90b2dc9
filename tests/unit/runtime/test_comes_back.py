"""A worker that time has passed by: frozen past its lease, or waiting while its sources went on."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpy.errors import StaleSequencerError
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.model.time import INSTANT_MIN
from millpy.runtime.isolation import Isolation
from millpy.runtime.steps import Inbox
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryDatabase, MemoryStore
from millpy.store.protocol import Polled, Want
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import readings, started, two_stages


class SlowToAnswer(MemoryStore):
    """A poll takes a minute."""

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        clock = self.database.clock
        assert isinstance(clock, ManualClock)
        clock.advance(60)
        return await super().poll(wants, bytes_max)


async def a_worker(
    graph: Graph,
    only: Sequence[str] = (),
    store_type: type[MemoryStore] = MemoryStore,
    database: MemoryDatabase | None = None,
    bundle_records_max: int = 10,
) -> Worker:
    limits = Limits(bundle_records_max=bundle_records_max, lease_ttl_s=10_000)
    database = database or MemoryDatabase(ManualClock())
    worker = await started(store_type(database), graph, limits, database.clock, only=only)
    await worker._balance()
    return worker


async def one_step(worker: Worker) -> None:
    clock = worker._clock._host
    assert isinstance(clock, ManualClock)
    clock.advance(0.01)
    await worker.step()
    await asyncio.sleep(0)  # the thread that reads the file says when it is done


async def test_a_worker_that_polls_what_its_successor_wrote_gives_up_instead_of_dying(tmp_path: Path) -> None:
    worker = await a_worker(two_stages(tmp_path / "in", readings(100)))
    intervals = worker.holdings.intervals
    consumer = next(i for i in intervals.values() if i.plan.name == "largest")
    producer, subscriptions = next(iter(consumer.plan.producers.items()))
    want = Want(consumer.interval_id, consumer.deployed.index, producer, subscriptions, after=0)
    beyond = Polled(want, (), intervals[producer].bundle + 7, INSTANT_MIN, truncated=False)

    with pytest.raises(StaleSequencerError) as raised:
        worker._steps.run(Inbox(worker._clock.read(), 0.0, {consumer.interval_id: [beyond]}), intervals, Isolation())

    assert list(raised.value.stale) == [producer]
    await worker._abandon()


async def test_time_is_read_before_the_sources_so_that_an_idle_watermark_overtakes_nothing(tmp_path: Path) -> None:
    worker = await a_worker(two_stages(tmp_path / "in", readings(100)), ("readings", "largest"), SlowToAnswer)
    looked_at = worker._clock.now_us()

    inbox = await worker._gather()

    assert inbox is not None
    assert worker._clock.now_us() >= looked_at + 60_000_000
    assert inbox.now_us == looked_at
    await worker._abandon()


async def test_a_refused_record_behind_a_position_that_is_not_stored_costs_only_itself(tmp_path: Path) -> None:
    records = readings(100)
    database = MemoryDatabase(ManualClock())
    graph = two_stages(tmp_path / "in", records)
    upstream = await a_worker(graph, ("readings", "totals"), database=database)
    downstream = await a_worker(graph, ("largest",), database=database, bundle_records_max=1_000)
    for _ in range(10):
        downstream.budget.stepped(1_000, 0.0)  # all of it in one turn
    async with asyncio.timeout(60):
        while database.accounting(1).subscriptions[0].consumed < len(records):
            await one_step(upstream)
    await upstream._settle()
    for interval in downstream.holdings.intervals.values():
        for producer in interval.cursors:
            first = min(s.segment.seq for s in database.segments if s.interval_id == producer)
            interval.advance_cursor(producer, first, INSTANT_MIN)  # as an empty bundle does, without a commit
    refused = records[-1].value
    database.constrain("largest", "not_the_last", lambda row: row["value"] != refused)

    wanted = sum(record.value != refused for record in records)
    async with asyncio.timeout(60):
        while len(database.rows("largest")) < wanted:
            await one_step(downstream)

    assert len(database.dead_letters) == len(records) - wanted
    await upstream._abandon()
    await downstream._abandon()
