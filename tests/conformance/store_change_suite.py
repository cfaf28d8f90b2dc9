"""What every store promises about changes of a deployed graph that stored state survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpy.errors import GraphError
from millpy.model.deployment import GraphSpec
from millpy.model.time import INSTANT_MIN, Instant
from tests.conformance.store_builders import Owner, World, a_graph
from tests.conformance.store_reading_suite import a_run


def with_horizons(lateness: int, within: int) -> GraphSpec:
    """A graph with a lateness of `sums` and a dedupe horizon of `readings`, in µs."""
    graph = a_graph("changing")
    settings = {"readings": {"within_us": within}, "sums": {"allowed_lateness_us": lateness}, "alarms": {}}
    tables = tuple(replace(t, allowed_lateness_us=lateness if t.name == "sums_1m" else 0) for t in graph.tables)
    changed = tuple(replace(c, settings=settings[c.name]) for c in graph.computations)
    return replace(graph, computations=changed, tables=tables)


async def deployed(world: World, spec: GraphSpec) -> Owner:
    """Deploy a graph, and return a worker that owns all of it."""
    owner = Owner(world.store, await world.store.deploy(spec, on_purpose=True))
    await owner.register()
    await owner.claim()
    return owner


class ChangeSuite:
    """Mix into a test class that has a `world` fixture."""

    async def test_windows_that_are_over_stay_over_when_the_lateness_grows(self, world: World) -> None:
        owner = await deployed(world, with_horizons(10, 100))
        reached, behind = owner.deployment.intervals_of("sums")
        await owner.commit(owner.checkpoint(reached, input_watermark=Instant(1_000), low_watermark=Instant(900)))

        floors = []
        for lateness in (50, 5, 400):
            owner = await deployed(world, with_horizons(lateness, 100))
            floors.append((await owner.opened(reached)).recovered.horizon_floor)

        assert floors == [990, 990, 995]
        assert (await owner.opened(behind)).recovered.horizon_floor == INSTANT_MIN
        (alarms,) = owner.deployment.intervals_of("alarms")
        assert (await owner.opened(alarms)).recovered.horizon_floor == INSTANT_MIN

    async def test_ids_that_are_forgotten_stay_forgotten_when_the_horizon_grows(self, world: World) -> None:
        owner = await deployed(world, with_horizons(10, 100))
        a, b = owner.deployment.intervals_of("readings")
        for number, (expires_at, clock) in enumerate([(150, 50), (1_080, 1_000)]):
            run = a_run(number, expires_at=expires_at, clock=clock)
            await owner.commit(owner.checkpoint(a, dedupe_run=run))

        owner = await deployed(world, with_horizons(10, 400))

        assert (await owner.opened(a)).recovered.horizon_floor == 900
        assert [run.expires_at for run in await owner.store.load_dedupe_runs(owner.grants[a.interval_id])] == [1_380]
        assert (await owner.opened(b)).recovered.horizon_floor == INSTANT_MIN
        owner = await deployed(world, with_horizons(10, 60))
        assert (await owner.opened(a)).recovered.horizon_floor == 900
        assert len(await owner.store.load_dedupe_runs(owner.grants[a.interval_id])) == 1

    async def test_horizons_change_only_when_an_operator_deploys_them(self, world: World) -> None:
        await deployed(world, with_horizons(10, 100))

        with pytest.raises(GraphError, match="allowed_lateness changed"):
            await world.store.deploy(with_horizons(20, 100))
