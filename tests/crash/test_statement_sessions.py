"""The session of the commit after statements of `to_sql`, and triggers of result tables, that change it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millpy import Count, FixedWindows, Graph, seconds
from millpy.process.assembly import deploy
from millpy.store.postgres.statement_runs import StatementRunner
from tests.crash.graph_files import rows
from tests.crash.test_lookups import execute, until
from tests.crash.test_sinks import LIMITS, reading, readings, statement_graph, until_true, working
from tests.feed import Feed

SCHEMA = """
CREATE SCHEMA app;
CREATE TABLE app.log (
    number bigint GENERATED ALWAYS AS IDENTITY, device text CHECK (device <> 'refused'), role text, path text, zone text
);
CREATE FUNCTION app.log(device text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.log (device, role, path, zone)
    VALUES (device, current_user, current_setting('search_path'), current_setting('timezone'));
    IF device <> 'plain' THEN {change}; END IF;
    IF device = 'fails' THEN RAISE 'as it was told'; END IF;
END$$;
CREATE PROCEDURE app.log_by_procedure(device text) LANGUAGE plpgsql AS $$BEGIN PERFORM app.log(device); END$$;
CREATE TABLE app.triggering (device text);
CREATE FUNCTION app.changes() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN PERFORM app.log(NEW.device); RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER changes AFTER INSERT ON app.triggering DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW EXECUTE FUNCTION app.changes();
"""
CHANGES = {
    "role": "SET ROLE {role}",
    "session": "SET SESSION AUTHORIZATION {role}",
    "settings": "SET statement_timeout = 1; SET search_path = app; PERFORM set_config('timezone', 'Asia/Tokyo', false)",
    "all": "SET statement_timeout = 1; SET search_path = app; SET timezone = 'Asia/Tokyo'; SET work_mem = '64kB';"
    " SET default_transaction_read_only = on; SET session_replication_role = replica; SET ROLE {role}",
}
"""What the function does, without a right in its way: the workers of these tests are superusers."""
FUNCTION = "SELECT app.log(%(device)s)"
CALLS = {
    "function": FUNCTION,
    "procedure": "CALL app.log_by_procedure(%(device)s)",
    "deferred trigger": "INSERT INTO app.triggering VALUES (%(device)s)",
}


def prepare(url: str, change: str) -> str:
    """Create what the statements use; return a role that may use nothing of it."""
    ((database,),) = rows(url, "SELECT current_database()::text")
    role = f"powerless_{database}"
    execute(url, f"CREATE ROLE {role}")
    execute(url, SCHEMA.format(change=CHANGES[change].format(role=role)))
    return role


def logged(url: str) -> list[Any]:
    return rows(url, "SELECT DISTINCT role, path, zone FROM app.log")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", CALLS)
async def test_statements_that_change_role_and_settings_leave_none_of_them(
    database_url: str, how: str, change: str
) -> None:
    role = prepare(database_url, change)
    feed = Feed()
    devices = [f"d{number}" for number in range(20)]
    try:
        async with working(database_url, lambda: statement_graph(feed, CALLS[how])):
            if how != "deferred trigger":  # those of one transaction run one behind the other
                feed.push(*[reading(device, 1.0) for device in devices])
                await until(database_url, "SELECT count(DISTINCT device) FROM app.log", [(20,)])
            for count in range(1, 4):  # in turns of their own
                feed.push(reading("plain", 1.0), reading(f"later{count}", 1.0))
                await until(database_url, "SELECT count(*) FROM app.log WHERE device ~ 'later'", [(count,)])
        assert rows(database_url, "SELECT count(*) FROM app.log WHERE device = 'plain'") == [(3,)]
        worker = rows(database_url, "SELECT current_user::text")[0][0]
        assert logged(database_url) == [(worker, "pg_catalog, pg_temp", "UTC")]
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]
    finally:
        execute(database_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize("change", CHANGES)
async def test_role_or_setting_that_a_trigger_of_a_result_table_leaves_does_not_end_a_worker(
    database_url: str, change: str
) -> None:
    role = prepare(database_url, change)
    feed, graph = Feed(), Graph("plant")
    windows = readings(graph, feed).key_by("device").window(FixedWindows(seconds(10)))
    windows.aggregate(n=Count()).to_table("counts")
    await deploy(graph, database_url)
    execute(
        database_url,
        "CREATE FUNCTION app.log_row() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN PERFORM app.log('window'); RETURN NULL; END$$;"
        "CREATE TRIGGER log_row AFTER INSERT ON plant.counts FOR EACH ROW EXECUTE FUNCTION app.log_row()",
    )
    try:
        async with working(database_url, lambda: graph):
            for count in range(1, 4):  # in turns of their own
                feed.push(reading("a", 1.0, 10 * count))
                await until(database_url, "SELECT count(*) FROM plant.counts", [(count - 1,)])
        assert rows(database_url, "SELECT count(*) FROM app.log WHERE device = 'window'") == [(2,)]
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]
    finally:
        execute(database_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


async def test_all_records_run_in_one_go_if_their_statement_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(database_url, "role")
    runs: list[int] = []

    async def run_each(*_: Any) -> list[Any]:
        runs.append(1)
        return []

    monkeypatch.setattr(StatementRunner, "_run_each", run_each)
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed, FUNCTION)):
        for count in (1, 2):
            feed.push(*[reading("plain", 1.0)] * 20)
            await until(database_url, "SELECT count(*) FROM app.log", [(20 * count,)])
    assert runs == []


async def test_encoding_that_a_trigger_sets_does_not_reach_the_next_turn(database_url: str) -> None:
    feed, graph = Feed(), Graph("plant")
    windows = readings(graph, feed).key_by("device").window(FixedWindows(seconds(10)))
    windows.aggregate(n=Count()).to_table("counts")
    await deploy(graph, database_url)
    execute(
        database_url,
        "CREATE SCHEMA app; CREATE FUNCTION app.set() RETURNS trigger LANGUAGE plpgsql AS"
        " $$BEGIN SET client_encoding = 'LATIN1'; RETURN NULL; END$$;"
        "CREATE TRIGGER sets AFTER INSERT ON plant.counts FOR EACH ROW EXECUTE FUNCTION app.set()",
    )
    async with working(database_url, lambda: graph):
        for count in range(1, 5):  # in turns of their own
            feed.push(reading("ü", 1.0, 10 * count))
            await until(
                database_url, "SELECT device, count(*) FROM plant.counts GROUP BY 1", [("ü", count - 1)][: count - 1]
            )


@pytest.mark.parametrize("change", CHANGES)
async def test_a_statement_that_fails_behind_a_change_is_a_dead_letter_and_no_other_is(
    database_url: str, change: str
) -> None:
    role = prepare(database_url, change)
    feed = Feed()
    try:
        async with working(database_url, lambda: statement_graph(feed, FUNCTION)):
            feed.push(*[reading(device, 1.0) for device in ("a", "fails", "b", "plain", "refused", "c")])
            await until(database_url, "SELECT device FROM app.log ORDER BY 1", [("a",), ("b",), ("c",), ("plain",)])
            feed.push(reading("plain", 1.0), reading("plain", 1.0))
            await until(database_url, "SELECT count(*) FROM app.log", [(6,)])
        letters = rows(database_url, "SELECT payload FROM millpy.dead_letters ORDER BY payload")
        assert letters == [(reading("fails", 1.0),), (reading("refused", 1.0),)]
    finally:
        execute(database_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ("SET TRANSACTION READ ONLY", "read-only transaction", "do not make its transaction read-only"),
        ("EXECUTE 'DEALLOCATE ALL'", "prepared statement", "do not DEALLOCATE"),
        ("IF device = 'd7' THEN PERFORM pg_sleep(60); END IF", "statement timeout", "make it faster"),
    ],
)
async def test_a_statement_that_spoils_its_turn_is_named_until_it_is_corrected(
    database_url: str, change: str, said: str, hint: str
) -> None:
    execute(database_url, SCHEMA.format(change=change))
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed, FUNCTION), replace(LIMITS, statement_s=2)):
        feed.push(*[reading(f"d{number}", 1.0) for number in range(20)])
        refused = f"why LIKE '%to_app% cannot run:%{said}%' AND hint LIKE '{hint}%'"
        events = "jsonb_to_record(detail) AS d (why text, hint text) WHERE kind = 'results_refused'"
        await until(database_url, f"SELECT DISTINCT {refused} FROM millpy.events, {events}", [(True,)])
        body = SCHEMA[SCHEMA.index("CREATE FUNCTION app.log(") : SCHEMA.index("CREATE PROCEDURE")]
        execute(database_url, body.format(change="NULL").replace("CREATE", "CREATE OR REPLACE"))
        await until(database_url, "SELECT count(*), count(DISTINCT device) FROM app.log", [(20, 20)])
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]


async def test_a_statement_that_ends_its_session_is_an_outage_that_names_its_sink(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server says the same when somebody else has ended the session, so no record is to blame."""
    ends = "IF device = 'd7' THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF"
    execute(database_url, SCHEMA.format(change=ends))
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed, FUNCTION)):
        feed.push(*[reading(f"d{number}", 1.0) for number in range(20)])
        await until_true(lambda: "in the statement of sink 'to_app'" in caplog.text, lambda: caplog.text)
        body = SCHEMA[SCHEMA.index("CREATE FUNCTION app.log(") : SCHEMA.index("CREATE PROCEDURE")]
        execute(database_url, body.format(change="NULL").replace("CREATE", "CREATE OR REPLACE"))
        await until(database_url, "SELECT count(*), count(DISTINCT device) FROM app.log", [(20, 20)])
        assert rows(database_url, "SELECT count(*) FROM millpy.dead_letters") == [(0,)]


@pytest.mark.parametrize("code", ["MW001", "MW002", "57P01", "40001"])
async def test_a_function_that_raises_a_code_of_millpy_or_of_an_outage_refuses_its_record(
    database_url: str, code: str
) -> None:
    execute(database_url, SCHEMA.format(change=f"IF device = 'coded' THEN RAISE SQLSTATE '{code}'; END IF"))
    feed = Feed()
    async with working(database_url, lambda: statement_graph(feed, FUNCTION)):
        feed.push(*[reading(device, 1.0) for device in ("a", "coded", "b")])
        await until(database_url, "SELECT device FROM app.log ORDER BY 1", [("a",), ("b",)])
        await until(database_url, "SELECT payload FROM millpy.dead_letters", [(reading("coded", 1.0),)])
