"""What users do to their result tables: triggers of every kind, rows of their own, tables altered and gone."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import Count, EventTime, File, FixedWindows, Graph, seconds
from millpy.errors import CommitUnknownError, PaneOrderError, PoisonError, ResultTableError
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.results import COPY_ROWS_MIN
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, panes

BAD, GOOD = "bad", "good"


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


WHEN = {
    "before": "CREATE TRIGGER mine BEFORE INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION public.mine()",
    "after": "CREATE TRIGGER mine AFTER INSERT OR UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION public.mine()",
    "deferred": "CREATE CONSTRAINT TRIGGER mine AFTER INSERT OR UPDATE ON {} DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION public.mine()",
}
BODIES = {
    "raises": "RAISE EXCEPTION 'no'",
    "own state": "RAISE EXCEPTION 'no' USING ERRCODE = 'ZZ123'",
    "as if it were a stale grant": "RAISE EXCEPTION 'no' USING ERRCODE = 'MW001', DETAIL = '1,2'",
    "as if it were a version": "RAISE EXCEPTION 'no' USING ERRCODE = 'MW002'",
    "as if it were our order": "RAISE EXCEPTION 'no' USING ERRCODE = 'MW004'",
    "as if the connection were lost": "RAISE EXCEPTION 'no' USING ERRCODE = '57P01'",
    "as if it were a conflict": "RAISE EXCEPTION 'no' USING ERRCODE = '40001'",
    "asserts": "ASSERT NEW.device <> 'bad', 'no'",
    "no data": "RAISE no_data_found",
    "names what is not there": "PERFORM count(*) FROM public.nowhere",
    "divides by zero": "PERFORM 1 / (length(NEW.device) - length(NEW.device))",
    "casts": "PERFORM 'x'::integer",
    "constraint": "INSERT INTO public.once VALUES (1), (1)",
    "feature": "RAISE feature_not_supported",
    "internal": "RAISE internal_error",
    "corrupted": "RAISE data_corrupted",
    "transaction of its own": "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "foreign key": "INSERT INTO public.child VALUES (7)",
}


def put_trigger(url: str, table: str, when: str, body: str) -> None:
    run(
        url,
        "CREATE TABLE IF NOT EXISTS public.once (n int PRIMARY KEY)",
        "CREATE TABLE IF NOT EXISTS public.child (n int REFERENCES public.once)",
        "CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.device = 'bad' THEN {body}; END IF; RETURN NEW; END $$",
        WHEN[when].format(table),
    )


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("body", BODIES)
async def test_any_error_of_a_users_trigger_dead_letters_its_row(
    owner: Owner, database_url: str, when: str, body: str
) -> None:
    put_trigger(database_url, "factory.sums_1m", when, BODIES[body])
    table = owner.deployment.table_ids["sums_1m"]
    interval = owner.deployment.intervals_of("sums")[0]
    many = [(f"d{n}", 1.0, 0) for n in range(COPY_ROWS_MIN)]

    for rows in ([(BAD, 1.0, 0)], [*many, (BAD, 1.0, 0)]):
        for trial in (True, False):
            checkpoint = owner.checkpoint(interval, results=[panes(table, *rows, first=True)])
            with pytest.raises(PoisonError):
                await owner.store.commit([checkpoint], graph_version=owner.deployment.version, trial=trial)
    with pytest.raises(PoisonError):
        await owner.commit(owner.checkpoint(interval, results=[panes(table, (BAD, 1.0, 1))]))
    await owner.commit(owner.checkpoint(interval, results=[panes(table, (GOOD, 1.0, 0), first=True)]))

    assert fetch(database_url, "SELECT device FROM factory.sums_1m") == [(GOOD,)]


@pytest.mark.parametrize("column", ["device", "pane_timing", "window_start"])
async def test_trigger_that_clears_a_required_column_rejects_its_row(
    owner: Owner, database_url: str, column: str
) -> None:
    put_trigger(database_url, "factory.sums_1m", "before", f"NEW.{column} := NULL")
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    many = [(f"d{n}", 1.0, 0) for n in range(COPY_ROWS_MIN)]

    for rows in ([(BAD, 1.0, 0)], [*many, (BAD, 1.0, 0)]):
        with pytest.raises(PoisonError):
            await owner.commit(owner.checkpoint(interval, results=[panes(table, *rows, first=True)]))


async def test_lost_connection_in_a_users_trigger_dead_letters_no_row(owner: Owner, database_url: str) -> None:
    put_trigger(database_url, "factory.sums_1m", "before", "PERFORM pg_terminate_backend(pg_backend_pid())")
    rows = panes(owner.deployment.table_ids["sums_1m"], (BAD, 1.0, 0), first=True)

    with pytest.raises(CommitUnknownError):
        await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], results=[rows]))


@pytest.mark.parametrize("event", ["INSERT", "UPDATE", "INSERT OR UPDATE"])
async def test_rows_that_a_trigger_filters_are_not_stored(owner: Owner, database_url: str, event: str) -> None:
    run(
        database_url,
        "CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.device = 'bad' AND NEW.total < 10 THEN RETURN NULL; END IF; RETURN NEW; END $$",
        f"CREATE TRIGGER mine BEFORE {event} ON factory.sums_1m FOR EACH ROW EXECUTE FUNCTION public.mine()",
    )
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]

    shown = []
    for index, total in enumerate((1.0, 2.0, 3.0, 20.0, 4.0, 30.0)):
        rows = panes(table, (BAD, total, index), (GOOD, total, index), first=index == 0)
        await owner.commit(owner.checkpoint(interval, results=[rows]))
        shown.append(dict(fetch(database_url, "SELECT device, total FROM factory.sums_1m")))

    assert [row[GOOD] for row in shown] == [1.0, 2.0, 3.0, 20.0, 4.0, 30.0]
    assert shown[-1][BAD] == 30.0
    assert shown[3][BAD] == shown[4][BAD] == 20.0


ROW = (
    "INSERT INTO factory.sums_1m (device, window_start, window_end, total, pane_index, pane_timing, late_count,"
    " interval_id, bundle) VALUES ('bad', 'epoch', timestamptz 'epoch' + interval '1 minute', 77, {}, 'on_time', 0,"
    " {}, {})"
)


@pytest.mark.parametrize("many", [False, True], ids=["insert", "copy"])
@pytest.mark.parametrize(("index", "place"), [(0, (0, 0)), (5, (1, 1)), (-1, (-1, 99)), (0, (10**9, 1))])
async def test_users_row_with_the_key_of_a_window_is_kept_and_the_pane_is_poison(
    owner: Owner, database_url: str, index: int, place: tuple[int, int], many: bool
) -> None:
    run(database_url, ROW.format(index, *place))
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    others = [(f"d{n}", 1.0, 0) for n in range(COPY_ROWS_MIN if many else 2)]

    with pytest.raises(PoisonError):
        await owner.commit(owner.checkpoint(interval, results=[panes(table, (BAD, 1.0, 0), *others, first=True)]))
    with pytest.raises(PoisonError):
        await owner.commit(owner.checkpoint(interval, results=[panes(table, (BAD, 1.0, index or 3), *others)]))

    assert fetch(database_url, "SELECT device, total FROM factory.sums_1m") == [(BAD, 77.0)]


async def test_pane_that_the_interval_itself_wrote_before_is_not_poison(owner: Owner) -> None:
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    await owner.commit(owner.checkpoint(interval, results=[panes(table, (BAD, 1.0, 0), first=True)]))

    for again in (panes(table, (BAD, 1.0, 0), first=True), panes(table, (BAD, 1.0, 0)), panes(table, (BAD, 1.0, 2))):
        with pytest.raises(PaneOrderError):
            await owner.commit(owner.checkpoint(interval, results=[again]))


ALTERED = {
    "dropped": "DROP TABLE factory.sums_1m CASCADE",
    "renamed": "ALTER TABLE factory.sums_1m RENAME TO other",
    "column dropped": "ALTER TABLE factory.sums_1m DROP COLUMN total CASCADE",
    "column renamed": "ALTER TABLE factory.sums_1m RENAME COLUMN label TO other",
    "key dropped": "ALTER TABLE factory.sums_1m DROP CONSTRAINT sums_1m_pkey",
    "schema renamed": "ALTER SCHEMA factory RENAME TO works",
    "given a rule": "CREATE RULE mine AS ON INSERT TO factory.sums_1m DO ALSO DELETE FROM factory.sums_1m WHERE false",
    "made a view": "ALTER TABLE factory.sums_1m RENAME TO t; CREATE VIEW factory.sums_1m AS SELECT 1 AS a",
    "another type": "DROP VIEW factory.sums_1m_status; ALTER TABLE factory.sums_1m ALTER total TYPE text[] USING '{}'",
    "published without identity": "ALTER TABLE factory.sums_1m REPLICA IDENTITY NOTHING;"
    " CREATE PUBLICATION p FOR ALL TABLES",
}


@pytest.mark.parametrize("before", [True, False], ids=["seen before", "first"])
@pytest.mark.parametrize("many", [False, True], ids=["insert", "copy"])
@pytest.mark.parametrize("altered", ALTERED)
async def test_altered_table_is_reported_and_waited_for(
    owner: Owner, database_url: str, altered: str, many: bool, before: bool
) -> None:
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    if before:
        await owner.commit(owner.checkpoint(interval, results=[panes(table, ("x", 1.0, 0), first=True)]))
        await owner.commit(owner.checkpoint(interval, results=[panes(table, ("x", 1.0, 1))]))
    run(database_url, ALTERED[altered])
    rows = [(f"d{n}", 1.0, 1) for n in range(COPY_ROWS_MIN if many else 2)]

    async def attempt() -> None:
        await owner.commit(owner.checkpoint(interval, results=[panes(table, *rows, first=many)]))

    if altered in ("key dropped", "published without identity", "given a rule") and many:
        await attempt()  # rows that are new only go in
        return
    for _ in range(3):  # a prepared statement may have to be prepared again first
        try:
            await attempt()
        except ResultTableError as error:
            assert "sums_1m" in error.message and error.hint
            return
        except Exception as error:
            assert "TransientError" in repr(type(error).__mro__), error
    pytest.fail("it is not said")


class Reading(msgspec.Struct):
    device: str
    at: datetime


def plant(path: Path) -> Graph:
    graph = Graph("plant")
    readings = graph.inject("readings", File(path), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1)))
    readings.key_by("device").window(FixedWindows(seconds(10)), name="windows").aggregate(n=Count()).to_table("counts")
    return graph


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("body", ["asserts", "own state", "names what is not there"])
async def test_worker_dead_letters_refused_rows_and_commits_the_rest(
    database_url: str, tmp_path: Path, when: str, body: str
) -> None:
    path = tmp_path / "readings.ndjson"
    moments = [datetime.fromtimestamp(1_700_000_000 + 10 * window, UTC).isoformat() for window in range(4)]
    devices = ["bad", *(f"d{n}" for n in range(20))]
    path.write_text("".join(json.dumps({"device": d, "at": m}) + "\n" for m in moments for d in devices))
    async with PostgresStore(database_url) as store:
        await store.deploy(plant(path).spec())
    put_trigger(database_url, "plant.counts", when, BODIES[body])

    async with asyncio.timeout(100):
        await run_worker(plant(path), database_url, limits=Limits(bundle_records_max=30))

    assert dict(fetch(database_url, "SELECT device, count(*)::int FROM plant.counts GROUP BY 1")) == {
        device: 4 for device in devices if device != "bad"
    }
    (dead_letters,) = fetch(database_url, "SELECT count(*) FROM millpy.dead_letters WHERE reason = 'refused'")[0]
    assert dead_letters > 0
    assert fetch(database_url, "SELECT count(*) FROM millpy.accounting WHERE NOT balanced") == [(0,)]
