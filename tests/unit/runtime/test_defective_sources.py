"""A source that raises what it may not delays its own records: no other step, and no record is lost or doubled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy.clock import SystemClock
from millpy.errors import SourceUnavailableError
from millpy.graph import Graph
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import milliseconds
from millpy.runtime.guarded_injector import PAUSE_S_MAX, GuardedInjector
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.crash import memory_world

EVENT_TIME = EventTime("at", unit="us", sorted=True)
RECORDS = 10
ERRORS: list[Callable[[], BaseException]] = [
    ValueError,
    lambda: SystemExit(0),
    asyncio.CancelledError,
    lambda: SourceUnavailableError("away"),
    lambda: SourceUnavailableError(5),  # type: ignore[arg-type]
]


class Reading(msgspec.Struct):
    at: int
    value: int


@dataclass(frozen=True)
class Numbers(Source):
    """The numbers below RECORDS, one a batch, by an injector that fails `times` in a place once it is at a number."""

    where: str
    error: Callable[[], BaseException] = ValueError
    times: int = 3
    at: int = 5
    failures: list[str] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        return {"kind": "numbers"}

    def partitions(self) -> tuple[str, ...]:
        return ("all",)

    def connect(self, setup: SourceSetup) -> NumbersInjector:
        return NumbersInjector(self, setup)


class NumbersInjector:
    def __init__(self, source: Numbers, setup: SourceSetup) -> None:
        self.source, self.setup = source, setup
        self.next = 0
        self.check("connect")

    def check(self, where: str) -> None:
        source = self.source
        if where == source.where and self.next >= (0 if where in ("connect", "open") else source.at):
            if len(source.failures) < source.times:
                source.failures.append(where)
                raise source.error()

    async def open(self, position: bytes | None) -> None:
        self.check("open")
        self.next = 0 if position is None else json.loads(position)
        self.setup.ready.set()

    async def take(self) -> SourceBatch | None:
        self.check("take")
        if self.next >= RECORDS:
            return None
        number, self.next = self.next, self.next + 1
        self.setup.ready.set()
        return SourceBatch(
            "json",
            self.setup.clock.now_us(),
            payloads=[json.dumps({"at": 1_000 * number, "value": number}).encode()],
            position=json.dumps(self.next).encode(),
            finished=self.next >= RECORDS,
        )

    async def acknowledge(self, token: Any) -> None:
        self.check("acknowledge")

    def quiet(self) -> bool:
        self.check("quiet")
        return False

    async def close(self) -> None:
        self.check("close")


@pytest.mark.parametrize("where", ["connect", "open", "take", "acknowledge", "quiet"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: repr(error()))
async def test_no_exception_of_a_source_ends_the_worker(
    tmp_path: Path, where: str, error: Callable[[], BaseException]
) -> None:
    (tmp_path / "in").write_text("".join(json.dumps({"at": n, "value": n}) + "\n" for n in range(RECORDS)))
    source = Numbers(where, error)
    graph = Graph("defective")
    sources: dict[str, Source] = {"numbers": source, "others": File(tmp_path / "in")}
    for name, given in sources.items():
        keyed = graph.inject(name, given, schema=Reading, event_time=EVENT_TIME).key_by("value")
        windows = keyed.window(FixedWindows(milliseconds(1)), name=f"{name}_windows")
        windows.aggregate(n=Count()).to_table(f"of_{name}")
    database = MemoryDatabase()
    limits = Limits(lease_ttl_s=60, retry_s_min=0.001, retry_s_max=0.01, progress_every_s=0.01)
    worker = await memory_world.started(MemoryStore(database), graph, limits, SystemClock())

    async with asyncio.timeout(60):
        await worker.run(asyncio.Event())

    assert source.failures == [where] * 3
    for name in sources:
        counts = sorted((row["value"], row["n"]) for row in database.rows(f"of_{name}"))
        assert counts == [(number, 1) for number in range(RECORDS)]


def setup_of(clock: ManualClock) -> SourceSetup:
    return SourceSetup(
        graph="g", stream="numbers", partition="all", limits=Limits(), clock=clock, ready=asyncio.Event()
    )


async def test_source_that_keeps_failing_is_told_as_one_outage_and_tried_more_and_more_rarely() -> None:
    clock = ManualClock()
    setup = setup_of(clock)
    connection = setup.connection
    source = Numbers("take", times=1_000, at=1)
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
    (tmp_path / "in").write_text("".join(json.dumps({"at": n, "value": n}) + "\n" for n in range(RECORDS)))
    source = Numbers(where, lambda: SourceUnavailableError("the broker is away"), times=1_000_000, at=0)
    graph = Graph("away")
    for name, given in {"numbers": source, "others": File(tmp_path / "in")}.items():
        keyed = graph.inject(name, given, schema=Reading, event_time=EVENT_TIME).key_by("value")
        windows = keyed.window(FixedWindows(milliseconds(1)), name=f"{name}_windows")
        windows.aggregate(n=Count()).to_table(f"of_{name}")
    database = MemoryDatabase()
    limits = Limits(lease_ttl_s=60, retry_s_min=0.001, retry_s_max=0.01, progress_every_s=0.01)
    worker = await memory_world.started(MemoryStore(database), graph, limits, SystemClock())
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
    source = Numbers("take", times=2, at=0)
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
