"""What the server allows each of a worker's connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import conninfo, sql

from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError
from millpy.limits import Limits
from millpy.store.postgres.connection import Channel, Connection, ConnectionGroup, ConnectionSettings
from millpy.store.postgres.store import PostgresStore
from millpy.store.postgres.timeouts import hang_up
from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import PostgresProxy
from tests.databases import fresh_database


@pytest.mark.parametrize("channel", ["_commit", "_poll", "_admin", "_fold", "_hint"])
async def test_no_channel_may_idle_in_a_transaction_longer_than_the_lease(database_url: str, channel: str) -> None:
    # A process that is frozen while it folds holds the header's lock, and its fold backend is not the recorded one.
    limits = Limits()
    async with PostgresStore(database_url, limits=limits) as store, getattr(store, channel).use() as connection:
        row = await (
            await connection.execute(
                "SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
            )
        ).fetchone()

    assert row is not None
    assert 0 < row[0] < limits.lease_ttl_s * 1000


async def test_channel_keeps_no_notice_to_which_a_function_of_a_user_listens(database_url: str) -> None:
    async with PostgresStore(database_url) as store, store._commit.use() as connection:
        await connection.execute("LISTEN storm")
        await connection.execute("SELECT pg_notify('storm', number::text) FROM generate_series(1, 1000) AS number")
        kept = len(connection._notifies_backlog or ())

    assert kept == 0


async def test_a_server_that_ends_before_it_answers_is_not_taken_for_a_full_pool(database_url: str) -> None:
    async def end_server(connection: Connection) -> None:
        hang_up(connection)  # no error of the server comes, as when it is killed
        await connection.execute("SELECT 1")

    channel = Channel(ConnectionGroup(database_url, ConnectionSettings()), "test", prepare=end_server)
    with pytest.raises(StoreUnavailableError, match="the database is not available") as lost:
        await channel.connected()

    assert "pooler" not in f"{lost.value.message} {lost.value.hint}"


async def test_channel_whose_server_restarted_does_not_cost_the_next_channel_an_attempt(database_url: str) -> None:
    # Each dead connection, met one by one, cost a worker another back-off: ten seconds after a restart of three.
    channels = ("_commit", "_poll", "_admin", "_fold", "_hint")
    async with PostgresStore(database_url) as store:
        for channel in channels:
            async with getattr(store, channel).use() as connection:
                await connection.execute("SELECT 1")
        with psycopg.connect(database_url, autocommit=True) as outsider:
            outsider.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

        outcomes = []
        for channel in channels:
            try:
                async with getattr(store, channel).use() as connection:
                    await connection.execute("SELECT 1")
                outcomes.append("answered")
            except StoreUnavailableError:
                outcomes.append("lost")

    assert outcomes == ["lost", "answered", "answered", "answered", "answered"]


async def test_turn_does_not_continue_on_a_database_that_took_the_place_of_its_own(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    # A dump restored beside the database and renamed has its name and its server, and lacks its newest commits.
    name = sql.Identifier(conninfo.conninfo_to_dict(database_url)["dbname"])
    group = ConnectionGroup(database_url, ConnectionSettings())
    poll, admin = Channel(group, "poll", serves_turns=True), Channel(group, "admin")
    with fresh_database(postgres) as restored:
        async with admin.use() as connection:
            await group.follow_server(connection)
        for channel in (poll, admin):
            await channel.drop()
        with psycopg.connect(postgres.url(), autocommit=True) as operator:
            for old, new in ((name, sql.Identifier("away")), (sql.Identifier(restored), name)):
                operator.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(old, new))
            try:
                with pytest.raises(StoreUnavailableError, match="restarted or replaced"):
                    await poll.connected()
            finally:
                await poll.close()
                for old, new in ((name, sql.Identifier(restored)), (sql.Identifier("away"), name)):
                    operator.execute(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(old, new))


async def test_fold_is_abandoned_when_another_channel_finds_the_network_silent(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    # A fold may take a minute; behind a pooler that hung, a worker that had finished waited a minute for it.
    name = conninfo.conninfo_to_dict(database_url)["dbname"]
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    settings = ConnectionSettings(answer_s=1.0)
    with PostgresProxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        group = ConnectionGroup(url_through_proxy(postgres.tcp_url(str(name)), proxy.port), settings)
        fold = Channel(group, "fold", long=True)
        poll = Channel(group, "poll")
        for channel in (fold, poll):
            async with channel.use() as connection:
                await connection.execute("SELECT 1")
        proxy.forsake()

        async def ask(channel: Channel) -> None:
            async with channel.use() as connection:
                await connection.execute("SELECT 1")

        async with asyncio.timeout(settings.long_statement_s):
            outcomes = await asyncio.gather(ask(fold), ask(poll), return_exceptions=True)
        await ask(fold)
        await fold.close()
        await poll.close()

    assert [type(outcome) for outcome in outcomes] == [StoreUnavailableError, StoreUnavailableError]


async def test_statement_longer_than_the_lease_is_waited_for(database_url: str) -> None:
    moved: list[float] = []
    group = ConnectionGroup(database_url, ConnectionSettings(answer_s=1.0), progressed=lambda: moved.append(0.0))
    channel = Channel(group, "commit", serves_turns=True)
    async with channel.use() as connection:
        await (await connection.execute("SELECT 1")).fetchall()
        moved.clear()
        slept = await (await connection.execute("SELECT 'slept' FROM pg_sleep(5)")).fetchall()
    await channel.close()

    assert slept == [("slept",)]
    assert len(moved) > 3, "the worker's watchdog would not know that something happens"


async def test_slow_answer_is_waited_for(database_url: str, postgres: EmbeddedPostgres) -> None:
    with slow_link(postgres, database_url, bytes_per_s=400_000) as url:
        channel = Channel(ConnectionGroup(url, ConnectionSettings(answer_s=1.5)), "poll")
        async with channel.use() as connection:
            ((text,),) = await (await connection.execute("SELECT repeat('x', 1200000)")).fetchall()
            ((length,),) = await (await connection.execute("SELECT length(%s)", [text])).fetchall()
        await channel.close()

    assert length == 1_200_000


async def test_channel_is_abandoned_when_the_network_lost_its_statement(
    database_url: str, postgres: EmbeddedPostgres
) -> None:
    parts = conninfo.conninfo_to_dict(postgres.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        name = str(conninfo.conninfo_to_dict(database_url)["dbname"])
        url = url_through_proxy(postgres.tcp_url(name), proxy.port)
        channel = Channel(ConnectionGroup(url, ConnectionSettings(answer_s=0.5)), "commit")
        with pytest.raises(StoreUnavailableError):
            async with channel.use() as connection, connection.transaction():
                await connection.execute("SELECT 1")
                proxy.forsake()
                await connection.execute("SELECT 2")
        await channel.close()


@contextmanager
def slow_link(server: EmbeddedPostgres, url: str, *, bytes_per_s: float) -> Iterator[str]:
    """URL of the same database by way of a slow link."""
    parts = conninfo.conninfo_to_dict(server.tcp_url())
    with PostgresProxy(str(parts["host"]), int(str(parts["port"])), bytes_per_s=bytes_per_s) as proxy:
        yield url_through_proxy(server.tcp_url(str(conninfo.conninfo_to_dict(url)["dbname"])), proxy.port)
