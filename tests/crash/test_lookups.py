"""Lookups of a real worker in real tables: what is read, what an operator sees, and what a changed table does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from millpy import EventTime, Graph, milliseconds, seconds
from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.clock import SystemClock, random_id
from millpy.errors import TableLoadError
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.alarms import Alarms, Alert
from tests.crash.cases.lookups import GRAPH, LOOKUPS
from tests.crash.graph_files import rows
from tests.crash.harness import Worker
from tests.crash.lookups import changing, lookup_faults, write
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=2, lookup_rows_max=100, statement_s=1)
TABLE = """
CREATE SCHEMA registry;
CREATE TABLE registry.devices (
    name text PRIMARY KEY, site text, rating numeric, mounted timestamptz, tags jsonb, raw json, pin bytea, id uuid);
INSERT INTO registry.devices VALUES
    ('a', E'no"r\\\\t\\nh', 1.5, '2026-11-20 12:00+00', '["x"]', E'{"k":\\n 1}', '\\x00ff', gen_random_uuid()),
    ('ü', 'south', NULL, NULL, NULL, NULL, NULL, NULL);
CREATE TABLE public.rules (name text, above double precision);
INSERT INTO public.rules VALUES ('hot', 5);
"""


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class Device(msgspec.Struct):
    name: str
    site: str
    rating: float | None
    tags: list[str] | None
    raw: dict[str, int] | None
    pin: bytes | None


def graph_of(feed: Feed) -> Graph:
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    readings = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    known = readings.lookup(
        "registry.devices", Device, key="device", table_key="name", refresh=milliseconds(100), name="known"
    )
    known.to_table("known")
    strict = known.filter(lambda record: record.device == "later")
    how: dict[str, Any] = {"key": "device", "table_key": "name", "refresh": milliseconds(100)}
    strict.lookup("registry.devices", Device, **how, missing="dead_letter").to_table("strict")
    readings.key_by("device").process(Alarms(), name="alarms", output=Alert).to_table("alarms")
    return graph


def execute(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for text in statements:
            connection.execute(text)


@asynccontextmanager
async def working(url: str, feed: Feed) -> AsyncIterator[None]:
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph_of(feed), url, limits=LIMITS, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await worker


async def findings(url: str) -> list[Finding]:
    facts = await asyncio.to_thread(read_facts, url, SystemClock())
    return [finding for finding in examine(facts, LIMITS) if finding.check == "lookup"]


async def until(url: str, query: str, expected: Any) -> None:
    found: Any = None
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    found = await asyncio.to_thread(rows, url, query)
                except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
                    found = error
                if found == expected:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(found) from None


def reading(device: str, value: float = 0.0) -> bytes:
    return msgspec.json.encode(Reading(device, 1_000, value))


KNOWN = "SELECT device, site, rating, tags, raw, pin FROM plant.known ORDER BY device"


async def test_rows_of_all_types_are_read_and_a_change_counts_without_a_deployment(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, feed):
        feed.push(reading("a"), reading("x", 9.0), reading("ü"))
        a, x = ("a", 'no"r\\t\nh', 1.5, ["x"], {"k": 1}, b"\x00\xff"), ("x", *[None] * 5)
        await until(database_url, KNOWN, [a, x, ("ü", "south", *[None] * 4)])
        await until(database_url, "SELECT device, rule FROM plant.alarms", [("x", "hot")])
        execute(
            database_url, "INSERT INTO public.rules VALUES ('hotter', 8)", "UPDATE registry.devices SET site = 'west'"
        )
        await until(database_url, "SELECT rows FROM millpy.lookups WHERE table_name = 'public.rules'", [(2,)])
        feed.push(reading("y", 9.0))
        await until(
            database_url, "SELECT rule FROM plant.alarms WHERE device = 'y' ORDER BY rule", [("hot",), ("hotter",)]
        )
        await until(
            database_url,
            "SELECT min(length(version)), sum(unmatched) FROM millpy.lookup_versions WHERE computation = 'known'",
            [(32, 2)],
        )
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


EXPLAINED = """
SELECT held_by, detail LIKE 'table registry.devices was not read yet: %does not exist'
  FROM millpy.explain_watermark('plant', 'known') ORDER BY step DESC LIMIT 1
