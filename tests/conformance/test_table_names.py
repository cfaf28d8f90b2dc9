"""Tables whose names are so long that PostgreSQL would cut the name of their publication."""

from __future__ import annotations

import itertools
from datetime import timedelta

import psycopg
import pytest

from millpy import PolledTable, PostgresTable
from millpy.errors import ConfigError
from millpy.sources.postgres.table_checks import publication_name
from tests.conformance.table_reading import EVERY, drop_slots, reader_of

_secrets = itertools.count(1)
SCHEMA = "a_schema_with_quite_a_long_name"
NAMES = ("t" * 63, "t" * 62 + "u", "ü" * 31, "orders of the plant in Köln and of the other one")


async def test_tables_with_long_names_are_read_through_publications_of_their_own(database_url: str) -> None:
    secret = f"long names {next(_secrets)}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {SCHEMA}")
        try:
            for name in NAMES:
                table = f'{SCHEMA}."{name}"'
                connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
                connection.execute(f"INSERT INTO {table} VALUES (1)")
                source = PostgresTable(f"{SCHEMA}.{name}", operations=EVERY)
                async with reader_of(source, database_url, secret=secret) as found:
                    assert [record["id"] for record in await found.records(1)] == [1]
                    connection.execute(f"INSERT INTO {table} VALUES (2)")
                    assert [record["id"] for record in await found.records(1)] == [2]
                drop_slots(connection)
            published = connection.execute("SELECT pubname, tablename FROM pg_publication_tables").fetchall()
        finally:
            drop_slots(connection)
            connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")

    assert sorted(published) == sorted((publication_name(PostgresTable(f"{SCHEMA}.{name}")), name) for name in NAMES)
    assert len(dict(published)) == len(NAMES)


def test_short_names_stay_as_they_are_and_a_publication_that_postgresql_would_cut_is_refused() -> None:
    assert publication_name(PostgresTable("orders")) == "millpy_public_orders"
    assert publication_name(PostgresTable("s." + "t" * 54)) == "millpy_s_" + "t" * 54
    assert publication_name(PostgresTable("orders", publication="mine")) == "mine"
    for name in ("p" * 64, "ü" * 32, ""):
        with pytest.raises(ConfigError, match="and a name in PostgreSQL has 1 to 63"):
            PostgresTable("orders", publication=name)


async def test_names_with_a_percent_sign_are_read(database_url: str) -> None:
    lag, table = timedelta(0), 'public."wet % s"'
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f'CREATE TABLE {table} (id int PRIMARY KEY, "hum %" int)')
        connection.execute(f"INSERT INTO {table} VALUES (1, 2)")
        try:
            for source in (PostgresTable("wet % s"), PolledTable("wet % s", column="hum %", lag=lag)):
                async with reader_of(source, database_url, secret=f"percent {next(_secrets)}") as found:
                    assert await found.records(1) == [{"id": 1, "hum %": 2}]
        finally:
            drop_slots(connection)
            connection.execute(f"DROP TABLE {table}")
