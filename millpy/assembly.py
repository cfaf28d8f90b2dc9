"""Builds a worker from a graph and settings: the only place that names the concrete store."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Sequence

from millpy.clock import SystemClock, fresh_identity
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.runtime.ownership import HeartThread, Lease
from millpy.runtime.plan import plan
from millpy.runtime.probe import NoProbe, Probe
from millpy.runtime.worker import Worker
from millpy.store.postgres.heart import Heart
from millpy.store.postgres.store import PostgresStore

log = logging.getLogger(__name__)
SWITCH_S = 0.0005
"""The event loop and the thread for steps hand the interpreter to each other; Python's 5 ms would be our latency."""


async def run_worker(
    graph: Graph,
    database_url: str,
    *,
    limits: Limits | None = None,
    only: Sequence[str] = (),
    stop: asyncio.Event | None = None,
    probe: Probe | None = None,
    start: Instant | None = None,
) -> None:
    """Deploy the graph if that is new, and run one worker on it until `stop` or until the graph has finished.

    Raises:
        UsageError: the graph, a setting or the deployment is wrong.
        GraphVersionError: another version of the graph runs.
        CorruptionError: an invariant is broken; the worker has stopped and kept everything.
    """
    sys.setswitchinterval(SWITCH_S)
    limits = limits or Limits()
    clock = SystemClock()
    store = PostgresStore(database_url, limits=limits)
    await store.open()
    try:
        deployment = await store.deploy(graph.spec())
        worker_id = fresh_identity()
        lease = Lease(limits, clock)
        worker = Worker(
            store,
            plan(graph, deployment, limits),
            worker_id,
            limits=limits,
            clock=clock,
            probe=probe or NoProbe(),
            lease=lease,
            rng=random.Random(worker_id.int),
            only=only,
            start=start,
        )
        # What is loaded by now lives as long as the process; looking through it again costs tens of milliseconds.
        gc.collect()
        gc.freeze()
        await worker.start()
        heart = HeartThread(Heart(database_url), worker_id, lease, limits, clock)
        heart.start()
        try:
            await worker.run(stop or asyncio.Event())
        finally:
            heart.stop()
    finally:
        await store.close()
