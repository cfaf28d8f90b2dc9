"""PostgresStore as a subject of the store suite: each store behind a proxy that can lose a commit's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from millpy.limits import Limits
from millpy.model.checkpoint import RecordTableName
from millpy.model.deployment import Deployment
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import Store
from millpy.testing.proxy import CommitFault, PostgresProxy
from tests.conformance.store_builders import Row

FAULTS = {"before": CommitFault.SWALLOW, "later": CommitFault.LATE_COMMIT, "never": CommitFault.CUT_COMMIT}
LANDS_AFTER_S = 0.6
"""Longer than the test watches a takeover wait."""


class PostgresSubject:
    """Stores over one database, reached by TCP."""

    def __init__(self, tcp_url: str) -> None:
        self._url = tcp_url
        self._stores: dict[int, tuple[PostgresStore, PostgresProxy]] = {}
        self._lost: list[PostgresProxy] = []

    async def store(self) -> Store:
        address = conninfo_to_dict(self._url)
        proxy = PostgresProxy(str(address.get("host", "127.0.0.1")), int(address["port"]), delay_s=LANDS_AFTER_S)
        proxy.__enter__()
        store = PostgresStore(make_conninfo(self._url, host="127.0.0.1", port=proxy.port), limits=Limits())
        self._stores[id(store)] = (store, proxy)
        await store.open()
        return store

    async def close(self) -> None:
        for store, proxy in self._stores.values():
            await store.close()
            proxy.__exit__(None, None, None)

    async def rows(self, deployment: Deployment, table: str) -> list[Row]:
        found = await self._fetch(sql.SQL("SELECT * FROM {}").format(sql.Identifier(deployment.name, table)))
        return [{name: _in_us(value) for name, value in row.items() if name != "emitted_at"} for row in found]

    async def delete_rows(self, deployment: Deployment, table: str) -> None:
        await self._execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(deployment.name, table)))

    async def forbid_negative(self, deployment: Deployment, table: str, column: str) -> None:
        statement = sql.SQL("ALTER TABLE {} ADD CONSTRAINT not_negative CHECK ({} >= 0)")
        await self._execute(statement.format(sql.Identifier(deployment.name, table), sql.Identifier(column)))

    async def dead_and_late(self, deployment: Deployment) -> tuple[int, int]:
        statement = "SELECT (SELECT count(*) FROM mill.late_records) l, (SELECT count(*) FROM mill.dead_letters) d"
        (row,) = await self._fetch(sql.SQL(statement))
        return row["l"], row["d"]

    async def replay(self, table: RecordTableName, number: int, payload: bytes | None = None) -> bool:
        if payload is not None:
            statement = sql.SQL("SELECT millpy.replay_dead_letter({}, {}) AS n").format(number, payload)
        else:
            function = sql.Identifier("millpy", f"replay_{table}")
            statement = sql.SQL("SELECT {}(ARRAY[{}]::bigint[]) AS n").format(function, number)
        return bool((await self._fetch(statement))[0]["n"])

    async def replay_into_window(self, number: int) -> bool:
        statement = sql.SQL("SELECT millpy.replay_into_window(ARRAY[{}]::bigint[], 'why') AS n").format(number)
        return bool((await self._fetch(statement))[0]["n"])

    async def discard(self, table: RecordTableName, number: int) -> bool:
        function = sql.Identifier("millpy", f"discard_{table}")
        statement = sql.SQL("SELECT {}(ARRAY[{}]::bigint[]) AS n").format(function, number)
        return bool((await self._fetch(statement))[0]["n"])

    async def standing(self, table: RecordTableName, number: int) -> tuple[str, int]:
        column = sql.Identifier(table.removesuffix("s") + "_id")
        statement = sql.SQL("SELECT state, attempts FROM {} WHERE {} = {}")
        (row,) = await self._fetch(statement.format(sql.Identifier("millpy", table), column, number))
        return row["state"], row["attempts"]

    async def resume(self, graph: str, stream: str, interval_id: int) -> None:
        await self._fetch(sql.SQL("SELECT millpy.resume_source({}, {})").format(graph, stream))

    async def release(self, computation: str, interval_id: int, key: str, ticket: int) -> None:
        await self._fetch(sql.SQL("SELECT millpy.release_parked('factory', {}, {})").format(computation, key))

    async def drain(self, graph: str, worker_id: UUID) -> bool:
        statement = sql.SQL("SELECT millpy.drain_worker({}, {}) AS n").format(graph, worker_id)
        return bool((await self._fetch(statement))[0]["n"])

    async def switch(self, family: str, generation: int) -> bool:
        async with PostgresStore(self._url) as store:
            return await store.switch(family, generation) is not None

    async def balance(self, deployment: Deployment) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for row in await self._fetch(sql.SQL("SELECT * FROM millpy.accounting")):
            if row["graph"] == deployment.name:
                name = row["stream"] if row["consumer"] is None else f"{row['stream']}>{row['consumer']}"
                counts = found.setdefault(name, {})
                for count, value in row.items():
                    if isinstance(value, int) and not isinstance(value, bool) and not count.endswith("_id"):
                        counts[count] = counts.get(count, 0) + value
        return found

    def lose_answer_of_next_commit(self, store: Store, lands: str) -> Callable[[], Any] | None:
        _, proxy = self._stores[id(store)]
        proxy.arm(FAULTS[lands])
        if lands == "later":
            self._lost.append(proxy)
        return _pause

    async def land_lost_commits(self) -> None:
        for proxy in self._lost:
            assert await asyncio.to_thread(proxy.landed.wait, 30)
        self._lost.clear()

    async def _fetch(self, statement: sql.SQL | sql.Composed) -> list[Row]:
        async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
            cursor = connection.cursor(row_factory=psycopg.rows.dict_row)
            return await (await cursor.execute(statement)).fetchall()

    async def _execute(self, statement: sql.Composed) -> None:
        async with await psycopg.AsyncConnection.connect(self._url, autocommit=True) as connection:
            await connection.execute(statement)


async def _pause() -> None:
    """Stop between fence and COMMIT, so that they are two messages."""


def _in_us(value: Any) -> Any:
    """Convert datetimes to µs; return other values unchanged."""
    if not isinstance(value, datetime):
        return value
    if value.year in (1, 9999):
        return INSTANT_MIN if value.year == 1 else INSTANT_MAX
    return instant(value.astimezone(UTC))
