"""A step that takes long: it is alive while its calls end, and a call that never ends costs its record at most."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy.clock import SystemClock
from millpy.computation import Computation, Context
from millpy.graph import Graph, Stream
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.step_progress import StepProgress
from millpy.runtime.lease import Lease
from millpy.sinks import Sink, SinkMessages, SinkSetup
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.testing.clock import ManualClock
from tests.crash import memory_world

HANGS = 7
LIMITS = Limits(lease_ttl_s=0.5, watchdog_s=0.25, progress_every_s=0.01, retry_s_min=0.01, retry_s_max=0.05)
never, hanging, calls = threading.Event(), threading.Event(), Counter[int]()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    calls.clear()
    never.clear()
    hanging.clear()
    yield
    never.set()  # lets the threads end


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class Out(msgspec.Struct):
    device: str
    value: int


def takes_long(record: Any) -> None:
    calls[record.value] += 1
    if record.value == HANGS:
        hanging.set()
        never.wait()


class Hangs(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        takes_long(record)
        context.produce(Out(record.device, record.value))


class HangsOnItsLoop(Computation):
    async def process_record(self, context: Context, record: Any) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        takes_long(record)
        context.produce(Out(record.device, record.value))


class WaitsForEver(Computation):
    async def process_record(self, context: Context, record: Any) -> None:  # type: ignore[override]
        calls[record.value] += 1
        if record.value == HANGS:
            await asyncio.Event().wait()
        context.produce(Out(record.device, record.value))


class Passes(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(Out(record.device, record.value))


def let_through(record: Any) -> bool:
    takes_long(record)
    return True


def graph_of(path: Path, computation: Computation, *, filtered: bool = False, records: int = 40) -> Graph:
    lines = [json.dumps({"device": f"dev-{n % 3}", "at": 1_000 * n, "value": n}) + "\n" for n in range(records)]
    path.write_text("".join(lines))
    graph = Graph("slow")
    stream: Stream = graph.inject(
        "readings", File(path), schema=Reading, event_time=EventTime("at", unit="us", sorted=True)
    )
    stream = stream.filter(let_through) if filtered else stream
    stream.key_by("device").process(computation, name="stage", output=Out).to_table("out")
    return graph


CASES = {
    "a callback": (Hangs(), False),
    "an async one that blocks": (HangsOnItsLoop(), False),
    "an async one that waits": (WaitsForEver(), False),
    "an operator": (Passes(), True),
}


class Shelf(Sink):
    """A place whose messages have a header of a function of the user's."""

    calls_code = True

    def __init__(self) -> None:
        self.taken: list[bytes | None] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "shelf"}

    def header_reader(self, record_type: Any) -> Any:
        return lambda record: [("passes", str(let_through(record)).encode())]

    def connect(self, setup: SinkSetup) -> Any:
        return self

    async def open(self) -> None:
        return

    async def send(self, messages: SinkMessages) -> None:
        self.taken += messages.values

    async def close(self) -> None:
        return


async def test_a_header_that_never_comes_rejects_only_its_record(tmp_path: Path) -> None:
    graph, sink = graph_of(tmp_path / "in", Passes()), Shelf()
    graph.streams()[0].to_sink(sink, key="device", name="to_shelf", intervals=1)
    world = memory_world.World(graph, LIMITS)
    world.start()
    await world.finish()

    taken = sorted(msgspec.json.decode(value or b"")["value"] for value in sink.taken)
    assert taken == [n for n in range(40) if n != HANGS]
    ((_, _, dead_letter),) = world.database.dead_letters
    assert (dead_letter.computation, "CallTimeoutError" in dead_letter.detail) == ("to_shelf", True)


@pytest.mark.parametrize("case", CASES)
async def test_a_call_that_never_returns_rejects_only_its_record(tmp_path: Path, case: str) -> None:
    computation, filtered = CASES[case]
    world = memory_world.World(graph_of(tmp_path / "in", computation, filtered=filtered), LIMITS)
    world.start()
    await world.finish()

    assert sorted(row["value"] for row in world.database.rows("out")) == [n for n in range(40) if n != HANGS]
    ((_, _, dead_letter),) = world.database.dead_letters
    assert "CallTimeoutError" in dead_letter.detail
    assert json.loads(dead_letter.payload)["value"] == HANGS
    assert calls[HANGS] <= LIMITS.record_attempts_max
    assert max(calls.values()) <= LIMITS.record_attempts_max + 1


async def test_intervals_of_a_hanging_worker_are_taken_over(tmp_path: Path) -> None:
    """A call that hangs only where it is made first succeeds elsewhere: nothing is dead-lettered."""

    class HangsOnce(Computation):
        def process_record(self, context: Context, record: Any) -> None:
            calls[record.value] += 1
            if record.value == HANGS and calls[HANGS] == 1:
                never.wait()
            context.produce(Out(record.device, record.value))

    world = memory_world.World(graph_of(tmp_path / "in", HangsOnce()), LIMITS)
    for _ in range(2):
        world.start()
    await world.finish()

    assert sorted(row["value"] for row in world.database.rows("out")) == list(range(40))
    assert not world.database.dead_letters


async def test_a_draining_worker_does_not_wait_for_a_call(tmp_path: Path) -> None:
    database = MemoryDatabase()
    limits = Limits(lease_ttl_s=60, drain_grace_s=0.4)
    worker = await memory_world.started(
        MemoryStore(database), graph_of(tmp_path / "in", Hangs()), limits, SystemClock()
    )
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    await asyncio.to_thread(hanging.wait)

    stop.set()

    async with asyncio.timeout(60):
        await running
    assert all(header.owner is None for header in database.headers.values())


def test_a_step_whose_calls_end_is_not_stuck() -> None:
    clock, progress = ManualClock(), StepProgress()
    lease = Lease(Limits(watchdog_s=60), clock)
    lease.watch(progress)
    progress.stepping = True

    for _ in range(100):
        clock.advance(90)
        progress.count_unit(progress.run)
        assert not lease.is_stuck()

    clock.advance(119)
    assert not lease.is_stuck()
    clock.advance(2)
    assert lease.is_stuck()


def test_a_blocked_event_loop_is_stuck_after_the_watchdog_without_a_step() -> None:
    clock = ManualClock()
    lease = Lease(Limits(watchdog_s=60), clock)
    lease.watch(StepProgress())

    clock.advance(61)

    assert lease.is_stuck()
