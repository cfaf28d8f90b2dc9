"""The background tasks of a worker, which run beside its turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from millpy.errors import OwnershipError, StepStuckError, TransientError
from millpy.runtime.context import WorkerContext
from millpy.runtime.maintenance import Maintenance
from millpy.runtime.source_health import REPORT_EVERY_S
from millpy.runtime.turn import TurnCycle

log = logging.getLogger(__name__)
LISTEN_S = 5.0
WATCH_EVERY_S = 0.25
REQUESTS_EVERY_S = 0.25
"""Seconds between reads of operators' requests."""
BACKPRESSURE_EVERY_S = 0.25
ARCHIVES_EVERY_S = 1.0
"""Seconds between attempts to write where the archives are, while that fails."""
FOLD_EVERY_S_MAX = 0.25
"""Seconds between searches for intervals whose deltas must be folded, at most."""
TURNS_OF_RINGS_PER_EPOCH = 8
"""How often in an epoch a worker looks whether a ring has to advance."""


class BackgroundTasks:
    """The tasks of one run of a worker. A task that fails ends; the worker calls `raise_failed` before each turn."""

    def __init__(self, context: WorkerContext, maintenance: Maintenance, cycle: TurnCycle, stop: asyncio.Event) -> None:
        self._context = context
        self._maintenance = maintenance
        self._cycle = cycle
        self._stop = stop
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self) -> None:
        """Start the tasks: maintenance, requests, hints from other workers, and the watch over the step."""
        limits = self._context.limits
        repeated: list[tuple[Callable[[], Awaitable[object]], float]] = [
            (self._maintenance.fold, min(FOLD_EVERY_S_MAX, limits.fold_every_s)),
            (self._maintenance.turn_rings, limits.epoch_s / TURNS_OF_RINGS_PER_EPOCH),
            (self._maintenance.apply_backpressure, BACKPRESSURE_EVERY_S),
            (self._poll_requests, REQUESTS_EVERY_S),
            (self._context.sources.report, REPORT_EVERY_S),
        ]
        if self._context.archive_pace.exists:
            repeated.append((self._maintenance.try_archives, ARCHIVES_EVERY_S))
        self._tasks = [asyncio.create_task(self._repeat(work, every_s)) for work, every_s in repeated]
        self._tasks += [asyncio.create_task(self._listen()), asyncio.create_task(self._watch_step())]
        lookups = self._context.lookups
        self._tasks += [asyncio.create_task(lookups.keep(table)) for table in lookups.tables]
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: self._context.wake.set())
        self._tasks.append(stopping)

    def raise_failed(self) -> None:
        """Raise the error of a task that has failed, if any has."""
        for task in self._tasks:
            if task.done():
                task.result()
        self._context.drains.raise_failed()

    async def end(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.lookups.close()

    async def _repeat(self, work: Callable[[], Awaitable[object]], every_s: float) -> None:
        """Call `work` every `every_s` seconds; after a TransientError or OwnershipError, try again next time."""
        while True:
            await self._context.clock.sleep(every_s)
            try:
                await work()
            except (TransientError, OwnershipError) as error:
                log.debug("background work failed: %s", error)

    async def _poll_requests(self) -> None:
        """Log the dead letters that are due, and read operators' requests."""
        self._cycle.log_dead_letters()
        if await self._maintenance.poll_requests():
            self._context.wake.set()

    async def _listen(self) -> None:
        """Wake the worker when another one announces new segments."""
        while True:
            try:
                if await self._context.store.wait_hint(self._context.graph_id, LISTEN_S):
                    self._cycle.hinted = True
                    self._context.wake.set()
            except TransientError as error:
                log.debug("waiting for hints failed: %s", error)
                await self._context.clock.sleep(self._context.limits.retry_s_max)

    async def _watch_step(self) -> None:
        """Abandon a step in which a call does not return, or one that takes half the grace of a stopping worker."""
        clock, thread, progress = self._context.clock, self._context.thread, self._context.plan.progress
        leave_at = float("inf")
        while True:
            await clock.sleep(WATCH_EVERY_S)
            now = clock.monotonic()
            drain_requested = self._context.lease.drain_requested
            if drain_requested:
                self._context.wake.set()
            if drain_requested or self._stop.is_set():
                leave_at = min(leave_at, now + self._context.limits.drain_grace_s / 2)
            if not thread.is_busy():
                continue
            if self._context.lease.is_stuck():
                call = progress.abandon()
                where = "" if call is None else f", in {call[0]} of {call[1][0]!r}"
                thread.abandon(StepStuckError(f"a call does not return{where}"))
            elif now > leave_at:
                progress.abandon(blame=False)
                thread.abandon(StepStuckError("the step takes longer than half the grace of a stopping worker"))
