"""A heartbeat that is late costs a wait; only a lease that has expired costs that everything is read again."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from millpy.clock import SystemClock
from millpy.errors import LeaseExpiredError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, Grant
from millpy.runtime.lease import Lease
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.protocol import OwnerSnapshot
from millpy.testing.clock import ManualClock
from tests.crash import memory_world
from tests.crash.memory_world import readings, two_stages


class FrequentHeartbeats(Limits):
    """A lease that does not end while the machine is busy, with heartbeats as of a short one."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats."""
        return 0.1


QUICK: dict[str, Any] = {"bundle_records_max": 10, "progress_every_s": 0.01, "retry_s_min": 0.01, "retry_s_max": 0.05}
LIMITS = FrequentHeartbeats(lease_ttl_s=60, **QUICK)


class CountingStore(MemoryStore):
    """Counts the reads of intervals, and the commits while the lease is not trusted."""

    reads = distrusted_commits = 0
    is_distrusted = False

    async def commit(self, checkpoints: Sequence[Checkpoint], **how: Any) -> None:
        self.distrusted_commits += self.is_distrusted
        await super().commit(checkpoints, **how)

    async def read(self, grants: Sequence[Grant], **bounds: int) -> Sequence[OwnerSnapshot]:
        self.reads += len(grants)
        return await super().read(grants, **bounds)


async def at_work(path: Path) -> tuple[Worker, CountingStore]:
    """Start a worker that has committed a turn."""
    store = CountingStore(MemoryDatabase())
    worker = await memory_world.started(store, two_stages(path, readings(100)), LIMITS, SystemClock())
    while worker.cycle._committing is None:
        await worker.step()
    await worker.cycle.await_in_flight()
    return worker, store


def distrusted(lease: Lease) -> None:
    """Expire the trust in a lease, as if no heartbeat had come back."""
    lease._trusted_until = float("-inf")


@pytest.mark.parametrize("before", ["turn", "commit"])
async def test_late_heartbeat_is_waited_for_without_a_recovery(tmp_path: Path, before: str) -> None:
    worker, store = await at_work(tmp_path / "in")
    place, name = (worker, "_turn") if before == "turn" else (worker.cycle, "_commit_in_background")
    reads, intervals, sound = store.reads, dict(worker.owned.intervals), getattr(place, name)

    def renewed() -> None:
        store.is_distrusted = False
        worker.context.lease.renewed(SystemClock().monotonic())

    def distrusts(*arguments: Any) -> Any:
        store.is_distrusted = True
        distrusted(worker.context.lease)
        asyncio.get_running_loop().call_later(0.02, renewed)
        return sound(*arguments)

    setattr(place, name, distrusts)
    for _ in range(5):
        await worker.step()
    await worker.cycle.await_in_flight()

    assert store.reads == reads
    assert worker.owned.intervals == intervals
    assert store.distrusted_commits == 0
    await worker.abandon()


async def test_lease_ended_by_the_database_causes_a_recovery(tmp_path: Path) -> None:
    worker, store = await at_work(tmp_path / "in")
    reads = store.reads

    worker.context.lease.lost()
    await worker.step()

    assert worker.context.lease.is_trusted(), "registered again"
    assert store.reads > reads or not worker.owned.intervals
    await worker.abandon()


async def test_lease_that_has_expired_is_not_waited_for() -> None:
    lease = Lease(Limits(), ManualClock())
    lease.lost()

    async with asyncio.timeout(60):
        with pytest.raises(LeaseExpiredError, match="has expired"):
            await lease.await_trust()


@pytest.mark.parametrize("lease_s", [0.5, 5.0])
async def test_missing_heartbeat_is_waited_for_at_most_a_lease(lease_s: float) -> None:
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


async def test_worker_that_folds_for_long_while_leaving_keeps_its_lease(tmp_path: Path) -> None:
    clock = ManualClock()

    class Slow(MemoryStore):
        """Takes longer than the watchdog's patience to fold, in pieces that take less."""

        async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
            for _ in range(5):
                clock.advance(0.6 * LIMITS.watchdog_s)
                assert not worker.context.lease.is_stuck()
                if progressed is not None:
                    progressed()
            return await super().fold(grant, bytes_max=bytes_max)

    store = Slow(MemoryDatabase())
    worker = await memory_world.started(store, two_stages(tmp_path / "in", readings(100)), Limits(), SystemClock())
    while not any(interval.unfolded_bytes for interval in worker.owned.intervals.values()):
        await worker.step()
    await worker.cycle.await_in_flight()
    worker.context.lease._clock = clock
    worker.context.lease.progressed()

    await worker.owned.fold()

    assert not worker.context.lease.is_stuck()
    await worker.abandon()
