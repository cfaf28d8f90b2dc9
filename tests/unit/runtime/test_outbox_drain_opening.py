"""When a drain connects, and what it makes of a position that is ahead of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from millpy.clock import SystemClock
from millpy.errors import SinkUnavailableError
from millpy.limits import Limits
from millpy.model.checkpoint import OutboxState
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound, Sink, SinkSetup
from tests.conformance.memory_subject import MemorySubject
from tests.conformance.store_builders import Owner, World, a_world

NUMBER = 300
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


class Slow(Sink):
    """A place that takes at most seven messages in the time that it has, and ten again in the end."""

    bound = SendBound(records=100)

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.taken: list[bytes | None] = []
        self.all_taken = asyncio.Event()

    def identity(self) -> dict[str, Any]:
        return {"kind": "slow"}

    def connect(self, setup: SinkSetup) -> Slow:
        return self

    async def open(self) -> int:
        return len(self.taken)

    async def send(self, messages: SinkMessages) -> None:
        self.sizes.append(len(messages))
        if len(messages) > 7 and len(self.taken) < 50:
            raise SinkUnavailableError("the transaction took too long")
        self.taken += messages.values
        if len(self.taken) == NUMBER:
            self.all_taken.set()

    async def close(self) -> None:
        return


async def test_what_is_too_much_for_one_send_is_sent_in_smaller_parts(world: World) -> None:
    owner, sink = await world.owner(world.a), Slow()
    values: list[bytes | None] = [b"%d" % number for number in range(NUMBER)]
    rows = SinkMessages(0, [b"k"] * NUMBER, values, [0] * NUMBER).encode()
    await owner.commit(owner.checkpoint(world.a, outbox=rows))
    clock = SystemClock()
    context = DrainContext(owner.store, LIMITS, clock, random.Random(1), lambda: None, lambda: None)
    setup = SinkSetup("plant", "out", 0, world.a.interval_id, 1, clock)
    state = OutboxState(NUMBER, 0, len(rows.payload))
    drain = OutboxDrain(context, owner.grants[world.a.interval_id], sink, setup, state)
    async with asyncio.timeout(10):
        await sink.all_taken.wait()
    await drain.close()

    assert sink.taken == values
    assert sink.sizes[:5] == [100, 50, 25, 12, 6]
    assert max(sink.sizes[-3:]) > 50
