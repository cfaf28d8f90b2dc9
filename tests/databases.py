"""Fresh, migrated databases on one server, for tests and for the crash matrix."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from millpy.embedded import EmbeddedPostgres

TEMPLATE = "millpy_template"
IN_MEMORY = Path("/dev/shm")
MEMORY_MIN = 8 * 2**30
_numbers = itertools.count(1)
_migrating = threading.Lock()  # Alembic keeps its state in globals


def make_template(server: EmbeddedPostgres) -> None:
    """Migrate once; every database is a copy."""
    from millpy.store.postgres.deployment.migrate import migrate  # here: tests without a database need not pay for it

    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
    with _migrating:
        migrate(server.url(TEMPLATE))


@contextmanager
def passing_server(directory: Path) -> Iterator[EmbeddedPostgres]:
    """A server with the template, which has ended when this ends: the directory may be removed then."""
    with EmbeddedPostgres(directory, tcp=True) as server:
        make_template(server)
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def memory_directory(otherwise: Path) -> Iterator[Path]:
    """A directory in memory where there is room, else another one.

    On a disk, making and dropping a database takes ten times the CPU, a quarter of that of all tests. No test cuts the
    power, so none sees the difference.
    """
    prefix = "millpy-tests-"
    if not IN_MEMORY.is_dir() or min(shutil.disk_usage(IN_MEMORY).free, _available_memory()) < MEMORY_MIN:
        yield otherwise
        return
    for left in IN_MEMORY.glob(f"{prefix}*"):
        if not Path("/proc", left.name.removeprefix(prefix)).exists():
            shutil.rmtree(left, ignore_errors=True)
    directory = IN_MEMORY / f"{prefix}{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _available_memory() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextmanager
def fresh_database(server: EmbeddedPostgres, template: str = TEMPLATE) -> Iterator[str]:
    """Name of a database that is dropped at the end."""
    name = sql.Identifier(text := f"test_{os.getpid()}_{next(_numbers)}")
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(name, sql.Identifier(template))
        )
    try:
        yield text
    finally:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))


async def until_waiting(url: str, number: int) -> None:
    """Wait until as many statements of a database wait for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, asyncio.timeout(10):
        while True:
            row = await (await connection.execute(waiting)).fetchone()
            if row is not None and row[0] >= number:
                return
