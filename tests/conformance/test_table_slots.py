"""Slots of tables: they hear of nothing that is not committed, and a reader stops when changes are missing."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from millpy import PostgresTable
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.postgres import table_thread
from millpy.sources.postgres.table_checks import ensure_slot
from millpy.sources.postgres.table_position import TablePosition
from tests.conformance.table_reading import SLOTS, Reader, end_readers, followed, reader, table_of

_secrets = itertools.count(1)
MUCH_LOG = "SELECT pg_logical_emit_message(false, 'none', repeat('x', 500000)) FROM generate_series(1, 5)"


@pytest.fixture
def secret() -> str:
    return f"slots {next(_secrets)}"


def confirmed(connection: psycopg.Connection[Any]) -> int:
    (found,) = connection.execute(f"SELECT (confirmed_flush_lsn - '0/0')::bigint {SLOTS}").fetchone() or (0,)
    return int(found)


def committed(found: Reader) -> int:
    return msgspec.json.decode(found.position or b"", type=TablePosition).lsn


def a_thread(url: str, secret: str) -> table_thread.TableThread:
    setup = SourceSetup(
        graph="g", stream="s", partition="public.t", limits=Limits(), clock=SystemClock(), ready=asyncio.Event(),
        secret=secret, database=url,
    )  # fmt: skip
    call = asyncio.get_running_loop().call_soon_threadsafe
    return table_thread.TableThread(setup, PostgresTable("t"), url, "unused", None, call)


async def test_slot_hears_of_the_log_without_changes_when_that_is_committed(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            begin = confirmed(connection)
            assert committed(found) == begin
            connection.execute(MUCH_LOG)
            taken = None
            while taken is None:
                taken = await found.injector.take()
                await SystemClock().sleep(0.01)
            await SystemClock().sleep(2.5)  # of statuses every second
            assert confirmed(connection) == begin
            await found.injector.acknowledge(taken.token)
            position = msgspec.json.decode(taken.position, type=TablePosition)
            assert position.lsn >= begin + 1_000_000
            while confirmed(connection) == begin:
                await SystemClock().sleep(0.05)
            assert confirmed(connection) <= position.lsn
            connection.execute("INSERT INTO t VALUES (1)")
            assert [record["id"] for record in await found.records(1)] == [1]


async def test_reader_stops_when_the_slot_or_the_log_does_not_fit_what_is_committed(
    database_url: str, secret: str
) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
        position = msgspec.json.decode(found.position or b"", type=TablePosition)
        future = msgspec.json.encode(msgspec.structs.replace(position, lsn=1 << 60))
        with pytest.raises(ConfigError, match=r"the log ends at .* is an older state"):
            async with reader(database_url, future, secret=secret) as stopped:
                await stopped.take()
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute(
            "SELECT pg_logical_slot_get_binary_changes(slot_name, NULL, NULL,"
            f" 'proto_version', '1', 'publication_names', 'millpy_public_t') {SLOTS}"
        )
        with pytest.raises(ConfigError, match="another program has read the slot"):
            async with reader(database_url, found.position, secret=secret) as stopped:
                await stopped.take()


async def test_server_that_decodes_in_silence_is_waited_for(
    database_url: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_thread, "_SILENT_S_MAX", 1.0)
    async with followed(database_url, secret) as (connection, found):
        while (row := connection.execute(f"SELECT active_pid {SLOTS} AND active").fetchone()) is None:
            await SystemClock().sleep(0.02)
        os.kill(row[0], signal.SIGSTOP)
        try:
            await SystemClock().sleep(4)
        finally:
            os.kill(row[0], signal.SIGCONT)
        connection.execute("INSERT INTO t VALUES (1)")
        assert [record["id"] for record in await found.records(1)] == [1]
        assert found.setup.connection.outage is None


async def test_what_a_first_read_waits_for_is_named_and_read_once(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.execute("PREPARE TRANSACTION 'forgotten'")
        connection.execute("INSERT INTO t VALUES (2)")
        async with reader(database_url, secret=secret) as found:
            while "such as the prepared one 'forgotten' since" not in found.setup.connection.why:
                await SystemClock().sleep(0.02)
            connection.execute("COMMIT PREPARED 'forgotten'")
            connection.execute("INSERT INTO t VALUES (3)")
            assert sorted([record["id"] for record in await found.records(3)]) == [1, 2, 3]


async def test_first_read_waits_for_a_transaction_younger_than_the_last_that_ended(
    database_url: str, secret: str
) -> None:
    thread = a_thread(database_url, secret)
    with (
        table_of(database_url, "id int PRIMARY KEY") as connection,
        psycopg.connect(database_url) as older,
        psycopg.connect(database_url) as younger,
    ):
        older.execute("SELECT pg_current_xact_id()")
        younger.execute("INSERT INTO public.t VALUES (1)")
        older.commit()  # no snapshot names the younger one
        waiting = asyncio.create_task(asyncio.to_thread(thread._await_open, connection))
        while "waits for 1 older transactions" not in thread._setup.connection.why:
            assert not waiting.done()
            await SystemClock().sleep(0.02)
        younger.commit()
        await waiting


async def test_time_limit_of_transactions_does_not_end_the_stream(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY, name text DEFAULT repeat('x', 500)") as connection:
        if connection.info.server_version < 170000:
            return
        database = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL("ALTER DATABASE {} SET transaction_timeout TO 300").format(database))
        async with reader(database_url, secret=secret, limits=Limits(bundle_records_max=100)) as found:
            assert await found.take() == []
            connection.execute("INSERT INTO t SELECT generate_series(1, 20000)")
            read = await found.take()
            await SystemClock().sleep(1)  # the others wait for room
            read += await found.records(20_000 - len(read))
            assert found.setup.connection.outage is None
    assert [record["id"] for record in read] == list(range(1, 20_001))


async def test_first_read_waits_for_a_transaction_of_another_role(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection, psycopg.connect(database_url) as older:
        connection.execute("CREATE ROLE follower LOGIN REPLICATION; GRANT SELECT ON t TO follower")
        connection.execute("CREATE PUBLICATION millpy_public_t FOR TABLE t")
        older.execute("SELECT pg_current_xact_id()")
        why = f"that of pid {older.info.backend_pid} since a time that only pg_read_all_stats may see"
        try:
            url = make_conninfo(database_url, user="follower")
            async with reader(database_url, secret=secret, database=url) as found:
                while why not in found.setup.connection.why:
                    await SystemClock().sleep(0.02)
                older.rollback()
                assert await found.take() == []
        finally:
            connection.execute("DROP OWNED BY follower; DROP ROLE follower")


async def test_slot_that_a_dead_worker_had_begun_to_create_is_read_when_the_server_has_finished_it(
    database_url: str, secret: str
) -> None:
    with (
        table_of(database_url, "id int PRIMARY KEY") as connection,
        psycopg.connect(database_url) as first,
        psycopg.connect(database_url) as second,
        psycopg.connect(database_url) as third,
    ):

        async def await_wait(found: Reader, older: psycopg.Connection[Any]) -> None:
            named = f"such as that of pid {older.info.backend_pid} since"
            while named not in found.setup.connection.why:
                await SystemClock().sleep(0.02)

        first.execute("SELECT pg_current_xact_id()")
        async with reader(database_url, secret=secret) as dead:
            await await_wait(dead, first)
            second.execute("SELECT pg_current_xact_id()")
            first.commit()
            while (slot := connection.execute(f"SELECT slot_name {SLOTS}").fetchone()) is None:
                await SystemClock().sleep(0.02)
            while "waits for transactions that have begun since" not in dead.setup.connection.why:  # not for the first
                await SystemClock().sleep(0.02)
        with pytest.raises(SourceUnavailableError, match="still being created by the session of an earlier worker"):
            ensure_slot(connection, dead.setup, slot[0], None)
        async with reader(database_url, secret=secret) as found:
            await await_wait(found, second)
            third.execute("SELECT pg_current_xact_id()")
            second.commit()  # the server waits for the third one now, and then has the slot
            await await_wait(found, third)
            connection.execute("INSERT INTO t VALUES (1)")
            third.commit()
            read = await found.records(1)
            connection.execute("INSERT INTO t VALUES (2)")
            read += await found.records(1)

    assert [(record["id"], record["operation"]) for record in read] == [(1, "snapshot"), (2, "insert")]


class EndlessStream:
    """A stream of messages that are no records."""

    def next(self, wait_s: float) -> bytes:
        return b"C"


async def test_changes_that_are_no_records_do_not_keep_a_reader_from_its_other_work(secret: str) -> None:
    thread = a_thread("", secret)
    unused: Any = None
    stream: Any = EndlessStream()
    pages = thread._changes(stream, unused, unused, unused, unused)
    async with asyncio.timeout(10):
        assert await asyncio.to_thread(lambda: [next(pages), next(pages)]) == [None, None]


async def test_prepared_transaction_counts_when_it_commits(database_url: str, secret: str) -> None:
    with table_of(database_url, "id int PRIMARY KEY") as connection:
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
            for number in (1, 2):
                connection.execute("BEGIN")
                connection.execute("INSERT INTO t VALUES (%s)", [number])
                connection.execute(f"PREPARE TRANSACTION 'p{number}'")  # type: ignore[call-overload]
            connection.execute("INSERT INTO t VALUES (3)")
            read = await found.records(1)
        connection.execute("COMMIT PREPARED 'p2'")
        connection.execute("ROLLBACK PREPARED 'p1'")
        async with reader(database_url, found.position, secret=secret) as again:
            connection.execute("INSERT INTO t VALUES (4)")
            read += await again.records(2)

    assert [record["id"] for record in read] == [3, 2, 4]


async def test_server_shuts_down_while_changes_are_not_committed(tmp_path: Path, secret: str) -> None:
    tmp_path.chmod(0o755)
    server = EmbeddedPostgres(tmp_path / "postgres")
    with server:
        url = server.url()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
        limits = Limits(bundle_records_max=100)
        async with reader(url, secret=secret, database=url, limits=limits) as found:
            assert await found.take() == []
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute("INSERT INTO public.t SELECT generate_series(1, 20000)")
            await found.take()  # the others wait for room
            await SystemClock().sleep(0.5)
            pid = server.pid()
            os.kill(pid, signal.SIGINT)  # a fast shutdown
            async with asyncio.timeout(8):
                while Path("/proc", str(pid)).exists():
                    await SystemClock().sleep(0.05)


async def test_crash_of_the_server_does_not_give_ids_that_the_copy_shows_to_other_transactions(
    tmp_path: Path, secret: str
) -> None:
    tmp_path.chmod(0o755)
    with EmbeddedPostgres(tmp_path / "postgres") as server:
        url = server.url()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
            connection.execute("INSERT INTO public.t VALUES (1), (2)")
            connection.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            connection.execute("SELECT pg_reload_conf()")
            limits = Limits(bundle_records_max=1)
            async with reader(url, secret=secret, database=url, limits=limits) as found:
                read = await found.take()
            connection.execute("BEGIN")
            connection.execute("SELECT pg_logical_emit_message(true, 'none', repeat('x', 100000))")
            connection.execute("ROLLBACK")  # which is not on the disk yet
            async with reader(url, found.position, secret=secret, database=url, limits=limits) as again:
                while len(read) < 2:
                    read += await again.take()
                while not msgspec.json.decode(again.position or b"", type=TablePosition).copied:
                    await again.take()
                server.kill()
    with EmbeddedPostgres(tmp_path / "postgres") as server:
        url = server.url()
        with psycopg.connect(url, autocommit=True) as connection:
            for number in range(3, 7):
                connection.execute("INSERT INTO public.t VALUES (%s)", [number])
        async with reader(url, again.position, secret=secret, database=url) as last:
            read += await last.records(4)
    assert [record["id"] for record in read] == [1, 2, 3, 4, 5, 6]


async def test_setting_by_which_a_slot_was_lost_is_named(tmp_path: Path, secret: str) -> None:
    tmp_path.chmod(0o755)
    with EmbeddedPostgres(tmp_path / "postgres", version="18") as server:
        url = server.url()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE public.t (id int PRIMARY KEY)")
            async with reader(url, secret=secret, database=url) as found:
                assert await found.take() == []
            end_readers(connection)
            connection.execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute(f"SELECT wal_status {SLOTS}").fetchone() != ("lost",):
                connection.execute("SELECT pg_switch_wal()")
                connection.execute("CHECKPOINT")
                await SystemClock().sleep(0.5)
        with pytest.raises(ConfigError, match=r"lost a part of the log \(idle_replication_slot_timeout\)"):
            async with reader(url, found.position, secret=secret, database=url) as stopped:
                await stopped.take()


@pytest.mark.parametrize("has_read", [False, True])
async def test_slot_of_another_database_is_neither_read_nor_dropped(
    database_url: str, secret: str, has_read: bool
) -> None:
    """The workers' database may be a copy within the server: the slot is that of the database it was copied from."""
    with (
        table_of(database_url, "id int PRIMARY KEY") as connection,
        psycopg.connect(make_conninfo(database_url, dbname="postgres"), autocommit=True) as other,
    ):
        async with reader(database_url, secret=secret) as found:
            assert await found.take() == []
        end_readers(connection)
        (name,) = connection.execute(f"SELECT slot_name {SLOTS}").fetchone() or ("",)
        connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        try:
            with pytest.raises(ConfigError, match=f"slot {name} is that of database postgres"):
                async with reader(database_url, found.position if has_read else None, secret=secret) as stopped:
                    await stopped.take()
        finally:
            other.execute("SELECT pg_drop_replication_slot(%s)", [name])
