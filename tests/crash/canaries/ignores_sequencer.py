"""Canary: commits as the present owner of the intervals, so that a worker that was taken over still writes."""

from __future__ import annotations

from typing import Any

from millpy.errors import StaleSequencerError
from millpy.process import assembly
from millpy.store.postgres.store import PostgresStore
from tests.crash.canaries.forge import forged, without_tripwires
from tests.crash.graph import graph

__all__ = ["graph"]


class IgnoresSequencer(PostgresStore):
    async def commit(self, checkpoints: Any, **options: Any) -> None:
        while True:
            changed = forged(checkpoints)
            if [checkpoint.grant for checkpoint in changed] != [checkpoint.grant for checkpoint in checkpoints]:
                without_tripwires(changed)
            try:
                return await super().commit(changed, **options)
            except StaleSequencerError:
                pass  # the owner was faster: again, until the fence lets it through


assembly.PostgresStore = IgnoresSequencer  # type: ignore[misc, attr-defined]
