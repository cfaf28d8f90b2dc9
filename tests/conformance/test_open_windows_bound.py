"""A worker whose windows have no more room: the rest is dead-lettered, counted over takeovers, and can be replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import LiteralString

import msgspec
import psycopg

from millpy import Count, EventTime, FixedWindows, Graph, Last, minutes, seconds
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from tests.conformance.test_users_tables import fetch
from tests.feed import Feed

FULL = Limits(open_windows_bytes_max=4 * 80_000)
"""70 new keys an interval, or a little more."""


class Reading(msgspec.Struct):
    device: str
    at: datetime


def a_graph(feed: Feed) -> Graph:
    graph = Graph("flood")
    readings = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(10)))
    windows = readings.key_by("device").window(FixedWindows(minutes(1)), name="counted")
    windows.aggregate(n=Count(), last=Last("device")).to_table("counts")  # text keeps them in memory until they fire
    return graph


def readings(name: str, count: int, at: str = "2026-01-01T00:00:00Z") -> list[bytes]:
    return [json.dumps({"device": f"{name}{n}", "at": at}).encode() for n in range(count)]


@asynccontextmanager
async def working(url: str, feed: Feed, limits: Limits) -> AsyncIterator[None]:
    """Run a worker that takes over from the one before."""
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(a_graph(feed), url, limits=limits, stop=stop))
    yield
    stop.set()
    await worker


async def until(url: str, query: LiteralString, wanted: object) -> None:
    async with asyncio.timeout(60), await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        while await (await connection.execute(query)).fetchall() != [(wanted,)]:
            pass


JUDGED = "SELECT (consumed + dead_lettered)::int FROM millpy.accounting WHERE consumer = 'counted'"
REFUSED = "SELECT seen::int FROM millpy.retention WHERE reason = 'windows'"


async def test_records_without_room_are_counted_across_takeovers_and_can_be_replayed(database_url: str) -> None:
    feed = Feed()
    feed.push(*readings("old", 4))
    async with working(database_url, feed, FULL):
        await until(database_url, JUDGED, 4)
        feed.push(*readings("new", 1_000))
        await until(database_url, JUDGED, 1_004)
        ((refused,),) = fetch(database_url, REFUSED)
        assert fetch(database_url, "SELECT count(*)::int FROM millpy.windows") == [(1_004 - refused,)]
        assert 1_004 - refused <= 4 * 100
        feed.push(*readings("old", 4) * 5)  # of windows that are open
        await until(database_url, JUDGED, 1_024)
        assert fetch(database_url, REFUSED) == [(refused,)]
    async with working(database_url, feed, FULL):
        feed.push(*readings("newer", 500))
        await until(database_url, JUDGED, 1_524)
        feed.push(*readings("old", 4))
        await until(database_url, JUDGED, 1_528)
    assert fetch(database_url, REFUSED) == [(refused + 500,)]
    assert fetch(database_url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]

    fetch(database_url, "SELECT millpy.replay_dead_letters(array_agg(dead_letter_id)) FROM millpy.dead_letters")
    async with working(database_url, feed, Limits()):
        await until(database_url, "SELECT count(*) FROM millpy.dead_letters WHERE state <> 'replayed'", 0)
        feed.end()
        await until(database_url, "SELECT sum(n)::int FROM flood.counts", 1_528)

    devices = "SELECT count(*)::int, sum(n) FILTER (WHERE device LIKE 'old%')::int FROM flood.counts"
    assert fetch(database_url, devices) == [(1_504, 28)]
    assert fetch(database_url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
