"""No source runs further ahead than `max_skew`, and none waits forever."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from millpy.graph import Graph
from millpy.ingest.protocol import Source
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, milliseconds, minutes, seconds
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.crash.memory_world import LIMITS, Reading, World
from tests.feed import Feed

SPAN_US = 2_000_000_000
SKEW = seconds(150)
SPARSE_US, DENSE_US = 1_000_000, 100_000
BUNDLE = LIMITS.bundle_records_max


def file_of(path: Path, step_us: int) -> File:
    readings = (Reading(path.name, at, 1) for at in range(0, SPAN_US, step_us))
    path.write_bytes(b"".join(msgspec.json.encode(reading) + b"\n" for reading in readings))
    return File(str(path))


def counts(sparse: Source, dense: Source, max_skew: timedelta | None) -> Graph:
    graph = Graph("world", max_skew=max_skew)
    event_time = EventTime("at", unit="us", max_disorder=milliseconds(5))
    first = graph.inject("sparse", sparse, schema=Reading, event_time=event_time)
    second = graph.inject("dense", dense, schema=Reading, event_time=event_time)
    both = first.union(second).key_by("device").window(FixedWindows(minutes(1)))
    both.aggregate(n=Count()).to_table("counts")
    return graph


async def widest(world: World) -> int:
    """Runs to the end; how far the sparse source was ahead of the dense one at most, in s, while neither had ended."""
    finished = asyncio.create_task(world.finish())
    ahead = 0
    while not finished.done():
        marks = [h.low_watermark for h in world.database.headers.values() if h.interval.keys is None]
        if marks and all(INSTANT_MIN < mark < INSTANT_MAX for mark in marks):
            ahead = max(ahead, (marks[0] - marks[1]) // 1_000_000)
        await asyncio.sleep(0.001)
    await finished
    return ahead


@pytest.mark.parametrize("placement", [[()], [("sparse",), ("dense", "counts")]], ids=["one worker", "two workers"])
async def test_the_source_ahead_waits_for_the_slowest(tmp_path: Path, placement: list[tuple[str, ...]]) -> None:
    world = World(counts(file_of(tmp_path / "sparse", SPARSE_US), file_of(tmp_path / "dense", DENSE_US), SKEW))
    for only in placement:
        world.start(only)

    ahead = await widest(world)

    # A source overshoots by what one turn brings, and another may be stepped while that one commits.
    assert SKEW.seconds / 2 < ahead <= SKEW.seconds + 2 * BUNDLE * SPARSE_US / 1e6
    assert sum(row["n"] for row in world.database.rows("counts")) == SPAN_US // SPARSE_US + SPAN_US // DENSE_US
    assert world.adds_up()


async def test_without_max_skew_a_source_runs_ahead(tmp_path: Path) -> None:
    world = World(counts(file_of(tmp_path / "sparse", SPARSE_US), file_of(tmp_path / "dense", DENSE_US), None))
    world.start()

    assert await widest(world) > 2 * (SKEW.seconds + 2 * BUNDLE * SPARSE_US / 1e6)


@pytest.mark.parametrize("placement", [[()], [("sparse",), ("dense", "counts")]], ids=["one worker", "two workers"])
async def test_an_idle_source_does_not_hold_others_back(tmp_path: Path, placement: list[tuple[str, ...]]) -> None:
    feed = Feed()
    feed.push(msgspec.json.encode(Reading("dense", 1, 1)))
    feed.push(msgspec.json.encode(Reading("dense", 2, 1)))
    limits = Limits(lease_ttl_s=0.5, bundle_records_max=BUNDLE, progress_every_s=0.01)
    world = World(counts(file_of(tmp_path / "sparse", SPARSE_US), feed, SKEW), limits)
    for only in placement:
        world.start(only)

    await world.deployed.wait()
    async with asyncio.timeout(60):
        while True:
            if any(header.low_watermark >= INSTANT_MAX for header in world.database.headers.values()):
                break
            await asyncio.sleep(0.005)
    feed.end()
    await world.finish()

    assert (
        sum(row["n"] for row in world.database.rows("counts"))
        + sum(account.late for account in world.database.accounting(world.graph_id).subscriptions)
        == 2 + SPAN_US // SPARSE_US
    )
