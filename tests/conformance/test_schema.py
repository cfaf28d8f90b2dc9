"""The migrations make what the code needs, once."""

from __future__ import annotations

import psycopg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg.conninfo import make_conninfo

from millpy.errors import ConfigError, StoreUnavailableError
from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.store import PostgresStore
from millpy.store.revision import HEAD, migrations_folder
from tests.conformance.store_builders import Owner


async def test_migrating_twice_changes_nothing(empty_database_url: str) -> None:
    migrate(empty_database_url)
    migrate(empty_database_url)

    async with PostgresStore(empty_database_url) as store:
        assert await store.now_us() > 0


def test_newest_revision_is_the_one_in_the_code() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.set_main_option("path_separator", "os")

    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


async def test_store_refuses_a_database_that_is_not_migrated(empty_database_url: str) -> None:
    store = PostgresStore(empty_database_url)

    with pytest.raises(ConfigError, match="not migrated"):
        await store.open()

    await store.close()


async def test_unreachable_database_is_reported() -> None:
    url = "postgresql://nobody@127.0.0.1:1/nothing"
    store = PostgresStore(url)

    with pytest.raises(StoreUnavailableError):
        await store.open()
    with pytest.raises(StoreUnavailableError):
        migrate(url)

    await store.close()


def test_a_server_that_refuses_a_session_is_not_said_to_be_away(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE preloading LOGIN")
        connection.execute("ALTER ROLE preloading SET session_preload_libraries = 'no_such_library'")
        try:
            with pytest.raises(StoreUnavailableError, match=r'FATAL: could not access file "no_such_library"'):
                migrate(make_conninfo(empty_database_url, user="preloading"))
        finally:
            connection.execute("DROP ROLE preloading")


def test_database_in_another_encoding_is_refused(empty_database_url: str) -> None:
    name = "in_latin1"
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with pytest.raises(ConfigError, match="the encoding of the database is LATIN1"):
                migrate(make_conninfo(empty_database_url, dbname=name))
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_wrong_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="URL"):
        migrate("not a url")


RINGS = ("segments", "deltas", "dedupe_runs")
"""Their rows stay until their slots are emptied."""
OF_INTERVALS = """
SELECT c.relname, a.attname, EXISTS (SELECT FROM pg_constraint AS k
                                      WHERE k.conrelid = c.oid AND k.contype = 'f' AND a.attnum = ANY (k.conkey))
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND NOT a.attisdropped
 WHERE c.relnamespace = 'mill'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
   AND c.relname <> ALL (%s) AND a.attname IN ('interval_id', 'producer', 'consumer') ORDER BY 1, 2
"""
ROWS = """
INSERT INTO mill.last_segments VALUES ({0}, 1, 1);
INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
VALUES ({0}, 'state', 'x', '"a"', '', 0, 0, 1, '1');
INSERT INTO mill.pauses VALUES ({0}, 1, 'x');
INSERT INTO mill.source_states VALUES ({0}, true);
INSERT INTO mill.source_connections VALUES ({0}, gen_random_uuid(), true, now(), '', 0, '');
INSERT INTO mill.releases (interval_id, key, ticket, discards) VALUES ({0}, '"a"', 1, false);
INSERT INTO mill.archive_files VALUES ({0}, 1, 'x', 1, 1, 0, 0, '{{}}');
INSERT INTO mill.archive_garbage VALUES ('y', {0});
"""


async def test_no_table_keeps_rows_of_a_graph_that_was_dropped(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals_of("sums")[0]
    late = LateRows("readings", "sums", [b'"a"'], [b"{}"], [1], [3], [1], [2])
    dead = DeadLetter("user_error", "boom", b"{}", "readings", "sums")
    await owner.commit(owner.checkpoint(interval, dead_letters=[dead], late=[late]))
    await owner.store.unregister(owner.worker_id)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(ROWS.format(interval.interval_id).encode())
        tables = connection.execute(OF_INTERVALS, [list(RINGS)]).fetchall()

        def found() -> set[str]:
            return {
                table
                for table, column, _ in tables
                if connection.execute(f"SELECT FROM mill.{table} WHERE {column} > 0 LIMIT 1".encode()).fetchone()
                is not None
            }

        before = found()
        async with PostgresStore(database_url) as store:
            await store.drop("factory")
        after = found()

    assert {table for table, _, cascades in tables if not cascades} <= before
    assert after == set()
