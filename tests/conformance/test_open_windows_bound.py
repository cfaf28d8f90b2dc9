"""A worker whose windows have no more room: the rest is dead-lettered, counted over takeovers, and can be replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from typing import LiteralString

import msgspec
import psycopg
import pytest

from millpy import Count, EventTime, FixedWindows, Graph, Last, SessionWindows, minutes, seconds
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.arrays import Bigints, Texts, register_arrays
from millpy.store.postgres.statements import statement
from millpy.windowing.unfired_sessions import UnfiredSessions
from tests.conformance.test_users_tables import fetch
from tests.feed import Feed

FULL = Limits(open_windows_bytes_max=4 * 80_000)
"""70 new keys an interval, or a little more."""


class Reading(msgspec.Struct):
    device: str
    at: datetime


def visits(feed: Feed) -> Graph:
    graph = Graph("flood")
    readings = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=minutes(3)))
    readings.key_by("device").window(SessionWindows(minutes(1)), name="counted").aggregate(n=Count()).to_table("counts")
    return graph


def a_graph(feed: Feed) -> Graph:
    graph = Graph("flood")
    readings = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(10)))
    windows = readings.key_by("device").window(FixedWindows(minutes(1)), name="counted")
    windows.aggregate(n=Count(), last=Last("device")).to_table("counts")  # text keeps them in memory until they fire
    return graph


def readings(name: str, count: int, at: str = "2026-01-01T00:00:00Z") -> list[bytes]:
    return [json.dumps({"device": f"{name}{n}", "at": at}).encode() for n in range(count)]


@asynccontextmanager
async def working(
    url: str, feed: Feed, limits: Limits, graph: Callable[[Feed], Graph] = a_graph
) -> AsyncIterator[None]:
    """Run a worker that takes over from the one before."""
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph(feed), url, limits=limits, stop=stop))
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


async def test_sessions_beyond_the_bound_leave_memory_and_count_every_record(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2,000 open sessions, memory has room for 200; their devices come again after a takeover, and they merge."""
    in_memory: list[int] = []
    spill, bytes_max = UnfiredSessions.spill, FULL.unfired_bytes_max // 4

    def watched(self: UnfiredSessions, folded_bundle: int) -> None:
        spill(self, folded_bundle)
        in_memory.append(self._sessions.weights.total - self.bytes_in_memory)

    monkeypatch.setattr(UnfiredSessions, "spill", watched)
    feed = Feed()
    async with working(database_url, feed, FULL, visits):
        for part in range(20):
            feed.push(*readings(f"part{part}-", 100))
            await until(database_url, JUDGED, 100 * (part + 1))
        feed.push(*readings("part0-", 100, at="2026-01-01T00:01:30Z"))  # a second session
        await until(database_url, JUDGED, 2_100)
        assert max(in_memory) <= 3 * bytes_max // 2 + 40_000  # input waits there, and a part is some 25 sessions
        assert fetch(database_url, "SELECT count(*)::int FROM millpy.windows") == [(2_100,)]
        assert fetch(database_url, "SELECT count(*) FROM flood.counts") == [(0,)]
    async with working(database_url, feed, FULL, visits):
        feed.push(*readings("part1-", 50, at="2026-01-01T00:00:30Z"))
        feed.push(*readings("part0-", 50, at="2026-01-01T00:00:45Z"))  # it joins both
        await until(database_url, JUDGED, 2_200)
        feed.push(*readings("last", 1, at="2026-01-01T00:05:10Z"))
        await until(database_url, "SELECT count(*)::int FROM flood.counts", 2_000 - 50)
        await until(database_url, "SELECT count(*)::int FROM millpy.windows", 101)
        feed.end()
        await until(database_url, "SELECT count(*)::int FROM flood.counts", 2_051)

    found = fetch(database_url, "SELECT n::int, count(*)::int FROM flood.counts GROUP BY 1 ORDER BY 1")
    assert found == [(1, 1_951), (2, 50), (3, 50)]
    assert fetch(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]
    assert fetch(database_url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
    assert fetch(database_url, "SELECT count(*) FROM mill.keyed WHERE kind = 'window'") == [(0,)]


async def test_sessions_of_new_keys_are_read_by_index_though_most_rows_are_of_another_key(database_url: str) -> None:
    """The planner must not read the whole table for each key when it knows nothing of the new ones yet."""
    asked = {"interval": 1, "others_max": 4, "keys": Texts([b'"new"']), "lows": Bigints([1]), "highs": Bigints([2])}
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        register_arrays(connection)
        await connection.execute(
            "INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)"
            " SELECT 1, 'window', '', '\"old\"', format('%s/%s', n, n + 1), 1, n + 1, 1, '{}'"
            " FROM generate_series(1, 20000) AS n"
        )
        await connection.execute("ANALYZE mill.keyed")
        found = await connection.execute(b"EXPLAIN " + statement("load_sessions"), asked)
        plan = [line async for (line,) in found]
    assert any("Index Scan using keyed_identity" in line for line in plan), plan


@pytest.mark.parametrize(("name", "index"), [("delete_windows", "keyed_windows"), ("load_windows", "keyed_identity")])
async def test_windows_are_found_by_index_before_the_table_has_statistics(
    database_url: str, name: str, index: str
) -> None:
    asked = {"interval": 1, "sequencer": 1, "rows_max": 10, "subkeys": Texts(["0/60", "60/120"])}
    asked |= {"keys": Texts(['"key"', '"key"']), "bytes_max": 1_000}
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        register_arrays(connection)
        await connection.execute("ALTER TABLE mill.keyed SET (autovacuum_enabled = off)")
        await connection.execute(
            "INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)"
            " SELECT 1, 'window', '', '\"key\"', format('%s/%s', n, n + 60), 1, n, 1, '{}'"
            " FROM generate_series(1, 2000) AS n"
        )
        found = await connection.execute(b"EXPLAIN " + statement(name), asked)
        plan = [line async for (line,) in found]
    assert any(f"Index Scan using {index}" in line for line in plan), plan
