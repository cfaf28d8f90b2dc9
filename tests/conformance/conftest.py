"""What several conformance tests begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millpy.model.deployment import GraphSpec
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph


@pytest.fixture
def spec() -> GraphSpec:
    """What `owner` works at: a small graph, where a module has no other."""
    return a_graph()


@pytest_asyncio.fixture
async def owner(database_url: str, spec: GraphSpec) -> AsyncIterator[Owner]:
    """A worker that owns all intervals of a graph, on PostgreSQL."""
    async with PostgresStore(database_url) as store:
        found = Owner(store, await store.deploy(spec))
        await found.register()
        await found.claim()
        yield found
