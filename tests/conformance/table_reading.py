"""A table and its reader for tests, on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg

from millpy import ChangeFields, PostgresTable
from millpy.clock import SystemClock
from millpy.ingest.protocol import Source, SourceSetup, TakeBound
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.sources.postgres.table_reader import PageReader

EVERY = ("snapshot", "insert", "update", "delete", "truncate")
FIELDS = ChangeFields(operation="operation", before="before", committed_at="committed_at")
SLOTS = "FROM pg_replication_slots WHERE database = current_database()"


@contextmanager
def table_of(url: str, columns: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with table t; its slots are dropped at the end."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET search_path TO public")  # the role has a schema of its own name
        connection.execute("DROP PUBLICATION IF EXISTS millpy_public_t; DROP TABLE IF EXISTS t")
        connection.execute(f"CREATE TABLE t ({columns})")
        try:
            yield connection
        finally:
            drop_slots(connection)


def drop_slots(connection: psycopg.Connection[Any]) -> None:
    end_readers(connection)
    connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {SLOTS}")


def end_readers(connection: psycopg.Connection[Any]) -> None:
    """End the replication connections; a reader that was closed may still have its own."""
    connection.execute(f"SELECT pg_terminate_backend(active_pid, 1000) {SLOTS} AND active")


class Reader:
    def __init__(self, injector: PageReader, setup: SourceSetup) -> None:
        self.injector, self.setup = injector, setup
        self.position: bytes | None = None
        self.places: list[str] = []
        self.refused: list[str] = []

    async def take(self) -> list[dict[str, Any]]:
        while (taken := await self.injector.take()) is None:
            self.setup.ready.clear()
            await self.setup.ready.wait()
        self.position = taken.position
        self.places += [taken.describe(row) for row in range(len(taken.payloads))]
        self.refused += [row.detail for row in taken.refused]
        await self.injector.acknowledge(taken.token)
        return [json.loads(payload) for payload in taken.payloads]

    async def records(self, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < count:
            found += await self.take()
        return found


@asynccontextmanager
async def reader(
    url: str, position: bytes | None = None, *, secret: str, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Reader]:
    source = PostgresTable("t", **{"operations": EVERY, "fields": FIELDS, **options})
    async with reader_of(source, url, position, secret=secret, limits=limits) as found:
        yield found


@asynccontextmanager
async def reader_of(
    source: Source,
    url: str,
    position: bytes | None = None,
    *,
    secret: str,
    limits: Limits | None = None,
    bound: TakeBound | None = None,
    record_type: RecordType | None = None,
    within_s: float = 25.0,
) -> AsyncIterator[Reader]:
    setup = SourceSetup(
        graph="g", stream="s", partition="public.t", limits=limits or Limits(), clock=SystemClock(),
        ready=asyncio.Event(), secret=secret, database=url, bound=bound, record_type=record_type,
    )  # fmt: skip
    found = Reader(source.connect(setup), setup)  # type: ignore[arg-type]
    async with asyncio.timeout(within_s):
        await found.injector.open(position)
        try:
            yield found
        finally:
            await found.injector.close()


@asynccontextmanager
async def followed(url: str, secret: str) -> AsyncIterator[tuple[psycopg.Connection[Any], Reader]]:
    """A connection to a database with an empty table t, and a reader that follows its changes."""
    with table_of(url, "id int PRIMARY KEY") as connection:
        async with reader(url, secret=secret) as found:
            assert await found.take() == []
            yield connection, found
