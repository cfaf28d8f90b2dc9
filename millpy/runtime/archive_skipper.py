"""Archives that may skip: when too much waits for them, a worker moves their cursors past it and counts the records.

The worker takes the archive's intervals over, whether an archiver lives or not, commits the cursors under this fence
like any owner, and releases them. An archiver that was writing finds its grants stale, and continues behind the gap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millpy.hosting.interval_state import IntervalState, state_of
from millpy.hosting.plan import ComputationPlan
from millpy.hosting.routing import segment_queries
from millpy.model.checkpoint import Checkpoint, Grant
from millpy.model.watermark import advance, input_watermark
from millpy.runtime.context import WorkerContext
from millpy.store.protocol import Backlog, Event

log = logging.getLogger(__name__)


class ArchiveSkipper:
    """Lets the archives of a graph skip what sources would have to wait for."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._store = context.store
        self._archives = [computation for computation in context.plan if computation.skips]
        self._held: list[Grant] = []

    async def skip(self, backlog: Mapping[str, Backlog]) -> bool:
        """Skip if the backlog's bytes are above their bound, and half of the bound waits for archives that may skip.

        Raises:
            TransientError, OwnershipError: the database failed, or another worker has skipped at the same time.
        """
        limits, size = self._context.limits, _bytes(backlog)
        await self._release()
        if not self._archives or size <= limits.backlog_bytes_high:
            return False
        others = await self._store.backlog(self._context.graph_id, without=[plan.name for plan in self._archives])
        if size - _bytes(others) <= limits.backlog_bytes_low:
            return False
        for plan in self._archives:
            ids = [interval.interval_id for interval in plan.intervals]
            self._held += await self._store.seize(self._context.worker_id, ids)
            skipped = sum([await self._skip_interval(grant, plan) for grant in self._held])
            await self._release()
            log.warning("archive %s is too far behind: left out %d records", plan.name, skipped)
            detail: dict[str, object] = {"archive": plan.name, "records": skipped}
            await self._store.record_events(self._context.graph_id, [Event("archive_skipped", detail)])
        return True

    async def _skip_interval(self, grant: Grant, plan: ComputationPlan) -> int:
        """Move an interval's cursors to the end of what is stored; return the number of records that it skips."""
        limits = self._context.limits
        (snapshot,) = await self._store.read([grant], state_rows_max=limits.state_preload_rows_max)
        interval = state_of(IntervalState, grant, plan, snapshot, limits)
        skipped, truncated = 0, True
        while truncated:
            answers = await self._store.poll(
                segment_queries({grant.interval_id: interval}), limits.segment_poll_bytes_max
            )
            truncated = any(answer.truncated for answer in answers)
            for answer in answers:
                for segment in answer.segments:
                    interval.count("dead_lettered", str(segment.subscription_id), segment.records)
                    interval.advance_cursor(answer.query.producer, segment.seq, segment.watermark)
                    skipped += segment.records
                if not answer.truncated:
                    interval.advance_cursor(answer.query.producer, answer.head_seq, answer.head_watermark)
        reached = input_watermark(cursor.watermark for cursor in interval.cursors.values())
        await self._store.commit(
            [
                Checkpoint(
                    grant,
                    interval.bundle + 1,
                    reached,
                    advance(interval.low_watermark, reached),
                    delta=tuple(interval.take_counters()),
                    cursors=interval.take_moved(),
                )
            ],
            graph_version=self._context.plan.deployment.version,
        )
        return skipped

    async def _release(self) -> None:
        """Release what is held, also after a failure."""
        if self._held:
            await self._store.release(self._context.worker_id, self._held)
            self._held = []


def _bytes(backlog: Mapping[str, Backlog]) -> int:
    return sum(waiting.bytes for waiting in backlog.values())
