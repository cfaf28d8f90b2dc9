"""Worker: takes turns until it is stopped or the graph has finished. `step` is the one place that reacts to errors.

Ownership changes only between turns: an interval is claimed or released when no stepped or in-flight turn holds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress

from millpy.errors import (
    ArchiveUnavailableError,
    CursorGapError,
    GraphVersionError,
    MillError,
    OwnershipError,
    PoisonError,
    ResultTableError,
    StepStuckError,
    TransientError,
    UsageError,
)
from millpy.hosting.step import Steps, StoreLoader
from millpy.runtime.background import BackgroundTasks
from millpy.runtime.cancellation import is_cancelled
from millpy.runtime.context import WorkerContext
from millpy.runtime.maintenance import Maintenance
from millpy.runtime.ownership import OwnedIntervals
from millpy.runtime.poison_handler import PoisonHandler
from millpy.runtime.skew import Skew
from millpy.runtime.source_health import report_at_last
from millpy.runtime.source_servers import serving_sources
from millpy.runtime.turn import TurnCycle
from millpy.runtime.turn_budget import FACTOR_MIN

log = logging.getLogger(__name__)


class Worker:
    """Owns intervals of one graph and takes turns over them until stopped or until the graph has finished.

    Args:
        context: the objects that the worker's parts share.
        load: loads state and windows from inside a step; by default from the step thread.
    """

    cycle_type = TurnCycle

    def __init__(self, context: WorkerContext, load: StoreLoader | None = None) -> None:
        self.context = context
        skew = Skew(context.plan.max_skew_us)
        self.owned = OwnedIntervals(context)
        self.maintenance = Maintenance(context, self.owned, skew)
        load = load or context.thread.loader(context.store)
        steps = Steps(context.plan, context.limits, load, context.failpoints, context.budget, context.clock.monotonic)
        self.cycle = self.cycle_type(context, self.owned, self.maintenance, skew, steps)
        self._poison = PoisonHandler(context, self.owned, self.cycle)
        context.lease.watch(context.plan.progress)
        self._claim_at = 0.0
        self._retry_s = context.limits.retry_s_min
        self._needs_recovery = False
        self._gap_seen = False
        self._tried_to_read_on = False
        self._stop = asyncio.Event()

    @property
    def graph_version(self) -> int:
        """The version of the graph that this worker runs."""
        return self.context.plan.deployment.version

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register and read the database's clock."""
        await self.owned.announce()
        await self.context.clock.synchronize()

    async def run(self, stop: asyncio.Event) -> None:
        """Take turns until `stop` is set, an operator requests a drain, or the graph has finished; then release all."""
        self._stop = stop
        background = BackgroundTasks(self.context, self.maintenance, self.cycle, stop)
        background.start()
        try:
            async with serving_sources(self.context):
                await self._run_until(stop, background)
        except (UsageError, GraphVersionError):
            # The graph will be fixed or planned again; its next worker need not wait for this lease to expire.
            await report_at_last(self.context.sources)
            with suppress(TransientError):
                await self.context.store.unregister(self.context.worker_id)
            raise
        finally:
            await background.end()
            await self.abandon()

    async def _run_until(self, stop: asyncio.Event, background: BackgroundTasks) -> None:
        while not self._is_stopping(stop):
            background.raise_failed()
            worked = await self.step()
            if is_cancelled():  # a commit that is cancelled raises only that its outcome is unknown
                raise asyncio.CancelledError
            if not worked and not self._is_stopping(stop):
                if await self.owned.have_finished():
                    if not await self._await_more():
                        break
                await self._wait()
        finished = not self._is_stopping(stop)
        if finished:
            log.info("all sources have ended; saving state and exiting")
            self._report_left_out()
        await self._drain(None if finished else self.context.limits.drain_grace_s)
        if finished:
            await self.maintenance.clean_up()

    def _report_left_out(self) -> None:
        """Warn of records that are in no result: of what has ended, nobody watches the status."""
        late, dead = Counter[str](), Counter[str]()
        for interval in self.owned.intervals.values():
            name = interval.plan.name
            counters = dict(interval.counters)
            if interval.intake is not None:  # which counts on from what was stored; that is in the counters, too
                counters["dead_lettered", name] = interval.intake.counts["dead_lettered"]
            for (what, _), count in counters.items():
                late[name] += count if what == "late" else 0
                dead[name] += count if what == "dead_lettered" else 0
        for name, count in (+late).items():
            log.warning("%s: records that came too late: %d; `millpy late list` shows them", name, count)
        for name, count in (+dead).items():
            log.warning("%s: records that are dead letters: %d; `millpy dead-letters list` shows them", name, count)

    def _is_stopping(self, stop: asyncio.Event) -> bool:
        return stop.is_set() or self.context.lease.drain_requested

    async def _await_more(self) -> bool:
        """Tell whether something has come to the sources of a finished graph; the next turn then reads it."""
        ended = self.owned.ended_sources
        await ended.await_checks()
        if ended.is_pending and self._tried_to_read_on:
            log.warning(
                "what has come to a source since its end is not read yet, because not all have processed the end",
                extra={"hint": "let `millpy archive` read up to it, or release parked keys, and run again"},
            )
            return False
        self._tried_to_read_on = True
        self._claim_at = 0.0
        return ended.is_pending

    async def step(self) -> bool:
        """Take at most one turn and react to its errors; return False when there was nothing to do."""
        self.context.lease.progressed()
        try:
            worked = await self._turn()
        except (CursorGapError, PoisonError, OwnershipError, TransientError) as error:
            if isinstance(error, CursorGapError) and self._gap_seen:
                raise
            self.context.observer.failed(error)
            await self._recover_with(self._react(error))
            return True
        if worked:
            self._retry_s = self.context.limits.retry_s_min
        self._gap_seen = False
        return worked

    async def _turn(self) -> bool:
        if self._needs_recovery:
            await self.recover()
        clock = self.context.clock
        await self.context.lease.await_trust()
        self.context.growth.check()
        self.maintenance.apply_folds()
        self.context.wake.clear()  # before looking at any input: what arrives later wakes the worker again
        now = clock.monotonic()
        if clock.is_due():
            await clock.synchronize()
        if now >= self._claim_at:
            self._claim_at = now + self.context.limits.claim_every_s * self.context.rng.uniform(0.8, 1.0)
            await self.balance()
            if self.owned.ended_sources.is_pending:
                await self.cycle.await_in_flight()
                if await self.owned.reopen_sources():
                    await self.recover()
        if not self.owned.intervals:
            return await self.cycle.await_in_flight()
        if failed := self.owned.failed_sources():
            await self.cycle.await_in_flight()
            await self.owned.connect_again(failed)
        return await self.cycle.take_turn()

    # -- reactions ------------------------------------------------------------------------------------------------

    async def _react(self, error: MillError) -> None:
        """React to an error of a turn; turn.py has the table of reactions."""
        log.warning("%s: %s", type(error).__name__, error)
        self._hold_archives(error)
        if isinstance(error, ArchiveUnavailableError):
            await self.recover()
        elif isinstance(error, PoisonError) and not (error.too_large and self.context.budget.factor > FACTOR_MIN):
            await self._isolate(error)
        elif isinstance(error, StepStuckError):
            await self._hand_over()
        elif isinstance(error, CursorGapError):
            # A worker that was frozen may poll with a cursor that its successor's retention has passed. The gap is
            # real only when it is still there under a fresh grant.
            self._gap_seen = True
            await self.recover()
        elif isinstance(error, OwnershipError):
            self._shrink_turns()
            self.cycle.note_loss(error)
            await self.recover()
        elif isinstance(error, ResultTableError):  # a smaller turn would be refused, too
            await self._await_table(error)
            await self.recover()
        else:  # all records of a turn that is too large may be good: search only one that cannot get smaller
            self._shrink_turns()
            await self._back_off()
            await self.recover()

    async def _recover_with(self, reaction: Awaitable[None]) -> None:
        """Run a reaction. If it fails in the database, back off; the next step then begins with `recover`."""
        try:
            await reaction
        except (OwnershipError, TransientError, PoisonError) as error:
            log.warning("recovery failed: %s", error)
            self._hold_archives(error)
            self._needs_recovery = True
            await (self._await_table(error) if isinstance(error, ResultTableError) else self._back_off())

    def _hold_archives(self, error: MillError) -> None:
        """Let archives take nothing if the error is that their files cannot be written or named."""
        pace = self.context.archive_pace
        if ArchiveUnavailableError in (type(error), type(error.__cause__)) and pace.held is None:
            pace.hold(error.message)
            self.context.events.add_of_worker("archives_held", {"why": error.message})

    async def _back_off(self) -> None:
        self._retry_s = min(self.context.limits.retry_s_max, self._retry_s * 2)
        await self.context.clock.sleep(self._retry_s * self.context.rng.uniform(0.5, 1.0))

    async def _await_table(self, error: ResultTableError) -> None:
        """Wait before the next attempt to write to a result table, or until the worker is to stop."""
        clock, lease = self.context.clock, self.context.lease
        until = clock.monotonic() + self.context.refused_results.refused(error)
        while (left_s := until - clock.monotonic()) > 0.001 and not self._is_stopping(self._stop):
            lease.progressed()
            await clock.sleep(min(1.0, left_s))

    def _shrink_turns(self) -> None:
        """Halve the budget of turns, unless a recovery has failed: the failed turn may have been too large or slow."""
        if not self._needs_recovery and self.owned.intervals:
            self.context.budget.voided()

    async def recover(self) -> None:
        """Void every stepped turn, take over the intervals from this worker itself and read their stored state."""
        self._needs_recovery = True
        await self.cycle.void()
        await self.owned.recover()
        self.context.observer.holds(self.owned.intervals, 0)
        await self.context.clock.synchronize()
        self._needs_recovery = False
        self._claim_at = 0.0
        await self.cycle.record_losses()

    async def _isolate(self, error: PoisonError) -> None:
        """Commit the refused turn without the records and rows that the database refuses (see poison_search.py)."""
        turn = self.cycle.in_flight
        assert turn is not None, "only a commit can be refused"
        self._needs_recovery = True
        await self.cycle.void()
        event = await self._poison.commit_without_poison(turn, error)
        # A turn stepped behind the refused one is void, and its inputs have left their sources: fetch them again. A
        # turn without a checkpoint is void, too: its poll followed a position that had moved and was not yet stored.
        await self.owned.recover()
        self.context.observer.holds(self.owned.intervals, 0)
        self._needs_recovery = False
        if event is not None:
            await self.context.store.record_events(self.context.graph_id, [event])

    async def _hand_over(self) -> None:
        """Release all intervals and claim none for the length of a lease: the call may succeed in another worker."""
        self._shrink_turns()
        await self.cycle.void()
        await self.owned.release(list(self.owned.intervals))
        self.context.observer.holds(self.owned.intervals, 0)
        self._claim_at = self.context.clock.monotonic() + self.context.limits.lease_ttl_s
        await self.context.store.notify(self.context.graph_id)

    # -- ownership and the end ------------------------------------------------------------------------------------

    async def balance(self) -> None:
        """Claim free intervals and release surplus ones, between two turns."""
        claim, to_release = await self.owned.rebalance()
        if not claim and not to_release:
            return
        await self.cycle.await_in_flight()
        if to_release:
            log.info("handing intervals %s to another worker", to_release)
            await self.owned.release(to_release)
            await self.context.store.notify(self.context.graph_id)
        claimed = await self.owned.claim(claim) if claim else 0
        self.context.observer.holds(self.owned.intervals, claimed)

    async def _wait(self) -> None:
        now = self.context.clock.monotonic()
        until = min(self._claim_at, self.cycle.due_at(now))
        # Not `wait_for`, which may swallow a cancellation before Python 3.12 and makes a task each time.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0005, until - now)):
                await self.context.wake.wait()

    async def _drain(self, grace_s: float | None) -> None:
        """Finish the turn in flight, fold, release and unregister. After `grace_s` stop, and let the lease expire."""
        if grace_s is not None:
            log.info("stopping: finishing the turn in flight, within %g s", grace_s)
        try:
            async with asyncio.timeout(grace_s):
                await self.cycle.await_in_flight()
                with suppress(TransientError):  # an event is no reason to keep the intervals
                    await self.context.events.store_all()
                await self.owned.leave(grace_s and grace_s / 2)
        except (OwnershipError, TransientError, PoisonError, TimeoutError) as error:
            log.warning("exiting without releasing all intervals: %s", error)

    async def abandon(self) -> None:
        """Cancel the commit in flight, close all sources and forget all intervals without releasing them."""
        await self.cycle.cancel()
        await self.owned.close()
        self.context.thread.shutdown()
