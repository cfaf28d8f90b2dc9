"""PostgresStore keeps what every store promises."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict

from millpy.embedded import EmbeddedPostgres
from tests.conformance.postgres_subject import PostgresSubject
from tests.conformance.store_builders import World, a_world
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
