"""The store on a database with settings of its own, all at once: they change nothing.

MILLPY_TEST_SETTINGS=all runs the whole suite; without it, what depends on isolation, time and formats.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.admin.queries import Admin
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError, UsageError
from millpy.limits import Limits
from millpy.model.finding import Severity
from millpy.spark.connection import connected
from millpy.store.postgres.session_settings import PINNED
from tests.conformance.postgres_subject import PostgresSubject
from tests.conformance.store_builders import World, a_world
from tests.conformance.store_commit_suite import FenceSuite, ResultSuite
from tests.conformance.store_polling_suite import RetentionSuite
from tests.conformance.store_suite import StoreSuite

FOREIGN = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "search_path": "public, pg_catalog",
    "datestyle": "SQL, DMY",
    "intervalstyle": "sql_standard",
    "timezone": "Asia/Kolkata",
    "bytea_output": "escape",
    "extra_float_digits": "-10",
    "standard_conforming_strings": "off",
    "backslash_quote": "on",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "client_encoding": "LATIN1",
    "client_min_messages": "debug1",
    "row_security": "off",
    "synchronous_commit": "off",
    "lock_timeout": "1ms",
    "statement_timeout": "3s",
    "idle_session_timeout": "1s",
    "idle_in_transaction_session_timeout": "50ms",
    "session_replication_role": "replica",
    "work_mem": "64kB",
    "plan_cache_mode": "force_custom_plan",
    "jit_above_cost": "0",
    "join_collapse_limit": "1",
    "from_collapse_limit": "1",
    **{name: "off" for name in PINNED if name.startswith("enable_") and name != "enable_partition_pruning"},
}
LATER = {"transaction_timeout": "500ms", "restrict_nonsystem_relation_kind": "view"}
PEOPLE = (
    "-c default_transaction_read_only=off -c datestyle=ISO -c timezone=UTC -c client_encoding=UTF8 -c lock_timeout=0"
)
if os.environ.get("MILLPY_TEST_POSTGRES", "18") == "18":
    PEOPLE += " -c restrict_nonsystem_relation_kind= -c transaction_timeout=0"


class ForeignSubject(PostgresSubject):
    """Users connect with most of these settings, too, except those that change their output or rights."""

    async def _fetch(self, statement: sql.SQL | sql.Composed) -> list[dict[str, Any]]:
        async with await psycopg.AsyncConnection.connect(self._people(), autocommit=True) as connection:
            cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
            return await (await cursor.execute(statement)).fetchall()

    async def _execute(self, statement: sql.Composed) -> None:
        async with await psycopg.AsyncConnection.connect(self._people(), autocommit=True) as connection:
            await connection.execute(statement)

    def _people(self) -> str:
        return make_conninfo(self._url, options=PEOPLE)


def make_foreign(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        database = sql.Identifier(connection.info.dbname)
        connection.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        known = {name for (name,) in connection.execute("SELECT name FROM pg_settings").fetchall()}
        for name, value in (FOREIGN | {n: v for n, v in LATER.items() if n in known}).items():
            values = sql.SQL(", ").join(map(sql.Literal, value.split(", ")))
            connection.execute(sql.SQL("ALTER DATABASE {} SET {} TO {}").format(database, sql.Identifier(name), values))


@pytest_asyncio.fixture
async def world(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[World]:
    make_foreign(database_url)
    subject = ForeignSubject(postgres.tcp_url(str(conninfo_to_dict(database_url)["dbname"])))
    try:
        yield await a_world(subject)
    finally:
        await subject.close()


if os.environ.get("MILLPY_TEST_SETTINGS") == "all":

    class TestForeignSettings(StoreSuite):
        """The whole suite."""

else:

    class TestForeignSettings(FenceSuite, ResultSuite, RetentionSuite):  # type: ignore[no-redef]
        """The tests that foreign settings are most likely to break."""


async def test_every_channel_has_our_settings_and_no_others(world: World) -> None:
    store: Any = world.store
    for channel in (store._commit, store._poll, store._admin, store._fold, store._hint, store._listen):
        own = channel._own_settings()
        async with channel.use() as connection:
            rows = await (await connection.execute("SELECT name, current_setting(name) FROM pg_settings")).fetchall()
        found = {name.lower(): value for name, value in rows}
        wanted = {name: value for name, value in PINNED.items() if name not in own}
        assert {
            n: found[n] for n, v in wanted.items() if found[n].lower() != v.lower() and n != "plan_cache_mode"
        } == {}
        assert found["synchronous_commit"] == own["synchronous_commit"]
        assert found.get("transaction_timeout", "0") == "0"
        assert found["session_replication_role"] == "origin"


def test_queries_and_the_doctor_work_under_foreign_settings(database_url: str) -> None:
    make_foreign(database_url)

    assert Admin(database_url).graphs() == []
    assert read_facts(database_url, SystemClock()).revision is not None


def test_spark_knows_the_types_of_columns_under_foreign_settings(database_url: str) -> None:
    query = "SELECT now(), 1.5::float8, 1::int8, 'x'::text, true, '\\x00'::bytea"
    with connected(database_url) as connection:
        usual = connection.batches(query)[0][0].schema
    make_foreign(database_url)

    with connected(make_conninfo(database_url, application_name="foreign")) as connection:
        assert connection.batches(query)[0][0].schema == usual


def test_a_query_that_the_server_ends_may_be_tried_again(database_url: str) -> None:
    ended, limited = Admin(database_url), Admin(database_url, statement_s_max=0.1)

    with pytest.raises(StoreUnavailableError, match="the server ended the query"):
        ended.ask("SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(60)")
    with pytest.raises(UsageError, match="takes too long"):
        limited.ask("SELECT pg_sleep(60)")


def test_the_doctor_names_the_defaults_that_millpy_does_not_follow(database_url: str) -> None:
    make_foreign(database_url)

    found = {
        f.severity: f.found for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "settings"
    }

    assert "default_transaction_isolation = serializable" in found[Severity.NOTE]
    assert "session_replication_role is replica" in found[Severity.WARNING]
