"""The drains of a worker's outboxes, and the record of their progress.

Progress is stored every PROGRESS_EVERY_S seconds for all intervals in one statement, which also deletes the delivered
rows. A sink that does not store positions waits for it after each `send`, so a crash repeats no more than one. What
becomes of messages that are given up is in the commit of a turn (`settlements`), with their dead letters.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from millpy.clock import Clock
from millpy.errors import OwnershipError, TransientError
from millpy.hosting.plan import ComputationPlan, Plan
from millpy.ingest.connection_state import ConnectionState
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, Grant, OutboxState, Settlement
from millpy.model.stage import Release
from millpy.runtime.events import EventQueue
from millpy.runtime.lease import Lease
from millpy.runtime.outbox_drain import DrainContext, OutboxDrain
from millpy.sinks.outbox import OutboxStage
from millpy.sinks.protocol import SinkSetup
from millpy.store.protocol import Store

log = logging.getLogger(__name__)
PROGRESS_EVERY_S = 0.1


@dataclass(slots=True)
class SinkState:
    """The intervals of one sink that a worker owns, together.

    Attributes:
        connected: whether all of them are connected, or not known not to be.
        messages, size: what is committed and not known to be delivered, and its bytes.
        full: whether any of them takes no input.
        refused: messages that the other side refuses, and those that wait behind them.
        parked_keys: keys that wait until an operator releases them.
    """

    connected: bool = True
    messages: int = 0
    size: int = 0
    full: bool = False
    refused: int = 0
    parked_keys: int = 0


class OutboxDrains:
    """The drains of the intervals of sinks that a worker owns, by interval id."""

    def __init__(  # noqa: PLR0913 - the shared objects of a worker, whose context makes it
        self,
        store: Store,
        plan: Plan,
        limits: Limits,
        clock: Clock,
        rng: random.Random,
        lease: Lease,
        events: EventQueue,
        wake: asyncio.Event,
    ) -> None:
        self._store = store
        self._plan = plan
        self._clock = clock
        self._lease = lease
        self._events = events
        self._due = asyncio.Event()
        self._context = DrainContext(store, limits, clock, rng, wake.set, self._due.set)
        self._drains: dict[int, OutboxDrain] = {}
        self._announced: dict[int, bool] = {}
        self._reporter: asyncio.Task[None] | None = None

    async def open(self, grant: Grant, plan: ComputationPlan, state: OutboxState) -> None:
        """Begin to deliver the messages of an interval, or continue under another grant of this worker.

        After a failover that has lost commits, a drain knows messages that the store lacks: it ends, and another one
        begins with what is stored.

        Raises:
            ConfigError: the sink cannot run here.
        """
        if plan.sink is None:
            return
        known = self._drains.get(grant.interval_id)
        if known is not None and known.agrees(grant, state):
            known.regrant(grant, state)
            return
        if known is not None:
            log.warning("sink %s: the database has lost commits; beginning again with what it has", plan.name)
            await self._close([grant.interval_id])
        deployed = next(interval for interval in plan.intervals if interval.interval_id == grant.interval_id)
        setup = SinkSetup(
            graph=self._plan.permanent_name,
            sink=plan.name,
            interval=deployed.index,
            number=grant.interval_id,
            intervals=len(plan.intervals),
            clock=self._clock,
            trusted=self._lease.is_trusted,
            connection=ConnectionState(self._clock.now_us),
            secret=self._plan.deployment.secret,
        )
        assert isinstance(plan.stage, OutboxStage)
        self._drains[grant.interval_id] = OutboxDrain(self._context, grant, plan.sink, setup, state, plan.stage)
        if self._reporter is None:
            self._reporter = asyncio.create_task(self._keep_reporting(), name="millpy-outbox-progress")

    def full(self) -> frozenset[int]:
        """Return the intervals that take no input, because too much waits in their outboxes."""
        return frozenset(interval_id for interval_id, drain in self._drains.items() if drain.is_full)

    def states(self) -> dict[str, SinkState]:
        """Return the states of the sinks, by name."""
        found: dict[str, SinkState] = {}
        for interval_id, drain in list(self._drains.items()):
            state = found.setdefault(self._plan.by_interval[interval_id].name, SinkState())
            state.connected = state.connected and drain.connection.is_connected is not False
            state.messages += drain.waiting.head - drain.waiting.delivered
            state.size += drain.waiting.size
            state.full = state.full or drain.is_full
            state.refused += drain.refused.records
            state.parked_keys += drain.refused.parked_keys
        return found

    def settlements(self, releases: dict[int, Sequence[Release]]) -> dict[int, Settlement]:
        """Return what the next commit is to settle, by interval; leave those `releases` that it executes."""
        found: dict[int, Settlement] = {}
        for interval_id, drain in self._drains.items():
            settlement, executed = drain.settlement(releases.get(interval_id, ()))
            if settlement is not None:
                found[interval_id] = settlement
            if interval_id in releases:
                releases[interval_id] = executed
        return found

    def committed(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Hand the messages of a committed turn over."""
        for checkpoint in checkpoints:
            drain = self._drains.get(checkpoint.grant.interval_id)
            if drain is not None and (checkpoint.outbox is not None or checkpoint.settlement is not None):
                drain.committed(checkpoint.outbox, checkpoint.settlement)

    def raise_failed(self) -> None:
        """Raise the error of a drain that has ended, or of the record of their progress, if any has."""
        if self._reporter is not None and self._reporter.done() and not self._reporter.cancelled():
            self._reporter.result()
        for drain in self._drains.values():
            drain.raise_failed()

    async def keep_only(self, interval_ids: Collection[int]) -> None:
        """Stop the drains of intervals that this worker has lost."""
        await self._close([interval_id for interval_id in self._drains if interval_id not in interval_ids])

    async def release(self, interval_ids: Collection[int]) -> None:
        """Stop the drains of intervals that this worker is about to release, and record their progress."""
        closed = await self._close([interval_id for interval_id in interval_ids if interval_id in self._drains])
        with suppress(TransientError, OwnershipError):
            await self._report(closed)

    async def close(self) -> None:
        """Stop all drains."""
        await self._close(list(self._drains))
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
            self._reporter = None

    async def _close(self, interval_ids: Sequence[int]) -> list[OutboxDrain]:
        closing = [self._drains.pop(interval_id) for interval_id in interval_ids]
        await asyncio.gather(*(drain.close() for drain in closing))
        return closing

    # -- progress -------------------------------------------------------------------------------------------------

    async def _keep_reporting(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROGRESS_EVERY_S):
                    await self._due.wait()
            self._due.clear()
            self._announce()
            try:
                await self._report(list(self._drains.values()))
            except (TransientError, OwnershipError) as error:
                log.debug("cannot record the progress of sinks: %s", error)
                await self._clock.sleep(PROGRESS_EVERY_S)

    async def _report(self, drains: Sequence[OutboxDrain]) -> None:
        due = [(drain, report) for drain in drains if (report := drain.due_report()) is not None]
        if not due:
            return
        stale: Collection[int] = ()
        try:
            await self._store.record_delivered([report for _, report in due])
        except OwnershipError as error:
            if not error.stale:
                raise  # nothing is recorded
            stale = error.stale
        for drain, report in due:
            if drain.grant.interval_id not in stale:
                drain.recorded(report)

    def _announce(self) -> None:
        """Queue an event for each interval whose sink was lost or is back."""
        for interval_id, drain in self._drains.items():
            connected = drain.connection.is_connected
            if connected is None or connected is self._announced.get(interval_id, True):
                continue
            self._announced[interval_id] = connected
            detail: dict[str, object] = {"sink": self._plan.by_interval[interval_id].name, "interval": interval_id}
            if not connected:
                detail["why"] = drain.connection.why
            self._events.add_of_worker("sink_connected" if connected else "sink_disconnected", detail)
