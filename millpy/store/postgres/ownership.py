"""Ownership: leases, claims, releases, and a worker's takeover from itself.

The server's clock decides whether a lease has expired. A claim skips locked rows, then examines the rows that it left
out. When the owner of such a row has no live lease, the lock belongs to a commit in flight, for which the claim waits,
or to a frozen transaction, which the claim ends by terminating the owner's recorded backend.

    1. Worker A is stopped between fence and COMMIT; its lease expires.
    2. B claims. The row is locked, so B skips it.
    3. B waits LOCK_WAIT_S for the row: a commit in flight would end in that time.
    4. B terminates A's recorded backend; the server rolls back its transaction.
    5. B claims again. When A continues, its connection is gone and the outcome unknown, so A takes over from itself,
       and finds that it owns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from millpy.errors import GraphVersionError, OtherEngineError, StaleSequencerError, UsageError
from millpy.model.checkpoint import Grant
from millpy.store.postgres.arrays import Bigints, Timestamps
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import IntervalOwner, LiveWorker, Ownership, WorkerInfo

LOCK_WAIT_S = 0.2
"""How long a claim waits for a commit in flight before it terminates its backend."""

Backend = tuple[int, datetime]


async def register(connection: Connection, worker: WorkerInfo, ttl_s: float) -> None:
    """Register a worker, and take all intervals from it; see `Store.register`."""
    parameters = {
        "worker_id": worker.worker_id,
        "graph_id": worker.graph_id,
        "graph_version": worker.graph_version,
        "computations": list(worker.only),
        "host": worker.host,
        "engine": worker.engine,
        "pid": worker.pid,
        "ttl_s": ttl_s,
    }
    async with connection.transaction():
        await connection.execute(statement("disown"), {"worker_id": worker.worker_id})
        registered = await connection.execute(statement("register_worker"), parameters)
        if not registered.rowcount:
            await _check_engine(connection, worker)
            raise GraphVersionError(f"version {worker.graph_version} of the graph is not the deployed version")
    await connection.execute(statement("forget_workers"))


async def _check_engine(connection: Connection, worker: WorkerInfo) -> None:
    """Raise OtherEngineError if Spark computes the graph, UsageError if workers do it already."""
    engines = [row[0] for row in await all_rows(connection, statement("read_engine"), {"graph_id": worker.graph_id})]
    if "spark" in engines and worker.engine == "workers":
        raise OtherEngineError(
            "Spark computes this generation",
            hint="workers begin when `millpy backfill` has handed it over; or end it with `millpy drop`",
        )
    if "workers" in engines and worker.engine == "spark":
        raise UsageError("workers compute this generation", hint="give the graph another generation=")


async def give_to_spark(connection: Connection, graph_id: int) -> None:
    """Give a generation that workers have not begun to Spark, and end all grants; in the caller's transaction.

    A claim of a worker is refused from then on, and one in flight waits for this transaction, so none slips through
    (I1).

    Raises:
        UsageError: workers have begun it.
    """
    graph = {"graph_id": graph_id}
    await connection.execute(statement("disown_graph"), graph)  # before the check: it waits for commits in flight
    if not await all_rows(connection, statement("give_to_spark"), graph):
        raise UsageError("workers have begun this generation", hint="give the graph another generation=")


async def give_to_workers(connection: Connection, graph_id: int, grants: Sequence[Grant]) -> None:
    """Give a generation to workers, if all of it is under these grants, which end; in the caller's transaction.

    Raises:
        StaleSequencerError: another driver has taken intervals.
    """
    parameters = {
        "intervals": Bigints([g.interval_id for g in grants]),
        "sequencers": Bigints([g.sequencer for g in grants]),
    }
    held = await all_rows(connection, statement("count_held"), {"graph_id": graph_id} | parameters)
    if held != [(len(grants), len(grants))]:
        raise StaleSequencerError("another driver of the query has taken its intervals")
    await connection.execute(statement("disown_graph"), {"graph_id": graph_id})
    await connection.execute(statement("give_to_workers"), {"graph_id": graph_id})


async def read_ownership(connection: Connection, graph_id: int) -> Ownership:
    """Read the live workers and the owner of each interval, in one snapshot."""
    workers, intervals, deployed = [], [], 0
    for worker_id, computations, interval_id, live, version in await all_rows(
        connection, statement("read_ownership"), {"graph_id": graph_id}
    ):
        if interval_id is None:
            workers.append(LiveWorker(worker_id, tuple(computations)))
        else:
            intervals.append(IntervalOwner(interval_id, worker_id, live))
            deployed = version
    return Ownership(tuple(workers), tuple(intervals), deployed)


async def claim(connection: Connection, worker_id: UUID, interval_ids: Sequence[int]) -> list[Grant]:
    """Claim intervals without a live owner; see `Store.claim`."""
    wanted = list(interval_ids)
    grants = await _claim_unlocked(connection, worker_id, wanted)
    left = [i for i in wanted if i not in {g.interval_id for g in grants}]
    if left:
        parameters: dict[str, Any] = {"intervals": Bigints(left), "claimer": worker_id}
        locked = [row[0] for row in await all_rows(connection, statement("find_locked"), parameters)]
        if locked:
            if not await _unlocked_in_time(connection, locked):
                await connection.execute(statement("terminate_owners"), {"intervals": Bigints(locked)})
                await _unlocked_in_time(connection, locked)
            grants += await _claim_unlocked(connection, worker_id, locked)
    return sorted(grants, key=lambda g: g.interval_id)


async def _claim_unlocked(connection: Connection, worker_id: UUID, interval_ids: Sequence[int]) -> list[Grant]:
    parameters = {"worker_id": worker_id, "intervals": Bigints(sorted(interval_ids))}
    return [Grant(*row) for row in await all_rows(connection, statement("claim_intervals"), parameters)]


async def _unlocked_in_time(connection: Connection, interval_ids: Sequence[int]) -> bool:
    """Wait at most LOCK_WAIT_S until these headers are unlocked. Return False when they still are locked."""
    try:
        async with connection.transaction():
            await _limit_lock_wait(connection)
            await connection.execute(statement("wait_for_rows"), {"intervals": Bigints(interval_ids)})
    except psycopg.errors.LockNotAvailable:
        return False
    return True


async def _limit_lock_wait(connection: Connection) -> None:
    await connection.execute(b"SELECT set_config('lock_timeout', %s, true)", [f"{int(LOCK_WAIT_S * 1000)}ms"])


async def release(connection: Connection, worker_id: UUID, grants: Sequence[Grant]) -> None:
    """Release intervals. Stale grants are ignored."""
    await connection.execute(statement("release_intervals"), _grant_parameters(worker_id, grants))


async def take_over_from_self(
    connection: Connection, worker_id: UUID, grants: Sequence[Grant], lost: Sequence[Backend]
) -> list[Grant]:
    """Raise the sequencers of the grants that are still current. Return the new grants, in the order of `grants`.

    The update waits for a commit in flight. A commit that does not end in time runs on a connection that this process
    has lost: terminating its backend decides the outcome.
    """
    parameters = _grant_parameters(worker_id, grants)
    query = statement("raise_sequencers")
    try:
        async with connection.transaction():
            await _limit_lock_wait(connection)
            rows = await all_rows(connection, query, parameters)
    except psycopg.errors.LockNotAvailable:
        if lost:
            starts = [int(started.timestamp()) * 1_000_000 + started.microsecond for _, started in lost]
            backends = {"pids": Bigints([pid for pid, _ in lost]), "starts": Timestamps(starts)}
            await connection.execute(statement("terminate_backends"), backends)
        rows = await all_rows(connection, query, parameters)
    raised: dict[int, int] = {interval_id: sequencer for interval_id, sequencer in rows}
    return [Grant(g.interval_id, raised[g.interval_id]) for g in grants if g.interval_id in raised]


def _grant_parameters(worker_id: UUID, grants: Sequence[Grant]) -> dict[str, Any]:
    return {
        "worker_id": worker_id,
        "intervals": Bigints([g.interval_id for g in grants]),
        "sequencers": Bigints([g.sequencer for g in grants]),
    }
