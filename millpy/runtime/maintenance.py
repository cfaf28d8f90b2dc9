"""Folding, retention, backpressure and operators' requests: methods that a background task calls off the hot path.

Folding turns an interval's deltas into rows when its unfolded bytes or their age pass a limit; commits continue
meanwhile. Retention turns the rings. Backpressure pauses the injectors while the stored backlog is above its mark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from millpy.errors import OwnershipError, TransientError
from millpy.hosting.failpoints import Failpoint
from millpy.hosting.interval_state import PauseState
from millpy.runtime.archive_skipper import ArchiveSkipper
from millpy.runtime.context import WorkerContext
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.ownership import OwnedIntervals
from millpy.runtime.skew import Skew
from millpy.store.protocol import Backlog

log = logging.getLogger(__name__)

FORGET_PIECES = 20
"""Most pieces of expired rows that one call of `turn_rings` deletes; the next call continues."""
FINISHED_BYTES = 1_000_000
"""A finished graph leaves a ring's slot below this size as it is, so that many short runs do not use up the slots."""
WARN_AGAIN_S_MIN = 30.0
"""Seconds until the next warning that archives wait; after that, twice as long each time."""


class Maintenance:
    """A worker's work beside its turns: folding, retention, backpressure, operators' requests."""

    def __init__(self, context: WorkerContext, owned: OwnedIntervals, skew: Skew) -> None:
        self._context = context
        self._owned = owned
        self._skew = skew
        self._store = context.store
        self._skipper = ArchiveSkipper(context)
        self._limits = context.limits
        self._clock = context.clock
        self._failpoints = context.failpoints
        self._folded: list[tuple[int, int, int]] = []
        self._deleted: list[tuple[int, int, int]] = []
        self._held_since: float | None = None
        self._warn_at = 0.0
        self.backlog: Mapping[str, Backlog] = {}
        """Backlog by producing computation, from the last `apply_backpressure`; empty in a worker without a source."""

    def _due(self) -> list[OwnedInterval]:
        intervals = [i for i in self._owned.intervals.values() if i.unfolded_bytes or i.expired_windows()]
        total = sum(interval.unfolded_bytes for interval in intervals)
        now = self._clock.monotonic()
        if total >= self._limits.fold_bytes:
            return sorted(intervals, key=lambda i: -i.unfolded_bytes)
        return [i for i in intervals if i.needs_fold or now - i.unfolded_since >= self._limits.fold_every_s]

    async def fold(self) -> bool:
        """Fold the deltas of the intervals that are due; return whether there were any."""
        due = self._due()
        for interval in due:
            await self.fold_one(interval)
        return bool(due)

    async def fold_one(self, interval: OwnedInterval) -> None:
        """Fold the deltas of one interval in the store; `apply_folds` then updates soft state."""
        # Fold everything, in pieces: a remainder in an interval that goes quiet would keep its slot in use for ever.
        bytes_max = 2 * self._limits.unfolded_bytes_max
        try:
            await self._failpoints.reach(Failpoint.BEFORE_FOLD)
            folded = await self._store.fold(interval.grant, bytes_max=bytes_max)
            committed = interval.committed_bundle
            if expired := interval.expired_windows():
                await self._store.delete_windows(interval.grant, expired)
                self._deleted.append((interval.interval_id, interval.grant.sequencer, committed))
        except OwnershipError:
            return  # another worker owns the interval now; the next commit finds that out, too
        await self._failpoints.reach(Failpoint.AFTER_FOLD)
        self._folded.append((interval.interval_id, interval.grant.sequencer, folded))

    def apply_folds(self) -> None:
        """Update soft state after folds that have finished. The worker calls it between turns."""
        folds, self._folded = self._folded, []
        for interval_id, sequencer, folded in folds:
            interval = self._owned.intervals.get(interval_id)
            if interval is None or interval.grant.sequencer != sequencer:
                continue
            interval.fold_to(folded)
            interval.unfolded_since = self._clock.monotonic()
            if interval.stage is not None:
                interval.stage.on_folded(folded)
        deletions, self._deleted = self._deleted, []
        for interval_id, sequencer, bundle in deletions:
            interval = self._owned.intervals.get(interval_id)
            if interval is not None and interval.grant.sequencer == sequencer and interval.stage is not None:
                interval.stage.on_windows_deleted(bundle)

    def unfolded_bytes(self) -> int:
        """Return the bytes of this worker's deltas that are not yet folded."""
        return sum(interval.unfolded_bytes for interval in self._owned.intervals.values())

    async def turn_rings(self) -> None:
        """Advance the rings of segments and dedupe ids to their next slots, free old slots, delete expired rows."""
        freed = await self._store.turn_rings(epoch_s=self._limits.epoch_s, epoch_bytes=self._limits.epoch_bytes)
        for _ in range(FORGET_PIECES):
            if not await self._store.forget_old(
                now_us=self._clock.read().earliest_us,
                dead_letter_kept_s=self._limits.dead_letter_kept_s,
                settled_kept_s=self._limits.settled_kept_s,
                events_kept_s=self._limits.events_kept_s,
            ):
                break
        if freed:
            await self._failpoints.reach(Failpoint.AFTER_SLOT_FREED)

    async def clean_up(self) -> None:
        """Drop expired rows of a finished graph, and free what it leaves in the rings, if it is large.

        No worker may come that does it later. A slot that another graph still needs stays, and so does what a reader
        holds just now.
        """
        with suppress(TransientError):
            await self._store.drop_expired()
            await self._store.turn_rings(epoch_s=self._limits.epoch_s, epoch_bytes=FINISHED_BYTES)

    async def poll_requests(self) -> bool:
        """Read operators' replays, releases and resumptions of owned intervals; return whether there are any."""
        held = dict(self._owned.intervals)
        # Requests that are in a turn have no stored outcome yet: a read would return them again.
        free = {i for i, interval in held.items() if not (interval.requested or interval.replaying)}
        paused = {i for i, interval in held.items() if interval.pause is PauseState.COMMITTED}
        if not free | paused:
            return False
        pending = await self._store.read_requests(
            list(free | paused), records_max=self._limits.replay_records_max, bytes_max=self._limits.bundle_bytes_max
        )
        found = False
        for request in pending.requests:
            interval = held[request.interval_id]
            if request.interval_id in free and self._owned.intervals.get(request.interval_id) is interval:
                interval.requested.append(request)
                found = True
        for interval_id in paused - pending.paused:
            log.info("%s is resumed", held[interval_id].plan.name)
            held[interval_id].pause = PauseState.NO
            found = True
        for interval_id in free:
            # A ticket makes a release idempotent, so one whose commit is not yet known may be passed on again.
            held[interval_id].releases = [r for r in pending.releases if r.interval_id == interval_id]
        return found or bool(pending.releases)

    async def try_archives(self) -> None:
        """Let archives that are held take input again once their place can be written."""
        pace, events, now = self._context.archive_pace, self._context.events, self._clock.monotonic()
        if pace.held is None:
            self._held_since = None
            return
        if self._held_since is None:
            self._held_since = self._warn_at = now
        await events.store_all()
        if await self._store.archives_are_available():
            log.info("the place of the archives can be written again")
            events.add_of_worker("archives_resumed", {})
            await events.store_all()
            pace.resume()
            self._context.wake.set()
        elif now >= self._warn_at:
            log.warning("archives wait, and their records stay in the database: %s", pace.held)
            self._warn_at = now + max(WARN_AGAIN_S_MIN, now - self._held_since)

    async def apply_backpressure(self) -> None:
        """Pause owned sources above the high mark of the backlog, resume them below the low mark, and learn skew."""
        injectors = [i for i in self._owned.intervals.values() if i.plan.stage is None]
        if not injectors:
            self.backlog = {}
            return
        await self._context.events.store_all()
        graph_id = self._context.graph_id
        if self._skew.max_skew_us is not None:
            self._skew.learn(await self._store.compare_sources(graph_id, self._skew.own(self._owned.intervals)))
        backlog = self.backlog = await self._store.backlog(graph_id)
        if await self._skipper.skip(backlog):
            backlog = self.backlog = await self._store.backlog(graph_id)
        # What only archives wait for is read in bulk, and nobody waits for it: its bytes count, not its records.
        archives = [plan.name for plan in self._context.plan if plan.archives]
        read = await self._store.backlog(graph_id, without=archives) if archives else backlog
        records = sum(pending.records for pending in read.values())
        size = sum(pending.bytes for pending in backlog.values())
        limits = self._limits
        for interval in injectors:
            if records > limits.backlog_records_high or size > limits.backlog_bytes_high:
                if not interval.backpressured:
                    log.warning("backlog of %d records, %d bytes: pausing %s", records, size, interval.plan.name)
                interval.backpressured = True
            elif records < limits.backlog_records_low and size < limits.backlog_bytes_low:
                interval.backpressured = False
