"""A worker that has missed time: frozen past its lease, or waiting while its sources continued."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from millpy.errors import StaleSequencerError
from millpy.graph import Graph
from millpy.hosting.isolation import Isolation
from millpy.hosting.step import TurnInput
from millpy.limits import Limits
from millpy.model.time import INSTANT_MIN
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.protocol import PollResult, SegmentQuery
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import readings, started, two_stages


class SlowToAnswer(MemoryStore):
    """A poll takes a minute."""

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        clock = self.database.clock
        assert isinstance(clock, ManualClock)
        clock.advance(60)
        return await super().poll(queries, bytes_max)


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
    await worker.balance()
    return worker


async def one_step(worker: Worker) -> None:
    clock = worker.context.clock._host
    assert isinstance(clock, ManualClock)
    clock.advance(0.01)
    await worker.step()
    await asyncio.sleep(0)  # the thread that reads the file says when it is done


async def test_a_worker_that_polls_its_successors_output_releases_its_intervals(tmp_path: Path) -> None:
    worker = await a_worker(two_stages(tmp_path / "in", readings(100)))
    intervals = worker.owned.intervals
    consumer = next(i for i in intervals.values() if i.plan.name == "largest")
    producer, subscriptions = next(iter(consumer.plan.producers.items()))
    query = SegmentQuery(consumer.interval_id, consumer.deployed.index, producer, subscriptions, after=0)
    beyond = PollResult(query, (), intervals[producer].bundle + 7, INSTANT_MIN, truncated=False)

    with pytest.raises(StaleSequencerError) as raised:
        worker.cycle._steps.run(
            TurnInput(worker.context.clock.read(), 0.0, {consumer.interval_id: [beyond]}), intervals, Isolation()
        )

    assert list(raised.value.stale) == [producer]
    await worker.abandon()


async def test_time_is_read_before_the_sources_so_that_an_idle_watermark_overtakes_nothing(tmp_path: Path) -> None:
    worker = await a_worker(two_stages(tmp_path / "in", readings(100)), ("readings", "largest"), SlowToAnswer)
    looked_at = worker.context.clock.now_us()

    inbox = await worker.cycle.gather()

    assert inbox is not None
    assert worker.context.clock.now_us() >= looked_at + 60_000_000
    assert inbox.now_us == looked_at
    await worker.abandon()


async def test_a_refused_record_after_an_unstored_position_rejects_only_itself(tmp_path: Path) -> None:
    records = readings(100)
    database = MemoryDatabase(ManualClock())
    graph = two_stages(tmp_path / "in", records)
    upstream = await a_worker(graph, ("readings", "totals"), database=database)
    downstream = await a_worker(graph, ("largest",), database=database, bundle_records_max=1_000)
    for _ in range(10):
        downstream.context.budget.stepped(1_000, 0.0)  # all of it in one turn
    async with asyncio.timeout(60):
        while database.accounting(1).subscriptions[0].consumed < len(records):
            await one_step(upstream)
    await upstream.cycle.await_in_flight()
    for interval in downstream.owned.intervals.values():
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
    await upstream.abandon()
    await downstream.abandon()


async def test_an_idle_worker_learns_that_others_own_its_intervals_and_claims_what_is_free(tmp_path: Path) -> None:
    graph, database = two_stages(tmp_path / "in", []), MemoryDatabase(ManualClock())
    late, other = await a_worker(graph, database=database), await a_worker(graph, database=database)
    held = sorted(late.owned.intervals)
    free, *taken = held
    await other.context.store.seize(other.context.worker_id, taken)
    await late.context.store.release(late.context.worker_id, [late.owned.intervals[free].grant])
    assert len(taken) > len(held) / 2, "with these it would have more than its share"

    with pytest.raises(StaleSequencerError, match="other workers own intervals") as raised:
        await late.balance()
    late._claim_at = 0.0
    while sorted(late.owned.intervals) != [free]:
        await one_step(late)

    assert sorted(raised.value.stale) == held
    assert late.context.worker_id == database.headers[free].owner
    await late.abandon()
    await other.abandon()
