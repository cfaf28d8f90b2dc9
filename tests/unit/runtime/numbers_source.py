"""A source of numbers, and a worker that reads sources to windows of a millisecond, all of them in a test's memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from millpy.clock import SystemClock
from millpy.graph import Graph
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import milliseconds
from millpy.runtime.worker import Worker
from millpy.sources.files.source import File
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.crash import memory_world

RECORDS = 10
EVENT_TIME = EventTime("at", unit="us", sorted=True)
Read = tuple[Source, EventTime, type[msgspec.Struct]]
"""A source, its event time and the class of its records."""


class Reading(msgspec.Struct):
    at: int
    value: int


@dataclass(frozen=True, kw_only=True)
class Numbers(Source):
    """The numbers below RECORDS, one a batch. `failures` has the calls that have failed."""

    failures: list[str] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        return {"kind": "numbers"}

    def partitions(self) -> tuple[str, ...]:
        return ("all",)


class NumbersInjector:
    def __init__(self, setup: SourceSetup) -> None:
        self.setup = setup
        self.next = 0

    async def open(self, position: bytes | None) -> None:
        self.next = 0 if position is None else json.loads(position)
        self.setup.ready.set()

    async def take(self) -> SourceBatch | None:
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
        pass

    def quiet(self) -> Any:
        return False

    async def close(self) -> None:
        pass


def written(path: Path) -> File:
    """Write the numbers, one a microsecond, to a file; return it as a source."""
    path.write_text("".join(json.dumps({"at": n, "value": n}) + "\n" for n in range(RECORDS)))
    return File(path)


async def worker_of(sources: Mapping[str, Read], database: MemoryDatabase, watchdog_s: float = 60.0) -> Worker:
    """Return a worker that counts the records of each source by value, in the table `of_SOURCE`."""
    graph = Graph("numbers")
    for name, (source, event_time, schema) in sources.items():
        keyed = graph.inject(name, source, schema=schema, event_time=event_time).key_by("value")
        windows = keyed.window(FixedWindows(milliseconds(1)), name=f"{name}_windows")
        windows.aggregate(n=Count()).to_table(f"of_{name}")
    limits = Limits(lease_ttl_s=60, retry_s_min=0.001, retry_s_max=0.01, progress_every_s=0.01, watchdog_s=watchdog_s)
    return await memory_world.started(MemoryStore(database), graph, limits, SystemClock())


async def check_run(sources: Mapping[str, Read]) -> None:
    """Run a worker with sources to the end; each has all numbers once in its table."""
    database = MemoryDatabase()
    worker = await worker_of(sources, database)
    async with asyncio.timeout(60):
        await worker.run(asyncio.Event())
    for name in sources:
        counts = sorted((row["value"], row["n"]) for row in database.rows(f"of_{name}"))
        assert counts == [(number, 1) for number in range(RECORDS)]


async def check_beside_others(numbers: Read, others: Path) -> None:
    """Run a worker with a source, and a file that the source must not delay, to the end; see `check_run`."""
    await check_run({"numbers": numbers, "others": (written(others), EVENT_TIME, Reading)})
