"""The handling of a turn that the database refuses: dead-letter the records at fault, commit the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from millpy.errors import PoisonError, TransientError
from millpy.hosting.isolation import Isolation
from millpy.model.checkpoint import Checkpoint
from millpy.runtime.context import WorkerContext
from millpy.runtime.ownership import OwnedIntervals
from millpy.runtime.poison_filter import rows_of
from millpy.runtime.poison_search import PoisonSearch
from millpy.runtime.turn import Turn, TurnCycle
from millpy.runtime.turn_budget import FACTOR_MIN
from millpy.store.protocol import Event

log = logging.getLogger(__name__)
SEARCH_S_MAX = 5.0
"""Seconds after which a search ends without success, and the turn is taken again with fewer records."""


class PoisonHandler:
    """Steps a refused turn again without the records and rows that the database refuses, and commits the rest."""

    def __init__(self, context: WorkerContext, owned: OwnedIntervals, cycle: TurnCycle) -> None:
        self._context = context
        self._owned = owned
        self._cycle = cycle

    async def commit_without_poison(self, turn: Turn, error: PoisonError) -> Event | None:
        """Commit the rest of a refused turn; return the event to store after recovery, or None if nothing was left.

        Raises:
            TransientError: the database refuses too much; a smaller turn has less of it.
            CorruptionError: the database refuses the turn without any record or row.
        """
        search = PoisonSearch(
            lambda isolation: self._step(turn, isolation), self._refusal, self._context.plan.table_writers(), turn.fired
        )
        budget, clock = self._context.budget, self._context.clock
        # A turn that cannot be halved again is searched to the end, however long that takes.
        smallest = budget.factor <= FACTOR_MIN
        records_max = 2**62 if smallest else self._context.limits.poison_records_max
        ends_at = float("inf") if smallest else clock.monotonic() + SEARCH_S_MAX
        try:
            final = await search.run(records_max, error, lambda: clock.monotonic() >= ends_at)
        except TransientError:
            if search.is_exhausted:  # otherwise a connection was lost, which says nothing about the turn's size
                budget.refused(turn.records, rows_of(turn.checkpoints))
            raise
        if final is None:
            return None
        log.warning("dead-lettered %d records and %d rows: %s", search.records, search.rows, error)
        final = replace(final, tokens=turn.tokens, checkpoints=self._kept(final))
        await self._cycle.commit(final, (turn.inbox.monotonic, clock.monotonic()))
        return Event("refused", {"records": search.records, "rows": search.rows, "reason": error.message})

    async def _step(self, turn: Turn, isolation: Isolation) -> Turn | None:
        self._context.lease.progressed()  # a few thousand trials are slow, but not stuck
        await self._owned.restart()
        return await self._cycle.run_steps(turn.inbox, isolation)

    async def _refusal(self, checkpoints: Sequence[Checkpoint]) -> PoisonError | None:
        self._context.lease.progressed()
        version = self._context.plan.deployment.version
        try:
            await self._context.store.commit(checkpoints, graph_version=version, trial=True)
        except PoisonError as refused:
            return refused
        return None

    def _kept(self, turn: Turn) -> list[Checkpoint]:
        """Return the checkpoints of a turn with the sampled part of its dead letters."""
        intervals = self._owned.intervals
        return [
            intervals[checkpoint.grant.interval_id].sampler.keep(checkpoint, turn.inbox.now_us)
            for checkpoint in turn.checkpoints
        ]
