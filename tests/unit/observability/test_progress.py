"""How far a worker is, for a person at a terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millpy.clock import SystemClock
from millpy.errors import StoreUnavailableError
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.observability.progress import ProgressReporter, RecordRate, described
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import readings, started, two_stages

LIMITS = Limits(lease_ttl_s=60, bundle_records_max=100, retry_s_min=0.001)
RECORDS = 1_000


@pytest.mark.parametrize(
    ("watermark", "upto"),
    [
        (INSTANT_MIN, "event time not known yet"),
        (INSTANT_MAX, "every source has ended"),
        (Instant(1_793_520_000_250_000), "event time up to 2026-11-01T08:00:00Z"),
        (Instant(2**61), f"event time up to {2**61 // 1_000_000 * 1_000_000} µs"),
    ],
)
def test_line_shows_records_rate_and_watermark(watermark: Instant, upto: str) -> None:
    assert described(12_345, 678.9, watermark) == f"12,345 records, 679/s, {upto}"


def test_rate_covers_the_last_seconds() -> None:
    rate = RecordRate()

    assert [rate.update(records, now) for records, now in ((0, 0.0), (10, 1.0), (10, 100.0), (40, 103.0))] == [
        0, 10, 0, 10
    ]  # fmt: skip


def test_rate_restarts_when_intervals_have_moved_away() -> None:
    rate = RecordRate()

    assert [rate.update(records, now) for records, now in ((100, 0.0), (10, 1.0), (20, 2.0))] == [0, 0, 10]


async def test_progress_counts_a_workers_records_and_stops_with_it(tmp_path: Path) -> None:
    graph, database = two_stages(tmp_path / "in", readings(RECORDS)), MemoryDatabase()
    output: list[str] = []
    progress = ProgressReporter(ManualClock(), output.append)
    progress.waiting(StoreUnavailableError("no database"))
    worker = await started(MemoryStore(database), graph, LIMITS, SystemClock(), observer=progress)
    progress.begun(worker)
    while not output[-1].startswith(f"{RECORDS:,} records"):
        await worker.step()
        progress._show()

    await worker.run(asyncio.Event())
    progress.ended()

    assert output[0] == "no database; waiting"
    counts = [int(line.partition(" ")[0].replace(",", "")) for line in output[1:]]
    assert counts == sorted(counts)
    assert progress._next is not None
    assert progress._next.cancelled()
