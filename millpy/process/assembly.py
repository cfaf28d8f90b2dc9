"""Assembly of a worker from a graph and settings: the only module that names the concrete store."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import pyarrow as pa

from millpy.clock import Clock, SystemClock, random_id
from millpy.errors import (
    ConfigError,
    GraphError,
    GraphReplacedError,
    GraphVersionError,
    MillError,
    NotMigratedError,
    SinkUnavailableError,
    TransientError,
    UsageError,
)
from millpy.graph import Graph
from millpy.hosting.failpoints import Failpoints, NoFailpoints
from millpy.hosting.plan import plan
from millpy.limits import Limits
from millpy.model.dead_letter import error_text
from millpy.model.time import Instant
from millpy.runtime.context import WorkerContext
from millpy.runtime.lease import HeartbeatThread, Lease
from millpy.runtime.observer import Observer, Observers
from millpy.runtime.outbox_drain import DEFECTS
from millpy.runtime.pauses import short_pauses
from millpy.runtime.source_growth import SourceGrowth
from millpy.runtime.worker import Worker
from millpy.store.postgres.archiving import ArchiveInto, ArchivingStore
from millpy.store.postgres.heartbeat import HeartbeatConnection
from millpy.store.postgres.store import PostgresStore

log = logging.getLogger(__name__)
REPLACED = "start a worker with the file of that version"
SWITCH_S = 0.0005
"""How long one thread may keep the interpreter from another; Python's default of 5 ms would add to our latency."""


def archives_of(graph: Graph) -> tuple[str, ...]:
    """Return the names of a graph's archives.

    Raises:
        UsageError: the graph has none.
    """
    names = _archives(graph)
    if not names:
        raise UsageError(
            f"graph {graph.name!r} has no archive", hint="declare one: stream.key_by(…).archive(), and deploy the graph"
        )
    return names


async def run_worker(  # noqa: PLR0913 - keywords of the function that others embed
    graph: Graph,
    database_url: str,
    *,
    limits: Limits | None = None,
    only: Sequence[str] = (),
    stop: asyncio.Event | None = None,
    failpoints: Failpoints | None = None,
    start: Instant | None = None,
    patient: bool = False,
    observer: Observer | None = None,
    archive: ArchiveInto | None = None,
) -> None:
    """Deploy the graph if it is new, and run one worker on it until `stop` is set or the graph has finished.

    Args:
        graph: the graph to run.
        database_url: the database, which must be migrated.
        limits: the bounds; by default those of `Limits()`.
        only: the names of the computations to run; empty for all, without archives unless these run in workers.
        stop: drains the worker when it is set, as does an operator's request through the database.
        failpoints: named points in the cycle, for tests.
        start: the instant at which a source without a position begins, if the source supports it.
        patient: whether to wait, like a service, for a database that does not answer or is not migrated yet.
        observer: observes the worker.
        archive: where to write the archives that run.

    Raises:
        UsageError: the graph, a setting or the deployment is wrong.
        GraphVersionError: another version of the graph is deployed; GraphReplacedError if it was while the worker ran.
        CorruptionError: an invariant is broken; the worker has stopped and kept all data.
        TransientError: the database is unreachable at the start, and `patient` is false.
    """
    limits, stop, observer = limits or Limits(), stop or asyncio.Event(), observer or Observers()
    clock, growth, previous_version = SystemClock(), SourceGrowth(), 0  # of the worker that ran before in this loop
    only, open_store, every_s = _chosen(graph, only, archive, clock)
    common = partial(WorkerContext, limits=limits, host_clock=clock, failpoints=failpoints or NoFailpoints(), only=only)
    common = partial(common, start=start, observer=observer, archive_every_s=every_s, database=database_url)
    with short_pauses():
        while True:
            lease = Lease(limits, clock)
            store = open_store(database_url, limits=limits, progressed=lease.progressed)
            context = partial(common, store=store, lease=lease, growth=growth)
            begin = partial(_begin, store, graph, limits, context, growth, previous_version != 0)
            try:
                worker = await _begin_when_ready(begin, stop, limits, observer) if patient else await begin()
                if worker is None:
                    return
                try:
                    heartbeats = worker.context.heartbeats(HeartbeatConnection(database_url))
                    await _run(worker, heartbeats, stop, observer)
                    return
                except GraphVersionError as error:
                    # If only source partitions were added, deploying our graph again returns the new version.
                    if worker.graph_version == previous_version and not growth.is_pending:
                        raise
                    previous_version = -1 if growth.is_pending else worker.graph_version
                    log.warning("%s; starting again", error.message)
            finally:
                await store.close()


async def deploy(graph: Graph, database_url: str, *, back: bool = False) -> None:
    """Deploy a graph or its changes, and create its result tables, so that workers need not create them.

    Args:
        graph: the graph to deploy.
        database_url: the database, which must be migrated.
        back: whether to remove additions of the deployed graph that this graph lacks.

    Raises:
        UsageError: the graph cannot be deployed, or does not fit the stored data.
        TransientError: the database is unreachable.
    """
    await prepare_sinks(graph)
    async with PostgresStore(database_url) as store:
        await store.deploy(graph.spec(), on_purpose=True, back=back)


