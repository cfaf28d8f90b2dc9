"""What the sources of a graph run in each worker, whatever partitions the worker owns (`Source.serve`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from millpy.graph import InjectorNode
from millpy.hosting.plan import ComputationPlan
from millpy.ingest.protocol import WorkerSetup
from millpy.runtime.context import WorkerContext


@asynccontextmanager
async def serving_sources(context: WorkerContext) -> AsyncIterator[None]:
    """Run it inside the block. Raises ConfigError: a source cannot listen."""
    async with AsyncExitStack() as running:
        for computation in context.plan:
            node = computation.node
            if not isinstance(node, InjectorNode) or (context.only and computation.name not in context.only):
                continue
            server = node.source.serve(_setup(context, computation, node))
            if server is not None and (traffic := await running.enter_async_context(server)) is not None:
                context.sources.traffic[computation.name] = traffic
        yield


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
