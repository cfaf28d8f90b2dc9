"""PostgresStore keeps what every store promises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict

from millpy.embedded import EmbeddedPostgres
from millpy.model.checkpoint import OutboxState
from tests.conformance.postgres_subject import PostgresSubject
from tests.conformance.store_builders import World, a_world
from tests.conformance.store_outbox_suite import filled, report, state
from tests.conformance.store_suite import StoreSuite


@pytest_asyncio.fixture
async def world(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[World]:
    subject = PostgresSubject(postgres.tcp_url(str(conninfo_to_dict(database_url)["dbname"])))
    try:
        yield await a_world(subject)
    finally:
        await subject.close()


class TestPostgresStore(StoreSuite):
    """The whole suite."""


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_report_in_flight_at_a_takeover_is_read_by_the_new_owner(
    world: World, database_url: str, is_first: bool
) -> None:
    """The rows that a new owner has read must not leave the outbox behind its back."""
    first = await world.owner()
    interval = await filled(world, first)
    if not is_first:
        await first.store.record_delivered([report(first, interval, 1)])

    async def take_over() -> OutboxState:
        second = await world.owner(interval)
        return await state(second, interval)

    with psycopg.connect(database_url) as blocker:
        blocker.execute("SELECT FROM mill.outbox FOR UPDATE")  # the report has stored its position, and waits here
        reporting = asyncio.create_task(first.store.record_delivered([report(first, interval, 5)]))
        await _until_waiting(database_url, 1)
        await first.expire()
        taking = asyncio.create_task(take_over())
        await asyncio.wait([taking], timeout=2)
        blocker.rollback()
    await reporting
    found = await taking
    assert (found.head, found.delivered, found.size) == (5, 5, 0)


async def _until_waiting(url: str, number: int) -> None:
    """Wait until as many statements wait for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection, asyncio.timeout(10):
        while True:
            row = await (await connection.execute(waiting)).fetchone()
            if row is not None and row[0] >= number:
                return
