"""What comes to a source after its end is read on by the next worker; what the end has closed stays closed."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from millpy.clock import SystemClock
from millpy.errors import BrokenFileError
from millpy.graph import Graph
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.files.source import Files
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.crash.memory_world import (
    WINDOW_US,
    Reading,
    expected,
    readings,
    source_of,
    started,
    two_stages,
    windows_over_several,
)
from tests.unit.sources.test_files import connect, take

SIZE_US = 40_000
SIZE = timedelta(microseconds=SIZE_US)


async def run(graph: Graph, database: MemoryDatabase) -> list[dict[str, object]]:
    """Run a worker until its sources have ended; return what the events say of what has come to them."""
    before = len(database.events)
    worker = await started_worker(graph, database)
    await worker.run(asyncio.Event())
    return [
        {"kind": event.kind, **event.detail}
        for _, event in database.events[before:]
        if event.kind in ("came_after_end", "read_on")
    ]


async def started_worker(graph: Graph, database: MemoryDatabase) -> Any:
    return await started(MemoryStore(database), graph, Limits(lease_ttl_s=10_000), SystemClock())


def windowed(path: Path, records: Sequence[Reading], windows: Windows, lateness: timedelta = timedelta(0)) -> Graph:
    """Counts of windows by device, and of the windows of all devices."""
    graph = Graph("world")
    source = source_of(graph, "readings", path, records)
    mode = Accumulation.RETRACTING if lateness else Accumulation.ACCUMULATING
    keyed = source.key_by("device").window(windows, allowed_lateness=lateness, accumulation=mode, name="counts")
    counts = keyed.aggregate(n=Count())
    counts.to_table("counts")
    counts.key_by("n").window(FixedWindows(2 * SIZE), name="of_counts").aggregate(windows=Count()).to_table("of_counts")
    return graph


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
async def test_no_exception_of_the_look_at_an_ended_source_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(_source: object, _setup: object) -> Sequence[str]:
        raise error

    path, database = tmp_path / "in.ndjson", MemoryDatabase()
    await run(two_stages(path, readings(10)), database)
    monkeypatch.setattr(Files, "unread", fails)

    assert await run(two_stages(path, readings(10)), database) == []


async def test_a_grown_file_is_read_on_by_the_next_worker_exactly_once(tmp_path: Path) -> None:
    path, database = tmp_path / "in.ndjson", MemoryDatabase()
    records = readings(200)

    assert await run(two_stages(path, records[:100]), database) == []
    assert await run(two_stages(path, records[:100]), database) == []
    (told,) = await run(two_stages(path, records[:150]), database)
    assert await run(two_stages(path, records[:150]), database) == []
    assert len(await run(two_stages(path, records), database)) == 1

    assert (told["kind"], told["stream"]) == ("read_on", "readings")
    assert f"{path} had " in str(told["what"])
    rows = sorted((row["device"], row["number"], row["total"]) for row in database.rows("largest"))
    assert rows == expected(records)
    assert database.accounting(1).balanced


@pytest.mark.parametrize(
    ("windows", "ends_of"),
    [
        (FixedWindows(SIZE), lambda at: [at // SIZE_US * SIZE_US + SIZE_US]),
        (
            SlidingWindows(SIZE, every=SIZE / 4),
            lambda at: [at // (SIZE_US // 4) * (SIZE_US // 4) + n * (SIZE_US // 4) for n in range(1, 5)],
        ),
    ],
    ids=["fixed", "sliding"],
)
@pytest.mark.parametrize("lateness", [timedelta(0), timedelta(days=7)])
async def test_windows_that_the_end_has_closed_stay_as_they_are_and_later_ones_are_whole(
    tmp_path: Path, windows: Any, ends_of: Any, lateness: timedelta
) -> None:
    path, database, records = tmp_path / "in.ndjson", MemoryDatabase(), readings(330)
    await run(windowed(path, records[:110], windows, lateness), database)
    closed = ends_of(records[109].at)[-1]
    first = {(row["device"], row["window_end"]): row["n"] for row in database.rows("counts")}

    (told,) = await run(windowed(path, records[:220], windows, lateness), database)
    await run(windowed(path, records, windows, lateness), database)

    again = ends_of(records[219].at)[-1]
    counted: Counter[tuple[str, int]] = Counter()
    for place, record in enumerate(records):
        floor = 0 if place < 110 else closed if place < 220 else again
        counted.update((record.device, end) for end in ends_of(record.at) if end > floor)
    found = {(row["device"], row["window_end"]): row["n"] for row in database.rows("counts")}
    assert found == dict(counted)
    assert first.items() <= found.items()
    assert dict(told["windows_are_closed_to"]).keys() == {"counts", "of_counts"}  # type: ignore[call-overload]
    assert database.accounting(1).balanced
    if lateness:  # a retraction may be late
        assert sum(row["windows"] for row in database.rows("of_counts")) <= len(found)
        return
    behind: Counter[tuple[int, int]] = Counter()
    for (_, end), n in found.items():
        resumed_at = 0 if end <= closed else closed if end <= again else again
        floor = (
            -(-resumed_at // (2 * SIZE_US)) * 2 * SIZE_US
        )  # the window of the last pane, at `resumed_at` - 1, is closed
        if (of := -(-end // (2 * SIZE_US)) * 2 * SIZE_US) > floor:
            behind[n, of] += 1
    assert {(row["n"], row["window_end"]): row["windows"] for row in database.rows("of_counts")} == dict(behind)


async def test_sessions_of_a_grown_file_begin_anew_behind_those_that_were_closed(tmp_path: Path) -> None:
    path, database, gap = tmp_path / "in.ndjson", MemoryDatabase(), timedelta(milliseconds=3)
    times = [0, 1_000, 2_000, 10_000, 12_000, 13_000, 20_000]
    records = [Reading("dev-1", at, 1) for at in times]

    await run(windowed(path, records[:4], SessionWindows(gap)), database)
    await run(windowed(path, records, SessionWindows(gap)), database)

    found = sorted((row["window_start"], row["window_end"], row["n"]) for row in database.rows("counts"))
    assert found == [(0, 5_000, 3), (10_000, 13_000, 1), (12_000, 16_000, 2), (20_000, 23_000, 1)]
    assert database.accounting(1).balanced


async def test_two_grown_sources_of_a_step_go_on_at_their_own_watermarks(tmp_path: Path) -> None:
    database, size = MemoryDatabase(), WINDOW_US
    slow = [Reading("dev-0", at, 1) for at in range(0, 900_000, 10_000)]
    fast = [Reading("dev-1", at, 1) for at in range(0, 900_000, 3_000)]

    def parts(lo: float, hi: float) -> list[Reading]:  # `fast` is twice as far as `slow` in each run
        return slow[: int(len(slow) * lo)] + fast[: int(len(fast) * hi)]

    for lo, hi in ((0.3, 0.6), (0.5, 1.0)):
        await run(windows_over_several(tmp_path, parts(lo, hi), 2), database)

    floor = (fast[int(len(fast) * 0.6) - 1].at // size + 1) * size  # the end has closed the windows of both sources
    found = {(row["device"], row["window_start"]): row["n"] for row in database.rows("windows")}
    first = Counter((record.device, record.at // size * size) for record in parts(0.3, 0.6))
    later = Counter((record.device, record.at // size * size) for record in parts(0.5, 1.0))
    assert found == first | {(device, at): n for (device, at), n in later.items() if at >= floor}
    assert database.accounting(1).balanced


async def test_a_file_that_was_replaced_stops_the_worker_and_says_what_to_do(tmp_path: Path) -> None:
    path, database = tmp_path / "in.ndjson", MemoryDatabase()
    await run(two_stages(path, readings(100)), database)

    with pytest.raises(BrokenFileError, match="first bytes differ") as raised:
        await run(two_stages(path, readings(150, seed=2)), database)
    assert "--reset" in (raised.value.hint or "")
    with pytest.raises(BrokenFileError, match="has changed since it was read"):
        await run(two_stages(path, readings(50)), database)
    assert len(database.rows("largest")) == 100


async def test_a_file_that_cannot_be_looked_at_stops_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, database = tmp_path / "in.ndjson", MemoryDatabase()
    await run(two_stages(path, readings(100)), database)

    def refused(self: Files, setup: SourceSetup) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Files, "unread", refused)
    assert await run(two_stages(path, readings(150)), database) == []
    assert "Permission denied" in caplog.text


async def test_a_place_that_does_not_answer_delays_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, database, answered = tmp_path / "in.ndjson", MemoryDatabase(), threading.Event()
    await run(two_stages(path, readings(100)), database)
    monkeypatch.setattr(Files, "unread", lambda self, setup: [str(answered.wait(60))])
    worker = await started_worker(two_stages(path, readings(100)), database)
    try:
        async with asyncio.timeout(10):
            await worker.step()
        assert worker.owned.intervals
    finally:
        answered.set()
        await worker.abandon()


async def test_a_new_file_of_a_pattern_is_named_by_the_partition_that_reads_it(tmp_path: Path) -> None:
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


async def test_the_end_of_a_worker_says_how_many_records_are_in_no_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a run over files, nobody looks at the status; nearly all records of a second device may be late."""
    path, database, records = tmp_path / "in.ndjson", MemoryDatabase(), readings(100)
    await run(windowed(path, records, FixedWindows(SIZE)), database)
    assert not [message for message in caplog.messages if "too late" in message]

    graph = windowed(path, [*records, *records[:3]], FixedWindows(SIZE))
    with path.open("a") as file:
        file.write("nonsense\n")
    await run(graph, database)

    assert [message for message in caplog.messages if "list` shows them" in message] == [
        "counts: records that came too late: 3; `millpy late list` shows them",
        "readings: records that are dead letters: 1; `millpy dead-letters list` shows them",
    ]

    caplog.clear()
    with path.open("a") as file:
        file.write("nonsense\n")
    await run(graph, database)  # by another worker, which has read the counts of the first

    assert "readings: records that are dead letters: 2; `millpy dead-letters list` shows them" in caplog.messages
