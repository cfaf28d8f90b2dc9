"""`millpy doctor GRAPH.py`: what it finds at tables that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from millpy.admin import doctor_tables
from millpy.admin.doctor_tables import examine_tables
from millpy.cli.app import app
from millpy.graph.loader import load_graph
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
PUBLISHED = "CREATE PUBLICATION millpy_public_t FOR TABLE t"
FILL = """
SELECT pg_create_physical_replication_slot('full_' || i)
  FROM generate_series(1 + (SELECT count(*) FROM pg_replication_slots),
                       current_setting('max_replication_slots')::int) AS i
"""
EMPTY = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'full_%'"


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
        connection.execute("ALTER TABLE t ADD PRIMARY KEY (id), ADD n int, ADD at float8, REPLICA IDENTITY NOTHING")
        status, said = examined()
        assert "changes: table public.t has no replica identity" in said
        connection.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
        status, said = examined()
        assert status == 0, said
        assert said.count("may read table t") == 2
        found: list[Any] = connection.execute("SELECT FROM pg_publication").fetchall()
        assert found == []


@pytest.mark.parametrize(("published", "said"), [(PUBLISHED, True), (f"{PUBLISHED} WITH (publish = 'insert')", False)])
def test_doctor_says_that_rows_cannot_be_updated_without_a_replica_identity(
    database_url: str, tmp_path: Path, published: str, said: bool
) -> None:
    file = tmp_path / "stock.py"
    file.write_text(GRAPH.replace('PostgresTable("t")', 'PostgresTable("t", operations=("insert",))'))
    with table_of(database_url, "id int PRIMARY KEY, n int, at float8") as connection:
        connection.execute(published)  # type: ignore[call-overload]
        connection.execute("ALTER TABLE t REPLICA IDENTITY NOTHING; INSERT INTO t VALUES (1)")
        refuses = False
        try:
            connection.execute("DELETE FROM t")
        except psycopg.Error:
            refuses = True
        found = next(examine_tables(database_url, load_graph(str(file)), None))

    assert (refuses, found.severity.value == "error") == (said, said)
    assert ("refuses to update and delete rows of table public.t: it has no replica identity" in found.found) == said


def test_doctor_warns_of_fields_that_no_column_fills(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "stock.py"
    file.write_text(GRAPH)
    lacks = "table t has no column for field"
    with table_of(database_url, "id int PRIMARY KEY, n int") as connection:
        unpublished = [finding.found for finding in examine_tables(database_url, load_graph(str(file)), None)]
        connection.execute("ALTER TABLE t ADD at float8; CREATE PUBLICATION millpy_public_t FOR TABLE t (id, at)")
        published = [finding.found for finding in examine_tables(database_url, load_graph(str(file)), None)]

    assert unpublished == [f"changes: {lacks} at", f"polled: {lacks} at"]
    assert published[0] == f"changes: {lacks} n"
    assert "may read table t" in published[1]


def test_doctor_does_not_wait_for_a_table_that_is_locked(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor_tables.LIMITS, "lock_timeout", "50")
    file = tmp_path / "stock.py"
    file.write_text(GRAPH)
    with (
        table_of(database_url, "id int PRIMARY KEY, n int, at float8") as connection,
        psycopg.connect(database_url) as other,
    ):
        connection.execute(PUBLISHED)
        other.execute("LOCK TABLE public.t IN ACCESS EXCLUSIVE MODE")
        found = [finding.found for finding in examine_tables(database_url, load_graph(str(file)), None)]
        opens = connection.info.server_version >= 160000

    assert len(found) == 2
    assert ("changes: temporary database error: canceling statement due to lock timeout" in found) == opens


@pytest.mark.parametrize(
    ("given", "changes", "polled"),
    [
        ("GRANT SELECT ON t TO {role}", "role may not publish public.t", ""),
        ("ALTER TABLE t OWNER TO {role}", "with CREATE on the database: CREATE PUBLICATION", ""),
        ("GRANT CREATE ON DATABASE {database} TO {role}; ALTER TABLE t OWNER TO {role}", "", ""),
        (
            f"GRANT SELECT (id) ON t TO {{role}}; {PUBLISHED}",
            "may not read table public.t",
            "may not read table public.t",
        ),
        (f"GRANT SELECT (id, n, at) ON t TO {{role}}; {PUBLISHED}", "may not read table public.t", ""),
        (
            f"GRANT SELECT ON t TO {{role}}; ALTER TABLE t ENABLE ROW LEVEL SECURITY; {PUBLISHED}",
            "hides rows",
            "row security of table t applies to role table_reader",
        ),
        (f"GRANT SELECT ON t TO {{role}}; {PUBLISHED}; {FILL}", "raise max_replication_slots", ""),
        (f"GRANT SELECT ON t TO {{role}}; {PUBLISHED}", "", ""),
    ],
    ids=["stranger", "no create", "owner", "column", "columns", "row security", "slots", "published"],
)
def test_doctor_says_what_would_stop_the_first_worker(
    database_url: str, tmp_path: Path, given: str, changes: str, polled: str
) -> None:
    (tmp_path / "stock.py").write_text(GRAPH)
    with table_of(database_url, "id int PRIMARY KEY, n int, at float8") as connection:
        names = {"role": "table_reader", "database": connection.info.dbname}
        connection.execute("CREATE ROLE table_reader LOGIN REPLICATION PASSWORD 'table_reader'")
        try:
            connection.execute(given.format_map(names))  # type: ignore[arg-type]
            url = make_conninfo(database_url, user="table_reader", password="table_reader")
            found = list(examine_tables(url, load_graph(str(tmp_path / "stock.py")), None))
        finally:
            connection.execute(EMPTY)  # type: ignore[arg-type]
            connection.execute("DROP PUBLICATION IF EXISTS millpy_public_t")
            connection.execute("ALTER TABLE t OWNER TO CURRENT_USER")
            connection.execute("DROP OWNED BY table_reader; DROP ROLE table_reader")

    for finding, said in zip(found, (changes, polled), strict=True):
        assert (finding.severity.value == "ok") == (not said)
        assert said in f"{finding.found} {finding.action}"