"""
WAITING = "SELECT version, rows, error FROM millpy.lookups WHERE table_name = 'registry.devices'"


async def test_a_dead_letter_without_a_row_is_replayed_when_the_row_is_there(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, feed):
        feed.push(reading("later"), reading("a"))
        letters = "SELECT reason, key, state, attempts FROM millpy.dead_letters"
        await until(database_url, letters, [("no_row", '"later"', "open", 0)])
        replay = "SELECT millpy.replay_dead_letters(array_agg(dead_letter_id)) FROM millpy.dead_letters"
        execute(database_url, replay)
        await until(database_url, letters, [("no_row", '"later"', "open", 1)])
        assert [row["count"] for row in read_facts(database_url, SystemClock()).dead_letters] == [1]

        execute(database_url, "INSERT INTO registry.devices (name, site) VALUES ('later', 'east')")
        await until(database_url, WAITING.replace("version, ", ""), [(3, "")])
        execute(database_url, replay)

        await until(database_url, "SELECT device, site_table FROM plant.strict", [("later", "east")])
        await until(database_url, letters, [("no_row", '"later"', "replayed", 1)])
        assert read_facts(database_url, SystemClock()).dead_letters == []
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


async def test_records_wait_for_a_table_that_does_not_exist_yet(database_url: str) -> None:
    feed = Feed()
    async with working(database_url, feed):
        feed.push(reading("a"))
        query = "SELECT version, error LIKE '%does not exist' FROM millpy.lookups ORDER BY table_name"
        await until(database_url, query, [(None, True), (None, True)])
        await until(database_url, "SELECT sum(records) FROM millpy.backlog", [(2,)])
        await until(database_url, EXPLAINED, [("lookup", True)])
        assert {found.severity for found in await findings(database_url)} == {Severity.ERROR}

        execute(database_url, TABLE)

        await until(database_url, "SELECT device, site FROM plant.known", [("a", 'no"r\\t\nh')])
        kinds = "SELECT DISTINCT kind FROM millpy.events WHERE kind LIKE 'lookup%' ORDER BY kind"
        await until(database_url, kinds, [("lookup_failed",), ("lookup_restored",)])


TROUBLES = {
    "dropped": ("DROP TABLE registry.devices", "does not exist"),
    "renamed": ("ALTER TABLE registry.devices RENAME TO tools", "does not exist"),
    "a column is gone": ("ALTER TABLE registry.devices DROP COLUMN site", "does not exist"),
    "too large": (
        "INSERT INTO registry.devices SELECT i::text, 's' FROM generate_series(1, 200) AS i",
        "more than 100",
    ),
    "a key twice": (
        "ALTER TABLE registry.devices DROP CONSTRAINT devices_pkey; INSERT INTO registry.devices VALUES ('a', 's')",
        "has 2 rows with the key 'a'",
    ),
    "another type": ("ALTER TABLE registry.devices ALTER COLUMN site TYPE int USING 1", ""),
    "slow": (
        "ALTER TABLE registry.devices RENAME TO tools; CREATE VIEW registry.devices AS"
        " SELECT t.* FROM registry.tools AS t, pg_sleep(30)",
        "statement timeout",
    ),
}


async def test_a_table_in_trouble_keeps_its_version_and_says_so(database_url: str) -> None:
    """All troubles one after the other, in one worker: turns go on meanwhile."""
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, feed):
        await until(database_url, WAITING.replace("version, ", ""), [(2, "")])
        assert {found.severity for found in await findings(database_url)} == {Severity.OK}
        for number, (what, (statement, error)) in enumerate(TROUBLES.items()):
            execute(database_url, statement)
            if error:
                query = f"SELECT rows, error LIKE '%{error.replace(chr(39), chr(39) * 2)}%' FROM millpy.lookups"
                await until(database_url, f"{query} WHERE table_name = 'registry.devices'", [(2, True)])
            else:  # all rows do not fit
                query = "SELECT rows, misfits, misfit LIKE '%site%', error FROM millpy.lookups"
                await until(database_url, f"{query} WHERE table_name = 'registry.devices'", [(0, 2, True, "")])
            feed.push(reading(f"{number}", 9.0), reading("a"))
            await until(database_url, "SELECT count(*) FROM plant.known", [(2 * number + 2,)])
            site = None if what == "another type" else 'no"r\\t\nh'
            newest = "SELECT site FROM plant.known WHERE device = 'a' ORDER BY bundle DESC LIMIT 1"
            assert rows(database_url, newest) == [(site,)], what
            assert Severity.WARNING in {found.severity for found in await findings(database_url)}, what
            execute(database_url, "DROP SCHEMA registry CASCADE", "DROP TABLE public.rules", TABLE)
            await until(database_url, WAITING.replace("version, ", ""), [(2, "")])


async def test_a_lock_on_the_table_stops_no_turn(database_url: str) -> None:
    execute(database_url, TABLE)
    feed = Feed()
    async with working(database_url, feed):
        await until(database_url, WAITING.replace("version, ", ""), [(2, "")])
        with psycopg.connect(database_url) as holder:
            holder.execute("LOCK TABLE registry.devices IN ACCESS EXCLUSIVE MODE")
            for number in range(20):
                feed.push(reading(f"{number}"))
                await until(database_url, "SELECT count(*) FROM plant.known", [(number + 1,)])
            await until(
                database_url, f"{WAITING} AND error LIKE '%timeout%'".replace("version, rows, error", "rows"), [(2,)]
            )


async def test_a_table_and_its_columns_may_have_any_name(database_url: str) -> None:
    name = 'odd "Nämé"'
    quoted = name.replace('"', '""')
    execute(database_url, f"CREATE TABLE public.\"{quoted}\" AS SELECT 'a' AS device, 's' AS r")

    class Plain(msgspec.Struct):
        device: str
        r: str

    feed, graph, stop = Feed(), Graph("plant"), asyncio.Event()
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    readings = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    readings.lookup(name, Plain, key="device", refresh=seconds(1)).to_table("known")
    worker = asyncio.create_task(run_worker(graph, database_url, limits=LIMITS, stop=stop))
    feed.push(reading("a"))

    await until(database_url, "SELECT device, r FROM plant.known", [("a", "s")])

    stop.set()
    await worker


def test_killed_workers_see_one_version_in_each_commit(tmp_path: Path, database_url: str) -> None:
    """Real processes: one is killed, while the rows of the table change all the time."""
    source = tmp_path / "readings.ndjson"
    drawn = write(source, 5, 600)
    settings: dict[str, Any] = {"graph": GRAPH, "bundle_records_max": 7}
    with changing(database_url):
        with Worker(tmp_path, database_url, source, only="readings", **settings) as other:
            with Worker(
                tmp_path, database_url, source, failpoint="after_fence:20:kill", only=LOOKUPS, **settings
            ) as one:
                one.await_killed()
            other.kill()
        with Worker(tmp_path, database_url, source, **settings) as last:
            last.await_finished()

    assert lookup_faults(database_url, drawn) == []
    assert rows(database_url, "SELECT count(DISTINCT generation) > 3 FROM plant.known") == [(True,)]


async def test_a_role_without_rights_is_told_to_get_them(database_url: str) -> None:
    role = f"poor_{random_id().hex}"
    execute(database_url, TABLE, f"CREATE ROLE {role} LOGIN")
    store = PostgresStore(make_conninfo(database_url, user=role))
    try:
        with pytest.raises(TableLoadError, match="permission denied") as refused:
            await store.read_lookup_table(Alarms.rules, rows_max=10, bytes_max=1_000)
        assert "GRANT SELECT" in refused.value.hint
        execute(database_url, f"GRANT SELECT ON public.rules TO {role}")
        assert (await store.read_lookup_table(Alarms.rules, rows_max=10, bytes_max=1_000)).rows == 1
        too_long = await store.read_lookup_table(Alarms.rules, rows_max=10, bytes_max=5)
        assert (too_long.rows, too_long.text) == (1, b"")
    finally:
        await store.close()
        execute(database_url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")
