"""Dead letters and late records are bounded: the first of each cause are kept, all are counted, old ones expire."""

from __future__ import annotations

import asyncio
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import psycopg
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.graph import Graph
from millpy.hosting.failpoints import NoFailpoints
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.model.time import Instant, minutes, seconds
from millpy.process.assembly import deploy, run_worker
from millpy.runtime.guarded_clock import GuardedClock
from millpy.runtime.maintenance import Maintenance
from millpy.store.postgres.store import PostgresStore
from millpy.testing.clock import ManualClock
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.window import FixedWindows
from tests.conformance.store_builders import Owner
from tests.feed import Feed

KEPT = 50
LIMITS = Limits(dead_letter_records_max=KEPT, dead_letter_bytes_max=1_000_000, record_bytes_max=2_000)
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


async def test_first_dead_letters_of_each_cause_are_kept_and_all_are_counted(database_url: str) -> None:
    good = [b'{"device":"a","at":"2026-01-01T01:00:00Z"}']
    await run(database_url, [*good, *LATE, *(payload for payloads in SENT.values() for payload in payloads)])

    seen = fetch(
        database_url, "SELECT table_name, reason, seen, kept, not_kept, expired FROM millpy.retention ORDER BY 1, 2"
    )
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
    told = CliRunner().invoke(app, ["dead-letters", "list", "--database", database_url, "--reason", "undecodable"])
    assert "and 4,950 more of flood.readings (undecodable) that are counted, but not stored" in told.stdout
    assert "(future)" not in told.stdout
    told = CliRunner().invoke(app, ["doctor", "--database", database_url])
    assert "flood.readings: 143 in the last hour, and 5,200 more are counted, but not stored" in " ".join(
        told.stdout.split()
    )
    ((longest,),) = fetch(database_url, "SELECT max(length(payload)) FROM mill.dead_letters")
    assert longest == LIMITS.record_bytes_max + 1


async def test_old_dead_letters_are_removed_in_pieces_and_counted_except_requested_ones(
    database_url: str,
) -> None:
    await run(database_url, [*SENT["undecodable"], *SENT["future"]])
    ((before,),) = fetch(database_url, "SELECT count(*) FROM mill.events")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("UPDATE mill.dead_letters SET dead_lettered_at = now() - interval '2 days'")
        connection.execute("UPDATE mill.events SET at = now() - interval '2 days'")
        (first,) = connection.execute("SELECT min(dead_letter_id) FROM mill.dead_letters").fetchone() or (0,)
        connection.execute("SELECT millpy.replay_dead_letters(ARRAY[%s])", [first])
    old = {"dead_letter_kept_s": 86_400.0, "settled_kept_s": 86_400.0, "events_kept_s": 86_400.0}

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
        database_url, "SELECT reason, expired FROM millpy.retention WHERE table_name = 'dead_letters' ORDER BY reason"
    )
    assert expired == [("future", KEPT), ("undecodable", KEPT - 1)]
    assert fetch(database_url, "SELECT sum(expired)::int FROM millpy.retention WHERE table_name = 'events'") == [
        (before,)
    ]


async def test_rows_go_by_their_state_and_only_those_that_were_open_for_too_long_count(
    owner: Owner, database_url: str
) -> None:
    """A row is (id, days since it was recorded, state, days since then): kept for 10 days, if it is settled for 2."""
    rows = [(1, 5, "open", 3), (2, 5, "requested", 3), (3, 5, "replayed", 3), (4, 5, "discarded", 3)]
    rows += [(5, 5, "replayed", 1), (6, 11, "open", 11), (7, 11, "requested", 3), (8, 11, "replayed", 1)]
    rows += [(9, 11, "replayed", 3)]
    starts = list(range(9))
    late = LateRows("readings", "sums", [b'"a"'] * 9, [b"{}"] * 9, starts, starts, starts, starts)  # type: ignore[arg-type]
    letters = [DeadLetter("refused", "no", b"{}", "readings", "sums")] * 9
    step = owner.deployment.intervals_of("sums")[0]
    await owner.commit(owner.checkpoint(step, late=[late], dead_letters=letters))
    with psycopg.connect(database_url, autocommit=True) as connection:
        for number, days, state, since in rows:
            for table, at in (("dead_letter", "dead_lettered_at"), ("late_record", "recorded_at")):
                change = (
                    f"UPDATE mill.{table}s SET {at} = now() - make_interval(days => %s), state = %s,"
                    f" state_at = now() - make_interval(days => %s) WHERE {table}_id = %s"
                )
                connection.execute(change, [days, state, since, number])  # type: ignore[call-overload]

    day = 86_400.0
    while await owner.store.forget_old(
        now_us=await owner.store.now_us(), dead_letter_kept_s=10 * day, settled_kept_s=2 * day, events_kept_s=10 * day
    ):
        pass

    for table in ("dead_letter", "late_record"):
        assert fetch(database_url, f"SELECT {table}_id FROM mill.{table}s ORDER BY 1") == [(1,), (2,), (5,), (7,)]
    counted = "SELECT table_name, count FROM mill.expired WHERE table_name <> 'events' ORDER BY 1"
    assert fetch(database_url, counted) == [("dead_letters", 3), ("late_records", 3)]


async def test_clock_that_jumps_ahead_removes_no_dead_letters(database_url: str) -> None:
    await run(database_url, SENT["few"])
    year_us = 365 * 86_400_000_000
    with psycopg.connect(database_url, autocommit=True) as connection:  # of before the clock has jumped
        connection.execute(
            "UPDATE mill.dead_letters SET dead_lettered_at = now() - interval '365 days', state_at = now()"
        )
        connection.execute("UPDATE mill.events SET at = now() - interval '365 days'")
    counts = "SELECT (SELECT count(*) FROM mill.dead_letters), (SELECT count(*) FROM mill.events)"
    before = fetch(database_url, counts)

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
        context: Any = SimpleNamespace(store=store, plan=(), limits=LIMITS, clock=clock, failpoints=NoFailpoints())
        await Maintenance(context, nobody, nobody).turn_rings()

    assert before[0][0] and before[0][1]
    assert fetch(database_url, counts) == before


DISK = "pg_total_relation_size('mill.dead_letters')"


async def test_a_flood_of_small_dead_letters_writes_little_more_than_it_received(database_url: str) -> None:
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
