"""MemoryStore keeps the promises of a store, and its injected faults work as described."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millpy.errors import CommitUnknownError, StoreUnavailableError
from millpy.store.memory.store import MemoryDatabase
from tests.conformance.memory_subject import MemorySubject
from tests.conformance.store_builders import World, a_world
from tests.conformance.store_suite import StoreSuite


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    subject = MemorySubject()
    yield await a_world(subject)
    await subject.close()


def database_of(world: World) -> MemoryDatabase:
    assert isinstance(world.subject, MemorySubject)
    return world.subject.database


class TestMemoryStore(StoreSuite):
    """The whole suite."""


async def test_lost_connection_changes_nothing(world: World) -> None:
    owner = await world.owner(world.a)
    database_of(world).faults.lose_connections(1, store=owner.store)  # type: ignore[arg-type]

    with pytest.raises(StoreUnavailableError):
        await owner.commit(owner.checkpoint(world.a))

    assert (await owner.opened(world.a)).recovered.bundle == 0


async def test_delayed_commit_meets_the_fence_of_the_new_owner(world: World) -> None:
    owner = await world.owner(world.a)
    faults = database_of(world).faults
    faults.lose_answer_of_next_commit("delayed")
    with pytest.raises(CommitUnknownError):
        await owner.commit(owner.checkpoint(world.a))

    await owner.take_over_from_self()

    assert faults.land_lost_commits() == 0
    assert (await owner.opened(world.a)).recovered.bundle == 0


async def test_delayed_commit_succeeds_without_a_takeover(world: World) -> None:
    owner = await world.owner(world.a)
    faults = database_of(world).faults
    faults.lose_answer_of_next_commit("delayed")
    with pytest.raises(CommitUnknownError):
        await owner.commit(owner.checkpoint(world.a))

    assert faults.land_lost_commits() == 1
    assert (await owner.opened(world.a)).recovered.bundle == 1


async def test_dropped_commit_releases_its_waiters(world: World) -> None:
    owner = await world.owner(world.a)
    faults = database_of(world).faults
    faults.lose_answer_of_next_commit("later")
    with pytest.raises(CommitUnknownError):
        await owner.commit(owner.checkpoint(world.a))
    takeover = asyncio.ensure_future(owner.take_over_from_self())
    await asyncio.wait([takeover], timeout=0.01)
    assert not takeover.done()

    assert faults.drop_lost_commits() == 1

    await takeover
    assert (await owner.opened(world.a)).recovered.bundle == 0


async def test_takeover_waits_for_a_lost_commit_that_lands_later(world: World) -> None:
    owner = await world.owner(world.a)
    faults = database_of(world).faults
    faults.lose_answer_of_next_commit("later")
    with pytest.raises(CommitUnknownError):
        await owner.commit(owner.checkpoint(world.a))
    takeover = asyncio.ensure_future(owner.take_over_from_self())
    await asyncio.wait([takeover], timeout=0.01)
    assert not takeover.done()

    assert faults.land_lost_commits() == 1

    await takeover
    assert (await owner.opened(world.a)).recovered.bundle == 1


async def test_claim_waits_for_a_lost_commit_that_lands_later(world: World) -> None:
    old = await world.owner(world.a)
    new = await world.worker()
    faults = database_of(world).faults
    faults.lose_answer_of_next_commit("later", store=old.store)  # type: ignore[arg-type]
    with pytest.raises(CommitUnknownError):
        await old.commit(old.checkpoint(world.a))
    await old.expire()

    claim = asyncio.ensure_future(new.claim(world.a))
    await asyncio.wait([claim], timeout=0.01)
    assert not claim.done()
    faults.land_lost_commits()
    await claim

    assert new.bundles[world.a.interval_id] == 1


async def test_cancelled_commit_leaves_no_lock(world: World) -> None:
    owner = await world.owner(world.a)
    inside = asyncio.Event()

    async def freeze() -> None:
        inside.set()
        await asyncio.Event().wait()

    commit = asyncio.ensure_future(owner.commit(owner.checkpoint(world.a), inside=freeze))
    await inside.wait()
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)

    await owner.take_over_from_self()

    assert (await owner.opened(world.a)).recovered.bundle == 0
