"""Early panes on PostgreSQL: a worker wakes by its clock, and a new owner continues with the state of triggers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import (
    Accumulation,
    AfterCount,
    AfterProcessingTime,
    AfterWatermark,
    Count,
    EventTime,
    Every,
    FixedWindows,
    Graph,
    Sum,
    hours,
    milliseconds,
    minutes,
    seconds,
)
from millpy.limits import Limits
from millpy.process.assembly import deploy, run_worker
from millpy.windowing.triggers import Trigger
from tests.crash.graph_files import one, rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=30.0, fold_every_s=0.05, poll_s_max=30.0)
"""Nothing but records and clocks wakes a worker for half a minute."""
QUICK = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
WITHOUT_ROOM = replace(QUICK, closed_windows_bytes_max=1, unfired_windows_bytes_max=1)
PANES = "SELECT device, n::int, pane_index, pane_timing FROM factory.panes ORDER BY device"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


def graph_of(feed: Feed, trigger: Trigger, mode: Accumulation = Accumulation.ACCUMULATING) -> Graph:
    graph = Graph("factory")
    at = EventTime("at", unit="s", max_disorder=seconds(1))
    source = graph.inject("readings", feed, schema=Reading, event_time=at)
    keyed = source.key_by("device").window(
        FixedWindows(minutes(1)), trigger=trigger, accumulation=mode, allowed_lateness=hours(1), name="panes"
    )
    panes = keyed.aggregate(n=Count(), total=Sum("value")).to_table("panes")
    if mode is not Accumulation.ACCUMULATING:
        totals = panes.key_by("device").window(FixedWindows(minutes(10)), allowed_lateness=hours(1), name="totals")
        totals.aggregate(n=Sum("n"), total=Sum("total")).to_table("totals")
    return graph


def reading(device: str, at: int, value: int = 1) -> bytes:
    return msgspec.json.encode(Reading(device, at, value))


async def until(url: str, query: str, wanted: Sequence[Any], workers: Sequence[asyncio.Task[Any]] = ()) -> None:
    """Wait for rows; a worker that ends first raises its error."""
    found: list[Any] = []
    async with asyncio.timeout(60):
        while found != [*wanted]:
            for worker in workers:
                if worker.done():
                    worker.result()
            await asyncio.sleep(0.05)
            try:
                found = await asyncio.to_thread(rows, url, query)
            except psycopg.errors.UndefinedTable:
                found = []


@asynccontextmanager
async def running(
    url: str, make: Callable[[], Graph], only: Sequence[Sequence[str]] = ((),)
) -> AsyncIterator[list[asyncio.Task[Any]]]:
    stop = asyncio.Event()
    workers = [asyncio.create_task(run_worker(make(), url, limits=LIMITS, only=part, stop=stop)) for part in only]
    try:
        yield workers
    finally:
        stop.set()
        await asyncio.gather(*workers)


@pytest.mark.parametrize(
    "trigger",
    [AfterWatermark(early=Every(milliseconds(300))), AfterWatermark(early=AfterProcessingTime(milliseconds(300)))],
    ids=["every", "delay"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["one worker", "two workers"])
async def test_the_clock_fires_a_pane_without_any_record(database_url: str, trigger: Trigger, apart: bool) -> None:
    feed = Feed()
    only = [["readings"], ["panes"]] if apart else [()]
    await deploy(graph_of(feed, trigger), database_url)
    async with running(database_url, lambda: graph_of(feed, trigger), only) as workers:
        feed.push(reading("a", 1), reading("b", 2))
        started = time.monotonic()
        await until(database_url, PANES, [("a", 1, 0, "early"), ("b", 1, 0, "early")], workers)
        feed.push(reading("a", 3))
        await until(database_url, PANES, [("a", 2, 1, "early"), ("b", 1, 0, "early")], workers)

    assert time.monotonic() - started < LIMITS.progress_every_s / 2, "a worker has slept over its alarm"
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


async def test_an_alarm_whose_time_comes_while_no_worker_runs_fires_for_the_next_owner(database_url: str) -> None:
    feed, trigger = Feed(), AfterWatermark(early=AfterProcessingTime(timedelta(seconds=3)))
    feed.push(reading("a", 1), reading("a", 2))
    await fed(database_url, graph_of(feed, trigger), feed, LIMITS)
    assert rows(database_url, PANES) == []

    async with running(database_url, lambda: graph_of(feed, trigger)) as workers:
        await until(database_url, PANES, [("a", 2, 0, "early")], workers)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("limits", [QUICK, WITHOUT_ROOM], ids=["in memory", "in the database"])
@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
async def test_what_a_trigger_has_counted_survives_restarts_and_takeovers(
    database_url: str, mode: Accumulation, limits: Limits
) -> None:
    feed, trigger = Feed(), AfterWatermark(early=AfterCount(4), late=AfterCount(2))
    found = []
    for at in (1, 2, 3, 4, 5, 100, 6, 7, 8):
        feed.push(reading("a", at))
        await fed(database_url, graph_of(feed, trigger, mode), feed, limits)
        found += rows(database_url, PANES)

    assert found == [
        *[("a", 4, 0, "early")] * 2,
        *[("a", 5, 1, "on_time")] * 2,
        *[("a", 7, 2, "late")] * 2,
    ]
    feed.end()
    await run_worker(graph_of(feed, trigger, mode), database_url, limits=limits)
    assert rows(database_url, PANES + ", window_start LIMIT 1") == [("a", 8, 3, "late")]
    if mode is not Accumulation.ACCUMULATING:
        assert rows(database_url, "SELECT n::int, total::int FROM factory.totals") == [(9, 9)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


async def test_records_behind_a_finished_trigger_are_late_records(database_url: str) -> None:
    feed = Feed()
    feed.push(reading("a", 1), reading("a", 2), reading("b", 1))
    await fed(database_url, graph_of(feed, AfterCount(2)), feed, QUICK)
    feed.push(reading("a", 3), reading("b", 3))
    await fed(database_url, graph_of(feed, AfterCount(2)), feed, QUICK)

    assert rows(database_url, PANES) == [("a", 2, 0, "early"), ("b", 2, 0, "early")]
    (late,) = rows(database_url, "SELECT computation, key, watermark < window_end FROM millpy.late_records")
    assert late == ("panes", '"a"', True)
    counted = "SELECT sum(late) FROM millpy.accounting WHERE consumer = 'panes'"
    assert one(database_url, counted) == 1
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
