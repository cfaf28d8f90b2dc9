"""Folding, retention, backpressure, what people ask: off the hot path, each a step that a task or a test can call.

Folding brings an interval's deltas into rows when its unfolded bytes or their age pass a limit; a commit goes on
meanwhile. Retention turns the rings. Backpressure pauses the injectors while the stored backlog is above its mark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millpy.errors import OwnershipError
from millpy.limits import Limits
from millpy.runtime.guarded_clock import GuardedClock
from millpy.runtime.holdings import Holdings
from millpy.runtime.plan import Plan
from millpy.runtime.probe import Point, Probe
from millpy.runtime.skew import Skew
from millpy.runtime.soft_state import Halt, Owned
from millpy.store.protocol import Backlog, Store

log = logging.getLogger(__name__)

FORGET_PIECES = 20
"""Pieces of what is beyond its time that are removed at once; the next turn goes on."""


class Housekeeping:
    """What a worker does beside its turns."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        holdings: Holdings,
        limits: Limits,
        clock: GuardedClock,
        probe: Probe,
        skew: Skew,
    ) -> None:
        self._store = store
        self._plan = plan
        self._holdings = holdings
        self._limits = limits
        self._clock = clock
        self._probe = probe
        self._skew = skew
        self._folded: list[tuple[int, int, int]] = []
        self.backlog: Mapping[str, Backlog] = {}
        """By producing computation, as it was when a worker with a source last looked; others do not look."""

    def _due(self) -> list[Owned]:
        intervals = [i for i in self._holdings.intervals.values() if i.unfolded_bytes]
        total = sum(interval.unfolded_bytes for interval in intervals)
        now = self._clock.monotonic()
        if total >= self._limits.fold_bytes:
            return sorted(intervals, key=lambda i: -i.unfolded_bytes)
        return [i for i in intervals if now - i.unfolded_since >= self._limits.fold_every_s]

    async def fold(self) -> bool:
        """Fold the intervals that are due; False when none was."""
        due = self._due()
        for interval in due:
            await self.fold_one(interval)
        return bool(due)

    async def fold_one(self, interval: Owned) -> None:
        """Fold one interval; the stepping side learns of it through `apply_folds`."""
        # All of it, in pieces: a part that stayed behind in an interval that goes quiet would keep its slot for ever.
        bytes_max = 2 * self._limits.unfolded_bytes_max
        try:
            await self._probe.reach(Point.BEFORE_FOLD_END)
            folded = await self._store.fold(interval.grant, bytes_max=bytes_max)
        except OwnershipError:
            return  # somebody else folds it now; the next commit says so too
        await self._probe.reach(Point.AFTER_FOLD)
        self._folded.append((interval.interval_id, interval.grant.sequencer, folded))

    def apply_folds(self) -> None:
        """Tell soft state what is rows now; called between turns."""
        folds, self._folded = self._folded, []
        for interval_id, sequencer, folded in folds:
            interval = self._holdings.intervals.get(interval_id)
            if interval is None or interval.grant.sequencer != sequencer:
                continue
            interval.fold_to(folded)
            interval.unfolded_since = self._clock.monotonic()
            if interval.stage is not None:
                interval.stage.folded(folded)

    def unfolded_bytes(self) -> int:
        """Delta bytes of this worker that are not rows yet."""
        return sum(interval.unfolded_bytes for interval in self._holdings.intervals.values())

    async def turn_rings(self) -> None:
        """Start new epochs and free slots where that is due."""
        freed = await self._store.turn_rings(epoch_s=self._limits.epoch_s, epoch_bytes=self._limits.epoch_bytes)
        for _ in range(FORGET_PIECES):
            if not await self._store.forget_old(
                now_us=self._clock.read().earliest_us,
                set_aside_kept_s=self._limits.set_aside_kept_s,
                settled_kept_s=self._limits.settled_kept_s,
                events_kept_s=self._limits.events_kept_s,
            ):
                break
        if freed:
            await self._probe.reach(Point.AFTER_SLOT_FREED)

    async def attend(self) -> bool:
        """Look for what people ask of this worker's intervals; whether there is anything."""
        held = dict(self._holdings.intervals)
        # One whose requests are on their way has not settled them, and would be given them again.
        free = {i for i, interval in held.items() if not (interval.requested or interval.replaying)}
        halted = {i for i, interval in held.items() if interval.halt is Halt.COMMITTED}
        if not free | halted:
            return False
        asked = await self._store.asked(
            list(free | halted), records_max=self._limits.replay_records_max, bytes_max=self._limits.bundle_bytes_max
        )
        found = False
        for request in asked.requests:
            interval = held[request.interval_id]
            if request.interval_id in free and self._holdings.intervals.get(request.interval_id) is interval:
                interval.requested.append(request)
                found = True
        for interval_id in halted - asked.paused:
            log.info("%s goes on", held[interval_id].plan.name)
            held[interval_id].halt = Halt.NO
            found = True
        for interval_id in free:
            # By their tickets they do nothing twice, so one whose commit is not known yet may be given once more.
            held[interval_id].releases = [r for r in asked.releases if r.interval_id == interval_id]
        return found or bool(asked.releases)

    async def relieve(self) -> None:
        """Pause the injectors above the high mark, resume them below the low one; nothing is ever dropped."""
        injectors = [i for i in self._holdings.intervals.values() if i.plan.stage is None]
        if not injectors:
            self.backlog = {}
            return
        await self._holdings.record_told()
        graph_id = self._plan.deployment.graph_id
        if self._skew.max_skew_us is not None:
            self._skew.learn(await self._store.compare_sources(graph_id, self._skew.own(self._holdings.intervals)))
        backlog = self.backlog = await self._store.backlog(graph_id)
        records = sum(pending.records for pending in backlog.values())
        size = sum(pending.bytes for pending in backlog.values())
        limits = self._limits
        for interval in injectors:
            if records > limits.backlog_records_high or size > limits.backlog_bytes_high:
                if not interval.paused:
                    log.warning("backlog of %d records, %d bytes: %s pauses", records, size, interval.plan.name)
                interval.paused = True
            elif records < limits.backlog_records_low and size < limits.backlog_bytes_low:
                interval.paused = False
