"""Canary: sends one bundle in ten twice, as a retry without a bundle number would."""

from __future__ import annotations

from typing import Any

from millpy.process import assembly
from millpy.store.postgres.store import PostgresStore
from tests.crash.canaries.forge import forged, without_tripwires
from tests.crash.graph import graph

__all__ = ["graph"]


class CommitsTwice(PostgresStore):
    commits = 0

    async def commit(self, checkpoints: Any, **options: Any) -> None:
        await super().commit(forged(checkpoints), **options)
        self.commits += 1
        if self.commits % 10 == 0:
            again = forged(checkpoints)
            without_tripwires(again)
            await super().commit(again, **options)


assembly.PostgresStore = CommitsTwice  # type: ignore[misc, attr-defined]
