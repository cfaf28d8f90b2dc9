"""Holdings: the intervals that a worker owns, from claim to release.

A claim raises the sequencer; what a predecessor left is read in a later statement. After any failed or unknown commit
the worker takes its intervals over from itself, which waits for a commit in flight, and reads everything again: the
database is the authority, soft state is always dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import replace
from uuid import UUID

from millpy.clock import Clock
from millpy.errors import GraphVersionError, TransientError
from millpy.graph import InjectorNode, StageNode
from millpy.injectors.intake import Intake, IntakeSettings
from millpy.injectors.protocol import Injector, SourceSetup
from millpy.limits import Limits
from millpy.model.checkpoint import Grant
from millpy.model.deployment import DeployedInterval
from millpy.model.time import Instant
from millpy.runtime.balance import moves
from millpy.runtime.ownership import Lease
from millpy.runtime.plan import Plan
from millpy.runtime.probe import Point, Probe
from millpy.runtime.soft_state import Halt, Owned, owned
from millpy.runtime.turn_budget import TurnBudget
from millpy.store.protocol import Event, Opened, Store, WorkerInfo

log = logging.getLogger(__name__)
EVENTS_MAX = 1_000


class Holdings:
    """Soft state by interval id, and the store calls that begin and end it."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        worker_id: UUID,
        lease: Lease,
        limits: Limits,
        clock: Clock,
        probe: Probe,
        wake: asyncio.Event,
        executor: Executor,
        only: Sequence[str],
        start: Instant | None = None,
        budget: TurnBudget | None = None,
    ) -> None:
        self._store = store
        self._plan = plan
        self._worker_id = worker_id
        self._lease = lease
        self._limits = limits
        self._clock = clock
        self._probe = probe
        self._wake = wake
        self._executor = executor
        self._only = frozenset(only)
        self._start = start
        self._budget = budget
        self._told: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.intervals: dict[int, Owned] = {}

    async def rebalance(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Look at the ownership table: (what to claim, what to give up).

        Raises:
            GraphVersionError: another version of the graph is deployed. A commit would find that out, too; a worker
                that has nothing to commit must not sit on its lease.
        """
        known = self._plan.deployment
        ownership = await self._store.ownership(known.graph_id)
        if ownership.graph_version != known.version:
            raise GraphVersionError(f"version {ownership.graph_version} of the graph is deployed, not {known.version}")
        computations = {
            c.name: [i.interval_id for i in c.intervals] for c in self._plan if not self._only or c.name in self._only
        }
        decided = moves(self._worker_id, ownership, computations, frozenset(self.intervals))
        return decided.claim, decided.give_up

    async def claim(self, interval_ids: Sequence[int]) -> int:
        """Claim free intervals and open them; returns how many."""
        grants = await self._store.claim(self._worker_id, interval_ids)
        if not grants:
            return 0
        await self._probe.reach(Point.AFTER_CLAIM)
        await self._open(grants, {})
        log.info("claimed %d intervals: %s", len(grants), [grant.interval_id for grant in grants])
        graph_id = self._plan.deployment.graph_id
        await self._store.record_events(
            graph_id, [Event("claimed", {"worker": str(self._worker_id), "intervals": [g.interval_id for g in grants]})]
        )
        return len(grants)

    async def fold(self) -> None:
        """Fold everything, for a worker that leaves; a neighbour would load the deltas faster than they fold."""
        for interval in self.intervals.values():
            if interval.unfolded_bytes:
                await self._store.fold(
                    interval.grant, bytes_max=self._limits.unfolded_bytes_max, progressed=self._lease.progressed
                )

    async def release(self, interval_ids: Sequence[int]) -> None:
        """Give intervals up; no turn may hold them any more."""
        leaving = [self.intervals.pop(i) for i in interval_ids if i in self.intervals]
        for interval in leaving:
            if interval.injector is not None:
                await interval.injector.close()
        await self._probe.reach(Point.BEFORE_RELEASE)
        await self._store.release(self._worker_id, [interval.grant for interval in leaving])

    async def recover(self) -> None:
        """Take everything over from oneself and start from what is stored."""
        grants = [interval.grant for interval in self.intervals.values()]
        for interval in self.intervals.values():
            if interval.injector is not None:
                await interval.injector.close()
                interval.injector = None
        if not self._lease.is_trusted() or self._lease.expired:
            await self.announce()
        fresh = await self._store.take_over_from_self(self._worker_id, grants) if grants else []
        self.intervals.clear()
        await self._open(fresh, {})

    async def announce(self) -> None:
        """Register with the store: a lease from now on."""
        started = self._clock.monotonic()
        known, only = self._plan.deployment, tuple(sorted(self._only))
        info = WorkerInfo(self._worker_id, known.graph_id, known.version, only, platform.node(), os.getpid())
        await self._store.register(info, self._limits.lease_ttl_s)
        self._lease.renewed(started)

    async def restart(self) -> None:
        """Read everything again under the same grants, keeping live sources (nothing was committed)."""
        kept = {interval_id: interval.injector for interval_id, interval in self.intervals.items()}
        grants = [interval.grant for interval in self.intervals.values()]
        for interval in self.intervals.values():
            interval.stage = None  # not in memory twice
        await self._open(grants, kept)

    async def _open(self, grants: Sequence[Grant], kept: dict[int, Injector | None]) -> None:
        if not grants:
            return
        recovered = []
        for grant in grants:
            (found,) = await self._store.read([grant], state_rows_max=self._limits.state_preload_rows_max)
            self._lease.progressed()  # each may take its time, and together they may take long
            recovered.append(await self._recovered(grant, found, kept.get(grant.interval_id)))
            del found  # what was read of one interval is not kept while the next is read
        await self._connect(recovered)
        sources = [grant.interval_id for grant in grants if self.intervals[grant.interval_id].intake is not None]
        if sources:
            asked = await self._store.asked(sources, records_max=0, bytes_max=0)
            for interval_id in asked.paused:
                self.intervals[interval_id].halt = Halt.COMMITTED

    async def _connect(self, intervals: Sequence[Owned]) -> None:
        """Open the sources that are not open, all at once, so that one whose broker is away delays no other.

        When some fail, the others are kept, and the first failure is raised.
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

    async def _connect_one(self, interval: Owned) -> None:
        node, intake = interval.plan.node, interval.intake
        assert isinstance(node, InjectorNode)
        assert intake is not None
        deployed = next(i for i in interval.plan.intervals if i.interval_id == interval.interval_id)
        injector = node.source.connect(self._setup(node, deployed, intake))
        async with AsyncExitStack() as opening:
            opening.push_async_callback(injector.close)
            await injector.open(intake.position)
            opening.pop_all()
        interval.injector = injector
        intake.source_opened()
        self._lease.progressed()

    async def _recovered(self, grant: Grant, found: Opened, injector: Injector | None) -> Owned:
        plan = self._plan.by_interval[grant.interval_id]
        deployed = next(i for i in plan.intervals if i.interval_id == grant.interval_id)
        interval = owned(grant, deployed, plan, found, self._clock.monotonic(), self._limits)
        node = plan.node
        if plan.stage is not None:
            recovered = found.recovered
            if isinstance(node, StageNode) and node.keeps_ids:
                recovered = replace(recovered, dedupe_runs=await self._store.load_dedupe_runs(grant))
            # Millions of open windows take minutes, in which the process answers and may be told to end.
            loop = asyncio.get_running_loop()
            interval.stage = await loop.run_in_executor(self._executor, plan.stage.open, recovered)
            return interval
        assert isinstance(node, InjectorNode)
        runs = await self._store.load_dedupe_runs(grant) if node.dedupe is not None else ()
        settings = IntakeSettings(
            stream=node.name,
            record_type=node.record_type,
            event_time=node.event_time,
            dedupe=node.dedupe,
            idle=node.idle,
            pause_above=node.pause_above,
            devices=plan.devices(),
            limits=self._limits,
        )
        interval.intake = Intake(settings, found.recovered, runs)
        interval.injector = injector
        return interval

    def _setup(self, node: InjectorNode, deployed: DeployedInterval, intake: Intake) -> SourceSetup:
        return SourceSetup(
            graph=self._plan.own_name,
            generation=self._plan.generation,
            secret=self._plan.deployment.secret,
            stream=node.name,
            partition=deployed.partition,
            joined=deployed.joined,
            limits=self._limits,
            clock=self._clock,
            ready=self._wake,
            trusted=self._lease.is_trusted,
            record_type=node.record_type,
            notes=intake.notes,
            start=self._start,
            bound=self._budget,
            deduplicated=node.dedupe is not None,
            tell=lambda kind, detail: self.tell(Event(kind, detail)),
        )

    def tell(self, event: Event) -> None:
        """Note an event, to be stored soon."""
        self._told.append(event)

    async def record_told(self) -> None:
        """Store what the worker and its sources have told since; what could not be stored is told once more."""
        told = list(self._told)
        self._told.clear()
        if not told:
            return
        try:
            await self._store.record_events(self._plan.deployment.graph_id, told)
        except TransientError:
            self._told.extendleft(reversed(told))
            raise

    async def close(self) -> None:
        """Disconnect all sources; nothing is released."""
        for interval in self.intervals.values():
            if interval.injector is not None:
                await interval.injector.close()
        self.intervals.clear()
