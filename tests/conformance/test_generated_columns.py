"""Tables with generated columns: our publication never forbids the application to change them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.errors import ConfigError
from tests.conformance.table_reading import reader, table_of
from tests.conformance.test_doctor_tables import GRAPH

_secrets = itertools.count(1)
STORED = "id int PRIMARY KEY, n int, double int GENERATED ALWAYS AS (n * 2) STORED"
KEY = "id int, n int, double int GENERATED ALWAYS AS (n * 2) STORED, PRIMARY KEY (id, double)"
VIRTUAL = "id int PRIMARY KEY, n int, double int GENERATED ALWAYS AS (n * 2) VIRTUAL"
PARTITIONED = f"{STORED}) PARTITION BY RANGE (id"


@pytest.fixture
def secret() -> str:
    return f"generated {next(_secrets)}"


def skip_before_18(connection: psycopg.Connection[Any]) -> None:
    if connection.info.server_version < 180000:
        pytest.skip("PostgreSQL publishes generated columns from version 18 on")


@pytest.mark.parametrize(
    ("columns", "alter"),
    [
        (STORED, "ALTER TABLE t REPLICA IDENTITY FULL"),
        (
            STORED, "CREATE UNIQUE INDEX i ON t (double);"
            " ALTER TABLE t ALTER double SET NOT NULL, REPLICA IDENTITY USING INDEX i",
        ),
        (KEY, ""),
        (PARTITIONED, "CREATE TABLE t_1 PARTITION OF t DEFAULT; ALTER TABLE t_1 REPLICA IDENTITY FULL"),
    ],
    ids=["full", "index", "key", "partition"],
)  # fmt: skip
async def test_application_changes_rows_whose_replica_identity_has_a_generated_column(
    database_url: str, secret: str, columns: str, alter: str
) -> None:
    with table_of(database_url, columns) as connection:
        skip_before_18(connection)
        connection.execute(f"{alter}; INSERT INTO t (id, n) VALUES (1, 10)")  # type: ignore[call-overload]
        async with reader(database_url, secret=secret) as found:
            (copied,) = await found.records(1)
            connection.execute("UPDATE t SET n = 11; DELETE FROM t")
            updated, deleted = await found.records(2)

    assert [(record["operation"], record["double"]) for record in (copied, updated)] == [
        ("snapshot", 20), ("update", 22),
    ]  # fmt: skip
    assert deleted["operation"] == "delete"


async def test_table_whose_virtual_column_would_be_in_the_replica_identity_is_not_published(
    database_url: str, secret: str
) -> None:
    with psycopg.connect(database_url) as connection:
        skip_before_18(connection)
    with table_of(database_url, VIRTUAL) as connection:
        connection.execute("ALTER TABLE t REPLICA IDENTITY FULL; INSERT INTO t (id, n) VALUES (1, 10)")
        with pytest.raises(ConfigError, match="has a virtual column and REPLICA IDENTITY FULL"):
            async with reader(database_url, secret=secret) as found:
                await found.take()
        connection.execute("UPDATE t SET n = 11; DELETE FROM t")
        connection.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT")
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t (id, n) VALUES (2, 1); UPDATE t SET n = 2")
            assert [record["n"] for record in await found.records(2)] == [1, 2]


@pytest.mark.parametrize(
    ("columns", "alter", "publication", "remedy"),
    [
        (
            STORED, "ALTER TABLE t REPLICA IDENTITY FULL", "FOR TABLE t",
            "ALTER PUBLICATION theirs SET (publish_generated_columns = stored)",
        ),
        (KEY, "", "FOR ALL TABLES", "ALTER PUBLICATION theirs SET (publish_generated_columns = stored)"),
        (
            PARTITIONED, "CREATE TABLE t_1 PARTITION OF t DEFAULT; ALTER TABLE t_1 REPLICA IDENTITY FULL",
            "FOR TABLES IN SCHEMA public", "ALTER PUBLICATION theirs SET (publish_generated_columns = stored)",
        ),
        (VIRTUAL, "ALTER TABLE t REPLICA IDENTITY FULL", "FOR TABLE t", "ALTER TABLE t REPLICA IDENTITY DEFAULT"),
    ],
    ids=["full", "key", "partition", "virtual"],
)  # fmt: skip
def test_doctor_finds_a_publication_that_forbids_changes(
    database_url: str, tmp_path: Path, columns: str, alter: str, publication: str, remedy: str
) -> None:
    file = tmp_path / "stock.py"
    file.write_text(GRAPH)

    def examined() -> str:
        return CliRunner().invoke(app, ["doctor", str(file), "--database", database_url]).output

    with psycopg.connect(database_url) as connection:
        skip_before_18(connection)
    with table_of(database_url, columns) as connection:
        connection.execute(f"{alter}; INSERT INTO t (id, n) VALUES (1, 10)")  # type: ignore[call-overload]
        assert "PostgreSQL refuses" not in examined()
        connection.execute(f"CREATE PUBLICATION theirs {publication}")  # type: ignore[call-overload]
        try:
            with pytest.raises(psycopg.errors.InvalidColumnReference, match="unpublished generated columns"):
                connection.execute("UPDATE t SET n = 11")
            said = " ".join(examined().split())
            assert "generated column double of its replica identity is not in publication theirs" in said
            connection.execute(remedy)  # type: ignore[call-overload]
            connection.execute("UPDATE t SET n = 11")
            assert "PostgreSQL refuses" not in examined()
        finally:
            connection.execute("DROP PUBLICATION theirs")
