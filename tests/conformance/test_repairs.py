"""A repair of a result table does all or nothing, and a second one changes nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from millpy.admin.queries import Admin
from millpy.admin.repairs import graph_id, repair_rows
from millpy.errors import ConfigError, TableSwitchedError
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import a_graph

SUMS = a_graph().tables[0]
MINUTE = 60_000_000
WRONG = [("d1", 9.0, "a"), ("d3", 3.0, "c"), ("d4", float("nan"), None)]
RIGHT = [("d1", 1.0, "a"), ("d2", 2.0, None), ("d4", float("nan"), None)]
ROWS: list[tuple[str, list[Any]]] = [
    ("changed", ["d1", "0", str(MINUTE), "1.0", "a"]),
    ("missing", ["d2", "0", str(MINUTE), "2.0", None]),
    ("added", ["d3", "0", str(MINUTE)]),
]
REPAIR = """
import json, sys
from dataclasses import replace
from millpy.admin.queries import Admin
from millpy.admin.repairs import graph_id, repair_rows
from tests.conformance.store_builders import a_graph
admin = Admin(sys.argv[1])
table = replace(a_graph().tables[0], history="retracting")
repair_rows(admin, ("factory", graph_id(admin, "factory")), table, json.loads(sys.argv[2]))
"""


async def deploy(url: str, history: str = "") -> None:
    graph = a_graph()
    async with PostgresStore(url) as store:
        await store.deploy(replace(graph, tables=(replace(SUMS, history=history), *graph.tables[1:])))


@pytest.fixture
def admin(database_url: str) -> Admin:
    asyncio.run(deploy(database_url))
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO factory.sums_1m VALUES"
            " (%s, to_timestamp(0), to_timestamp(60), %s, %s, 0, 'on_time', 0, now(), 1, 1)",
            WRONG,
        )
    return Admin(database_url)


def stored(admin: Admin) -> list[str]:
    return [
        str(tuple(row.values())) for row in admin.ask("SELECT device, total, label FROM factory.sums_1m ORDER BY 1")
    ]


def repair(admin: Admin) -> dict[str, int]:
    return dict(repair_rows(admin, ("factory", graph_id(admin, "factory")), SUMS, ROWS))


def test_repairs_at_once_leave_the_right_rows_and_say_who_did_it(admin: Admin) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = [found.result() for found in [pool.submit(repair, admin) for _ in range(3)]]

    assert stored(admin) == [str(row) for row in RIGHT]
    assert {"replaced": 1, "added": 1, "deleted": 1} in done
    assert sum(one["deleted"] for one in done) == sum(one["added"] for one in done) == 1
    (event, *_) = admin.ask("SELECT detail FROM millpy.events WHERE kind = 'repaired' ORDER BY at")
    (me,) = admin.ask("SELECT session_user AS name")
    assert (event["detail"]["table"], event["detail"]["by"]) == ("sums_1m", me["name"])


def with_history(url: str, mode: str) -> Admin:
    asyncio.run(deploy(url, mode))
    names = "device, window_start, window_end, total, label, pane_index, pane_timing, late_count, interval_id, bundle"
    with psycopg.connect(url) as connection, connection.cursor() as cursor:
        for name in ("sums_1m", "sums_1m_history"):
            cursor.executemany(
                f"INSERT INTO factory.{name} ({names}) VALUES"
                " (%s, to_timestamp(0), to_timestamp(60), %s, %s, 0, 'on_time', 0, 1, 1)",
                WRONG,
            )
    return Admin(url)


@pytest.mark.parametrize("mode", ["accumulating", "retracting"])
def test_a_history_remembers_what_was_wrong(database_url: str, mode: str) -> None:
    admin, table = with_history(database_url, mode), replace(SUMS, history=mode)
    as_of = "SELECT device, total, label FROM millpy.as_of(NULL::factory.sums_1m, {}) ORDER BY 1"
    (before,) = admin.ask("SELECT max(emitted_at)::text AS at FROM factory.sums_1m")

    for _ in range(2):
        repair_rows(admin, ("factory", graph_id(admin, "factory")), table, ROWS)

    assert [str(tuple(row.values())) for row in admin.ask(as_of.format("now()"))] == stored(admin)
    earlier = admin.ask(as_of.format(f"'{before['at']}'"))
    assert [str(tuple(row.values())) for row in earlier] == [str(row) for row in WRONG]
    history = (
        "SELECT device, pane_index, is_retraction FROM factory.sums_1m_history WHERE device <> 'd4' ORDER BY 1, 2, 3"
    )
    found = [tuple(row.values()) for row in admin.ask(history)]
    taken_back = [("d1", 0, True), ("d1", 1, True), ("d2", 0, True)] if mode == "retracting" else []
    panes = [("d1", 0), ("d1", 1), ("d1", 2), ("d2", 0), ("d2", 1), ("d3", 0)]
    assert found == sorted([*((*pane, False) for pane in panes), ("d3", 0, True), *taken_back])


def test_a_repair_that_is_refused_changes_nothing(admin: Admin, database_url: str) -> None:
    number = graph_id(admin, "factory")
    with pytest.raises(TableSwitchedError, match="was switched to another table"):
        repair_rows(admin, ("factory", number + 1), SUMS, ROWS)
    with psycopg.connect(database_url, autocommit=True) as connection:
        role = f"repairs_{connection.info.backend_pid}"
        connection.execute(f"CREATE ROLE {role}; GRANT pg_read_all_data TO {role}")
        with pytest.raises(ConfigError, match="missing rights"):
            repair_rows(Admin(make_conninfo(database_url, options=f"-c role={role}")), ("factory", number), SUMS, ROWS)
        connection.execute(f"DROP ROLE {role}")
        connection.execute("ALTER TABLE factory.sums_1m ADD CHECK (device <> 'd2')")
        with pytest.raises(ConfigError, match=r"a constraint of yours refuses a row: .*violates check constraint"):
            repair(admin)

    assert stored(admin) == [str(row) for row in WRONG]
    assert not admin.ask("SELECT FROM millpy.events WHERE kind = 'repaired'")


def test_a_repair_that_is_killed_changes_nothing(database_url: str) -> None:
    admin = with_history(database_url, "retracting")
    history = "SELECT device, total, is_retraction FROM factory.sums_1m_history ORDER BY 1"
    before = str(admin.ask(history))
    command = [sys.executable, "-c", REPAIR, database_url, json.dumps(ROWS)]
    with psycopg.connect(database_url) as other, psycopg.connect(database_url, autocommit=True) as watch:
        other.execute("SELECT FROM factory.sums_1m WHERE device = 'd3' FOR UPDATE")
        waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as process:
            end = time.monotonic() + 30
            while not watch.execute(waiting).fetchall():
                assert time.monotonic() < end and process.poll() is None
                watch.execute("SELECT pg_sleep(0.05)")
            process.kill()
        other.rollback()  # now the statement ends in the server, and has nobody who commits it
        end = time.monotonic() + 30
        while watch.execute(
            "SELECT FROM pg_stat_activity WHERE query LIKE '%jsonb_array_elements%' AND pid <> pg_backend_pid()"
            " AND datname = current_database() AND state <> 'idle'"
        ).fetchall():
            assert time.monotonic() < end
            watch.execute("SELECT pg_sleep(0.05)")

    assert stored(admin) == [str(row) for row in WRONG]
    assert str(admin.ask(history)) == before
    assert repair(admin) == {"replaced": 1, "added": 1, "deleted": 1}
