"""A heartbeat that is late costs a wait; only a lease that has expired costs that everything is read again."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from millpy.clock import SystemClock
from millpy.errors import LeaseExpiredError
from millpy.limits import Limits
from millpy.model.checkpoint import Grant
from millpy.runtime.ownership import Lease
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryDatabase, MemoryStore
from millpy.store.protocol import Opened
from millpy.testing.clock import ManualClock
from tests.crash import memory_world
from tests.crash.memory_world import readings, two_stages

LIMITS = Limits(lease_ttl_s=0.5, bundle_records_max=10, progress_every_s=0.01, retry_s_min=0.01, retry_s_max=0.05)


class CountingStore(MemoryStore):
    """Counts what is read of intervals."""

    reads = 0

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int) -> Sequence[Opened]:
        self.reads += len(grants)
        return await super().read(grants, state_rows_max=state_rows_max)


async def at_work(path: Path) -> tuple[Worker, CountingStore]:
    """A worker with a turn on its way to the database."""
    store = CountingStore(MemoryDatabase())
    worker = await memory_world.started(store, two_stages(path, readings(100)), LIMITS, SystemClock())
    while worker._in_flight is None:
        await worker.step()
    await worker._settle()
    return worker, store


def distrusted(lease: Lease) -> None:
    """No heartbeat has come back for a while."""
    lease._trusted_until = float("-inf")


@pytest.mark.parametrize("before", ["_turn", "_launch"], ids=["turn", "commit"])
async def test_late_heartbeat_is_waited_for_and_nothing_is_read_again(tmp_path: Path, before: str) -> None:
    worker, store = await at_work(tmp_path / "in")
    reads, intervals, sound = store.reads, dict(worker.holdings.intervals), getattr(worker, before)

    def distrusts(*arguments: Any) -> Any:
        distrusted(worker.lease)
        asyncio.get_running_loop().call_later(0.02, lambda: worker.lease.renewed(SystemClock().monotonic()))
        return sound(*arguments)

    setattr(worker, before, distrusts)
    for _ in range(5):
        await worker.step()
    await worker._settle()

    assert store.reads == reads
    assert worker.holdings.intervals == intervals
    await worker._abandon()


async def test_lease_that_the_database_has_given_up_costs_a_recovery(tmp_path: Path) -> None:
    worker, store = await at_work(tmp_path / "in")
    reads = store.reads

    worker.lease.lost()
    await worker.step()

    assert worker.lease.is_trusted(), "registered again"
    assert store.reads > reads or not worker.holdings.intervals
    await worker._abandon()


async def test_lease_that_has_expired_is_not_waited_for() -> None:
    lease = Lease(Limits(), ManualClock())
    lease.lost()

    async with asyncio.timeout(60):
        with pytest.raises(LeaseExpiredError, match="has expired"):
            await lease.await_trust()


@pytest.mark.parametrize("lease_s", [0.5, 5.0])
async def test_heart_that_does_not_beat_is_waited_for_no_longer_than_a_lease_lasts(lease_s: float) -> None:
    clock = ManualClock()
    lease = Lease(Limits(lease_ttl_s=lease_s), clock)
    waiting = asyncio.create_task(lease.await_trust())
    started = clock.monotonic()
    while not waiting.done():
        await asyncio.sleep(0)
        clock.advance(lease_s / 100)

    with pytest.raises(LeaseExpiredError, match=f"not renewed for {lease_s} s"):
        await waiting
    assert lease_s <= clock.monotonic() - started < 1.2 * lease_s


async def test_worker_that_leaves_and_folds_for_long_keeps_its_lease(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(MemoryStore):
        """Takes longer than the watchdog's patience to fold, in pieces that take less."""

        async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
            for _ in range(5):
                clock.advance(0.6 * LIMITS.watchdog_s)
                assert not worker.lease.is_stuck()
                if progressed is not None:
                    progressed()
            return await super().fold(grant, bytes_max=bytes_max)

    store = Slow(MemoryDatabase())
    worker = await memory_world.started(store, two_stages(tmp_path / "in", readings(100)), Limits(), SystemClock())
    while not any(interval.unfolded_bytes for interval in worker.holdings.intervals.values()):
        await worker.step()
    await worker._settle()
    worker.lease._clock = clock
    worker.lease.progressed()

    await worker.holdings.fold()

    assert not worker.lease.is_stuck()
    await worker._abandon()
