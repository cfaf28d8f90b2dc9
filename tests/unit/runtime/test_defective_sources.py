"""A source that raises what it may not delays its own records: no other step, and no record is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpy.errors import SourceUnavailableError
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.runtime.guarded_injector import PAUSE_S_MAX, GuardedInjector
from millpy.runtime.worker import Worker
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


@dataclass(frozen=True)
class Hanging(Failing):
    """The numbers, by an injector whose calls do not return where others fail."""

    never: asyncio.Event = field(kw_only=True)

    def connect(self, setup: SourceSetup) -> HangingInjector:
        return HangingInjector(self, setup)


class HangingInjector(FailingInjector):
    source: Hanging

    async def _check_slowly(self, where: str) -> None:
        try:
            self.check(where)
        except ValueError:
            await self.source.never.wait()

    async def open(self, position: bytes | None) -> None:
        await self._check_slowly("open")
        await NumbersInjector.open(self, position)

    async def take(self) -> SourceBatch | None:
        await self._check_slowly("take")
        return await NumbersInjector.take(self)

    async def acknowledge(self, token: Any) -> None:
        await self._check_slowly("acknowledge")

    async def close(self) -> None:
        await self._check_slowly("close")


@dataclass(frozen=True)
class Slow(Numbers):
    """The numbers, by an injector that opens once it may."""

    may_open: asyncio.Event

    def connect(self, setup: SourceSetup) -> SlowInjector:
        return SlowInjector(self.may_open, setup)


class SlowInjector(NumbersInjector):
    def __init__(self, may_open: asyncio.Event, setup: SourceSetup) -> None:
        super().__init__(setup)
        self.may_open = may_open

    async def open(self, position: bytes | None) -> None:
        await self.may_open.wait()
        await super().open(position)


@dataclass(frozen=True)
class Noting(Failing):
    """The numbers, by an injector that notes the last one; `noted` has the notes that each was given."""

    noted: list[dict[str, bytes]] = field(default_factory=list)

    def connect(self, setup: SourceSetup) -> NotingInjector:
        self.noted.append(dict(setup.notes))
        return NotingInjector(self, setup)


class NotingInjector(FailingInjector):
    async def take(self) -> SourceBatch | None:
        batch = await super().take()
        if batch is not None:
            number = self.next - 1
            batch.notes = {"last": b"%d" % number, f"n{number}": b"1", f"n{number - 1}": None}
        return batch


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


async def beside_others(source: Numbers, others: Path, database: MemoryDatabase) -> Worker:
    """A worker that reads a source, and a file that the source must not delay."""
    read = {"numbers": (source, EVENT_TIME, Reading), "others": (written(others), EVENT_TIME, Reading)}
    return await worker_of(read, database)


async def step_until(worker: Worker, holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            if not await worker.step():
                await worker._wait()


@pytest.mark.parametrize("where", ["open", "take"])
async def test_outage_of_a_source_delays_no_other_source(tmp_path: Path, where: str) -> None:
    source = Failing(where, lambda: SourceUnavailableError("the broker is away"), times=1_000_000, at=0)
    database = MemoryDatabase()
    worker = await beside_others(source, tmp_path / "in", database)
    await step_until(worker, lambda: len(database.rows("of_others")) == RECORDS)
    (part,) = worker.context.sources.disconnected()
    owned = {interval_id: (one.grant, one.stage) for interval_id, one in worker.owned.intervals.items()}
    attempts = part.connection.attempts
    await step_until(worker, lambda: part.connection.attempts >= attempts + 3)
    still = {interval_id: (one.grant, one.stage) for interval_id, one in worker.owned.intervals.items()}
    await worker.abandon()

    assert part.connection.why == "the broker is away"
    assert still == owned, "state was read again"


async def test_source_that_opens_slowly_delays_no_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.runtime.guarded_injector.OPENING_AWAITED_S", 0.01)
    database, may_open = MemoryDatabase(), asyncio.Event()
    worker = await beside_others(Slow(may_open), tmp_path / "in", database)
    await step_until(worker, lambda: len(database.rows("of_others")) == RECORDS)
    meanwhile = [part.connection.is_connected for part in worker.context.sources.parts.values()]
    monkeypatch.setattr("millpy.runtime.guarded_injector.OPENING_REPORTED_S", 0.0)
    await step_until(worker, worker.context.sources.disconnected)
    (away,) = worker.context.sources.disconnected()
    assert away.connection.why == "the attempt to connect has not ended"
    may_open.set()
    await step_until(worker, lambda: len(database.rows("of_numbers")) == RECORDS)
    then = [part.connection.is_connected for part in worker.context.sources.parts.values()]
    await worker.abandon()

    assert sorted(meanwhile, key=str) == [None, True]
    assert then == [True, True]


async def test_worker_that_stops_does_not_wait_for_a_source_that_does_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpy.runtime.guarded_injector.OPENING_AWAITED_S", 0.01)
    worker = await beside_others(Slow(asyncio.Event()), tmp_path / "in", MemoryDatabase())
    await worker.step()
    async with asyncio.timeout(10):
        await worker.abandon()


@pytest.mark.parametrize("where", ["open", "take", "acknowledge", "close"])
async def test_call_that_does_not_return_delays_its_source_only(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "edge_call_s_max", 0.05)
    monkeypatch.setattr(Limits, "call_s_max", 0.05)
    never = asyncio.Event()
    source = Hanging(where, never=never)

    await check_beside_others((source, EVENT_TIME, Reading), tmp_path / "in")

    assert source.failures == [where] * (1 if where == "close" else 3)


@dataclass(frozen=True)
class HangingTogether(Hanging):
    """Three partitions whose calls do not return; `stuck` has whether the worker counts as stuck then."""

    stuck: list[bool] = field(default_factory=list)
    is_stuck: list[Callable[[], bool]] = field(default_factory=list)

    def partitions(self) -> tuple[str, ...]:
        return ("one", "two", "three")

    def connect(self, setup: SourceSetup) -> HangingTogetherInjector:
        return HangingTogetherInjector(self, setup)


class HangingTogetherInjector(HangingInjector):
    source: HangingTogether

    async def _check_slowly(self, where: str) -> None:
        try:
            await super()._check_slowly(where)
        except asyncio.CancelledError:
            self.source.stuck.append(self.source.is_stuck[0]())
            raise


@pytest.mark.parametrize("where", ["take", "acknowledge", "close"])
async def test_partitions_whose_calls_do_not_return_cost_the_worker_no_lease(where: str) -> None:
    source = HangingTogether(where, at=1 if where == "acknowledge" else 0, never=asyncio.Event())
    worker = await worker_of({"numbers": (source, EVENT_TIME, Reading)}, MemoryDatabase(), watchdog_s=0.2)
    source.is_stuck.append(worker.context.lease.is_stuck)
    await worker.step()
    if where == "close":
        await worker.recover()
    await step_until(worker, lambda: len(source.stuck) >= 3)
    await worker.abandon()

    assert source.stuck == [False] * 3


async def test_source_that_is_connected_again_gets_what_it_has_noted(tmp_path: Path) -> None:
    source = Noting("take", times=2)
    database = MemoryDatabase()
    worker = await beside_others(source, tmp_path / "in", database)
    await step_until(worker, lambda: len(database.rows("of_numbers")) == RECORDS)
    await worker.abandon()

    assert source.failures == ["take"] * 2
    assert source.noted == [{}, *[{"last": b"4", "n4": b"1"}] * 2]


async def test_source_that_has_failed_is_due_after_the_pause() -> None:
    clock = ManualClock()
    guarded = GuardedInjector(Failing("take", at=0), setup_of(clock))
    await guarded.open(None)
    due = [guarded.is_due]
    await guarded.take()
    due.append(guarded.is_due)
    clock.advance(PAUSE_S_MAX)
    due.append(guarded.is_due)
    await guarded.close()
    assert due == [False, False, True]


async def test_source_that_works_again_and_has_nothing_to_give_is_connected_once_that_is_proven() -> None:
    setup = setup_of(ManualClock())
    source = Failing("take", times=1, at=RECORDS)
    told = []
    for _ in range(2):
        guarded = GuardedInjector(source, setup)
        await guarded.open(b"%d" % RECORDS)
        await guarded.take()
        if guarded.injector is not None:
            guarded.injector.quiet = lambda: True  # type: ignore[method-assign]
        told.append((guarded.quiet(), setup.connection.is_connected))
        await guarded.close()
    assert told == [(False, False), (True, True)]


async def test_arrivals_of_a_batch_are_asked_for_once_where_a_failure_costs_no_step() -> None:
    asked = []

    def arrivals() -> Any:
        asked.append(len(asked))
        return np.array([5], np.int64)

    guarded = GuardedInjector(Failing("nowhere"), setup_of(ManualClock()), arrives=True)
    injector = NumbersInjector(setup_of(ManualClock()))
    take = injector.take

    async def take_with_arrivals() -> SourceBatch | None:
        batch = await take()
        assert batch is not None
        batch.arrivals = arrivals
        return batch

    injector.take = take_with_arrivals  # type: ignore[method-assign]
    guarded.injector = injector
    batch = await guarded.take()
    assert batch is not None
    assert batch.arrivals is not None

    assert [batch.arrivals().tolist(), batch.arrivals().tolist()] == [[5], [5]]
    assert asked == [0]


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
