"""Builds a worker from a graph and settings: the only place that names the concrete store."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from millpy.clock import Clock, SystemClock, fresh_identity
from millpy.errors import GraphVersionError, NotMigratedError, TransientError
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.runtime.observer import Observer, Observers
from millpy.runtime.ownership import HeartThread, Lease
from millpy.runtime.pauses import short_pauses
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
    patient: bool = False,
    observer: Observer | None = None,
) -> None:
    """Deploy the graph if that is new, and run one worker on it until `stop` or until the graph has finished.

    Args:
        graph: what to run.
        database_url: where; migrated.
        limits: bounds; the defaults when left out.
        only: names of the computations to take part in; all when empty.
        stop: drain when it is set.
        probe: for tests.
        start: where a source without a position begins, when it can tell instants apart.
        patient: wait for a database that does not answer or is not migrated yet, as a service does; else that is an
            error.
        observer: is told what the worker does.

    Raises:
        UsageError: the graph, a setting or the deployment is wrong.
        GraphVersionError: another version of the graph runs.
        CorruptionError: an invariant is broken; the worker has stopped and kept everything.
        TransientError: the database cannot be reached at the beginning, and `patient` is false.
    """
    sys.setswitchinterval(SWITCH_S)
    limits = limits or Limits()
    stop = stop or asyncio.Event()
    clock = SystemClock()
    observer = observer or Observers()
    left = 0  # the version that the worker before this one has left
    with short_pauses():
        while True:
            lease = Lease(limits, clock)
            store = PostgresStore(database_url, limits=limits, progressed=lease.progressed)
            begin = partial(_begin, store, graph, limits, lease, clock, probe or NoProbe(), only, start, observer)
            try:
                worker = await _patiently(begin, stop, limits, observer) if patient else await begin()
                if worker is None:
                    return
                try:
                    await _run(
                        worker, HeartThread(Heart(database_url), worker.worker_id, lease, limits, clock), stop, observer
                    )
                    return
                except GraphVersionError as error:
                    # When source partitions were added, it is our graph still; deploying it again tells.
                    if worker.graph_version == left:
                        raise
                    left = worker.graph_version
                    log.warning("%s; beginning again", error.message)
            finally:
                await store.close()


async def deploy(graph: Graph, database_url: str, *, back: bool = False) -> None:
    """Deploy a graph, or what has changed in it: its result tables are there then, and workers need not make them.

    Args:
        graph: what to deploy.
        database_url: where; migrated.
        back: take away what was added to the deployed graph and is not in this one.

    Raises:
        UsageError: the graph cannot be deployed, or would change the meaning of what is.
        TransientError: the database cannot be reached.
    """
    async with PostgresStore(database_url) as store:
        await store.deploy(graph.spec(), on_purpose=True, back=back)


async def _begin(
    store: PostgresStore,
    graph: Graph,
    limits: Limits,
    lease: Lease,
    clock: Clock,
    probe: Probe,
    only: Sequence[str],
    start: Instant | None,
    observer: Observer,
) -> Worker:
    """Connect, deploy, register: a worker with a lease."""
    await store.open()
    while True:
        deployment = await store.deploy(graph.spec())
        for change in deployment.changes:
            log.warning("graph %s, version %d: %s", graph.name, deployment.version, change)
        worker_id = fresh_identity()
        worker = Worker(
            store,
            plan(graph, deployment, limits),
            worker_id,
            limits=limits,
            clock=clock,
            probe=probe,
            lease=lease,
            rng=random.Random(worker_id.int),
            only=only,
            start=start,
            observer=observer,
        )
        # What is loaded by now lives as long as the process; looking through it again costs tens of milliseconds.
        gc.collect()
        gc.freeze()
        try:
            await worker.start()
        except GraphVersionError:
            continue  # somebody has deployed it anew meanwhile
        return worker


async def _run(worker: Worker, heart: HeartThread, stop: asyncio.Event, observer: Observer) -> None:
    """Run it to its end, while its heart beats."""
    heart.start()
    observer.begun(worker)
    try:
        await worker.run(stop)
    finally:
        observer.ended()
        heart.stop()


async def _patiently(
    begin: Callable[[], Awaitable[Worker]], stop: asyncio.Event, limits: Limits, observer: Observer
) -> Worker | None:
    """Begin as soon as the database answers and is migrated; None when told to stop before."""
    retry_s = limits.retry_s_min
    while not stop.is_set():
        try:
            return await begin()
        except (TransientError, NotMigratedError) as error:
            log.warning("%s; waiting", error)
            observer.waiting(error)
        retry_s = min(limits.retry_s_max, retry_s * 2)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), retry_s)
    return None
