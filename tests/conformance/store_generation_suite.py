"""What every store promises about generations: a switch is one moment, for the names as for the fence (I1, I2)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millpy.errors import GraphVersionError, OwnershipError, TransientError, UsageError
from millpy.model.deployment import Deployment, GraphSpec
from tests.conformance.store_builders import Owner, World, a_graph, panes
from tests.conformance.store_commit_suite import holding

FIRST, SECOND = a_graph(), replace(a_graph(intervals=3), generation=2)


async def owner_of(world: World, spec: GraphSpec, *, claims: bool = True) -> Owner:
    """Start a worker of one generation like a process: deploy, register, and claim what is free."""
    store = await world.subject.store()
    owner = Owner(store, await store.deploy(spec))
    await owner.register()
    if claims:
        await owner.claim()
    return owner


async def write(owner: Owner, total: float, pane_index: int, device: str = "d") -> None:
    """Commit a row of the windowed table, at the first interval of its writer."""
    table_id = owner.deployment.table_ids["sums_1m"]
    rows = panes(table_id, (device, total, pane_index), first=pane_index == 0)
    await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], results=(rows,)))


async def totals(world: World, deployment: Deployment, name: str) -> list[float]:
    """Return the rows of the table of the graph that has this name now."""
    rows = await world.subject.rows(replace(deployment, name=name), "sums_1m")
    return sorted(row["total"] for row in rows)


class GenerationSuite:
    """Mix into a test class that has a `world` fixture."""

    async def test_switch_moves_name_and_tables_and_fences_both_generations(self, world: World) -> None:
        old, new = await owner_of(world, FIRST), await owner_of(world, SECOND)
        await write(old, 1.0, 0)
        await write(new, 2.0, 0)

        assert await world.subject.switch("factory", 2)

        assert await totals(world, old.deployment, "factory") == [2.0]
        assert await totals(world, old.deployment, "factory_1") == [1.0]
        for owner in (old, new):
            with pytest.raises(GraphVersionError):
                await write(owner, 9.0, 1)
            with pytest.raises(GraphVersionError):
                await owner.register()
            known = await owner.store.ownership(owner.deployment.graph_id)
            assert known.graph_version == owner.deployment.version + 1
            assert {interval.worker_id for interval in known.intervals} == {None}
        assert await totals(world, old.deployment, "factory") == [2.0]
        assert await totals(world, old.deployment, "factory_1") == [1.0]

    async def test_worker_that_looks_its_graph_up_again_continues_under_its_new_name(self, world: World) -> None:
        for spec, total in ((FIRST, 1.0), (SECOND, 2.0)):
            await write(await owner_of(world, spec), total, 0)
        before = [await world.store.deploy(spec) for spec in (FIRST, SECOND)]

        for current, names in ((2, ("factory_1", "factory")), (1, ("factory", "factory_2"))):
            assert await world.subject.switch("factory", current)
            for spec, found, name in zip((FIRST, SECOND), before, names, strict=True):
                again = await owner_of(world, spec)
                assert again.deployment == replace(found, name=name, version=found.version + 3 - current)
                await write(again, 10.0 * spec.generation, 0, f"after {current}")
            assert await totals(world, before[0], names[0]) == [1.0] + [10.0] * (3 - current)
            assert await totals(world, before[1], names[1]) == [2.0] + [20.0] * (3 - current)

    async def test_switch_waits_for_the_commit_in_flight_of_either(self, world: World) -> None:
        await world.store.deploy(SECOND)
        for spec, current in ((FIRST, 2), (SECOND, 1)):
            owner = await owner_of(world, spec)
            inside, may_continue = asyncio.Event(), asyncio.Event()
            commit = asyncio.ensure_future(
                owner.commit(owner.checkpoint(owner.deployment.intervals[-1]), inside=holding(inside, may_continue))
            )
            await inside.wait()

            switch = asyncio.ensure_future(world.subject.switch("factory", current))
            await asyncio.wait([switch], timeout=0.1)
            waited = not switch.done()
            may_continue.set()
            await asyncio.gather(commit, switch)

            assert waited
            again = await owner_of(world, spec)
            assert again.bundles[owner.deployment.intervals[-1].interval_id] == 1

    async def test_worker_that_is_frozen_inside_a_commit_does_not_delay_a_switch(self, world: World) -> None:
        await world.store.deploy(SECOND)
        owner = await owner_of(world, FIRST)
        inside, may_continue = asyncio.Event(), asyncio.Event()
        commit = asyncio.ensure_future(owner.commit(owner.checkpoint(world.a), inside=holding(inside, may_continue)))
        await inside.wait()
        await owner.expire()

        async with asyncio.timeout(60):
            assert await world.subject.switch("factory", 2)
        may_continue.set()
        (outcome,) = await asyncio.gather(commit, return_exceptions=True)

        assert isinstance(outcome, GraphVersionError | OwnershipError | TransientError), outcome
        assert (await owner_of(world, FIRST)).bundles[world.a.interval_id] == 0

    async def test_abandoned_switch_changes_nothing(self, world: World) -> None:
        new = await world.store.deploy(SECOND)
        owner = await owner_of(world, FIRST)
        inside, may_continue = asyncio.Event(), asyncio.Event()
        commit = asyncio.ensure_future(owner.commit(owner.checkpoint(world.a), inside=holding(inside, may_continue)))
        await inside.wait()
        switch = asyncio.ensure_future(world.subject.switch("factory", 2))
        await asyncio.wait([switch], timeout=0.1)
        switch.cancel()
        await asyncio.gather(switch, return_exceptions=True)
        may_continue.set()
        await commit

        assert await world.store.deploy(FIRST) == world.deployment
        assert await world.store.deploy(SECOND) == new
        await owner.commit(owner.checkpoint(world.a))
        assert await world.subject.switch("factory", 2)

    async def test_switch_to_the_current_generation_changes_nothing_and_to_a_missing_one_is_refused(
        self, world: World
    ) -> None:
        await world.store.deploy(SECOND)

        assert not await world.subject.switch("factory", 1)
        with pytest.raises(UsageError, match="no generation 3"):
            await world.subject.switch("factory", 3)

        assert await world.store.deploy(FIRST) == world.deployment
