"""The intervals that a worker owns, from claim to release.

A claim raises the sequencer; a later statement reads what the previous owner stored. After any failed or unknown
commit the worker takes its intervals over from itself, which waits for a commit in flight, and reads everything again:
the database is the authority, soft state is always dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from millpy.errors import GraphVersionError, StaleSequencerError, TransientError
from millpy.graph import InjectorNode
from millpy.hosting.closed_ends import closed_ends, why_not_reopened
from millpy.hosting.failpoints import Failpoint
from millpy.hosting.interval_state import PauseState, intake_of
from millpy.ingest.connection_state import ConnectionState
from millpy.ingest.intake import Intake
from millpy.ingest.protocol import SourceSetup
from millpy.ingest.record_check import record_check
from millpy.model.checkpoint import Grant
from millpy.model.deployment import DeployedInterval
from millpy.model.time import Instant, describe
from millpy.runtime.balance import moves
from millpy.runtime.context import WorkerContext
from millpy.runtime.ended_sources import EndedSources
from millpy.runtime.guarded_injector import GuardedInjector
from millpy.runtime.owned_interval import OwnedInterval, owned
from millpy.store.protocol import Event, OwnerSnapshot, WorkerInfo

log = logging.getLogger(__name__)
ASK_FINISHED_EVERY_S = 0.1
"""Seconds between questions to the store whether the graph has finished."""


class OwnedIntervals:
    """The intervals that a worker owns, by id, with their soft state; its methods claim, open and release them."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._store = context.store
        self._plan = context.plan
        self._limits = context.limits
        self._clock = context.clock
        self._lease = context.lease
        self._failpoints = context.failpoints
        self._only = frozenset(context.only)
        self._not_awaited = [c.name for c in context.plan if c.archives]
        if self._only & set(self._not_awaited):  # an archiver awaits them
            self._not_awaited = []
        self._ask_finished_at = 0.0
        self.ended_sources = EndedSources()
        self._why_not: dict[str, str] = {}
        self.intervals: dict[int, OwnedInterval] = {}

    async def rebalance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Read the ownership table and decide; return the ids of the intervals to claim and of those to release.

        A commit would find out, too, what is raised here, but a worker that has nothing to commit must neither keep its
        lease nor count as its share what others own by now.

        Raises:
            GraphVersionError: another version of the graph is deployed.
            StaleSequencerError: another worker has claimed an interval that this one holds. Its lease had expired by
                the clock of the server, or while this machine was suspended.
        """
        known = self._plan.deployment
        ownership = await self._store.ownership(known.graph_id)
        if ownership.graph_version != known.version:
            raise GraphVersionError(
                f"version {ownership.graph_version} of the graph is deployed; this worker runs {known.version}"
            )
        stale = [
            interval.interval_id
            for interval in ownership.intervals
            if interval.interval_id in self.intervals and interval.worker_id != self._context.worker_id
        ]
        if stale:
            raise StaleSequencerError(f"other workers own intervals {stale}", stale=stale)
        computations = {
            c.name: [i.interval_id for i in c.intervals] for c in self._plan if not self._only or c.name in self._only
        }
        decided = moves(self._context.worker_id, ownership, computations, frozenset(self.intervals))
        return decided.to_claim, decided.to_release

    async def claim(self, interval_ids: Sequence[int]) -> int:
        """Claim free intervals, notify, and open them; return how many were claimed."""
        grants = await self._store.claim(self._context.worker_id, interval_ids)
        if not grants:
            return 0
        await self._store.notify(self._context.graph_id)  # first: pages show a takeover, and opening may take minutes
        await self._failpoints.reach(Failpoint.AFTER_CLAIM)
        await self._open(grants, {})
        log.info("claimed %d intervals: %s", len(grants), [grant.interval_id for grant in grants])
        detail: dict[str, object] = {
            "worker": str(self._context.worker_id),
            "intervals": [grant.interval_id for grant in grants],
        }
        await self._store.record_events(self._context.graph_id, [Event("claimed", detail)])
        return len(grants)

    async def have_finished(self) -> bool:
        """Tell whether the graph has no work left. Ask the store (see `Store.finished`) at most every 0.1 s."""
        now = self._clock.monotonic()
        ended = all(interval.intake is None or interval.finished for interval in self.intervals.values())
        if not ended or now < self._ask_finished_at:
            return False
        self._ask_finished_at = now + ASK_FINISHED_EVERY_S
        try:
            return await self._store.finished(self._context.graph_id, without=self._not_awaited)
        except TransientError:
            return False

    async def reopen_sources(self) -> bool:
        """Let ended partitions be read on to which something has come; return whether any is.

        The caller has no turn in flight, and recovers afterwards: the partitions and what is behind them are free.

        Raises:
            BrokenFileError: what has come cannot be read.
            StaleSequencerError, TransientError: as `Store.reopen_source`.
        """
        if self.ended_sources.defect is not None:
            raise self.ended_sources.defect
        ends, reopened = partial(closed_ends, self._plan), False
        found: list[tuple[Instant, OwnedInterval]] = []
        for interval_id in list(self.ended_sources.unread):
            interval = self.intervals.get(interval_id)
            if interval is None or interval.intake is None or not interval.finished:
                self.ended_sources.forget(interval_id)  # another worker owns it, and looks at it, too
            else:
                found.append((interval.intake.ended_at, interval))
        # The lowest watermark first: a step that goes back to it does not go back again for another partition.
        for ended_at, interval in sorted(found, key=lambda one: one[0]):
            interval_id, stream, graph_id = interval.interval_id, interval.plan.name, self._context.graph_id
            what = self.ended_sources.unread[interval_id]
            detail: dict[str, object] = {"stream": stream, "partition": interval.deployed.partition, "what": what}
            told = Event("read_on", detail)
            watermark = await self._store.reopen_source(graph_id, interval.grant, ended_at, ends, told)
            if watermark is None:
                continue  # a step behind it has not processed the end yet
            del self.ended_sources.unread[interval_id]
            reopened = True
            log.info(
                "source %s had ended and is read on: %s; its watermark is %s again, and windows that its end has "
                "closed stay closed (event read_on has their ends)",
                stream,
                what,
                describe(watermark),
            )
        return reopened

    async def fold(self) -> None:
        """Fold the deltas of all intervals on exit. On a release they stay: a new owner loads them faster unfolded."""
        for interval in self.intervals.values():
            if interval.unfolded_bytes:
                await self._store.fold(
                    interval.grant, bytes_max=self._limits.unfolded_bytes_max, progressed=self._lease.progressed
                )
            if expired := interval.expired_windows():
                await self._store.delete_windows(interval.grant, expired, progressed=self._lease.progressed)

    async def leave(self, fold_s: float | None) -> None:
        """Fold for at most `fold_s` seconds (None: to the end), release everything and unregister."""
        owned = len(self.intervals)
        if fold_s is not None:
            log.info("stopping: folding the state of %d intervals, within %g s", owned, fold_s)
        try:
            async with asyncio.timeout(fold_s):
                await self.fold()
        except TimeoutError:
            log.info("stopping: not all state is folded; the next owner folds the rest")
        await self.release(list(self.intervals))
        await self._store.unregister(self._context.worker_id)
        if fold_s is not None:
            log.info("stopped: released %d intervals to other workers", owned)

    async def release(self, interval_ids: Sequence[int]) -> None:
        """Close the sources of these intervals and release them; no stepped turn may contain them."""
        leaving = [self.intervals.pop(i) for i in interval_ids if i in self.intervals]
        for interval in leaving:
            if interval.injector is not None:
                await interval.injector.close()
        await self._context.drains.release([interval.interval_id for interval in leaving])
        await self._failpoints.reach(Failpoint.BEFORE_RELEASE)
        await self._store.release(self._context.worker_id, [interval.grant for interval in leaving])
        self._context.sources.forget(interval_ids)

    async def recover(self) -> None:
        """Take all intervals over from this worker itself, which waits for commits in flight; read them again."""
        grants = [interval.grant for interval in self.intervals.values()]
        for interval in self.intervals.values():
            if interval.injector is not None:
                await interval.injector.close()
                interval.injector = None
        if not self._lease.is_trusted() or self._lease.expired:
            await self.announce()
        fresh = await self._store.take_over_from_self(self._context.worker_id, grants) if grants else []
        self.intervals.clear()
        await self._context.drains.keep_only({grant.interval_id for grant in fresh})
        self._context.sources.keep_only({grant.interval_id for grant in fresh})
        await self._open(fresh, {})

    async def announce(self) -> None:
        """Register this worker with the store, which starts its lease."""
        started = self._clock.monotonic()
        known, only = self._plan.deployment, tuple(sorted(self._only))
        info = WorkerInfo(self._context.worker_id, known.graph_id, known.version, only, platform.node(), os.getpid())
        await self._store.register(info, self._limits.lease_ttl_s)
        self._lease.renewed(started)

    def failed_sources(self) -> list[OwnedInterval]:
        """Return the intervals whose source has failed and is to be connected to again."""
        return [one for one in self.intervals.values() if one.injector is not None and one.injector.is_due]

    async def connect_again(self, intervals: Sequence[OwnedInterval]) -> None:
        """Close the sources of these intervals and open them where their intakes are, which has been committed.

        The caller has no turn in flight, and nothing that is taken but not stepped.

        Raises:
            ConfigError, TransientError: as `GuardedInjector.open`.
        """
        for interval in intervals:
            assert interval.injector is not None
            await interval.injector.close()
            interval.injector = None
        await self._connect(intervals)

    async def restart(self) -> None:
        """Read all state again under the same grants and keep the open sources; only valid if nothing was committed."""
        kept = {interval_id: interval.injector for interval_id, interval in self.intervals.items()}
        grants = [interval.grant for interval in self.intervals.values()]
        for interval in self.intervals.values():
            interval.stage = None  # free the old state before the new one is read
        await self._open(grants, kept)

    async def _open(self, grants: Sequence[Grant], kept: dict[int, GuardedInjector | None]) -> None:
        """Read what is stored under these grants and open the sources; `kept` has the sources that are open still."""
        if not grants:
            return
        recovered = []
        for grant in grants:
            computation = self._plan.by_interval[grant.interval_id]
            (found,) = await self._store.read(
                [grant],
                state_rows_max=self._limits.state_preload_rows_max,
                closed_rows_max=computation.closed_rows_max,
                closed=computation.closed_kind,
            )
            self._lease.progressed()  # each interval may take seconds, and together they may take minutes
            recovered.append(await self._recovered(grant, found, kept.get(grant.interval_id)))
            del found  # do not keep the snapshot of one interval while the next is read
        await self._connect(recovered)
        sources = [grant.interval_id for grant in grants if self.intervals[grant.interval_id].intake is not None]
        if sources:
            pending = await self._store.read_requests(sources, records_max=0, bytes_max=0)
            for interval_id in pending.paused:
                self.intervals[interval_id].pause = PauseState.COMMITTED

    async def _connect(self, intervals: Sequence[OwnedInterval]) -> None:
        """Open all closed sources at once, so that a source whose broker is away does not delay the others.

        When some fail, keep the others and raise the first failure.
        """
        closed = {
            interval.interval_id: asyncio.create_task(self._connect_one(interval))
            for interval in intervals
            if interval.intake is not None and interval.injector is None and not interval.finished
        }
        try:
            await asyncio.gather(*closed.values(), return_exceptions=True)
        finally:
            for interval in intervals:
                task = closed.get(interval.interval_id)
                if task is None or not (task.cancelled() or task.exception()):
                    self.intervals[interval.interval_id] = interval
        for task in closed.values():
            task.result()
        for interval in intervals:
            node = interval.plan.node
            if interval.finished and interval.intake is not None and isinstance(node, InjectorNode):
                setup, why_not = self._setup(node, interval.deployed, interval.intake), self._why_not.get(node.name)
                if why_not is None:
                    why_not = self._why_not[node.name] = why_not_reopened(self._plan, node.name)
                self.ended_sources.check(interval.interval_id, node.source, setup, why_not)

    async def _connect_one(self, interval: OwnedInterval) -> None:
        node, intake = interval.plan.node, interval.intake
        assert isinstance(node, InjectorNode)
        assert intake is not None
        injector = GuardedInjector(
            node.source,
            self._setup(node, interval.deployed, intake),
            arrives=node.event_time.arrives,
            progressed=self._lease.progressed,
        )
        async with AsyncExitStack() as opening:
            opening.push_async_callback(injector.close)
            await injector.open(intake.position)
            opening.pop_all()
        interval.injector = injector
        intake.source_opened()
        self._lease.progressed()

    async def _recovered(self, grant: Grant, found: OwnerSnapshot, injector: GuardedInjector | None) -> OwnedInterval:
        plan = self._plan.by_interval[grant.interval_id]
        interval = owned(grant, plan, found, self._clock.monotonic(), self._limits)
        runs = await self._store.load_dedupe_runs(grant) if plan.keeps_runs else ()
        if plan.stage is None:
            interval.intake = intake_of(plan, found.recovered, runs, self._limits)
            interval.injector = injector
        else:
            # Millions of open windows take minutes; meanwhile the process must answer and react to signals.
            loop, recovered = asyncio.get_running_loop(), replace(found.recovered, dedupe_runs=runs)
            interval.stage = await loop.run_in_executor(self._context.thread, plan.stage.open, recovered)
            await self._context.drains.open(grant, plan, found.recovered.outbox)
        return interval

    def _setup(self, node: InjectorNode, deployed: DeployedInterval, intake: Intake) -> SourceSetup:
        connection = self._connection_of(node, deployed)
        connection.accepted |= intake.counts["injected"] > 0
        return SourceSetup(
            graph=self._plan.permanent_name,
            generation=self._plan.generation,
            secret=self._plan.deployment.secret,
            stream=node.name,
            partition=deployed.partition,
            joined=deployed.joined,
            place=deployed.index,
            limits=self._limits,
            clock=self._clock,
            ready=self._context.wake,
            trusted=self._lease.is_trusted,
            record_type=node.record_type,
            notes=dict(intake.notes),
            start=self._context.start,
            bound=self._context.budget,
            deduplicated=node.dedupe is not None,
            tell=self._context.events.add,
            connection=connection,
            make_check=partial(
                record_check, node.record_type, node.event_time, node.dedupe, node.lax, self._limits, self._clock.read
            ),
            database=self._context.database,
            gained=self._context.growth.reporter(
                node.name, self._plan.deployment.intervals_of(node.name), self._context.wake.set
            ),
        )

    def _connection_of(self, node: InjectorNode, deployed: DeployedInterval) -> ConnectionState:
        return self._context.sources.connection_of(deployed.interval_id, node.name, deployed.partition)

    async def close(self) -> None:
        """Close all sources and forget all intervals, without releasing them in the store."""
        self.ended_sources.close()
        for interval in self.intervals.values():
            if interval.injector is not None:
                await interval.injector.close()
        await self._context.drains.close()
        self.intervals.clear()
