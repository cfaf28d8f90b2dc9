"""MemoryStore as a subject of the store suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from uuid import UUID

from millpy.model.checkpoint import RecordTableName
from millpy.model.deployment import Deployment
from millpy.model.keys import key_text
from millpy.store.memory.faults import Landing
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.protocol import Store
from tests.conformance.store_builders import Row


class MemorySubject:
    """Stores of one class over one `MemoryDatabase`."""

    def __init__(self, kind: type[MemoryStore] = MemoryStore) -> None:
        self.database = MemoryDatabase()
        self._kind = kind
        self._stores: list[MemoryStore] = []

    async def store(self) -> Store:
        store = self._kind(self.database)
        await store.open()
        self._stores.append(store)
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()

    async def rows(self, deployment: Deployment, table: str) -> list[Row]:
        if table.endswith("_history"):
            windows = self.database.table(table.removesuffix("_history"), deployment.name).history.values()
            return [{name: value for name, value in row.items() if name != "emitted_at"} for w in windows for row in w]
        return self.database.rows(table, deployment.name)

    async def delete_rows(self, deployment: Deployment, table: str) -> None:
        self.database.delete_rows(table, lambda row: True, deployment.name)

    async def forbid_negative(self, deployment: Deployment, table: str, column: str) -> None:
        self.database.constrain(table, "not_negative", lambda row: (row[column] or 0) >= 0, deployment.name)

    async def dead_and_late(self, deployment: Deployment) -> tuple[int, int]:
        late = sum(len(rows) for _, _, rows in self.database.late_records)
        return late, len(self.database.dead_letters)

    async def replay(self, table: RecordTableName, number: int, payload: bytes | None = None) -> bool:
        return self.database.requests.replay(table, number, payload)

    async def replay_into_window(self, number: int) -> bool:
        return self.database.requests.replay_into_window(number)

    async def discard(self, table: RecordTableName, number: int) -> bool:
        return self.database.requests.discard(table, number)

    async def standing(self, table: RecordTableName, number: int) -> tuple[str, int]:
        record = self.database.requests.state_of(table, number)
        return record.state, record.attempts

    async def resume(self, graph: str, stream: str, interval_id: int) -> None:
        self.database.requests.resume(interval_id)

    async def release(self, computation: str, interval_id: int, key: str, ticket: int) -> None:
        self.database.requests.release(interval_id, key_text(key), ticket)

    async def drain(self, graph: str, worker_id: UUID) -> bool:
        return self.database.requests.drain(worker_id)

    async def switch(self, family: str, generation: int) -> bool:
        return await self._stores[0].switch(family, generation)

    async def balance(self, deployment: Deployment) -> dict[str, dict[str, int]]:
        accounting = self.database.accounting(deployment.graph_id)
        found: dict[str, dict[str, int]] = {}
        for source in accounting.sources:
            counts = found.setdefault(source.stream, {})
            for name in ("injected", "accepted", "duplicate", "dead_lettered"):
                counts[name] = counts.get(name, 0) + getattr(source, name)
        for sub in accounting.subscriptions:
            counts = found.setdefault(f"{sub.stream}>{sub.consumer}", {})
            for name in (
                "produced",
                "consumed",
                "late",
                "dead_lettered",
                "pending",
                *(["parked"] if sub.parked else []),
            ):
                counts[name] = counts.get(name, 0) + getattr(sub, name)
        return found

    def lose_answer_of_next_commit(self, store: Store, lands: str) -> Callable[[], Any] | None:
        self.database.faults.lose_answer_of_next_commit(cast(Landing, lands), store=cast(MemoryStore, store))
        return None

    async def land_lost_commits(self) -> None:
        self.database.faults.land_lost_commits()
