"""A crash test empties its database, so it refuses a database that holds anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import psycopg
import pytest

from millpy import Count, EventTime, Files, FixedWindows, Graph, minutes
from millpy.embedded import EmbeddedPostgres
from millpy.errors import UsageError
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.store.postgres.store import PostgresStore
from millpy.testing.crash_test.database import Database, url_through_proxy
from millpy.testing.crash_test.databases import EmbeddedServer, GivenDatabase, proxied_address
from millpy.testing.crash_test.options import Options
from millpy.testing.crash_test.session import refuse_without_tables
from millpy.testing.proxy import PostgresProxy


class Reading(msgspec.Struct):
    device: str
    at: int


def graph(name: str) -> Graph:
    made = Graph(name)
    time = EventTime("at", unit="s", sorted=True)
    readings = made.inject("readings", Files("r.ndjson"), schema=Reading, event_time=time)
    readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
    return made


async def deploy(url: str, name: str) -> None:
    async with PostgresStore(url, limits=Limits()) as store:
        await store.deploy(graph(name).spec())


@pytest.mark.parametrize("name", ["factory", "another"])
async def test_database_that_holds_data_of_a_graph_is_refused(database_url: str, name: str) -> None:
    await deploy(database_url, name)

    with pytest.raises(UsageError, match=f"holds data of '{name}'"):
        GivenDatabase(database_url, "factory")


def test_database_with_a_schema_of_the_graphs_name_is_refused(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA factory")

    with pytest.raises(UsageError, match="has a schema 'factory'"):
        GivenDatabase(empty_database_url, "factory")
    with Database(empty_database_url) as database:
        assert database.graphs() == []
        assert not database.has_schema("mill")  # refused before anything was made


async def test_given_database_is_empty_for_every_run_and_afterwards(empty_database_url: str) -> None:
    server = GivenDatabase(empty_database_url, "factory")
    with Database(empty_database_url) as database:
        for name in ("one", "two"):
            assert database.snapshot() is None
            await deploy(server.prepare(name), "factory")
            assert database.snapshot() is not None
            assert database.graphs() == ["factory"]
            server.prepare(name)
        server.close(keep=False)

        assert database.graphs() == []
        assert not database.has_schema("factory")
        assert database.rows("SELECT count(*) > 0 FROM mill.epochs") == [(True,)]  # still migrated


async def test_nothing_is_removed_when_another_graph_was_deployed_meanwhile(empty_database_url: str) -> None:
    server = GivenDatabase(empty_database_url, "factory")
    url = server.prepare("one")
    await deploy(url, "factory")
    await deploy(url, "production")

    with pytest.raises(UsageError, match="'production' was deployed"):
        server.prepare("two")

    with Database(url) as database:
        assert database.graphs() == ["factory", "production"]


def test_the_tables_of_a_lookup_are_made_by_a_file(empty_database_url: str, tmp_path: Path) -> None:
    registry = Path(__file__).parents[2] / "examples/registry.py"
    options = Options(graph=str(registry))
    with pytest.raises(UsageError, match=r"looks up in plant_registry\.devices") as caught:
        refuse_without_tables(load_graph(options.graph), options)
    assert "--sql" in caught.value.hint
    statements = registry.parent / "data/registry.sql"
    refuse_without_tables(load_graph(options.graph), replace(options, sql=statements))

    url = GivenDatabase(empty_database_url, "machines", statements).prepare("one")

    with Database(url) as database:
        assert database.rows("SELECT count(*) FROM plant_registry.devices") == [(4,)]
    wrong = tmp_path / "wrong.sql"
    wrong.write_text("CREATE TABLE devices (device text);\nCREATE more;")
    with pytest.raises(UsageError, match=r"wrong\.sql: syntax error"):
        GivenDatabase(empty_database_url, "machines", wrong)
    with pytest.raises(UsageError, match="no file"):
        replace(options, sql=tmp_path / "none.sql")


def test_other_users_of_the_machine_cannot_log_in_to_a_crash_tests_database(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "postgres")
    try:
        url = server.prepare("run")
        with Database(url) as database:
            assert database.rows("SELECT current_user") == [("millpy",)]
        with PostgresProxy(*proxied_address(url)) as proxy:
            for address in (url, url_through_proxy(url, proxy.port)):
                known = psycopg.conninfo.conninfo_to_dict(address)
                del known["password"]
                with pytest.raises(psycopg.OperationalError, match="password"):
                    psycopg.connect(**known)
    finally:
        server.close(keep=False)


def test_proxy_works_for_tcp_only(postgres: EmbeddedPostgres) -> None:
    host, port = proxied_address(postgres.tcp_url())

    assert host == "127.0.0.1"
    assert f":{port}/" in postgres.tcp_url()
    for url in (postgres.url(), "postgresql://u@a,b/d", "postgresql://u@h/d?sslmode=require"):
        with pytest.raises(UsageError, match="the proxy cannot connect"):
            proxied_address(url)


def test_url_by_a_proxy_keeps_everything_but_the_address() -> None:
    url = url_through_proxy("postgresql://me:p%2Fw@db.example:5433/my%20data?application_name=x&sslmode=prefer", 6000)

    parts = psycopg.conninfo.conninfo_to_dict(url)
    assert parts == {
        "user": "me",
        "password": "p/w",
        "host": "127.0.0.1",
        "port": "6000",
        "dbname": "my data",
        "application_name": "x",
        "sslmode": "disable",
    }