async def prepare_sinks(graph: Graph) -> None:
    """Let each sink get what its messages need, before the graph is deployed; one that cannot now, does so later.

    Raises:
        ConfigError: the other side of a sink refuses, for example an incompatible schema; or the sink has a defect.
    """
    for node, sink in graph.sinks():
        try:
            await sink.prepare([taken.record_type for taken in node.inputs])
        except SinkUnavailableError as error:
            log.warning("sink %s: %s", node.name, error.message)
        except DEFECTS as error:
            if isinstance(error, MillError):
                raise
            raise ConfigError(f"sink {node.name} fails in `prepare`: {error_text(error)}", hint="correct it") from error


async def _prepare_to_run(store: PostgresStore, graph: Graph, growth: SourceGrowth) -> None:
    """Prepare the sinks; a refusal ends no worker of a deployed graph, because the step of the sink waits by itself.

    Raises:
        ConfigError: the other side of a sink refuses, and the graph is not deployed, or with other steps.
    """
    try:
        await prepare_sinks(graph)
    except ConfigError as error:
        deployed = await store.compare(growth.applied_to(graph.spec()))
        if deployed is None or deployed[1]:
            raise
        log.warning("%s; the step takes no input until that is over", error.message, extra={"hint": error.hint})


def _archives(graph: Graph) -> tuple[str, ...]:
    return tuple(spec.name for spec in graph.spec().computations if spec.kind == "archive")


def _chosen(
    graph: Graph, only: Sequence[str], archive: ArchiveInto | None, clock: Clock
) -> tuple[Sequence[str], Callable[..., PostgresStore], float]:
    """Return the names of the computations to run, empty for all; their kind of store; and the pace of archives."""
    archives, in_worker = _archives(graph), archive is not None and archive.in_worker
    if not only and archives:
        only = [spec.name for spec in graph.spec().computations if in_worker or spec.kind != "archive"]
    elif in_worker:
        only = [*only, *(name for name in archives if name not in only)]
    if not set(archives) & set(only):
        return only, PostgresStore, 0.0
    if archive is None:
        raise UsageError("no directory is set for the archive", hint="set MILLPY_ARCHIVE, or use `millpy archive --to`")
    return only, partial(ArchivingStore, into=archive, clock=clock), archive.every_s


async def _begin(
    store: PostgresStore,
    graph: Graph,
    limits: Limits,
    context: Callable[..., WorkerContext],
    growth: SourceGrowth,
    had_worker: bool,
) -> Worker:
    """Connect, deploy and register. Return a worker with a lease."""
    await store.open()
    await _prepare_to_run(store, graph, growth)
    while True:
        try:
            deployment = await store.deploy(growth.applied_to(graph.spec()))
        except (UsageError, GraphVersionError) as error:
            if growth.refuse(error):
                continue
            if had_worker and isinstance(error, GraphError | GraphVersionError):
                raise GraphReplacedError(f"another version was deployed: {error.message}", hint=REPLACED) from error
            raise
        for change in deployment.changes:
            log.warning("graph %s, version %d: %s", graph.name, deployment.version, change)
        worker_id = random_id()
        worker = Worker(
            context(plan=plan(graph, deployment, limits), worker_id=worker_id, rng=random.Random(worker_id.int))
        )
        pa.array([0.0])  # Arrow loads pandas if there is one; that would take 0.2 s of the first turn
        # Objects loaded by now live as long as the process; collecting them again would cost tens of milliseconds.
        gc.collect()
        gc.freeze()
        try:
            await worker.start()
        except GraphVersionError:
            had_worker = True
            continue  # the graph was deployed again in the meantime
        return worker


async def _run(worker: Worker, heartbeats: HeartbeatThread, stop: asyncio.Event, observer: Observer) -> None:
    """Run a worker to its end, with its heartbeat in a thread."""
    sys.setswitchinterval(SWITCH_S)
    heartbeats.start()
    observer.begun(worker)
    try:
        await worker.run(stop)
    except GraphVersionError:
        if not worker.context.lease.drain_requested:  # else the worker has left, as it was to
            raise
    finally:
        observer.ended()
        heartbeats.stop()


async def _begin_when_ready(
    begin: Callable[[], Awaitable[Worker]], stop: asyncio.Event, limits: Limits, observer: Observer
) -> Worker | None:
    """Begin as soon as the database answers and is migrated. Return None if `stop` is set before that."""
    retry_s = limits.retry_s_min
    while not stop.is_set():
        try:
            return await begin()
        except (TransientError, NotMigratedError) as error:
            log.warning("%s; trying again", error)
            observer.waiting(error)
        retry_s = min(limits.retry_s_max, retry_s * 2)
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), retry_s)
    return None
