"""Alive and ready: what each means, in threads that ask while the worker's own does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millpy.errors import StoreUnavailableError
from millpy.limits import Limits
from millpy.observability.health import HealthMonitor
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock
from tests.crash.memory_world import readings, started, two_stages


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest_asyncio.fixture
async def worker(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Worker]:
    """One with a lease that was just renewed, and with no interval yet."""
    store = MemoryStore(MemoryDatabase())
    yield await started(store, two_stages(tmp_path / "in", readings(10)), Limits(), clock)
    await store.close()


async def test_a_process_without_a_worker_is_alive_and_reports_what_it_waits_for() -> None:
    monitor = HealthMonitor()
    monitor.waiting(StoreUnavailableError("no answer"))

    assert (await asyncio.to_thread(monitor.live)).well
    ready = monitor.ready()

    assert not ready.well
    assert ready.detail == {"reason": "no answer"}


async def test_a_worker_is_ready_while_its_lease_lasts(worker: Worker, clock: ManualClock) -> None:
    monitor = HealthMonitor()
    monitor.begun(worker)
    assert monitor.ready().well
    assert monitor.ready().detail["intervals"] == 0

    clock.advance(Limits().lease_ttl_s)
    monitor.failed(StoreUnavailableError("no answer"))

    assert not monitor.ready().well
    assert monitor.ready().detail["reason"] == "its lease has ended: no answer"
    monitor.ended()
    assert monitor.ready().detail == {"reason": "the worker has left"}


async def test_a_worker_that_makes_no_progress_is_not_alive(worker: Worker, clock: ManualClock) -> None:
    monitor = HealthMonitor()
    monitor.begun(worker)
    assert (await asyncio.to_thread(monitor.live)).well

    clock.advance(Limits().watchdog_s + 1)

    assert (await asyncio.to_thread(monitor.live)).detail == {"reason": "the worker makes no progress"}
    worker.context.lease.progressed()
    assert (await asyncio.to_thread(monitor.live)).well


def test_a_blocked_event_loop_is_not_alive() -> None:
    monitor, blocked, release = HealthMonitor(answers_s=0.05), threading.Event(), threading.Event()

    async def run() -> None:
        monitor.waiting(StoreUnavailableError("no answer"))
        blocked.set()
        release.wait(60)  # whatever blocks: user code on the loop

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    blocked.wait(60)

    verdict = monitor.live()

    release.set()
    thread.join()
    assert verdict.detail == {"reason": "the event loop does not answer within 0.05 s"}
