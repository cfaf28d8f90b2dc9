"""What the sources of a graph run in each worker, whatever partitions the worker owns (`Source.serve`).

It may be somebody else's code, so its defects end no worker: they are logged, and it is started again after a pause,
which grows with the failures. Until then the worker does without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress

from millpy.errors import MillError, TransientError
from millpy.graph import InjectorNode
from millpy.hosting.plan import ComputationPlan
from millpy.ingest.protocol import WorkerSetup
from millpy.ingest.request_traffic import RequestTraffic
from millpy.model.step_progress import is_user_error
from millpy.runtime.cancellation import is_cancelled
from millpy.runtime.context import WorkerContext
from millpy.runtime.guarded_injector import PAUSE_S_MAX

log = logging.getLogger(__name__)


@asynccontextmanager
async def serving_sources(context: WorkerContext) -> AsyncIterator[None]:
    """Run it inside the block. Raises ConfigError: a source cannot listen."""
    async with AsyncExitStack() as running:
        for computation in context.plan:
            node = computation.node
            if not isinstance(node, InjectorNode) or (context.only and computation.name not in context.only):
                continue
            server = _GuardedServer(context, computation, node)
            running.push_async_callback(server.close)
            await server.start()
        yield


class _GuardedServer:
    """What one source runs in a worker. It is entered and left in a task of its own, as `async with` may require."""

    def __init__(self, context: WorkerContext, computation: ComputationPlan, node: InjectorNode) -> None:
        self._context = context
        self._computation = computation
        self._node = node
        self._closing = asyncio.Event()
        self._tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._entered = False

    async def start(self) -> None:
        """Wait for the first attempt to enter, unless it takes too long. Raises a MillError that is not temporary."""
        self._task = asyncio.create_task(self._keep())
        await asyncio.wait([self._tried], timeout=self._context.limits.edge_call_s_max)
        if self._tried.done():
            self._tried.result()
            return
        log.warning("what source %s serves in each worker does not begin; continuing without it", self._node.name)
        self._tried.set_result(None)

    async def close(self) -> None:
        """Leave it; if it does not let itself be left, cancel that."""
        self._closing.set()
        if self._task is None:
            return
        if not self._entered:
            self._task.cancel()
        try:
            await asyncio.wait([self._task], timeout=self._context.limits.edge_call_s_max)
        finally:
            self._task.cancel()

    async def _keep(self) -> None:
        """Enter, and after a failure enter again, until `close`."""
        limits, failures = self._context.limits, 0
        while not self._closing.is_set():
            try:
                await self._run()
            except BaseException as error:
                if not is_user_error(error) or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
                    raise
                if not self._tried.done() and isinstance(error, MillError) and not isinstance(error, TransientError):
                    self._tried.set_exception(error)
                    return
                log.exception("what source %s serves in each worker fails", self._node.name)
            if not self._tried.done():
                self._tried.set_result(None)
            self._entered, failures = False, failures + 1
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.retry_pause_s(failures, PAUSE_S_MAX)):
                    await self._closing.wait()

    async def _run(self) -> None:
        """Enter, stay until `close`, and leave."""
        server = self._node.source.serve(_setup(self._context, self._computation, self._node))
        async with nullcontext() if server is None else server as traffic:
            self._entered = True
            if not isinstance(traffic, RequestTraffic | None):
                raise TypeError(f"it gives {type(traffic).__name__}, not a RequestTraffic")
            if traffic is not None:
                self._context.sources.traffic[self._computation.name] = traffic
            if not self._tried.done():
                self._tried.set_result(None)
            await self._closing.wait()


def _setup(context: WorkerContext, computation: ComputationPlan, node: InjectorNode) -> WorkerSetup:
    intervals = {interval.interval_id: interval.partition for interval in computation.intervals}

    async def addresses() -> Mapping[str, str]:
        found = await context.store.source_addresses(list(intervals))
        return {intervals[interval_id]: address for interval_id, address in found.items()}

    return WorkerSetup(
        graph=context.plan.permanent_name,
        stream=node.name,
        partitions=list(intervals.values()),
        limits=context.limits,
        clock=context.clock,
        secret=context.plan.deployment.secret,
        deduplicated=node.dedupe is not None,
        addresses=addresses,
    )
