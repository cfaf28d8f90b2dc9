"""What the server allows each of a worker's connections."""

from __future__ import annotations

import pytest

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
