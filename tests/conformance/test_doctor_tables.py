"""`millpy doctor GRAPH.py`: what it finds at tables that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from typer.testing import CliRunner

from millpy.cli.app import app
from tests.conformance.table_reading import table_of

GRAPH = """
import msgspec
from millpy import EventTime, Graph, PolledTable, PostgresTable, seconds

class Item(msgspec.Struct):
    id: int
    n: int = 0
    at: float = 0.0

graph = Graph("stock")
how = {"schema": Item, "event_time": EventTime("at", unit="s", max_disorder=seconds(1))}
graph.inject("changes", PostgresTable("t"), **how)
graph.inject("polled", PolledTable("t", column="n"), **how)
"""


def test_doctor_says_what_a_table_lacks_and_creates_nothing(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "stock.py"
    file.write_text(GRAPH)

    def examined() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", str(file), "--database", database_url])
        return result.exit_code, result.output

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DROP PUBLICATION IF EXISTS millpy_public_t; DROP TABLE IF EXISTS public.t")
    status, said = examined()
    assert (status, said.count("there is no table public.t")) == (1, 2)
    with table_of(database_url, "id int") as connection:
        status, said = examined()
        assert status == 1
        assert "changes: table public.t has no primary key" in said
        assert "polled: table public.t lacks column 'n'" in said
        connection.execute("ALTER TABLE t ADD PRIMARY KEY (id), ADD n int, REPLICA IDENTITY NOTHING")
        status, said = examined()
        assert "changes: table public.t has no replica identity" in said
        connection.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
        status, said = examined()
        assert status == 0, said
        assert said.count("may read table t") == 2
        found: list[Any] = connection.execute("SELECT FROM pg_publication").fetchall()
        assert found == []
