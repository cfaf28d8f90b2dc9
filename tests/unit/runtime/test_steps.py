"""What a step publishes and sets aside, looked at directly: headers, cursors, dead letters."""

import asyncio
from pathlib import Path

import msgspec

from millpy.computation import Computation, Context
from millpy.graph import Graph
from millpy.injectors.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, milliseconds
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import Reading, readings, started, two_stages
from tests.feed import Feed


def a_payload(device: str, at: int, value: int) -> bytes:
    return msgspec.json.encode(Reading(device, at, value))


class Holding(Computation):
    """Holds at the first reading of a device, and lets go at one of value 0."""

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value:
            context.hold("first", at=record.at)
        else:
            context.release("first")


async def stepped(worker: Worker, clock: ManualClock, times: int = 6) -> None:
    for _ in range(times):
        clock.advance(1)
        worker.lease.renewed(clock.monotonic())
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
    await worker._settle()
    (header,) = [h for h in database.headers.values() if h.interval.computation == "holding"]
    assert (header.input_watermark, header.low_watermark, header.oldest_work) == (90_000, 1_000, 1_000)

    feed.push(a_payload("a", 95_000, 0))
    await stepped(worker, clock)
    await worker._settle()
    assert (header.input_watermark, header.low_watermark, header.oldest_work) == (95_000, 95_000, INSTANT_MAX)
    await worker._abandon()


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

    letters = [letter for _, _, letter in database.dead_letters]
    assert [(letter.reason, letter.computation) for letter in letters] == [("refused", "largest")] * len(wanted)
    assert all(b'"value":%d' % refused in letter.payload for letter in letters)
    last = database.accounting(1).subscriptions[-1]
    assert (last.produced, last.consumed, last.quarantined) == (20, 20 - len(wanted), len(wanted))
    await upstream._abandon()
    await downstream._abandon()
