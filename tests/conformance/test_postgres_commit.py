"""What only PostgreSQL can show of a commit: cancelled tasks, ended backends, rings that turn, the sender."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from millpy.errors import CommitUnknownError, StoreUnavailableError
from millpy.model.checkpoint import Entries, Kind
from millpy.model.lease import Renewal, WorkerUsage
from millpy.store.postgres.arrays import Bigints, Timestamps
from millpy.store.postgres.deployment.live_changes import FOLDS_S, hold_off_folds, lock_headers
from millpy.store.postgres.heartbeat import HeartbeatConnection
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_segment, a_slice, entries
from tests.crash.harness import await_true
from tests.databases import until_waiting


def some_state() -> tuple[Entries, ...]:
    return (entries(Kind.STATE, "cell", ("k", 1)),)


async def waits_for_a_lock(watcher: psycopg.AsyncConnection) -> None:
    """Until a commit waits for a row lock."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'millpy commit' AND wait_event_type = 'Lock'"
    )
    while (await (await watcher.execute(query)).fetchone()) == (0,):
        pass


async def test_fold_of_a_stale_owner_is_refused(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals[0]
    await owner.commit(owner.checkpoint(interval, delta=some_state()))
    grant = owner.grants[interval.interval_id]
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        for sequencer in (grant.sequencer - 1, grant.sequencer + 1):
            with pytest.raises(psycopg.Error) as refused:
                await connection.execute("SELECT mill.end_fold(%s, %s, 0, 1)", [interval.interval_id, sequencer])
            assert refused.value.sqlstate == "MW001"

        fold = "SELECT mill.end_fold(%s, %s, 0, 1)"
        await connection.execute(fold, [interval.interval_id, grant.sequencer])
        with pytest.raises(psycopg.Error) as refused:  # another fold was faster
            await connection.execute(fold, [interval.interval_id, grant.sequencer])
        assert refused.value.sqlstate == "MW001"


@pytest.mark.parametrize("fold_is_first", [True, False])
async def test_a_fold_and_a_deployment_that_changes_state_do_not_wait_for_each_other(
    owner: Owner, database_url: str, fold_is_first: bool
) -> None:
    """A fold locks rows of state, then the header; such a deployment locks the headers, then all rows of state."""
    interval = owner.deployment.intervals[0]
    await owner.commit(owner.checkpoint(interval, delta=some_state()))
    await owner.fold(interval)
    await owner.commit(owner.checkpoint(interval, delta=some_state()))
    async with (
        await psycopg.AsyncConnection.connect(database_url) as commit,
        await psycopg.AsyncConnection.connect(database_url) as deployment,
    ):
        await commit.execute("SELECT FROM mill.intervals FOR NO KEY UPDATE")  # both wait here at the latest
        begin = [lambda: owner.fold(interval), lambda: change_state(deployment, owner)]
        tasks = []
        for number, which in enumerate(begin if fold_is_first else reversed(begin), 1):
            tasks.append(asyncio.create_task(which()))
            await until_waiting(database_url, number)
        await commit.rollback()
        await asyncio.gather(*tasks)


async def test_expired_windows_are_not_deleted_while_a_deployment_changes_state(
    owner: Owner, database_url: str
) -> None:
    """Both delete rows of state, each in an order of its own."""
    interval = owner.deployment.intervals[0]
    async with await psycopg.AsyncConnection.connect(database_url) as deployment:
        await hold_off_folds(deployment, FOLDS_S)
        deleting = asyncio.create_task(owner.store.delete_windows(owner.grants[interval.interval_id], ["0/60"]))
        await until_waiting(database_url, 1)
        await deployment.rollback()
        await deleting


async def change_state(connection: psycopg.AsyncConnection, owner: Owner) -> None:
    """Lock what a deployment locks that removes a computation, and change nothing."""
    await hold_off_folds(connection, FOLDS_S)
    await lock_headers(connection, owner.deployment.graph_id)
    await connection.execute("DELETE FROM mill.keyed")
    await connection.rollback()


async def hold_grants(connection: psycopg.AsyncConnection, owner: Owner, intervals: Sequence[int], bundle: int) -> None:
    """Ask the fence for these intervals, as a commit does."""
    sequencers = [owner.grants[interval].sequencer for interval in intervals]
    watermarks = [0] * len(intervals)
    arrays = [list(intervals), sequencers, [bundle] * len(intervals), *[watermarks] * 4]
    await connection.execute(
        "SELECT mill.hold_grants(%s, %s, %s, %s, %s, %s, %s, %s)", [owner.deployment.version, *arrays]
    )


async def test_the_fence_locks_headers_in_the_order_that_claims_do(owner: Owner, database_url: str) -> None:
    """Otherwise a commit and a takeover of the same intervals would wait for each other."""
    first, second = sorted(owner.grants)[:2]
    lock = "SELECT FROM mill.intervals WHERE interval_id = %s FOR NO KEY UPDATE NOWAIT"
    one_by_one = (
        "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_seqscan=off"  # in the order that is asked for
    )
    async with (
        await psycopg.AsyncConnection.connect(database_url) as claimer,
        await psycopg.AsyncConnection.connect(
            database_url, application_name="millpy commit", options=one_by_one
        ) as committer,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watcher,
    ):
        await claimer.execute(lock, [first])
        fence = asyncio.create_task(hold_grants(committer, owner, [second, first], 1))
        await waits_for_a_lock(watcher)
        await claimer.execute(lock, [second])
        await claimer.rollback()
        await fence
        await committer.rollback()


async def test_the_fence_names_the_intervals_that_another_commit_has_advanced(owner: Owner, database_url: str) -> None:
    advanced, other = sorted(owner.grants)[:2]
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        await hold_grants(connection, owner, [advanced], 1)
        await connection.commit()
        with pytest.raises(psycopg.Error) as refused:
            await hold_grants(connection, owner, [advanced, other], 1)
    assert (refused.value.sqlstate, refused.value.diag.message_detail) == ("MW001", str(advanced))


async def test_cancelled_commit_is_unknown(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals[0]
    async with (
        await psycopg.AsyncConnection.connect(database_url) as locker,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watcher,
    ):
        await locker.execute("SELECT FROM mill.intervals FOR UPDATE")
        commit = asyncio.create_task(owner.commit(owner.checkpoint(interval, delta=some_state())))
        await waits_for_a_lock(watcher)

        commit.cancel()
        with pytest.raises(CommitUnknownError):
            await commit
        await locker.rollback()

    await owner.take_over_from_self()
    await owner.commit(owner.checkpoint(interval, delta=some_state()))


async def test_backend_terminated_inside_a_commit_changes_nothing(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals[0]

    async def end_it() -> None:
        async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other:
            await other.execute(
                "SELECT pg_terminate_backend(backend_pid) FROM mill.workers WHERE worker_id = %s", [owner.worker_id]
            )

    with pytest.raises((StoreUnavailableError, CommitUnknownError)):
        await owner.commit(owner.checkpoint(interval, delta=some_state()), inside=end_it)

    await owner.take_over_from_self()
    assert owner.bundles[interval.interval_id] == 0
    await owner.commit(owner.checkpoint(interval, delta=some_state()))


async def test_reconnected_commit_channel_is_recorded(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals[0]
    recorded = "SELECT backend_pid FROM mill.workers WHERE worker_id = %s"
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as other:
        before = await (await other.execute(recorded, [owner.worker_id])).fetchone()
        await other.execute("SELECT pg_terminate_backend(%s)", before)
        with pytest.raises((StoreUnavailableError, CommitUnknownError)):
            await owner.commit(owner.checkpoint(interval))
        await owner.take_over_from_self()

        await owner.commit(owner.checkpoint(interval))

        after = await (await other.execute(recorded, [owner.worker_id])).fetchone()
        alive = await other.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", after)
        assert after != before
        assert await alive.fetchone() == ("millpy commit",)


async def test_commit_continues_after_another_worker_turned_the_rings(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals_of("readings")[0]
    subscription = owner.deployment.subscription_ids["readings", "sums", 0]

    for seq in range(1, 4):
        segment = a_segment(subscription, seq, [a_slice(1.0), None], previous=seq - 1)
        await owner.commit(owner.checkpoint(interval, delta=some_state(), segments=[segment]))
        async with PostgresStore(database_url) as other:
            await other.turn_rings(epoch_s=0.0, epoch_bytes=1)

    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        slots = await (await connection.execute("SELECT slot FROM mill.segments ORDER BY seq")).fetchall()
    assert slots == [(0,), (1,), (2,)]


async def test_commit_of_a_live_owner_is_never_terminated(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals[0]

    async def end_whoever_is_frozen() -> None:
        async with PostgresStore(database_url) as other, other._admin.use() as connection:
            intervals = Bigints([interval.interval_id])
            cursor = await connection.execute(statement("terminate_owners"), {"intervals": intervals})
            assert await cursor.fetchall() == []

    await owner.commit(owner.checkpoint(interval, delta=some_state()), inside=end_whoever_is_frozen)

    assert (await owner.opened(interval)).recovered.bundle == 1


@pytest.mark.parametrize("name", ["terminate_owners", "terminate_backends"])
async def test_a_process_that_has_the_number_of_an_ended_backend_is_never_terminated(
    owner: Owner, database_url: str, name: str
) -> None:
    """Servers give the number of a process that has ended to another one: its start tells them apart."""
    begun = "SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
    record = "UPDATE mill.workers SET backend_pid = %s, backend_start = %s WHERE worker_id = %s"
    await owner.expire()
    ended = []
    innocent = await psycopg.AsyncConnection.connect(database_url)
    async with PostgresStore(database_url) as other, other._admin.use() as connection:
        ((started,),) = await (await innocent.execute(begun)).fetchall()
        pid = innocent.info.backend_pid
        for start in (started - timedelta(microseconds=1), started):
            await connection.execute(record, [pid, start, owner.worker_id])
            start_us = (start - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1)
            which = {
                "intervals": Bigints([owner.deployment.intervals[0].interval_id]),
                "pids": Bigints([pid]),
                "starts": Timestamps([start_us]),
            }
            ended += await (await connection.execute(statement(name), which)).fetchall()
            ended.append(None)

    await innocent.close()
    assert ended == [None, (True,), None]


async def test_heartbeat_renews_the_lease_and_tells_when_it_has_expired(owner: Owner, database_url: str) -> None:
    with HeartbeatConnection(database_url) as sender:
        renewed = await asyncio.to_thread(sender.beat, owner.worker_id, 60.0, WorkerUsage())
        await owner.expire()
        over = await asyncio.to_thread(sender.beat, owner.worker_id, 60.0, WorkerUsage())

    assert (renewed, over) == (Renewal(), None)


async def test_a_renewal_reports_what_the_worker_has_used(owner: Owner, database_url: str) -> None:
    used = WorkerUsage(8_000_000_000, 0.02, 0.5, 0.01, 0.25)
    statement = "SELECT memory_bytes, turn_p50_s, turn_p99_s, commit_p50_s, commit_p99_s FROM millpy.workers"
    shown = []
    with psycopg.connect(database_url, autocommit=True) as connection, HeartbeatConnection(database_url) as sender:
        for usage in (used, WorkerUsage(7), WorkerUsage()):
            await asyncio.to_thread(sender.beat, owner.worker_id, 60.0, usage)
            shown += connection.execute(statement).fetchall()

    assert shown == [astuple(used), (7, None, None, None, None), (None,) * 5]


async def test_a_request_that_hangs_keeps_no_lease_from_being_renewed(owner: Owner, database_url: str) -> None:
    drain = "SELECT millpy.drain_worker('factory', %s, 'the disk is full')"
    with psycopg.connect(database_url) as hanging, HeartbeatConnection(database_url) as sender:
        hanging.execute(drain, [owner.worker_id])
        meanwhile = await asyncio.to_thread(sender.beat, owner.worker_id, 60.0, WorkerUsage())
        hanging.commit()
        renewed = await asyncio.to_thread(sender.beat, owner.worker_id, 60.0, WorkerUsage())

    assert (meanwhile, renewed) == (Renewal(False), Renewal(True))


async def test_a_drain_that_two_request_at_once_is_one_event(owner: Owner, database_url: str) -> None:
    drain = "SELECT millpy.drain_worker('factory', %s)"
    with psycopg.connect(database_url) as first, psycopg.connect(database_url) as second:
        one = first.execute(drain, [owner.worker_id]).fetchone()
        waiting = asyncio.create_task(asyncio.to_thread(second.execute, drain, [owner.worker_id]))
        await asyncio.to_thread(await_lock, database_url)
        first.commit()
        other = (await waiting).fetchone()
        second.commit()
        elsewhere = first.execute("SELECT millpy.drain_worker('other', %s)", [owner.worker_id]).fetchone()
        noted = first.execute("SELECT detail FROM millpy.events WHERE kind = 'drain_requested'").fetchall()

    assert (one, other, elsewhere) == ((1,), (0,), (0,))
    assert noted == [({"worker": str(owner.worker_id), "by": "millpy", "why": ""},)]


async def test_a_worker_that_leaves_at_that_moment_is_not_requested_to_drain(owner: Owner, database_url: str) -> None:
    drain = "SELECT millpy.drain_worker('factory', %s)"
    with psycopg.connect(database_url) as leaving, psycopg.connect(database_url) as asking:
        leaving.execute("DELETE FROM mill.workers WHERE worker_id = %s", [owner.worker_id])
        waiting = asyncio.create_task(asyncio.to_thread(asking.execute, drain, [owner.worker_id]))
        await asyncio.to_thread(await_lock, database_url)
        leaving.commit()
        requested = (await waiting).fetchone()

    assert requested == (0,)


def await_lock(url: str) -> None:
    waits = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(url, autocommit=True) as connection:
        await_true(lambda: connection.execute(waits).fetchone() is not None, "it waits")


def test_heartbeat_without_an_answer_is_logged() -> None:
    with HeartbeatConnection("postgresql://nobody@127.0.0.1:1/nothing") as sender, pytest.raises(StoreUnavailableError):
        sender.beat(UUID(int=1), 1.0, WorkerUsage())
