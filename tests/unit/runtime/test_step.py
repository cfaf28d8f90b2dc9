"""What a step publishes, dead-letters and misses, looked at directly: headers, cursors, dead letters, gaps."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from millpy.computation import Computation, Context
from millpy.errors import CursorGapError
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, milliseconds
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.protocol import PollResult, SegmentQuery
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import Reading, readings, started, two_stages
from tests.feed import Feed


def a_payload(device: str, at: int, value: int) -> bytes:
    return msgspec.json.encode(Reading(device, at, value))


class Holding(Computation):
    """Holds at the first reading of a device, and releases the hold at a value of 0."""

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value:
            context.hold("first", at=record.at)
        else:
            context.release("first")


async def stepped(worker: Worker, clock: ManualClock, times: int = 6) -> None:
    for _ in range(times):
        clock.advance(1)
        worker.context.lease.renewed(clock.monotonic())
        await worker.step()
        await asyncio.sleep(0)


async def test_a_hold_keeps_the_low_watermark_back_and_nothing_else() -> None:
    feed, clock = Feed(), ManualClock()
    graph = Graph("holding")
    source = graph.inject(
        "readings", feed, schema=Reading, event_time=EventTime("at", unit="us", max_disorder=milliseconds(0))
    )
    source.key_by("device").process(Holding(), name="holding", output=Reading, intervals=1)
    database = MemoryDatabase(clock)
    worker = await started(MemoryStore(database), graph, Limits(lease_ttl_s=10_000), clock)

    feed.push(a_payload("a", 1_000, 1), a_payload("b", 50_000, 0), a_payload("b", 90_000, 0))
    await stepped(worker, clock)
    await worker.cycle.await_in_flight()
    (header,) = [h for h in database.headers.values() if h.interval.computation == "holding"]
    assert (header.input_watermark, header.low_watermark, header.oldest_work) == (90_000, 1_000, 1_000)

    feed.push(a_payload("a", 95_000, 0))
    await stepped(worker, clock)
    await worker.cycle.await_in_flight()
    assert (header.input_watermark, header.low_watermark, header.oldest_work) == (95_000, 95_000, INSTANT_MAX)
    await worker.abandon()


async def test_a_polled_record_that_the_database_refuses_is_dead_lettered_with_its_payload(tmp_path: Path) -> None:
    records, clock = readings(20), ManualClock()
    database = MemoryDatabase(clock)
    graph = two_stages(tmp_path / "in", records)
    limits = Limits(lease_ttl_s=10_000, bundle_records_max=100)
    upstream = await started(MemoryStore(database), graph, limits, clock, only=("readings", "totals"))
    downstream = await started(MemoryStore(database), graph, limits, clock, only=("largest",))
    refused = records[7].value
    wanted = [record for record in records if record.value == refused]
    database.constrain("largest", "not_this", lambda row: row["value"] != refused)

    async with asyncio.timeout(60):
        while len(database.rows("largest")) < len(records) - len(wanted):
            await stepped(upstream, clock, 1)
            await stepped(downstream, clock, 1)

    dead_letters = [dead_letter for _, _, dead_letter in database.dead_letters]
    assert [(dead_letter.reason, dead_letter.computation) for dead_letter in dead_letters] == [
        ("refused", "largest")
    ] * len(wanted)
    assert all(b'"value":%d' % refused in dead_letter.payload for dead_letter in dead_letters)
    last = database.accounting(1).subscriptions[-1]
    assert (last.produced, last.consumed, last.dead_lettered) == (20, 20 - len(wanted), len(wanted))
    await upstream.abandon()
    await downstream.abandon()


BEHIND = 300  # readings that wait
SHORT_ANSWER = 2_000  # bytes: about four of the segments of `behind`, so that one poll does not read them all


class LosingStore(MemoryStore):
    """Answers with a few segments at a time, and leaves out the first of `losses` answers."""

    losses = 0

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        return [self._without_first(answer) for answer in await super().poll(queries, min(bytes_max, SHORT_ANSWER))]

    def _without_first(self, answer: PollResult) -> PollResult:
        if not self.losses or len(answer.segments) < 2:
            return answer
        self.losses -= 1
        return replace(answer, segments=answer.segments[1:])


async def behind(path: Path, clock: ManualClock, database: MemoryDatabase) -> tuple[Worker, LosingStore]:
    """Return a worker whose input waits in several segments, and its store."""
    graph, limits = two_stages(path, readings(BEHIND)), Limits(lease_ttl_s=10_000, bundle_records_max=10)
    upstream = await started(MemoryStore(database), graph, limits, clock, only=("readings", "totals"))
    await stepped(upstream, clock, BEHIND // 4)
    await upstream.cycle.await_in_flight()
    await upstream.abandon()
    store = LosingStore(database)
    return await started(store, graph, limits, clock, only=("largest",)), store


async def test_a_gap_that_is_gone_when_read_again_loses_nothing(tmp_path: Path) -> None:
    clock = ManualClock()
    database = MemoryDatabase(clock)
    worker, store = await behind(tmp_path / "in", clock, database)

    async with asyncio.timeout(60):
        for _ in range(2):  # the second is not in a row
            store.losses = 1
            while store.losses:
                assert len(database.rows("largest")) < BEHIND, "nothing is left to lose"
                await stepped(worker, clock, 1)
            await stepped(worker, clock, 2)
        while len(database.rows("largest")) < BEHIND:
            await stepped(worker, clock, 1)
    await worker.abandon()


async def test_a_gap_that_stays_ends_the_worker(tmp_path: Path) -> None:
    clock = ManualClock()
    database = MemoryDatabase(clock)
    worker, store = await behind(tmp_path / "in", clock, database)
    store.losses = 1_000

    with pytest.raises(CursorGapError, match="follows"):
        await stepped(worker, clock, 100)

    assert not database.rows("largest")
    await worker.abandon()


async def test_segments_that_exceed_a_turn_are_consumed_once(tmp_path: Path) -> None:
    clock = ManualClock()
    database = MemoryDatabase(clock)
    worker, _ = await behind(tmp_path / "in", clock, database)

    async with asyncio.timeout(60):
        while database.accounting(1).subscriptions[-1].consumed < BEHIND:
            await stepped(worker, clock, 1)
    await stepped(worker, clock, 3)
    await worker.cycle.await_in_flight()

    last = database.accounting(1).subscriptions[-1]
    assert (last.produced, last.consumed, len(database.rows("largest"))) == (BEHIND, BEHIND, BEHIND)
    await worker.abandon()
