"""Commits are durable whatever the defaults of the server."""

from __future__ import annotations

import psycopg

from millpy.store.postgres.store import PostgresStore


async def test_commits_are_durable_whatever_the_default_of_the_database(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")

    async with PostgresStore(database_url) as store:
        async with store._commit.use() as channel:
            commit = await (await channel.execute("SHOW synchronous_commit")).fetchone()
        async with store._admin.use() as channel:
            ownership = await (await channel.execute("SHOW synchronous_commit")).fetchone()

    assert (commit, ownership) == (("on",), ("on",))
