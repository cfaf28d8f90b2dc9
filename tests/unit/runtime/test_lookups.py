"""Lookup tables of workers over the store in memory: what is held, what a turn sees, and what operators see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millpy import EventTime, File, Graph, milliseconds
from millpy.clock import SystemClock
from millpy.errors import UsageError
from millpy.hosting.takes import TakeWriter
from millpy.ingest.table_rows import version_of
from millpy.limits import Limits
from millpy.model.lookup import LookupTable
from millpy.model.take import Take
from millpy.observability.metrics import Gauges
from millpy.runtime.worker import Worker
from millpy.spark.job import refuse_lookups
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from tests.crash import memory_world

LIMITS = Limits(lease_ttl_s=60, bundle_records_max=10, retry_s_min=0.001, progress_every_s=0.001)


class Reading(msgspec.Struct):
    device: str
    at: int


class Device(msgspec.Struct, frozen=True):
    device: str
    site: int


def graph_of(path: Path, devices: Sequence[str]) -> Graph:
    """Two tables; the lookup in the second one may wait while the first continues."""
    path.write_text("".join(json.dumps({"device": device, "at": i}) + "\n" for i, device in enumerate(devices)))
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=milliseconds(0))
    readings = graph.inject("readings", File(path), schema=Reading, event_time=event_time)
    readings.lookup("devices", Device, key="device", refresh=milliseconds(100), intervals=1).to_table("known")
    readings.lookup("others", Device, key="device", refresh=milliseconds(100), intervals=1).to_table("other")
    return graph


def text(*rows: tuple[str, int]) -> bytes:
    return b"\n".join(msgspec.json.encode(Device(*row)) for row in rows)


async def started(graph: Graph, database: MemoryDatabase) -> Worker:
    return await memory_world.started(MemoryStore(database), graph, LIMITS, SystemClock())


async def step_until(worker: Worker, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await worker.step()
            await asyncio.sleep(0)


def table(worker: Worker, name: str) -> LookupTable:
    return next(table for table in worker.context.lookups.tables if table.table == name)


def samples(gauges: Gauges, name: str) -> list[Any]:
    return [sample for metric in gauges.collect() if metric.name == name for sample in metric.samples]


def sites(database: MemoryDatabase, name: str = "known") -> list[tuple[str, Any]]:
    return sorted(((row["device"], row["site"]) for row in database.rows(name)), key=str)


async def test_a_search_for_a_refused_value_loses_no_record_of_a_step_that_waits(tmp_path: Path) -> None:
    """The search opens all intervals anew: one that was held must be held in the search, too."""
    database = MemoryDatabase()
    worker = await started(graph_of(tmp_path / "in", ["a", "b", "bad", "c"]), database)
    database.constrain("known", "good", lambda row: row["device"] != "bad")
    database.lookup_tables["public.devices"] = text(("a", 1))
    assert await worker.context.lookups.load(table(worker, "devices"))
    await step_until(worker, lambda: len(sites(database)) == 3)

    assert sites(database) == [("a", 1), ("b", None), ("c", None)]
    assert [letter.reason for _, _, letter in database.dead_letters] == ["refused"]
    assert sites(database, "other") == []

    database.lookup_tables["public.others"] = text(("b", 2))
    assert await worker.context.lookups.load(table(worker, "others"))
    await step_until(worker, lambda: len(sites(database, "other")) == 3)

    assert sites(database, "other") == [("a", None), ("b", 2), ("c", None)]
    assert database.accounting(worker.context.graph_id).balanced
    await worker.abandon()


async def test_the_take_of_a_lookup_says_that_its_table_is_not_archived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes: list[Take] = []
    add = TakeWriter.add

    def adds(self: TakeWriter, interval: Any, consumed: Any, work: Any, result: Any, unarchived: str) -> None:
        add(self, interval, consumed, work, result, unarchived)
        if interval.plan.takes in result.productions:
            takes.extend(result.productions[interval.plan.takes].objects())

    monkeypatch.setattr(TakeWriter, "add", adds)
    graph = graph_of(tmp_path / "in", ["a", "b"])
    graph.archive_takes()
    database = MemoryDatabase()
    worker = await started(graph, database)
    for name in ("devices", "others"):
        database.lookup_tables[f"public.{name}"] = text(("a", 1))
        assert await worker.context.lookups.load(table(worker, name))

    await step_until(worker, lambda: len(sites(database)) == len(sites(database, "other")) == 2)

    assert {take.unarchived for take in takes} == {"lookup"}
    await worker.abandon()


async def test_a_turn_that_is_stepped_again_sees_the_version_that_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = MemoryDatabase()
    worker = await started(graph_of(tmp_path / "in", ["a", "bad"]), database)
    database.constrain("known", "good", lambda row: row["device"] != "bad")
    seen: dict[int, list[str]] = {}
    kept: list[Any] = []
    changes = 1
    lookups, run = worker.context.lookups, worker.cycle.run_steps
    for name in ("devices", "others"):
        database.lookup_tables[f"public.{name}"] = text(("a", 1))
        await lookups.load(table(worker, name))

    async def run_steps(inbox: Any, *arguments: Any, **more: Any) -> Any:
        nonlocal changes
        kept.append(inbox)  # so that no other one gets its id
        seen.setdefault(id(inbox), []).append(inbox.tables[table(worker, "devices")].version)
        turn = await run(inbox, *arguments, **more)
        changes += 1
        database.lookup_tables["public.devices"] = text(("a", changes))
        await lookups.load(table(worker, "devices"))  # between two trials of one turn
        return turn

    monkeypatch.setattr(worker.cycle, "run_steps", run_steps)
    await step_until(worker, lambda: bool(sites(database)))

    (searched,) = [versions for versions in seen.values() if len(versions) > 1]
    assert len(set(searched)) == 1
    assert len({versions[0] for versions in seen.values()}) == len(seen)
    ((_, site),) = sites(database)
    assert version_of(text(("a", site))) == searched[0]
    assert len(database.dead_letters) == 1
    await worker.abandon()


async def test_a_failed_read_is_told_once_and_its_end_too_and_the_version_stays(tmp_path: Path) -> None:
    database = MemoryDatabase()
    worker = await started(graph_of(tmp_path / "in", ["a"]), database)
    lookups, devices = worker.context.lookups, table(worker, "devices")
    database.lookup_tables["public.devices"] = text(("a", 1))
    await lookups.load(devices)
    version = lookups.versions[devices]

    del database.lookup_tables["public.devices"]
    assert not await lookups.load(devices)
    assert not await lookups.load(devices)
    report = database.lookup_reports[worker.context.worker_id, "public.devices"]
    database.lookup_tables["public.devices"] = text(("a", 1))
    assert await lookups.load(devices)
    await worker.context.events.store_all()

    assert (report.version, report.error) == (version, "table public.devices does not exist")
    assert report.computations == ("known",)
    assert lookups.versions[devices] is version
    gauges = Gauges("plant", SystemClock())
    gauges.worker = worker
    assert [sample.value for sample in samples(gauges, "millpy_lookup_rows")] == [1]
    assert [sample.value for sample in samples(gauges, "millpy_lookup_failing")] == [0, 1]  # devices; others never read
    assert database.lookup_reports[worker.context.worker_id, "public.devices"].error == ""
    told = [event.kind for _, event in database.events if event.kind.startswith("lookup")]
    assert told == ["lookup_failed", "lookup_restored"]
    await worker.abandon()


async def test_a_worker_reads_only_the_tables_of_the_computations_that_it_runs(tmp_path: Path) -> None:
    graph = graph_of(tmp_path / "in", ["a"])

    worker = await memory_world.started(MemoryStore(MemoryDatabase()), graph, LIMITS, SystemClock(), only=("known",))

    assert [table.name for table in worker.context.lookups.tables] == ["public.devices"]
    await worker.abandon()


async def test_a_worker_that_waits_for_a_table_does_not_spin(tmp_path: Path) -> None:
    database = MemoryDatabase()
    limits = Limits(lease_ttl_s=60, progress_every_s=60)
    graph = graph_of(tmp_path / "in", ["a", "b"])
    worker = await memory_world.started(MemoryStore(database), graph, limits, SystemClock())
    steps, step = 0, worker.step

    async def counted() -> bool:
        nonlocal steps
        steps += 1
        return await step()

    worker.step = counted  # type: ignore[method-assign]
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    while not any(interval.held for interval in worker.owned.intervals.values()):
        await asyncio.wait([running], timeout=0.05)
        assert not running.done()
    await asyncio.wait([running], timeout=0.1)
    before = steps
    await asyncio.wait([running], timeout=0.2)
    assert steps - before < 40, "a wait of half a millisecond between two steps"

    gauges = Gauges("plant", SystemClock())
    gauges.worker = worker
    failing = {sample.labels["table"]: sample.value for sample in samples(gauges, "millpy_lookup_failing")}
    assert failing == {"public.devices": 1, "public.others": 1}
    assert samples(gauges, "millpy_lookup_rows") == []
    held = [interval for interval in worker.owned.intervals.values() if interval.held]
    assert [interval.plan.name for interval in held] == ["known", "other"]
    assert all(interval.bundle == 0 for interval in held)
    stop.set()
    await running


def test_spark_refuses_a_graph_that_looks_up_in_tables(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"looks up in table public\.devices"):
        refuse_lookups(graph_of(tmp_path / "in", ["a"]))
