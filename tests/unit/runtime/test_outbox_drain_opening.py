"""When a drain connects, and what it makes of a position that is ahead of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millpy.clock import SystemClock
from millpy.limits import Limits
from millpy.model.checkpoint import OutboxState
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import Sink, SinkSetup
from tests.conformance.memory_subject import MemorySubject
from tests.conformance.store_builders import Owner, World, a_world

LIMITS = Limits(retry_s_min=0.001, retry_s_max=0.002)


class Ahead(Sink):
    """A place that has ten messages, of which the drain knows none."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = asyncio.Event()

    def identity(self) -> dict[str, Any]:
        return {"kind": "ahead"}

    def connect(self, setup: SinkSetup) -> Ahead:
        return self

    async def open(self) -> int:
        self.opened += 1
        return 10

    async def send(self, messages: SinkMessages) -> None:
        raise AssertionError("nothing is to be sent")

    async def close(self) -> None:
        self.closed.set()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    subject = MemorySubject()
    yield await a_world(subject)
    await subject.close()


def drain_of(owner: Owner, interval_id: int, sink: Ahead, *, trusted: bool, asked: asyncio.Semaphore) -> OutboxDrain:
    def is_trusted() -> bool:
        asked.release()
        return trusted

    clock = SystemClock()
    context = DrainContext(owner.store, LIMITS, clock, random.Random(1), lambda: None, lambda: None)
    setup = SinkSetup("plant", "out", 0, interval_id, 1, clock, trusted=is_trusted)
    return OutboxDrain(context, owner.grants[interval_id], sink, setup, OutboxState())


async def test_a_worker_without_a_lease_does_not_connect(world: World) -> None:
    """Its connection would shut out that of the new owner."""
    owner, sink, asked = await world.owner(world.a), Ahead(), asyncio.Semaphore(0)
    drain = drain_of(owner, world.a.interval_id, sink, trusted=False, asked=asked)
    async with asyncio.timeout(10):
        for _ in range(3):
            await asked.acquire()
    await drain.close()

    assert sink.opened == 0
    assert "the lease has ended" in drain.connection.why


@pytest.mark.parametrize("lost", [False, True])
async def test_only_an_owner_suspects_the_database(world: World, lost: bool) -> None:
    owner, sink = await world.owner(world.a), Ahead()
    drain = drain_of(owner, world.a.interval_id, sink, trusted=True, asked=asyncio.Semaphore(0))
    if lost:
        await owner.take_over_from_self()
    async with asyncio.timeout(10):
        await sink.closed.wait()
        sink.closed.clear()
        await sink.closed.wait()
    await drain.close()

    assert ("restored from a backup" in drain.connection.why) is not lost
