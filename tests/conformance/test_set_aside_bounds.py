"""What is set aside is bounded: of each cause the first are kept, all are counted, and what is old is removed."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec
import psycopg

from millpy.assembly import deploy, run_worker
from millpy.graph import Graph
from millpy.injectors.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import Instant, minutes, seconds
from millpy.runtime.guarded_clock import GuardedClock
from millpy.runtime.housekeeping import Housekeeping
from millpy.runtime.probe import NoProbe
from millpy.store.postgres.store import PostgresStore
from millpy.testing.clock import ManualClock
from millpy.windowing.aggregate import Count
from millpy.windowing.window import FixedWindows
from tests.feed import Feed

KEPT = 50
LIMITS = Limits(set_aside_records_max=KEPT, set_aside_bytes_max=1_000_000, record_bytes_max=2_000)
SENT = {
    "undecodable": [b"x"] * 5_000,
    "oversize": [b'{"at":"' + b"x" * 100_000 + b'"}'] * 40,
    "future": [b'{"device":"a","at":"2999-01-01T00:00:00Z"}'] * 300,
    "few": [b'{"device":"a\\u0000","at":"2026-01-01T00:00:00Z"}'] * 3,
}
LATE = [b'{"device":"a","at":"2026-01-01T00:00:00Z"}'] * 400


class Reading(msgspec.Struct):
    device: str
    at: datetime


def a_graph(feed: Feed) -> Graph:
    graph = Graph("flood")
    (
        graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", max_disorder=seconds(0)))
        .key_by("device")
        .window(FixedWindows(minutes(1)))
        .aggregate(n=Count())
        .to_table("counted")
    )
    return graph


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


async def run(url: str, payloads: list[bytes]) -> None:
    feed = Feed()
    feed.push(*payloads)
    feed.end()
    await run_worker(a_graph(feed), url, limits=LIMITS)


async def test_of_each_cause_the_first_are_kept_and_all_are_counted(database_url: str) -> None:
    good = [b'{"device":"a","at":"2026-01-01T01:00:00Z"}']
    await run(database_url, [*good, *LATE, *(payload for payloads in SENT.values() for payload in payloads)])

    seen = fetch(database_url, "SELECT pile, reason, seen, kept, not_kept, expired FROM millpy.set_aside ORDER BY 1, 2")
    assert seen == [
        ("dead_letters", "future", 300, KEPT, 250, 0),
        ("dead_letters", "oversize", 40, 40, 0, 0),
        ("dead_letters", "refused", 3, 3, 0, 0),
        ("dead_letters", "undecodable", 5_000, KEPT, 4_950, 0),
        ("late_records", "late", 400, KEPT, 350, 0),
    ]
    stored = fetch(database_url, "SELECT reason, count(*) FROM mill.dead_letters GROUP BY 1 ORDER BY 1")
    assert stored == [("future", KEPT), ("oversize", 40), ("refused", 3), ("undecodable", KEPT)]
    assert fetch(database_url, "SELECT count(*) FROM mill.late_records") == [(KEPT,)]
    ((injected, dead_lettered),) = fetch(
        database_url, "SELECT injected, dead_lettered FROM millpy.accounting WHERE source_partition IS NOT NULL"
    )
    assert (injected, dead_lettered) == (5_744, 5_343)
    assert fetch(database_url, "SELECT late, balanced FROM millpy.accounting WHERE consumer = 'counted'") == [
        (400, True)
    ]
    assert fetch(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    ((longest,),) = fetch(database_url, "SELECT max(length(payload)) FROM mill.dead_letters")
    assert longest == LIMITS.record_bytes_max + 1


async def test_what_is_old_is_removed_in_pieces_and_counted_but_not_what_people_have_asked_for(
    database_url: str,
) -> None:
    await run(database_url, [*SENT["undecodable"], *SENT["future"]])
    ((before,),) = fetch(database_url, "SELECT count(*) FROM mill.events")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.dead_letters SET dead_lettered_at = now() - interval '2 days'")
        connection.execute("UPDATE mill.events SET at = now() - interval '2 days'")
        (first,) = connection.execute("SELECT min(dead_letter_id) FROM mill.dead_letters").fetchone() or (0,)
        connection.execute("SELECT millpy.replay_dead_letters(ARRAY[%s])", [first])
    old = {"set_aside_kept_s": 86_400.0, "settled_kept_s": 86_400.0, "events_kept_s": 86_400.0}

    async with PostgresStore(database_url) as store:
        now = await store.now_us()
        kept = await store.forget_old(now_us=now, **{name: 30 * 86_400.0 for name in old})
        assert kept == 0
        removed = 0
        async with asyncio.timeout(60):
            while gone := await store.forget_old(now_us=now, **old):
                removed += gone

    assert removed == 2 * KEPT - 1 + before
    assert fetch(database_url, "SELECT state FROM mill.dead_letters") == [("requested",)]
    expired = fetch(
        database_url, "SELECT reason, expired FROM millpy.set_aside WHERE pile = 'dead_letters' ORDER BY reason"
    )
    assert expired == [("future", KEPT), ("undecodable", KEPT - 1)]
    assert fetch(database_url, "SELECT sum(expired)::int FROM millpy.set_aside WHERE pile = 'events'") == [(before,)]


async def test_database_whose_clock_jumps_ahead_loses_nothing_that_was_set_aside(database_url: str) -> None:
    await run(database_url, SENT["few"])
    year_us = 365 * 86_400_000_000
    with psycopg.connect(database_url, autocommit=True) as connection:  # of before the clock has jumped
        connection.execute(
            "UPDATE mill.dead_letters SET dead_lettered_at = now() - interval '365 days', state_at = now()"
        )
        connection.execute("UPDATE mill.events SET at = now() - interval '365 days'")
    piles = "SELECT (SELECT count(*) FROM mill.dead_letters), (SELECT count(*) FROM mill.events)"
    before = fetch(database_url, piles)

    async with PostgresStore(database_url) as store:
        jumps = [-year_us, 0]
        host = ManualClock(await store.now_us() - year_us)

        async def server_now() -> Instant:
            return Instant(await store.now_us() + jumps[0])

        clock = GuardedClock(host, server_now, LIMITS, lambda kind, detail: None)
        await clock.synchronize()
        del jumps[0]
        host.advance(60.0)
        await clock.synchronize()
        nobody: Any = None
        await Housekeeping(store, nobody, nobody, LIMITS, clock, NoProbe(), nobody).turn_rings()

    assert before[0][0] and before[0][1]
    assert fetch(database_url, piles) == before


DISK = "pg_total_relation_size('mill.dead_letters')"


async def test_a_flood_of_small_dead_letters_writes_little_more_than_was_sent(database_url: str) -> None:
    # Unbounded, each of them was a row: 86 bytes on disk and 108 of WAL for each byte.
    payloads = [b"not json"] * 100_000
    feed = Feed()
    await deploy(a_graph(feed), database_url)
    feed.push(*payloads)
    feed.end()
    before, empty = fetch(database_url, f"SELECT pg_current_wal_lsn(), {DISK}")[0]
    await run_worker(a_graph(feed), database_url)

    wal, disk = fetch(database_url, f"SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '{before}'), {DISK} - {empty}")[0]
    sent = sum(map(len, payloads))
    print(f"dead letters: {disk / sent:.2f} bytes on disk and {wal / sent:.2f} of WAL for each byte that was sent")
    assert disk < 5 * sent
    assert wal < 10 * sent
