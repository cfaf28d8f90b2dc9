"""What comes to a source after its end is not read: a warning and an event name it."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from millpy.clock import SystemClock
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.files.source import Files
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from tests.crash.memory_world import readings, started, two_stages
from tests.unit.sources.test_files import connect, take


async def told_by_a_start(path: Path, database: MemoryDatabase, records: int) -> list[str]:
    """Write a file, run a worker until its source has ended, and return what it tells of later records."""
    before = len(database.events)
    graph = two_stages(path, readings(records))
    worker = await started(MemoryStore(database), graph, Limits(lease_ttl_s=10_000), SystemClock())
    await worker.run(asyncio.Event())
    return [str(event.detail["what"]) for _, event in database.events[before:] if event.kind == "came_after_end"]


async def test_a_file_that_grew_after_the_end_is_named_at_each_start_and_not_read(tmp_path: Path) -> None:
    path, database = tmp_path / "in.ndjson", MemoryDatabase()

    assert await told_by_a_start(path, database, 100) == []
    assert await told_by_a_start(path, database, 100) == []
    for _ in range(2):
        (what,) = await told_by_a_start(path, database, 150)
        assert f"{path} had " in what
        assert "bytes and has" in what
    assert len(database.rows("largest")) == 100


async def test_a_file_that_cannot_be_looked_at_stops_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, database = tmp_path / "in.ndjson", MemoryDatabase()
    await told_by_a_start(path, database, 100)

    def refused(self: Files, setup: SourceSetup) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Files, "unread", refused)
    assert await told_by_a_start(path, database, 150) == []
    assert "Permission denied" in caplog.text


async def test_a_place_that_does_not_answer_delays_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, database, answered = tmp_path / "in.ndjson", MemoryDatabase(), threading.Event()
    await told_by_a_start(path, database, 100)
    monkeypatch.setattr(Files, "unread", lambda self, setup: [str(answered.wait(60))])
    graph = two_stages(path, readings(100))
    worker = await started(MemoryStore(database), graph, Limits(lease_ttl_s=10_000), SystemClock())
    try:
        async with asyncio.timeout(10):
            await worker.step()
        assert worker.owned.intervals
    finally:
        answered.set()
        await worker.abandon()


async def test_a_new_file_of_a_pattern_is_named_by_the_partition_that_would_read_it(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / f"{name}.csv").write_bytes(b"a\n1\n")
    source = Files(tmp_path / "*.csv", partitions=2)
    told = []
    for partition in source.partitions():
        injector = connect(source, partition=partition)
        await injector.open(None)
        notes, finished = {}, False
        while not finished:
            taken = await take(injector)
            notes.update(taken.notes)
            finished = taken.finished
        await injector.close()
        setup = replace(injector._setup, notes=notes)
        assert source.unread(setup) == []
        (tmp_path / "new.csv").write_bytes(b"a\n1\n")
        told.append(source.unread(setup))
        (tmp_path / "new.csv").unlink()

    assert sorted(told) == [[], [f"{tmp_path}/new.csv is new"]]
