"""The cycle of a worker: gather, step, commit, acknowledge. READ THIS FIRST.

    gather       collect the input that waits at the sources and in segments      (nothing is stored)
    step         run all owned intervals in topological order, in memory          (one checkpoint per changed interval)
    commit       store all checkpoints in one transaction, fenced by every grant  (I1, I2)
    acknowledge  tell the sources what is committed, then wake other workers      (never before the commit is known)

A crash at any line leaves all of a turn's effects or none: before the commit none has left the process, and the commit
stores all. A crash before acknowledge makes a source deliver committed input again; its stored position or ids drop it.
Turns overlap: the worker gathers and steps the next turn while this one commits, and commits that one once this one's
outcome is known. If a step takes a few quick records, overlap gains nothing: the worker then awaits the outcome first,
and records that arrive meanwhile join the next turn.

The reaction to a failure depends only on its class (`Worker.step`). To *recover* is to drop all soft state and stepped
turns, take over from itself what no other worker owns, and read its state again; that waits for a commit in flight.

    StaleSequencerError, LeaseExpiredError   make turns smaller, recover; store an event
    TransientError                           make turns smaller, back off, recover
    CommitUnknownError                       the same; recovery finds the turn either committed or not
    ArchiveUnavailableError                  recover; archives take nothing until their place can be written
    ResultTableError                         back off, longer each time until the table is written; store an event
    StepStuckError                           make turns smaller, hand all intervals to other workers
    PoisonError                              find the refused record, dead-letter it, commit the rest; if the turn may
                                             be too large, first as TransientError
    CursorGapError                           recover; the second time in a row, the worker ends
    anything else                            the worker ends; the database has everything that was committed

A source that fails raises none of these: it is connected to again between two turns (`guarded_injector.py`).

If a reaction itself fails in the database, the worker backs off and recovers before the next turn. If acknowledge, or
waking other workers, fails, the reaction is the same, and the turn stays committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from millpy.errors import OwnershipError, PoisonError, StaleSequencerError, TransientError
from millpy.hosting.failpoints import Failpoint
from millpy.hosting.interval_state import PauseState
from millpy.hosting.isolation import Isolation
from millpy.hosting.routing import segment_queries
from millpy.hosting.step import Steps, TurnInput
from millpy.ingest.protocol import Injector
from millpy.model.checkpoint import Checkpoint, Entries
from millpy.model.keys import Key
from millpy.runtime import gather
from millpy.runtime.context import WorkerContext
from millpy.runtime.dead_letter_log import DeadLetterLog
from millpy.runtime.lookups import without_held
from millpy.runtime.maintenance import Maintenance
from millpy.runtime.observer import TurnTimes
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.ownership import OwnedIntervals
from millpy.runtime.skew import Skew
from millpy.store.protocol import Event, SegmentQuery

log = logging.getLogger(__name__)
STEP_HERE_S_MAX = 0.005
"""Seconds: after a longer step, which means that user code is slow, the next step runs in the step thread."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A stepped turn.

    Attributes:
        inbox: its input.
        checkpoints: what has to be committed, one per interval that has changed.
        tokens: the sources to acknowledge after the commit, each with the token of what was taken.
        records: number of input records met while stepping; for poison isolation.
        fired: interval -> key -> number of timers that fired at the end of the turn, for intervals in which not all
            due ones did; for poison isolation.
    """

    inbox: TurnInput
    checkpoints: Sequence[Checkpoint]
    tokens: Sequence[tuple[Injector, Any]]
    records: int
    fired: Mapping[int, Mapping[Key, int]]


class TurnCycle:
    """Takes turns over the intervals that a worker owns.

    Attributes:
        in_flight: the turn that is being committed, or whose commit has failed and is not yet handled; else None.
        hinted: whether another worker has announced new segments.
        poll_at, progress_at: times of the next poll for segments and of the next commit of progress without data, in
            seconds on the monotonic clock.
    """

    def __init__(
        self, context: WorkerContext, owned: OwnedIntervals, maintenance: Maintenance, skew: Skew, steps: Steps
    ) -> None:
        self._context = context
        self._owned = owned
        self._maintenance = maintenance
        self._skew = skew
        self._steps = steps
        self._dead_letter_log = DeadLetterLog()
        self._committing: asyncio.Task[None] | None = None
        self._stepped = (0.0, 0.0)
        self._stepped_here = False
        self._poll_s = context.limits.poll_s_min
        self._losses: dict[str, Event] = {}
        self.in_flight: Turn | None = None
        self.hinted = False
        self.poll_at = self.progress_at = 0.0

    async def take_turn(self) -> bool:
        """Take one turn; return False when there was nothing to do. Also raises the error of the turn before."""
        # A quick step gains nothing from running beside a commit, and records that arrive meanwhile can join it.
        waited = self._stepped_here and await self.await_in_flight()
        inbox = await self.gather()
        if inbox is None:
            return await self.await_in_flight() or waited
        turn = await self.step(inbox)
        await self.await_in_flight()  # raises the failure of the turn before, which voids this one as well
        if turn is None:
            return not gather.is_empty(inbox)
        self._commit_in_background(turn)  # commit, then acknowledge
        return True

    async def gather(self) -> TurnInput | None:
        """Collect the waiting input; return None when no step is needed now."""
        now = self._context.clock.monotonic()
        # Read the clock before the sources: an idle watermark must not overtake records that arrive meanwhile.
        clock = self._context.clock.read()
        over = self._maintenance.unfolded_bytes() > self._context.limits.unfolded_bytes_max
        intervals, budget = self._owned.intervals, self._context.budget
        for interval in intervals.values():
            interval.needs_fold = interval.stage is not None and interval.stage.needs_fold()
            over = over or (interval.stage is not None and interval.needs_fold and interval.stage.waits_for_fold())
        pace = self._context.archive_pace
        pace.apply(intervals)
        self._context.lookups.apply(intervals)
        full = self._context.drains.full()
        for interval in intervals.values():
            interval.wait_for_outbox(full)
        free = {i: interval for i, interval in intervals.items() if not interval.held}
        queries = pace.due(without_held(segment_queries(intervals), intervals), intervals, now)
        budget.takers = gather.takers(intervals, queries)
        releases = gather.releases(intervals)
        settlements = self._context.drains.settlements(releases)
        releases = {interval_id: found for interval_id, found in releases.items() if found}
        inbox = TurnInput(clock, now, releases=releases, progress_due=now >= self.progress_at, settlements=settlements)
        inbox.tables = dict(self._context.lookups.versions)
        inbox.full = full
        if over:  # take no more input until folds have caught up
            self.poll_at = now + self._context.limits.poll_s_max
        else:
            inbox.replays = gather.replays(free, clock.now_us, budget.records)
            inbox.taken, inbox.quiet = await gather.take(intervals, inbox.replays, self._skew.held_back(intervals))
            await self._poll(inbox, queries)
        if inbox.progress_due:
            self.progress_at = now + self._context.limits.progress_every_s
        return inbox if self._is_needed(inbox) else None

    async def step(self, inbox: TurnInput) -> Turn | None:
        """Step a few quick records here, others in the step thread; return None if there is nothing to commit."""
        here = self._stepped[1] - self._stepped[0] < STEP_HERE_S_MAX and gather.is_immediate(
            inbox, self._owned.intervals
        )
        self._stepped_here = here
        started = self._context.clock.monotonic()
        try:
            return await self.run_steps(inbox, Isolation(), in_thread=not here)
        finally:
            self._stepped = (started, self._context.clock.monotonic())
            self._context.budget.stepped(self._steps.records, self._stepped[1] - started)

    async def commit(self, turn: Turn, stepped: tuple[float, float]) -> None:
        """Commit a turn, then acknowledge its sources; `stepped` is begin and end of its step, for the observer.

        Raises what `Store.commit` raises.
        """
        context = self._context
        await context.failpoints.reach(Failpoint.BEFORE_COMMIT)
        sent = context.clock.monotonic()
        await context.store.commit(
            turn.checkpoints, graph_version=context.plan.deployment.version, inside=self._inside_commit()
        )
        await context.failpoints.reach(Failpoint.AFTER_COMMIT)
        context.drains.committed(turn.checkpoints)
        context.refused_results.committed(turn.checkpoints)
        await self.acknowledge(turn)
        times = TurnTimes(turn.inbox.monotonic, *stepped, sent, context.clock.monotonic())
        self._report_committed(turn, times)

    async def acknowledge(self, turn: Turn) -> None:
        """Acknowledge to the sources what a committed turn has taken from them (I2)."""
        for injector, token in turn.tokens:
            await injector.acknowledge(token)
        await self._context.failpoints.reach(Failpoint.AFTER_ACKNOWLEDGE)

    # -- in between -----------------------------------------------------------------------------------------------

    async def _poll(self, inbox: TurnInput, queries: Sequence[SegmentQuery]) -> None:
        """Read the queried segments into the inbox if a poll is due."""
        if not queries or not (inbox.taken or self.hinted or inbox.monotonic >= self.poll_at):
            return
        if self._committing is not None and any(query.producer in self._owned.intervals for query in queries):
            # A local consumer lags: one poll can bring it up to its producer only when nothing is in flight.
            await self.await_in_flight()
        self.hinted = False
        inbox.polled = await gather.poll(self._context.store, queries, self._context.budget.segment_bytes)
        answers = [answer for of in inbox.polled.values() for answer in of]
        self._context.archive_pace.polled(answers, self._owned.intervals, inbox.monotonic)
        segments = [part for answer in answers for part in answer.segments]
        self._context.budget.polled(sum(s.records for s in segments), sum(len(s.payload or b"") for s in segments))
        limits = self._context.limits
        self._poll_s = limits.poll_s_min if not gather.is_empty(inbox) else min(self._poll_s * 2, limits.poll_s_max)
        self.poll_at = inbox.monotonic + self._poll_s

    def _is_needed(self, inbox: TurnInput) -> bool:
        """Tell whether a step from this input may change anything."""
        intervals = self._owned.intervals
        due = gather.next_processing_due(intervals)
        unfinished = any(interval.unfinished for interval in intervals.values())
        is_due = inbox.progress_due or unfinished or (due is not None and due <= inbox.now_us)
        return is_due or not gather.is_empty(inbox)

    async def run_steps(self, inbox: TurnInput, isolation: Isolation, *, in_thread: bool = True) -> Turn | None:
        """Step from gathered input, without the records that the isolation leaves out."""
        steps, failpoints = self._steps, self._context.failpoints
        intervals = dict(self._owned.intervals)  # an abandoned step must not see intervals that are opened after it

        def run() -> list[Checkpoint]:
            failpoints.reach_now(Failpoint.AFTER_POLL)
            return steps.run(inbox, intervals, isolation)

        isolation.seen = 0
        steps.progress.stepping = True
        try:
            loop = asyncio.get_running_loop()
            checkpoints = await loop.run_in_executor(self._context.thread, run) if in_thread else run()
        finally:
            steps.progress.stepping = False
        await failpoints.reach(Failpoint.AFTER_STEP)
        if not checkpoints:
            return None
        tokens = [
            (injector, taken.token)
            for interval_id, taken in inbox.taken.items()
            if (injector := self._owned.intervals[interval_id].injector) is not None
        ]
        return Turn(inbox, checkpoints, tokens, isolation.seen, isolation.fired)

    def _commit_in_background(self, turn: Turn) -> None:
        """Begin the commit of a turn; `await_in_flight` raises its error."""
        for checkpoint in turn.checkpoints:
            if size := sum(map(_size, checkpoint.delta)):
                self._owned.intervals[checkpoint.grant.interval_id].log(checkpoint.bundle, size)
        self.in_flight = turn
        self._committing = asyncio.create_task(self._commit_when_trusted(turn, self._stepped))
        self._committing.add_done_callback(lambda _: self._context.wake.set())

    async def _commit_when_trusted(self, turn: Turn, stepped: tuple[float, float]) -> None:
        """Commit a turn once the lease is trusted; then wake the workers that consume its segments."""
        await self._context.lease.await_trust()
        await self.commit(turn, stepped)
        if any(checkpoint.segments for checkpoint in turn.checkpoints):
            await self._context.store.notify(self._context.graph_id)

    def _inside_commit(self) -> Callable[[], Awaitable[None]] | None:
        failpoints = self._context.failpoints
        return partial(failpoints.reach, Failpoint.AFTER_FENCE) if failpoints.watches_fence else None

    def _report_committed(self, turn: Turn, times: TurnTimes) -> None:
        self._context.latencies.add(times)
        self._context.observer.committed(turn, times)
        for checkpoint in turn.checkpoints:
            if (interval := self._owned.intervals.get(checkpoint.grant.interval_id)) is not None:
                self._dead_letter_log.add(interval.plan.name, checkpoint)
        self.log_dead_letters()

    def log_dead_letters(self, *, everything: bool = False) -> None:
        """Log the counts of new dead letters and parked keys, if due; all of them if `everything`."""
        self._dead_letter_log.log_due(self._context.clock.monotonic(), everything=everything)

    async def await_in_flight(self) -> bool:
        """Wait for the turn in flight and raise its error, if any; return False when none was in flight."""
        if self._committing is None:
            return False
        task, self._committing = self._committing, None
        await task
        turn, self.in_flight = self.in_flight, None
        if turn is not None:
            _on_committed(turn, self._owned.intervals)
            self._context.budget.passed()
        return True

    def due_at(self, now: float) -> float:
        """Return when the next turn is due if nothing arrives; `now` and the result are in seconds, monotonic."""
        intervals, clock = self._owned.intervals, self._context.clock
        moments = [float("inf")]
        if intervals:
            moments.append(self.progress_at)
        queries, pace = without_held(segment_queries(intervals), intervals), self._context.archive_pace
        due_queries = pace.due(queries, intervals, now)
        if due_queries:
            moments.append(self.poll_at)
        if len(due_queries) < len(queries):
            moments.append(max(self.poll_at, pace.due_at()))
        due = gather.next_processing_due(intervals)
        if due is not None:
            moments.append(now + (due - clock.now_us()) / 1e6)
        return min(moments)

    async def void(self) -> None:
        """Wait for the commit in flight, if any, and forget its turn whether it succeeded or not. Log its error."""
        task, self._committing, self.in_flight = self._committing, None, None
        if task is not None:
            try:
                await task
            except OwnershipError as error:
                self.note_loss(error)  # another statement has failed first, and its error is being handled
            except (TransientError, PoisonError) as error:
                log.debug("the turn in flight also failed: %s", error)

    def note_loss(self, error: OwnershipError) -> None:
        """Log that ownership is lost, and keep the event for `record_losses`."""
        log.warning("ownership lost: %s", error)
        if isinstance(error, StaleSequencerError):
            event = Event("fence_refused", {"stale": list(error.stale)})
        else:
            event = Event("lease_expired", {"worker": str(self._context.worker_id), "why": error.message})
        self._losses[event.kind] = event

    async def record_losses(self) -> None:
        """Store the last event of each kind that `note_loss` has kept since it was called. Raises TransientError."""
        if self._losses:
            await self._context.store.record_events(self._context.graph_id, list(self._losses.values()))
            self._losses.clear()

    async def cancel(self) -> None:
        """Cancel the commit in flight, whatever its outcome, and log the dead letters that were not yet logged."""
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.gather(self._committing, return_exceptions=True)
        self.log_dead_letters(everything=True)


def _on_committed(turn: Turn, intervals: Mapping[int, OwnedInterval]) -> None:
    """Note the bundles and the pauses that a turn has committed; let its intervals take replay requests again."""
    for interval_id in turn.inbox.replays:
        if interval_id in intervals:
            intervals[interval_id].replaying = False
    for checkpoint in turn.checkpoints:
        interval = intervals.get(checkpoint.grant.interval_id)
        if interval is not None:
            interval.committed_bundle = checkpoint.bundle
        if checkpoint.pause is not None and interval is not None:
            interval.pause = PauseState.COMMITTED
            name = interval.plan.name
            log.warning(
                "source %s paused: %s; resume with `millpy sources resume %s`", name, checkpoint.pause.reason, name
            )


def _size(entries: Entries) -> int:
    return 40 * len(entries) + sum(len(value) for value in entries.values if value is not None)
