"""What a commit may be trusted with, whatever the server's defaults are."""

from __future__ import annotations

import psycopg

from millpy.store.postgres.store import PostgresStore


async def test_commits_are_durable_whatever_the_databases_default(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")

    async with PostgresStore(database_url) as store:
        async with store._commit.use() as lane:
            commit = await (await lane.execute("SHOW synchronous_commit")).fetchone()
        async with store._admin.use() as lane:
            ownership = await (await lane.execute("SHOW synchronous_commit")).fetchone()

    assert (commit, ownership) == (("on",), ("on",))
