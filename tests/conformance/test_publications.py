"""A database that publishes all of its tables (Debezium, a replica): workers go on, and a subscriber reads it all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
import psycopg
import pytest
from psycopg import sql

from millpy import (
    Computation,
    Context,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Max,
    SessionWindows,
    Value,
    seconds,
)
from millpy.embedded import EmbeddedPostgres
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph
from tests.databases import TEMPLATE, make_template

READINGS = 600
TABLES = """
    SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
     WHERE n.nspname IN ('mill', 'plant', 'factory') AND c.relkind = 'r' AND NOT c.relispartition ORDER BY 1, 2
"""


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: float


class Alert(msgspec.Struct):
    device: str
    value: float


class Spikes(Computation):
    highest = Value(float)

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value > (context[Spikes.highest] or 0):
            context[Spikes.highest] = record.value
            context.produce(Alert(record.device, record.value))


def plant(path: Path) -> Graph:
    """A result table of every kind: panes that replace each other, sessions that absorb others, records."""
    graph = Graph("plant")
    event_time = EventTime("at", max_disorder=seconds(5))
    readings = graph.inject("readings", File(path), schema=Reading, event_time=event_time)
    by_device = readings.key_by("device")
    fixed = by_device.window(FixedWindows(seconds(10)), allowed_lateness=seconds(60))
    fixed.aggregate(n=Count(), high=Max("value")).to_table("counts")
    sessions = by_device.window(SessionWindows(seconds(7)), name="sessions", allowed_lateness=seconds(60))
    sessions.aggregate(n=Count()).to_table("visits")
    by_device.process(Spikes(), name="spikes", output=Alert).to_table("alerts")
    return graph


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    path = tmp_path / "readings.ndjson"
    with path.open("w") as file:
        for n in range(READINGS):
            second = n - (30 if n % 50 == 7 else 0)  # some are late, and change panes that are out
            at = f"2026-11-21T08:{max(second, 0) // 60:02}:{max(second, 0) % 60:02}Z"
            file.write(f'{{"device": "d{n % 7}", "at": "{at}", "value": {n % 97}}}\n')
    return path


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(
        tmp_path_factory.mktemp("publisher"), tcp=True, settings={"max_replication_slots": "8"}
    ) as server:
        make_template(server)
        yield server
        server.kill()


def made(server: EmbeddedPostgres, name: str, template: str) -> str:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*map(sql.Identifier, (name, template))))
    return server.url(name)


def run(url: str, *statements: str) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            rows = cursor.fetchall() if cursor.description else []
    return rows


async def test_every_table_can_be_published_with_its_changes(database_url: str, feed: Path) -> None:
    async with PostgresStore(database_url) as store:
        await store.deploy(a_graph())
        await store.deploy(plant(feed).spec())

    unidentified = run(
        database_url,
        "SELECT c.oid::regclass::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname NOT IN ('pg_catalog', 'information_schema') AND c.relkind IN ('r', 'p') AND NOT ("
        " c.relreplident = 'f' OR c.relreplident IN ('d', 'i') AND EXISTS ("
        " SELECT FROM pg_index AS x WHERE x.indrelid = c.oid AND x.indisvalid"
        " AND (x.indisreplident OR c.relreplident = 'd' AND x.indisprimary)))",
    )

    assert unidentified == []


@pytest.mark.parametrize(
    ("does", "undoes"),
    [
        ("CREATE PUBLICATION part FOR TABLE mill.intervals WHERE (bundle > 5)", "DROP PUBLICATION part"),
        (
            "CREATE PUBLICATION part FOR TABLE mill.intervals; ALTER TABLE mill.intervals REPLICA IDENTITY NOTHING",
            "DROP PUBLICATION part",
        ),
    ],
    ids=["row filter", "no identity"],
)
async def test_publication_that_blocks_our_updates_is_reported_and_waited_for(
    database_url: str, feed: Path, caplog: pytest.LogCaptureFixture, does: str, undoes: str
) -> None:
    async with PostgresStore(database_url) as store:
        await store.deploy(plant(feed).spec())
    run(database_url, *does.split("; "))

    limits = Limits(lease_ttl_s=2, retry_s_max=0.5)
    working = asyncio.create_task(run_worker(plant(feed), database_url, limits=limits, patient=True))
    async with asyncio.timeout(60):
        while "replica identity" not in caplog.text:
            await asyncio.wait([working], timeout=0.05)
            assert not working.done(), working
        run(database_url, undoes)
        await working

    assert run(database_url, "SELECT sum(n) FROM plant.counts") == [(READINGS,)]


async def test_subscriber_of_all_tables_receives_what_the_workers_wrote(
    publisher: EmbeddedPostgres, feed: Path
) -> None:
    url = made(publisher, "published", TEMPLATE)
    async with PostgresStore(url) as store:
        await store.deploy(plant(feed).spec())
    copy = made(publisher, "copy", "published")
    run(
        url,
        "CREATE PUBLICATION everything FOR ALL TABLES",
        "SELECT pg_create_logical_replication_slot('everything', 'pgoutput')",
    )
    run(
        copy,
        f"CREATE SUBSCRIPTION everything CONNECTION '{publisher.tcp_url('published')}' PUBLICATION everything"
        " WITH (create_slot = false, copy_data = false, slot_name = 'everything')",
    )

    limits = Limits(fold_every_s=0.02, epoch_s=0.05, bundle_records_max=40, progress_every_s=0.01)
    await run_worker(plant(feed), url, limits=limits)
    async with PostgresStore(url) as store:
        for _ in range(3):
            await store.turn_rings(epoch_s=0.0, epoch_bytes=0)
    (lsn,) = run(url, "SELECT pg_current_wal_lsn()::text")[0]
    applied = f"SELECT coalesce(max(latest_end_lsn) >= '{lsn}', false) FROM pg_stat_subscription"
    while run(copy, applied) != [(True,)]:  # as long as the test may take
        run(url, "SELECT pg_logical_emit_message(true, 'go', 'on')")

    run(copy, "ALTER SUBSCRIPTION everything DISABLE", "ALTER SUBSCRIPTION everything SET (slot_name = NONE)")
    run(copy, "DROP SUBSCRIPTION everything")
    differing = [
        f"{schema}.{table}"
        for schema, table in run(url, TABLES)
        if contents(url, f"{schema}.{table}") != contents(copy, f"{schema}.{table}")
    ]
    counted = [run(copy, f"SELECT count(*) > 0 FROM plant.{table}")[0][0] for table in ("counts", "visits", "alerts")]
    folded = run(copy, "SELECT count(*) > 10 FROM mill.keyed")
    assert differing == []
    assert (counted, folded) == ([True] * 3, [(True,)])
    assert run(copy, "SELECT count(*) FROM mill.deltas") == run(url, "SELECT count(*) FROM mill.deltas")
    errors = run(copy, "SELECT coalesce(sum(apply_error_count), 0)::int FROM pg_stat_subscription_stats")
    assert errors == [(0,)]


def contents(url: str, table: str) -> list[tuple[object, ...]]:
    return run(url, f"SELECT t::text FROM {table} AS t ORDER BY 1")
