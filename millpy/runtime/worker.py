"""Worker: turns, one after the other and overlapping; the one place where errors meet reactions.

    wait -> gather -> step -> (outcome of the turn before) -> commit in the background -> wait ...

Ownership changes only between turns: an interval is claimed or released when no stepped or in-flight turn holds it.

    StaleSequencerError, LeaseExpiredError   somebody else may own intervals: take over what is still ours, read again
    CommitUnknownError                       the same; taking over waits for the commit that may still be in flight
    PoisonError                              find the refused record, dead-letter it, commit the rest
    TransientError                           back off, then the same as the first
    UsageError, CorruptionError, assertions  stop the worker; everything is kept in the database
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

from millpy.clock import Clock
from millpy.errors import (
    CursorGapError,
    GraphVersionError,
    OwnershipError,
    PoisonError,
    StepStuckError,
    TransientError,
    UsageError,
)
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, Entries, Grant
from millpy.model.time import Instant
from millpy.runtime import turn as turns
from millpy.runtime.guarded_clock import GuardedClock
from millpy.runtime.holdings import Holdings
from millpy.runtime.housekeeping import Housekeeping
from millpy.runtime.isolation import Isolation, rows_of
from millpy.runtime.observer import Moments, Observer, Observers
from millpy.runtime.ownership import Lease
from millpy.runtime.plan import Plan
from millpy.runtime.poison import Hunt
from millpy.runtime.probe import Probe
from millpy.runtime.set_aside_log import SetAsideLog
from millpy.runtime.skew import Skew
from millpy.runtime.step_thread import StepThread
from millpy.runtime.steps import Inbox, LoadState, Steps
from millpy.runtime.turn import Turn
from millpy.runtime.turn_budget import FACTOR_MIN, TurnBudget
from millpy.store.protocol import Event, Store

log = logging.getLogger(__name__)
WATCH_EVERY_S = 0.25
POISON_SEARCH_S_MAX = 5.0
"""After so long, what the database refuses is looked for in a smaller turn."""
ATTEND_EVERY_S = 0.25
"""How often a worker looks for what people ask of it."""
STEP_HERE_S_MAX = 0.005
"""When a step took longer, user code is slow or waits, and the next step goes to the thread."""


class Worker:
    """Owns intervals of one graph and turns them until stopped or until the graph has finished."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        worker_id: UUID,
        *,
        limits: Limits,
        clock: Clock,
        probe: Probe,
        lease: Lease,
        rng: random.Random,
        only: Sequence[str] = (),
        load: LoadState | None = None,
        start: Instant | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Take what belongs to one process; `load` fetches state from where steps run, if that is not a thread."""
        self._store = store
        self._plan = plan
        self._limits = limits
        self._clock = GuardedClock(clock, store.now_us, limits, self._tell)
        self._probe = probe
        self.lease = lease
        self._rng = rng
        self._observer = observer or Observers()
        self._graph_id = plan.deployment.graph_id
        self.worker_id = worker_id
        self.wake = asyncio.Event()
        self.budget = TurnBudget(limits)
        self._thread = StepThread()
        self.holdings = Holdings(
            store, plan, worker_id, lease, limits, self._clock, probe, self.wake, self._thread, only, start, self.budget
        )
        self._skew = Skew(plan.max_skew_us)
        self.housekeeping = Housekeeping(store, plan, self.holdings, limits, self._clock, probe, self._skew)
        self._set_aside = SetAsideLog()
        lease.watch(plan.progress)
        self._steps = Steps(plan, limits, load or self._load_state, probe, self.budget, self._clock)
        self._in_flight: asyncio.Task[None] | None = None
        self._flying: Turn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._claim_at = self._progress_at = self._poll_at = self._finished_at = 0.0
        self._poll_s = limits.poll_s_min
        self._retry_s = limits.retry_s_min
        self._hinted = False
        self._stepped = (0.0, 0.0)
        self._stepped_here = False
        self._needs_recovery = False
        self._refusal: Event | None = None
        self._gap_seen = False

    @property
    def plan(self) -> Plan:
        """The deployed graph."""
        return self._plan

    @property
    def graph_version(self) -> int:
        """The version of the graph that it knows."""
        return self._plan.deployment.version

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register and read the database's clock."""
        self._loop = asyncio.get_running_loop()
        await self.holdings.announce()
        await self._clock.synchronize()

    async def run(self, stop: asyncio.Event) -> None:
        """Turn until `stop` is set or everything has finished, then drain."""
        tasks = [
            asyncio.create_task(self._repeat(self.housekeeping.fold, min(0.25, self._limits.fold_every_s))),
            asyncio.create_task(self._repeat(self.housekeeping.turn_rings, self._limits.epoch_s / 8)),
            asyncio.create_task(self._repeat(self.housekeeping.relieve, 0.25)),
            asyncio.create_task(self._repeat(self._attend, ATTEND_EVERY_S)),
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._watch_step(stop)),
        ]
        stopping: asyncio.Task[bool] = asyncio.create_task(stop.wait())
        stopping.add_done_callback(self._awake)
        try:
            while not stop.is_set():
                for task in tasks:
                    if task.done():
                        task.result()
                worked = await self.step()
                if _is_cancelled():
                    raise asyncio.CancelledError
                if not worked and not stop.is_set():
                    if await self._has_finished():
                        break
                    await self._wait()
            if not stop.is_set():
                log.info("every source has ended and nothing is pending: folding and leaving")
            await self._drain(self._limits.drain_grace_s if stop.is_set() else None)
        except (UsageError, GraphVersionError):
            # It will be mended or planned anew, and run again, and need not wait for this worker's lease then.
            with suppress(TransientError):
                await self._store.unregister(self.worker_id)
            raise
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)
            await self._abandon()

    async def step(self) -> bool:
        """At most one turn, with the reaction to what goes wrong in it; False when there was nothing to do."""
        self.lease.progressed()
        try:
            worked = await self._turn()
            if worked:
                self._retry_s = self._limits.retry_s_min
            self._gap_seen = False
            return worked
        except CursorGapError as error:
            # A worker that was frozen may poll with a cursor that its successor's retention has passed. Only when
            # the gap is still there under a fresh grant is it one.
            if self._gap_seen:
                raise
            self._gap_seen = True
            log.warning("%s; reading again", error)
            self._observer.failed(error)
            await self._react(self._recover())
        except PoisonError as error:
            self._observer.failed(error)
            if error.too_large and self.budget.factor > FACTOR_MIN:
                # All of its records may be good. Only a turn that cannot get smaller has one that is not.
                log.warning("a turn is too large: %s", error)
                self._void_turn()
                await self._back_off()
                await self._react(self._recover())
            else:
                await self._react(self._isolate(error))
        except OwnershipError as error:
            self._void_turn()
            self._refused(error)
            self._observer.failed(error)
            await self._react(self._recover())
        except TransientError as error:
            log.warning("%s: %s", type(error).__name__, error)
            if isinstance(error, StepStuckError):
                self._observer.failed(error)
                await self._react(self._hand_over())
                return True
            self._void_turn()
            self._observer.failed(error)
            await self._back_off()
            await self._react(self._recover())
        return True

    async def _hand_over(self) -> None:
        """Let others have what this worker holds: with what does not return here they may have better luck."""
        self._void_turn()
        await self._abandon_turn()
        await self.holdings.release(list(self.holdings.intervals))
        self._observer.holds(self.holdings.intervals, 0)
        self._claim_at = self._clock.monotonic() + self._limits.lease_ttl_s
        await self._store.notify(self._graph_id)

    def _void_turn(self) -> None:
        """What was stepped or polled will come again, but smaller: it may have been too large, or too slow."""
        if not self._needs_recovery and self.holdings.intervals:
            self.budget.voided()

    async def _react(self, reaction: Awaitable[None]) -> None:
        """Run a reaction; when it fails for want of the database, the next step tries to recover again."""
        try:
            await reaction
        except (OwnershipError, TransientError, PoisonError) as error:
            log.warning("recovery failed: %s", error)
            self._needs_recovery = True
            await self._back_off()

    # -- one turn -----------------------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        if self._needs_recovery:
            await self._recover()
        await self.lease.await_trust()
        self.housekeeping.apply_folds()
        self.wake.clear()  # before anything is looked at: what comes later wakes again
        now = self._clock.monotonic()
        if self._clock.is_due():
            await self._clock.synchronize()
        if now >= self._claim_at:
            self._claim_at = now + self._limits.claim_every_s * self._rng.uniform(0.8, 1.0)
            await self._balance()
        if not self.holdings.intervals:
            return await self._settle()
        # A quick step gains nothing beside a commit, and what arrives meanwhile can go along with it.
        settled = self._stepped_here and await self._settle()
        inbox = await self._gather()
        if inbox is None:
            return await self._settle() or settled
        turn = await self._step_inbox(inbox)
        await self._settle()
        if turn is None:
            return not turns.inbox_is_empty(inbox)
        self._launch(turn)
        return True

    async def _gather(self) -> Inbox | None:
        """What is waiting; None when no step is needed now."""
        now = self._clock.monotonic()
        # Read before the sources are: what comes while we wait below must not be overtaken by an idle watermark.
        clock = self._clock.read()
        over = self.housekeeping.unfolded_bytes() > self._limits.unfolded_bytes_max
        intervals = self.holdings.intervals
        self.budget.takers = turns.takers(intervals)
        released = turns.releases(self.holdings.intervals)
        replays = {} if over else turns.retake(intervals, clock.now_us, self.budget.records)
        taken, quiet = (
            ({}, frozenset[int]()) if over else await turns.take(intervals, replays, self._skew.held_back(intervals))
        )
        wanted = [] if over else turns.wants(self.holdings.intervals)
        polled, looked = {}, False
        if wanted and (taken or self._hinted or now >= self._poll_at):
            if self._in_flight is not None and any(want.producer in self.holdings.intervals for want in wanted):
                # A local laggard: only with nothing in flight can one poll bring it up to its producer.
                await self._settle()
                wanted = turns.wants(self.holdings.intervals)
            self._hinted = False
            looked = True
            polled = await turns.poll(self._store, wanted, self.budget.segment_bytes)
        progress_due = now >= self._progress_at
        inbox = Inbox(clock, now, polled, taken, quiet, replays, progress_due, released)
        empty = turns.inbox_is_empty(inbox)
        if looked:
            self._poll_s = self._limits.poll_s_min if not empty else min(self._poll_s * 2, self._limits.poll_s_max)
            self._poll_at = now + self._poll_s
        elif over:
            self._poll_at = now + self._limits.poll_s_max
        if progress_due:
            self._progress_at = now + self._limits.progress_every_s
        due = turns.next_processing_due(self.holdings.intervals)
        unfinished = any(interval.unfinished for interval in intervals.values())
        if empty and not (progress_due or unfinished) and (due is None or due > inbox.now_us):
            return None
        return inbox

    async def _step_inbox(self, inbox: Inbox) -> Turn | None:
        """Step in the thread, so that I/O goes on; a few quick records right here."""
        intervals = self.holdings.intervals
        here = self._stepped[1] - self._stepped[0] < STEP_HERE_S_MAX and turns.is_immediate(inbox, intervals)
        executor = None if here else self._thread
        self._stepped_here = here
        started = self._clock.monotonic()
        try:
            return await turns.step(self._steps, inbox, intervals, Isolation(), executor, self._probe)
        finally:
            self._stepped = (started, self._clock.monotonic())
            self.budget.stepped(self._steps.records, self._stepped[1] - started)

    def _launch(self, turn: Turn) -> None:
        for checkpoint in turn.checkpoints:
            interval = self.holdings.intervals[checkpoint.grant.interval_id]
            if size := sum(map(_size, checkpoint.delta)):
                interval.log(checkpoint.bundle, size)
        self._flying = turn
        self._in_flight = asyncio.create_task(self._commit(turn, self._stepped))
        self._in_flight.add_done_callback(self._awake)

    async def _commit(self, turn: Turn, stepped: tuple[float, float]) -> None:
        await self.lease.await_trust()
        await self._send(turn, stepped)
        if any(checkpoint.segments for checkpoint in turn.checkpoints):
            await self._store.notify(self._graph_id)

    async def _send(self, turn: Turn, stepped: tuple[float, float]) -> None:
        sent = self._clock.monotonic()
        await turns.commit(self._store, turn, self._plan.deployment.version, self._probe)
        committed = self._clock.monotonic()
        self._observer.committed(turn, Moments(turn.inbox.monotonic, *stepped, sent, committed))
        for checkpoint in turn.checkpoints:
            if (interval := self.holdings.intervals.get(checkpoint.grant.interval_id)) is not None:
                self._set_aside.add(interval.plan.name, checkpoint)
        self._set_aside.tell(committed)

    def _awake(self, _: object) -> None:
        self.wake.set()

    async def _settle(self) -> bool:
        """Wait for the outcome of the turn in flight; raises what it raised. False when none was in flight."""
        if self._in_flight is None:
            return False
        task, self._in_flight = self._in_flight, None
        await task
        flown, self._flying = self._flying, None
        if flown is not None:
            turns.landed(flown, self.holdings.intervals)
            self.budget.passed()
        return True

    # -- ownership ----------------------------------------------------------------------------------------------

    async def _balance(self) -> None:
        claim, give_up = await self.holdings.rebalance()
        if not claim and not give_up:
            return
        await self._settle()
        if give_up:
            log.info("giving up %s", give_up)
            await self.holdings.release(give_up)
            await self._store.notify(self._graph_id)
        claimed = await self.holdings.claim(claim) if claim else 0
        self._observer.holds(self.holdings.intervals, claimed)

    async def _recover(self) -> None:
        """Void every turn stepped and start from what is stored."""
        self._needs_recovery = True
        await self._abandon_turn()
        await self.holdings.recover()
        self._observer.holds(self.holdings.intervals, 0)
        await self._clock.synchronize()
        self._needs_recovery = False
        self._claim_at = 0.0
        if self._refusal is not None:
            await self._store.record_events(self._graph_id, [self._refusal])
            self._refusal = None

    def _refused(self, error: OwnershipError) -> None:
        log.warning("ownership lost: %s", error)
        self._refusal = Event("fence_refused", {"stale": list(error.stale)})

    async def _abandon_turn(self) -> None:
        task, self._in_flight, self._flying = self._in_flight, None, None
        if task is not None:
            try:
                await task
            except OwnershipError as error:
                self._refused(error)  # another statement has failed first
            except (TransientError, PoisonError) as error:
                log.debug("the turn in flight failed too: %s", error)

    async def _isolate(self, error: PoisonError) -> None:
        """Step the refused turn again without what the database refuses, and commit that (see poison.py)."""
        turn = self._flying
        assert turn is not None, "only a commit can be refused"
        self._needs_recovery = True
        await self._abandon_turn()

        async def step(under: Isolation) -> Turn | None:
            self.lease.progressed()  # a few thousand trials are slow, but not stuck
            await self.holdings.restart()
            return await turns.step(self._steps, turn.inbox, self.holdings.intervals, under, self._thread, self._probe)

        async def refusal(checkpoints: Sequence[Checkpoint]) -> PoisonError | None:
            self.lease.progressed()
            try:
                await self._store.commit(checkpoints, graph_version=self._plan.deployment.version, trial=True)
            except PoisonError as refused:
                return refused
            return None

        hunt = Hunt(step, refusal, self._plan.table_writers(), turn.fired)
        # A turn that cannot be halved any more is searched to the end, however long that takes.
        smallest = self.budget.factor <= FACTOR_MIN
        records_max = 2**62 if smallest else self._limits.poison_records_max
        ends_at = float("inf") if smallest else self._clock.monotonic() + POISON_SEARCH_S_MAX
        try:
            final = await hunt.run(records_max, error, lambda: self._clock.monotonic() >= ends_at)
        except TransientError:
            if hunt.is_given_up:  # else a connection was lost, which says nothing of the turn's size
                self.budget.refused(turn.records, rows_of(turn.checkpoints))
            raise
        if final is not None:
            log.warning("quarantined %d records and %d rows: %s", hunt.records, hunt.rows, error)
            final = replace(final, tokens=turn.tokens, checkpoints=self._kept(final))
            await self._send(final, (turn.inbox.monotonic, self._clock.monotonic()))
        # A turn stepped behind the refused one is void, and its inputs have left their sources: fetch them again. So is
        # one without a checkpoint: what it polled came after a position that had moved and was not stored yet.
        await self.holdings.recover()
        self._observer.holds(self.holdings.intervals, 0)
        self._needs_recovery = False
        if final is None:
            return
        detail: dict[str, object] = {"records": hunt.records, "rows": hunt.rows, "reason": error.message}
        await self._store.record_events(self._graph_id, [Event("refused", detail)])

    def _kept(self, turn: Turn) -> list[Checkpoint]:
        """The checkpoints of a turn with what is kept of its letters."""
        intervals = self.holdings.intervals
        return [
            intervals[checkpoint.grant.interval_id].kept_letters.keep(checkpoint, turn.inbox.now_us)
            for checkpoint in turn.checkpoints
        ]

    # -- waiting ------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        now = self._clock.monotonic()
        until = [self._claim_at]
        if self.holdings.intervals:
            until.append(self._progress_at)
        if turns.wants(self.holdings.intervals):
            until.append(self._poll_at)
        due = turns.next_processing_due(self.holdings.intervals)
        if due is not None:
            until.append(now + (due - self._clock.now_us()) / 1e6)
        # Not `wait_for`, which before Python 3.12 may swallow a cancellation, and makes a task each time.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0005, min(until) - now)):
                await self.wake.wait()

    async def _listen(self) -> None:
        while True:
            try:
                if await self._store.wait_hint(self._graph_id, 5.0):
                    self._hinted = True
                    self.wake.set()
            except TransientError as error:
                log.debug("no hints: %s", error)
                await self._clock.sleep(self._limits.retry_s_max)

    async def _repeat(self, work: Callable[[], Awaitable[object]], every_s: float) -> None:
        """Housekeeping goes on through outages; what the turns need is retried by the turns."""
        while True:
            await self._clock.sleep(every_s)
            try:
                await work()
            except (TransientError, OwnershipError) as error:
                log.debug("housekeeping: %s", error)

    async def _watch_step(self, stop: asyncio.Event) -> None:
        """Give up a step that does not move any more, or that moves for too long when the worker is to leave."""
        leave_at = float("inf")
        while True:
            await self._clock.sleep(WATCH_EVERY_S)
            now = self._clock.monotonic()
            if stop.is_set():
                leave_at = min(leave_at, now + self._limits.drain_grace_s / 2)
            if not self._thread.is_busy():
                continue
            if self.lease.is_stuck():
                call = self._plan.progress.begin_anew()
                where = "" if call is None else f", in {call[0]} of {call[1][0]!r}"
                self._thread.give_up(StepStuckError(f"a call does not return{where}"))
            elif now > leave_at:
                self._plan.progress.begin_anew(blame=False)
                self._thread.give_up(StepStuckError("the step takes longer than the worker may stay"))

    async def _attend(self) -> None:
        self._set_aside.tell(self._clock.monotonic())
        if await self.housekeeping.attend():
            self.wake.set()

    async def _back_off(self) -> None:
        self._retry_s = min(self._limits.retry_s_max, self._retry_s * 2)
        await self._clock.sleep(self._retry_s * self._rng.uniform(0.5, 1.0))

    async def _has_finished(self) -> bool:
        """Whether every source has ended and every interval of the graph has reached the end of time."""
        intervals = self.holdings.intervals.values()
        now = self._clock.monotonic()
        if any(i.intake is not None and not i.finished for i in intervals) or now < self._finished_at:
            return False
        self._finished_at = now + 0.1
        try:
            return await self._store.finished(self._graph_id)
        except TransientError:
            return False

    async def _drain(self, grace_s: float | None) -> None:
        """Finish the turn in flight, fold, release, leave; after the grace the lease does it."""
        try:
            async with asyncio.timeout(grace_s):
                await self._settle()
                with suppress(TimeoutError):  # what is not folded in time is folded by the next owner
                    async with asyncio.timeout(grace_s and grace_s / 2):
                        await self.holdings.fold()
                await self.holdings.release(list(self.holdings.intervals))
                await self._store.unregister(self.worker_id)
        except (OwnershipError, TransientError, PoisonError, TimeoutError) as error:
            log.warning("left without releasing everything: %s", error)

    async def _abandon(self) -> None:
        if self._in_flight is not None:
            self._in_flight.cancel()
            await asyncio.gather(self._in_flight, return_exceptions=True)
        self._set_aside.tell(self._clock.monotonic(), everything=True)
        await self.holdings.close()
        self._thread.shutdown()

    # -- events and state ---------------------------------------------------------------------------------------

    def _tell(self, kind: str, detail: dict[str, object]) -> None:
        """Note an event of this worker for people."""
        self.holdings.tell(Event(kind, {"worker": str(self.worker_id), **detail}))

    def _load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Load missing state from the stepping thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._store.load_state(grant, keys), self._loop).result()


def _size(entries: Entries) -> int:
    return 40 * len(entries) + sum(len(value) for value in entries.values if value is not None)


def _is_cancelled() -> bool:
    """Whether this task is to end: a commit that was cancelled says that its outcome is unknown, and no more."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
