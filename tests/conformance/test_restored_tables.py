"""Tables whose database is an older state than what was read: a reader stops instead of missing changes."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.errors import ConfigError
from tests.conformance.table_reading import reader

_secrets = itertools.count(1)
MUCH_LOG = "SELECT pg_logical_emit_message(false, 'none', repeat('x', 500000)) FROM generate_series(1, 5)"


@pytest.fixture
def secret() -> str:
    return f"restored {next(_secrets)}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    tmp_path.chmod(0o755)
    with EmbeddedPostgres(tmp_path / "postgres") as server:
        run(server, "CREATE TABLE public.t (id int PRIMARY KEY)")
        yield server


def run(server: EmbeddedPostgres, query: str) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(query)  # type: ignore[call-overload]


@contextmanager
def stopped(server: EmbeddedPostgres) -> Iterator[None]:
    server.kill()
    yield
    server.restart()


def back_up(server: EmbeddedPostgres) -> Path:
    """Copy the cluster, as a snapshot of its volume does: with its slots."""
    backup = server.directory / "backup"
    with stopped(server):
        subprocess.run(["cp", "-a", server.data, backup], check=True)
    return backup


def restore(server: EmbeddedPostgres, backup: Path) -> None:
    with stopped(server):
        shutil.rmtree(server.data)
        backup.rename(server.data)


async def read(
    server: EmbeddedPostgres, secret: str, position: bytes | None, count: int
) -> tuple[list[dict[str, Any]], bytes | None]:
    async with reader(server.url(), position, secret=secret, database=server.url()) as found:
        records = await found.records(count) if count else await found.take()
        return records, found.position


def insert_each(server: EmbeddedPostgres, numbers: range) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for number in numbers:
            connection.execute("INSERT INTO public.t VALUES (%s)", [number])


async def test_restored_log_that_has_grown_beyond_what_was_read_stops_the_reader(
    server: EmbeddedPostgres, secret: str
) -> None:
    _, position = await read(server, secret, None, 0)
    backup = back_up(server)
    run(server, "INSERT INTO public.t SELECT generate_series(1, 100)")
    _, position = await read(server, secret, position, 100)
    restore(server, backup)
    insert_each(server, range(1, 200))
    with pytest.raises(ConfigError, match=r"s: the log has another transaction at .* is an older state"):
        await read(server, secret, position, 1)


async def test_change_in_a_restored_log_where_there_was_none_stops_the_reader(
    server: EmbeddedPostgres, secret: str
) -> None:
    _, position = await read(server, secret, None, 0)
    run(server, "INSERT INTO public.t VALUES (1)")
    records, position = await read(server, secret, position, 1)
    backup = back_up(server)
    run(server, MUCH_LOG)
    more, position = await read(server, secret, position, 0)
    assert (len(records), more) == (1, [])
    restore(server, backup)
    run(server, "INSERT INTO public.t VALUES (2)")
    run(server, f"{MUCH_LOG}; {MUCH_LOG}")
    with pytest.raises(ConfigError, match=r"s: the log has another transaction at .* is an older state"):
        await read(server, secret, position, 1)


async def test_restored_log_that_has_all_that_was_read_is_followed(server: EmbeddedPostgres, secret: str) -> None:
    _, position = await read(server, secret, None, 0)
    run(server, "INSERT INTO public.t SELECT generate_series(1, 10)")
    _, position = await read(server, secret, position, 10)
    first = back_up(server)
    run(server, "INSERT INTO public.t VALUES (11)")
    restore(server, first)
    insert_each(server, range(12, 15))
    records, position = await read(server, secret, position, 3)
    run(server, MUCH_LOG)
    _, position = await read(server, secret, position, 0)
    second = back_up(server)
    restore(server, second)
    insert_each(server, range(15, 18))
    more, _ = await read(server, secret, position, 3)
    assert [record["id"] for record in records + more] == [12, 13, 14, 15, 16, 17]


async def test_reader_waits_for_the_promotion_of_a_standby_and_reads_on(server: EmbeddedPostgres, secret: str) -> None:
    _, position = await read(server, secret, None, 0)
    run(server, "INSERT INTO public.t VALUES (1)")
    records, position = await read(server, secret, position, 1)
    with stopped(server):
        (server.data / "standby.signal").touch()
    async with reader(server.url(), position, secret=secret, database=server.url()) as found:
        while "is a standby" not in found.setup.connection.why:
            await SystemClock().sleep(0.02)
        run(server, "SELECT pg_promote()")
        run(server, "INSERT INTO public.t VALUES (2)")
        records += await found.records(1)
    assert [record["id"] for record in records] == [1, 2]
