"""Locks of rings: emptying a slot waits for its own writers, and no other session can make commits wait."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

import psycopg
import pytest

from millpy.model.checkpoint import Kind
from millpy.store.postgres import retention
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.statements import statements
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph, contents, entries, panes


def cell(number: int) -> tuple[object, ...]:
    return (entries(Kind.STATE, "cell", (f"k{number}", number)),)


async def commit_a_cell(owner: Owner, number: int) -> None:
    interval = owner.deployment.intervals_of("sums")[0]
    rows = panes(owner.deployment.table_ids["sums_1m"], (f"dev{number}", 1.0, 0), first=True)
    await owner.commit(owner.checkpoint(interval, delta=cell(number), results=[rows]))


async def waiting(watcher: psycopg.AsyncConnection, application: str) -> None:
    """Until a connection of this name waits for a lock."""
    asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    while await (await watcher.execute(asked, [application])).fetchone() == (0,):
        pass


async def a_filled_slot_that_nobody_needs(owner: Owner) -> None:
    await commit_a_cell(owner, 1)
    await owner.fold(owner.deployment.intervals_of("sums")[0])


async def test_slot_is_not_emptied_while_a_commit_writes_to_it(owner: Owner, database_url: str) -> None:
    # The commit has written to slot 0 and waits for a user's lock while the ring turns.
    await a_filled_slot_that_nobody_needs(owner)
    async with (
        PostgresStore(database_url) as other,
        await psycopg.AsyncConnection.connect(database_url) as user,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watcher,
    ):
        await user.execute("LOCK TABLE factory.sums_1m IN ACCESS EXCLUSIVE MODE")
        commit = asyncio.create_task(commit_a_cell(owner, 2))
        await waiting(watcher, "millpy commit")

        freed = [await other.turn_rings(epoch_s=0.0, epoch_bytes=1) for _ in range(3)]
        await user.rollback()
        await commit

    assert freed == [0, 0, 0]
    assert len(contents((await owner.opened(owner.deployment.intervals_of("sums")[0])).recovered)) == 2


async def test_the_slot_in_use_is_not_emptied(owner: Owner, database_url: str) -> None:
    """A worker may ask for a slot that others have emptied and filled again since it looked."""
    await a_filled_slot_that_nobody_needs(owner)
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as user:
        found = await user.execute(
            "SELECT ring, slot, mill.free_slot(ring, slot) FROM mill.epochs WHERE state = 'current'"
        )
        assert [row[2] for row in await found.fetchall()] == [False] * 3
    await commit_a_cell(owner, 2)


@pytest.mark.parametrize(
    ("age_s", "epoch_bytes", "turns"),
    [(0, 1_000_000, False), (61, 1_000_000, True), (-30, 1_000_000, True), (0, 1, True)],
    ids=["new", "old", "of before the clock was set back", "large"],
)
async def test_a_ring_turns_by_age_or_size_also_after_the_clock_was_set_back(
    owner: Owner, database_url: str, age_s: int, epoch_bytes: int, turns: bool
) -> None:
    """Else the data of all graphs would wait for the clock to catch up before any of it is freed."""
    await commit_a_cell(owner, 1)
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as user:
        began = "clock_timestamp() - make_interval(secs => %s)"
        await user.execute(f"UPDATE mill.epochs SET started_at = {began} WHERE state = 'current'", [age_s])
        await owner.store.turn_rings(epoch_s=60.0, epoch_bytes=epoch_bytes)
        found = await user.execute("SELECT ring FROM mill.epochs WHERE state = 'filled'")

        assert [row[0] for row in await found.fetchall()] == (["deltas"] if turns else [])


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_emptying_spares_what_was_committed_while_it_waited(
    owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    # Under any default of the database, the state after the wait counts, not that at the begin of the transaction.
    monkeypatch.setattr(retention, "FREE_LOCK_MS", 30_000)
    await a_filled_slot_that_nobody_needs(owner)
    async with (
        await psycopg.AsyncConnection.connect(database_url) as user,
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watcher,
    ):
        await watcher.execute(f"ALTER DATABASE {watcher.info.dbname} SET default_transaction_isolation = '{isolation}'")
        async with PostgresStore(database_url) as other:
            await user.execute("LOCK TABLE factory.sums_1m IN ACCESS EXCLUSIVE MODE")
            commit = asyncio.create_task(commit_a_cell(owner, 2))
            await waiting(watcher, "millpy commit")
            turning = asyncio.create_task(other.turn_rings(epoch_s=0.0, epoch_bytes=1))
            await waiting(watcher, "millpy fold")
            await user.rollback()
            await commit

            freed = await turning

    assert freed == 0
    assert len(contents((await owner.opened(owner.deployment.intervals_of("sums")[0])).recovered)) == 2


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    "call",
    [
        "mill.free_slot('deltas', 3)",
        "mill.turn_ring('deltas', 0, 1)",
        "mill.hold_grants(1, '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
    ],
)
def test_functions_that_read_after_a_lock_refuse_an_older_snapshot(
    database_url: str, isolation: str, call: str
) -> None:
    with psycopg.connect(database_url) as person:
        person.execute(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
        with pytest.raises(psycopg.Error) as refused:
            person.execute(f"SELECT {call}")

    assert refused.value.sqlstate == "MW008"


def test_millpy_takes_no_advisory_lock(database_url: str) -> None:
    # Any login can take one: there is no right to it.
    with psycopg.connect(database_url) as connection:
        found = connection.execute(
            "SELECT p.oid::regprocedure FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace"
            " WHERE n.nspname IN ('mill', 'millpy') AND p.prosrc ~ 'advisory'"
        ).fetchall()

    assert found == []
    assert [name for name, text in statements().items() if b"advisory" in text] == []


async def test_reader_with_all_its_locks_stops_no_commit_and_delays_no_turn(database_url: str) -> None:
    migrate(database_url, "millpy")
    reader = database_url.replace("//millpy@", "//millpy_reader@")
    worker = database_url.replace("//millpy@", "//millpy_worker@")
    async with PostgresStore(database_url) as store:
        await store.deploy(a_graph())
    async with PostgresStore(worker) as store:
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        await owner.claim()
        await commit_a_cell(owner, 0)
        with ExitStack() as stack:
            hostile = stack.enter_context(psycopg.connect(reader))
            take_everything(hostile)

            async with asyncio.timeout(60):
                for number in range(1, 40):
                    await commit_a_cell(owner, number)
                    await owner.fold(owner.deployment.intervals_of("sums")[0])
                    await store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        state = contents((await owner.opened(owner.deployment.intervals_of("sums")[0])).recovered)

    assert len(state) == 40


@pytest.mark.parametrize("role", ["reader", "stranger"])
async def test_reader_with_all_its_locks_delays_no_deployment_and_no_migration(database_url: str, role: str) -> None:
    migrate(database_url, "millpy")
    async with PostgresStore(database_url) as store:
        await store.deploy(a_graph())
        with psycopg.connect(database_url, autocommit=True) as administrator, ExitStack() as stack:
            administrator.execute("DROP ROLE IF EXISTS stranger_to_locks; CREATE ROLE stranger_to_locks LOGIN")
            login = "millpy_reader" if role == "reader" else "stranger_to_locks"
            hostile = stack.enter_context(psycopg.connect(database_url.replace("//millpy@", f"//{login}@")))
            take_everything(hostile)

            async with asyncio.timeout(60):
                await store.deploy(a_graph())
                await store.deploy(replace(a_graph(), name="another"))
                await store.deploy(replace(a_graph(), generation=2))
                await store.drop("factory_2")
            done = await asyncio.wait_for(asyncio.to_thread(migrate, database_url, "millpy"), 60)

    assert done.roles is not None


async def test_concurrent_migrations_and_deployments_wait_for_each_other(empty_database_url: str) -> None:
    async with asyncio.timeout(60):
        done = await asyncio.gather(*(asyncio.to_thread(migrate, empty_database_url) for _ in range(4)))
        assert sorted(len(migrated.applied) for migrated in done)[:3] == [0, 0, 0]
        async with PostgresStore(empty_database_url) as one, PostgresStore(empty_database_url) as other:
            specs = [a_graph(), replace(a_graph(), name="another"), replace(a_graph(), generation=2)]
            await asyncio.gather(*(store.deploy(spec) for spec in specs for store in (one, other)))
            assert [g.generation for g in await one.generations("factory")] == [1, 2]


def take_everything(connection: psycopg.Connection) -> None:
    """Take every lock that a reader is allowed: advisory locks, every relation in every mode, every row."""
    for key in (7596565200000000, *range(7596565200000100, 7596565200000200)):
        connection.execute("SELECT pg_advisory_lock(%s)", [key])
    for family in ("factory", "names"):
        for words in (f"millpy deploy {family}", f"millpy {family}"):
            connection.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [words])
    relations = connection.execute(
        "SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname IN ('mill', 'millpy', 'factory') AND c.relkind IN ('r', 'p', 'v')"
    ).fetchall()
    modes = (
        "ACCESS SHARE",
        "ROW SHARE",
        "ROW EXCLUSIVE",
        "SHARE UPDATE EXCLUSIVE",
        "SHARE",
        "EXCLUSIVE",
        "ACCESS EXCLUSIVE",
    )
    for schema, relation in relations:
        statements = [f"LOCK TABLE {schema}.{relation} IN {mode} MODE NOWAIT" for mode in modes]
        statements += [f"SELECT * FROM {schema}.{relation} FOR {lock}" for lock in ("UPDATE", "KEY SHARE")]
        for statement in (*statements, f"SELECT * FROM {schema}.{relation}"):
            try:
                with connection.transaction():  # a savepoint: locks that were given stay
                    connection.execute(statement)
            except psycopg.errors.InsufficientPrivilege:
                pass
            except psycopg.errors.LockNotAvailable:
                pass
