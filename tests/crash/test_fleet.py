"""The view of the fleet on PostgreSQL: what each device has sent, and what of it was dropped, late or dead-lettered."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from millpy.process.assembly import run_worker
from tests.crash.memory_world import LIMITS
from tests.crash.test_replay import Faults, a_graph, payload, world_now
from tests.feed import Feed


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


COUNTS = "SELECT device, records, duplicates, late, dead_letters FROM millpy.fleet ORDER BY device"


async def test_fleet_shows_the_outcome_for_each_device(database_url: str) -> None:
    Faults.decoding = Faults.computing = Faults.mapping = True
    feed, stop = Feed(batch_max=100), asyncio.Event()
    worker = asyncio.create_task(run_worker(a_graph(feed), database_url, limits=LIMITS, stop=stop))
    future = world_now() + 3_600_000_000
    feed.push(*(payload(n, at=5_000_000 + n) for n in range(200)), *(payload(n) for n in range(10)))
    feed.push(payload(1_001, at=0), payload(2_002, at=future), payload(3_003, kind="compute"), b"{")
    feed.push(payload(4_004, kind="decode"))
    feed.end()
    try:
        async with asyncio.timeout(60):
            await worker
    finally:
        stop.set()

    assert fetch(database_url, COUNTS) == [
        ("dev-0", 40, 2, 0, 0),
        ("dev-1", 41, 2, 2, 0),
        ("dev-2", 40, 2, 0, 1),
        ("dev-3", 41, 2, 2, 1),
        ("dev-4", 40, 2, 0, 0),
    ]
    (row,) = fetch(
        database_url,
        "SELECT last_event_time = 'epoch'::timestamptz + interval '5000199 microseconds', rate > 0,"
        " silent_for BETWEEN interval '0' AND interval '5 minutes', lag > interval '1 year', graph, stream"
        " FROM millpy.fleet WHERE device = 'dev-4'",
    )
    assert row == (True, True, True, True, "world", "readings")
    assert fetch(database_url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
    # What was replayed is in the results; a row that stands for no record is counted by that which does.
    first = "(SELECT min(late_record_id) FROM mill.late_records WHERE key LIKE '%dev-{}%')"
    with psycopg.connect(database_url, autocommit=True) as connection:
        for change in (
            f"UPDATE mill.late_records SET state = 'replayed' WHERE late_record_id = {first.format(1)}",
            f"UPDATE mill.late_records SET whole = false WHERE late_record_id = {first.format(3)}",
            "UPDATE mill.dead_letters SET state = 'replayed' WHERE key LIKE '%dev-3%'",
        ):
            assert connection.execute(change.encode()).rowcount == 1
    assert fetch(database_url, COUNTS)[1::2] == [("dev-1", 41, 2, 1, 0), ("dev-3", 41, 2, 1, 0)]
