"""Loading millions of open windows takes minutes: meanwhile the process answers, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from uuid import UUID

import pytest

from millpy.limits import Limits
from millpy.model.lease import Renewal
from millpy.model.stage import StoredInterval
from millpy.store.memory.store import MemoryStore
from millpy.windowing.logic import WindowedStage
from tests.crash.memory_world import LIMITS, World, readings, windows_over_several


class Slow:
    """Blocks the opening of a stage until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opening, self.may_go_on = threading.Event(), threading.Event()
        self.opened: list[int] = []
        bring_in = WindowedStage.open

        def held_up(stage: WindowedStage, recovered: StoredInterval) -> object:
            self.opened.append(recovered.interval_id)
            self.opening.set()
            assert self.may_go_on.wait(60), "the rest of this process is blocked"
            return bring_in(stage, recovered)

        monkeypatch.setattr(WindowedStage, "open", held_up)

    async def begins(self) -> None:
        assert await asyncio.to_thread(self.opening.wait, 60), "no stage is opened"


async def test_process_answers_while_windows_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, slow = readings(500), Slow(monkeypatch)
    beats, beat = asyncio.Semaphore(0), MemoryStore.heartbeat

    async def counted(store: MemoryStore, worker_id: UUID, ttl_s: float) -> Renewal | None:
        beats.release()
        return await beat(store, worker_id, ttl_s)

    monkeypatch.setattr(MemoryStore, "heartbeat", counted)
    world = World(windows_over_several(tmp_path, records, 1), dataclasses.replace(LIMITS, lease_ttl_s=2))
    world.start()
    await slow.begins()

    for _ in range(6):  # longer than a lease
        await beats.acquire()
    slow.may_go_on.set()
    await world.finish()

    assert sum(row["n"] for row in world.database.rows("windows")) == len(records)
    assert len(slow.opened) == len(set(slow.opened)), "the lease was renewed all the time"


async def test_worker_can_stop_while_windows_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, slow = readings(500), Slow(monkeypatch)
    limits = Limits(lease_ttl_s=0.5, drain_grace_s=1.0, retry_s_min=0.002)
    world = World(windows_over_several(tmp_path, records, 1), limits)
    try:
        leaving = world.start()
        await slow.begins()

        world.stop.set()
        async with asyncio.timeout(60):
            await leaving
    finally:
        slow.may_go_on.set()

    world.running.clear()
    world.stop.clear()
    world.start()
    await world.finish()
    assert sum(row["n"] for row in world.database.rows("windows")) == len(records)
