"""The queries of Grafana's dashboard over PostgreSQL run as the reader, and return what a panel takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from millpy.graph.loader import load_graph
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "compose/monitoring/dashboards/windows.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
DEVICE = "o'brien"
MACROS = {
    r"\$__timeFilter\((\w+)\)": r"\1 BETWEEN '2026-11-20T08:00:00Z' AND '2026-11-20T09:00:00Z'",
    r"\$__timeGroup\((\w+), \$__interval\)": r"floor(extract(epoch from \1)/60)*60",
    r"\$\{device:sqlstring\}": "'" + DEVICE.replace("'", "''") + "'",
}
"""What Grafana makes of its macros and of the variable."""
FILLED = {"text": "", "timestamp with time zone": "2026-11-20T08:00:00Z", "boolean": False, "jsonb": "{}"}


def expanded(query: str) -> str:
    for macro, text in MACROS.items():
        query = re.sub(macro, text, query)
    assert "$" not in query, query
    return query


def insert_window(connection: psycopg.Connection[Any], **values: Any) -> None:
    """Insert a row, with something in each column that must have a value."""
    columns = connection.execute(
        "SELECT column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = 'factory' AND table_name = 'temperature_5s' AND is_nullable = 'NO'"
    ).fetchall()
    row = {**{name: FILLED.get(kind, 0) for name, kind in columns}, **values}
    statement = sql.SQL("INSERT INTO factory.temperature_5s ({}) VALUES ({})").format(
        sql.SQL(", ").join(map(sql.Identifier, row)), sql.SQL(", ").join([sql.Placeholder()] * len(row))
    )
    connection.execute(statement, list(row.values()))


@pytest.fixture
async def reader(database_url: str) -> str:
    """URL of the reader of a database with the example's graph and one window."""
    migrate(database_url, "millpy")
    async with PostgresStore(database_url) as store:
        await store.deploy(load_graph(str(ROOT / "examples" / "factory.py")).spec())
    with psycopg.connect(database_url, autocommit=True) as connection:
        at, end = "2026-11-20T08:30:05Z", "2026-11-20T08:30:10Z"
        insert_window(connection, device=DEVICE, window_start=at, window_end=end, n=3, mean=20.5, high=21.5)
    return database_url.replace("//millpy@", "//millpy_reader@")


@pytest.fixture
def connection(reader: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(reader, autocommit=True, options="-c statement_timeout=5s") as found:
        yield found


def test_queries_run_as_the_reader_and_return_what_a_panel_takes(connection: psycopg.Connection[Any]) -> None:
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            result = connection.execute(expanded(target["rawSql"]))
            assert result.description is not None
            names = [column.name for column in result.description]
            rows = result.fetchall()
            if target["format"] == "time_series":
                assert names[0] == "time" and set(names[1:]) & {"metric", "value", "readings"}, title
                assert re.search(r"ORDER BY (1|window_start) LIMIT 20000$", target["rawSql"]), "bounded and in order"
            else:
                assert re.search(r" LIMIT \d+$|^SELECT (count|extract)", target["rawSql"]), "bounded"
            if panel["type"] == "stat":
                assert len(rows) == 1, title


def test_panels_show_the_windows_of_the_table(connection: psycopg.Connection[Any]) -> None:
    (target,) = PANELS["Highest temperature, also of open windows"]["targets"]
    ((time, metric, value),) = connection.execute(expanded(target["rawSql"])).fetchall()
    assert (float(time) % 60, metric, value) == (0.0, DEVICE, 21.5)
    (target,) = PANELS["Readings in the windows"]["targets"]
    assert [row[1] for row in connection.execute(expanded(target["rawSql"]))] == [3]
    (target,) = PANELS["Accounts that are not balanced"]["targets"]
    assert connection.execute(target["rawSql"]).fetchall() == [(0,)]


def test_choices_of_the_variables_are_queries_of_the_reader(connection: psycopg.Connection[Any]) -> None:
    for variable in DASHBOARD["templating"]["list"]:
        assert connection.execute(variable["query"]).fetchall() == []


def test_reader_changes_nothing(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("DELETE FROM factory.temperature_5s")
