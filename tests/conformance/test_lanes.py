"""What the server allows each of a worker's connections."""

from __future__ import annotations

import psycopg
import pytest

from millpy.errors import StoreUnavailableError
from millpy.limits import Limits
from millpy.store.postgres.store import PostgresStore


@pytest.mark.parametrize("lane", ["_commit", "_poll", "_admin", "_fold", "_hint"])
async def test_no_lane_may_idle_in_a_transaction_longer_than_the_lease(database_url: str, lane: str) -> None:
    # A process that is frozen while it folds holds the header's lock, and its fold backend is not the recorded one.
    limits = Limits()
    async with PostgresStore(database_url, limits=limits) as store, getattr(store, lane).use() as connection:
        row = await (
            await connection.execute(
                "SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
            )
        ).fetchone()

    assert row is not None
    assert 0 < row[0] < limits.lease_ttl_s * 1000


async def test_lane_whose_server_restarted_does_not_cost_the_next_lane_an_attempt(database_url: str) -> None:
    # Each dead connection, met one by one, cost a worker another back-off: ten seconds after a restart of three.
    lanes = ("_commit", "_poll", "_admin", "_fold", "_hint")
    async with PostgresStore(database_url) as store:
        for lane in lanes:
            async with getattr(store, lane).use() as connection:
                await connection.execute("SELECT 1")
        with psycopg.connect(database_url, autocommit=True) as outsider:
            outsider.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

        outcomes = []
        for lane in lanes:
            try:
                async with getattr(store, lane).use() as connection:
                    await connection.execute("SELECT 1")
                outcomes.append("answered")
            except StoreUnavailableError:
                outcomes.append("lost")

    assert outcomes == ["lost", "answered", "answered", "answered", "answered"]
