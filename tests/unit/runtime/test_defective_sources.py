"""A source that raises what it may not delays its own records: no other step, and no record is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millpy.errors import SourceUnavailableError
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.runtime.guarded_injector import PAUSE_S_MAX, GuardedInjector
from millpy.store.memory.store import MemoryDatabase
from millpy.testing.clock import ManualClock
from tests.unit.runtime.numbers_source import (
    EVENT_TIME,
    RECORDS,
    Numbers,
    NumbersInjector,
    Reading,
    check_beside_others,
    worker_of,
    written,
)

ERRORS: list[Callable[[], BaseException]] = [
    ValueError,
    lambda: SystemExit(0),
    asyncio.CancelledError,
    lambda: SourceUnavailableError("away"),
    lambda: SourceUnavailableError(5),  # type: ignore[arg-type]
]


@dataclass(frozen=True)
class Failing(Numbers):
    """The numbers, by an injector that fails `times` in a place once it is at a number."""

    where: str
    error: Callable[[], BaseException] = ValueError
    times: int = 3
    at: int = 5

    def connect(self, setup: SourceSetup) -> FailingInjector:
        return FailingInjector(self, setup)


class FailingInjector(NumbersInjector):
    def __init__(self, source: Failing, setup: SourceSetup) -> None:
        super().__init__(setup)
        self.source = source
        self.check("connect")

    def check(self, where: str) -> None:
        source = self.source
        if where == source.where and self.next >= (0 if where in ("connect", "open") else source.at):
            if len(source.failures) < source.times:
                source.failures.append(where)
                raise source.error()

    async def open(self, position: bytes | None) -> None:
        self.check("open")
        await super().open(position)

    async def take(self) -> SourceBatch | None:
        self.check("take")
        return await super().take()

    async def acknowledge(self, token: Any) -> None:
        self.check("acknowledge")

    def quiet(self) -> Any:
        self.check("quiet")
        return super().quiet()

    async def close(self) -> None:
        self.check("close")


@pytest.mark.parametrize("where", ["connect", "open", "take", "acknowledge", "quiet"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: repr(error()))
async def test_no_exception_of_a_source_ends_the_worker(
    tmp_path: Path, where: str, error: Callable[[], BaseException]
) -> None:
    source = Failing(where, error)

    await check_beside_others((source, EVENT_TIME, Reading), tmp_path / "in")

    assert source.failures == [where] * 3


def setup_of(clock: ManualClock) -> SourceSetup:
    return SourceSetup(
        graph="g", stream="numbers", partition="all", limits=Limits(), clock=clock, ready=asyncio.Event()
    )


async def test_source_that_keeps_failing_is_told_as_one_outage_and_tried_more_and_more_rarely() -> None:
    clock = ManualClock()
    setup = setup_of(clock)
    connection = setup.connection
    source = Failing("take", times=1_000, at=1)
    opened, outages = 0, 0
    position: bytes | None = None
    for _ in range(20):
        guarded = GuardedInjector(source, setup)
        await guarded.open(position)
        connection.connected()  # as the worker says of a source that it has opened
        opened += 1
        while True:
            taken = await guarded.take()
            if taken is not None:
                position = taken.position
                continue
            outages += connection.is_connected is False
            assert not guarded.quiet()
            break
        await guarded.close()
        clock.advance(PAUSE_S_MAX)
    assert (opened, outages, connection.attempts) == (20, 20, 20)
    assert connection.why == "the source has a defect: take raises ValueError: "


@pytest.mark.parametrize("where", ["open", "take"])
async def test_outage_of_a_source_delays_no_other_source(tmp_path: Path, where: str) -> None:
    source = Failing(where, lambda: SourceUnavailableError("the broker is away"), times=1_000_000, at=0)
    database = MemoryDatabase()
    others = written(tmp_path / "in")
    worker = await worker_of(
        {"numbers": (source, EVENT_TIME, Reading), "others": (others, EVENT_TIME, Reading)}, database
    )
    async with asyncio.timeout(30):
        while len(database.rows("of_others")) < RECORDS:
            if not await worker.step():
                await worker._wait()
    (part,) = worker.context.sources.disconnected()
    await worker.abandon()

    assert part.connection.why == "the broker is away"


async def test_source_that_works_again_is_connected_once_it_has_given_a_batch() -> None:
    clock = ManualClock()
    setup = setup_of(clock)
    source = Failing("take", times=2, at=0)
    told = []
    for _ in range(3):
        guarded = GuardedInjector(source, setup)
        await guarded.open(None)
        await guarded.take()
        told.append(setup.connection.is_connected)
        await guarded.close()
    assert told == [False, False, True]
    assert setup.connection.outage is not None
    assert setup.connection.outage.attempts == 2
