"""A worker that is cancelled ends, whatever it is doing at that moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg

from millpy.hosting.failpoints import Failpoint, NoFailpoints
from millpy.process.assembly import deploy, run_worker
from tests.conformance.test_postgres_commit import waits_for_a_lock
from tests.crash.memory_world import readings, two_stages


class LockedOut(NoFailpoints):
    """Another session locks every interval right before the first commit."""

    def __init__(self, locker: psycopg.AsyncConnection) -> None:
        self.locker = locker
        self.locked = False

    async def reach(self, point: Failpoint) -> None:
        if point is Failpoint.BEFORE_COMMIT and not self.locked:
            self.locked = True
            await self.locker.execute("SELECT FROM mill.intervals FOR UPDATE")


async def test_worker_that_is_cancelled_during_a_commit_ends(tmp_path: Path, database_url: str) -> None:
    graph = two_stages(tmp_path / "in.ndjson", readings(3_000))
    await deploy(graph, database_url)
    async with (
        await psycopg.AsyncConnection.connect(database_url) as locker,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watcher,
    ):
        worker = asyncio.create_task(run_worker(graph, database_url, failpoints=LockedOut(locker)))
        async with asyncio.timeout(60):
            await waits_for_a_lock(watcher)

        worker.cancel()
        await asyncio.sleep(0)
        await locker.rollback()
        done, _ = await asyncio.wait([worker], timeout=60)

    assert done
    assert worker.cancelled()
