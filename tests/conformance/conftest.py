"""What several conformance tests begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph


@pytest_asyncio.fixture
async def owner(database_url: str) -> AsyncIterator[Owner]:
    """A worker that owns all intervals of a small graph, on PostgreSQL."""
    async with PostgresStore(database_url) as store:
        found = Owner(store, await store.deploy(a_graph()))
        await found.register()
        await found.claim()
        yield found
