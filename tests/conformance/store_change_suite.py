"""What every store promises about changes of a deployed graph that stored state survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from millpy.errors import GraphError, GraphVersionError, StaleSequencerError
from millpy.model.checkpoint import Checkpoint, Cursor, Entries, Kind
from millpy.model.deployment import ComputationSpec, DeployedInterval, GraphSpec, StreamSpec, SubscriptionSpec
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.protocol import Event
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


def with_north(graph: GraphSpec) -> GraphSpec:
    """The graph with one more source, which `sums` reads beside its other streams."""
    return replace(
        graph,
        computations=(ComputationSpec("north", "injector", partitions=("n",)), *graph.computations),
        streams=(*graph.streams, StreamSpec("north", "north", graph.streams[0].schema)),
        subscriptions=(*graph.subscriptions, SubscriptionSpec("north", "sums", 2, ("device",))),
    )


def as_computation(graph: GraphSpec) -> GraphSpec:
    """The graph with the kind of step that a Computation is."""
    return replace(
        graph,
        computations=tuple(
            replace(c, identity={**c.identity, "kind": "computation"}) if c.name == "sums" else c
            for c in graph.computations
        ),
    )


def deduplicated(within: int) -> GraphSpec:
    """A graph whose step `sums` removes duplicates within a horizon, in µs."""
    spec = with_horizons(0, 100)
    settings = {"deduplicated_within_us": within}
    return replace(
        spec, computations=tuple(replace(c, settings=settings) if c.name == "sums" else c for c in spec.computations)
    )


def at_the_end(owner: Owner, interval: DeployedInterval, cursors: Sequence[Cursor] = (), **changes: Any) -> Checkpoint:
    """The checkpoint of an interval that has processed the end of its inputs."""
    return owner.checkpoint(
        interval, input_watermark=INSTANT_MAX, low_watermark=INSTANT_MAX, cursors=cursors, **changes
    )


def ended(owner: Owner, *producers: DeployedInterval) -> list[Cursor]:
    """Cursors behind the end of producers that have one bundle each."""
    return [Cursor(producer.interval_id, 1, INSTANT_MAX) for producer in producers]


def newest_of(at: int) -> Entries:
    """The position of a source whose newest record has an event time."""
    entries = Entries(Kind.POSITION, "source")
    entries.add(b'""', 0, "", b'{"newest_event_time": %d}' % at)
    return entries


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

    async def test_shorter_lateness_sets_no_floor(self, world: World) -> None:
        owner = await deployed(world, with_horizons(100, 100))
        (reached, _) = owner.deployment.intervals_of("sums")
        await owner.commit(owner.checkpoint(reached, input_watermark=Instant(1_000), low_watermark=Instant(900)))

        owner = await deployed(world, with_horizons(10, 100))

        assert (await owner.opened(reached)).recovered.horizon_floor == INSTANT_MIN

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
        owner = await deployed(world, with_horizons(10, 5_000))
        assert (await owner.opened(a)).recovered.horizon_floor == 900, "what is forgotten stays forgotten"
        assert len(await owner.store.load_dedupe_runs(owner.grants[a.interval_id])) == 1, "an expired run stays expired"
        owner = await deployed(world, with_horizons(10, 60))
        assert (await owner.opened(a)).recovered.horizon_floor == 900
        assert len(await owner.store.load_dedupe_runs(owner.grants[a.interval_id])) == 1

    async def test_what_a_deduplicate_step_has_forgotten_stays_forgotten_when_its_horizon_grows(
        self, world: World
    ) -> None:
        owner = await deployed(world, deduplicated(within=100))
        step, behind = owner.deployment.intervals_of("sums")
        for number, (expires_at, clock) in enumerate([(150, 50), (1_080, 1_000)]):
            run = a_run(number, expires_at=expires_at, clock=clock)
            reached = Instant(clock)
            await owner.commit(owner.checkpoint(step, input_watermark=reached, low_watermark=reached, dedupe_run=run))

        owner = await deployed(world, deduplicated(within=400))

        assert (await owner.opened(step)).recovered.horizon_floor == 800
        assert [r.expires_at for r in await owner.store.load_dedupe_runs(owner.grants[step.interval_id])] == [1_680]
        assert (await owner.opened(behind)).recovered.horizon_floor == INSTANT_MIN

    async def test_an_ended_partition_is_set_back_with_what_is_behind_it(self, world: World) -> None:
        owner = await deployed(world, with_horizons(0, 100))
        (a, b), steps = owner.deployment.intervals_of("readings"), owner.deployment.intervals_of("sums")
        (alarms,) = owner.deployment.intervals_of("alarms")
        runs = {a: {"dedupe_run": a_run(1, expires_at=9_000, clock=INSTANT_MAX)}, b: {}}
        await owner.commit(
            *(at_the_end(owner, source, delta=[newest_of(800)], **runs[source]) for source in (a, b)),
            at_the_end(owner, steps[0], ended(owner, a, b)),
        )
        asked = owner.deployment.graph_id, owner.grants[a.interval_id], Instant(500)

        def ends(newest: Mapping[str, Instant]) -> dict[str, Instant]:
            return {"sums": Instant(newest["readings"] + 100)}

        assert await owner.store.reopen_source(*asked, ends, Event("read_on")) is None  # not all steps are at the end
        await owner.commit(
            at_the_end(owner, steps[1], ended(owner, a, b)), at_the_end(owner, alarms, ended(owner, a, b, *steps))
        )
        assert await owner.store.finished(owner.deployment.graph_id)
        assert await owner.store.reopen_source(*asked, ends, Event("read_on")) == 500

        assert not await owner.store.finished(owner.deployment.graph_id)
        with pytest.raises(StaleSequencerError):
            await owner.commit(at_the_end(owner, steps[0]))
        with pytest.raises(StaleSequencerError):
            await owner.store.reopen_source(*asked, ends, Event("read_on"))
        await owner.claim(a, *steps, alarms)
        for interval, floor in {a: INSTANT_MIN, steps[0]: 900, steps[1]: 900, alarms: INSTANT_MIN}.items():
            opened = await owner.opened(interval)
            found = opened.recovered
            assert (found.input_watermark, found.low_watermark, found.horizon_floor) == (500, 500, floor), interval
            watermarks = {producer: watermark for producer, (_, watermark) in opened.cursors.items()}
            assert watermarks.get(a.interval_id, 500) == 500
            assert watermarks.get(b.interval_id, INSTANT_MAX) == INSTANT_MAX
        assert (await owner.opened(b)).recovered.low_watermark == INSTANT_MAX
        assert await owner.store.load_dedupe_runs(owner.grants[a.interval_id]) == []

    async def test_a_partition_behind_a_step_with_other_inputs_goes_on_at_its_watermark(self, world: World) -> None:
        owner = await deployed(world, with_horizons(0, 100))
        (a, b), steps = owner.deployment.intervals_of("readings"), owner.deployment.intervals_of("sums")
        moved = {"input_watermark": Instant(700), "low_watermark": Instant(600)}
        cursors = [Cursor(a.interval_id, 1, INSTANT_MAX), Cursor(b.interval_id, 1, Instant(700))]
        await owner.commit(
            at_the_end(owner, a), owner.checkpoint(b, input_watermark=Instant(700), low_watermark=Instant(700)),
            *(owner.checkpoint(step, **moved, cursors=cursors) for step in steps),
            owner.checkpoint(owner.deployment.intervals_of("alarms")[0], **moved, cursors=cursors),
        )  # fmt: skip

        asked = owner.deployment.graph_id, owner.grants[a.interval_id], Instant(500)
        assert await owner.store.reopen_source(*asked, lambda newest: {}, Event("read_on")) == 700

        for step in steps:  # an owner that remembers the end would be beyond what comes
            with pytest.raises(StaleSequencerError):
                await owner.commit(owner.checkpoint(step, input_watermark=Instant(900), low_watermark=Instant(900)))
        await owner.claim(a, *steps)
        assert (await owner.opened(steps[0])).recovered.input_watermark == 700
        assert (await owner.opened(steps[0])).cursors[a.interval_id] == (1, 700)

    async def test_a_horizon_that_changes_after_the_end_sets_no_floor_there(self, world: World) -> None:
        owner = await deployed(world, with_horizons(0, 100))
        (a, b), steps = owner.deployment.intervals_of("readings"), owner.deployment.intervals_of("sums")
        (alarms,) = owner.deployment.intervals_of("alarms")
        everything = [a, b, *steps, alarms]
        await owner.commit(at_the_end(owner, a), at_the_end(owner, b))
        await owner.commit(*(at_the_end(owner, step, ended(owner, a, b)) for step in steps))
        await owner.commit(at_the_end(owner, alarms, ended(owner, a, b, *steps)))

        owner = await deployed(world, with_horizons(50, 200))

        for interval in everything:
            assert (await owner.opened(interval)).recovered.horizon_floor < INSTANT_MAX - 1_000, interval

    async def test_horizons_change_only_when_an_operator_deploys_them(self, world: World) -> None:
        await deployed(world, with_horizons(10, 100))

        with pytest.raises(GraphVersionError, match="allowed_lateness changed"):
            await world.store.deploy(with_horizons(20, 100))

    async def test_partition_cannot_join_a_source_that_has_ended(self, world: World) -> None:
        owner = await deployed(world, a_graph("changing"))
        a, b = owner.deployment.intervals_of("readings")
        await owner.commit(at_the_end(owner, a))
        grown = a_graph("changing", partitions=("a", "b", "c"))

        await owner.commit(at_the_end(owner, b))
        with pytest.raises(GraphError, match="'c' cannot join readings: the source has ended"):
            await world.store.deploy(grown)

        assert (await world.store.deploy(a_graph("changing"))).version == owner.deployment.version

    async def test_partitions_that_have_ended_stay_ended_when_another_one_joins(self, world: World) -> None:
        owner = await deployed(world, a_graph("changing"))
        (a, b), steps = owner.deployment.intervals_of("readings"), owner.deployment.intervals_of("sums")
        await owner.commit(at_the_end(owner, a), *(owner.checkpoint(s, cursors=ended(owner, a)) for s in steps))

        owner = await deployed(world, a_graph("changing", partitions=("a", "b", "c")))

        c = owner.deployment.intervals_of("readings")[2]
        for step in steps:
            watermarks = {producer: at for producer, (_, at) in (await owner.opened(step)).cursors.items()}
            assert (watermarks[a.interval_id], watermarks[c.interval_id]) == (INSTANT_MAX, INSTANT_MIN)
        assert (await owner.opened(b)).recovered.low_watermark == INSTANT_MIN
        assert (await owner.opened(a)).recovered.low_watermark == INSTANT_MAX

    async def test_source_that_joins_a_step_begins_at_its_watermark(self, world: World) -> None:
        base = as_computation(with_horizons(10, 100))
        owner = await deployed(world, base)
        ahead, behind = owner.deployment.intervals_of("sums")
        await owner.commit(owner.checkpoint(ahead, input_watermark=Instant(1_000), low_watermark=Instant(900)))
        await owner.commit(owner.checkpoint(behind, input_watermark=Instant(400), low_watermark=Instant(400)))

        owner = await deployed(world, with_north(base))

        (north,) = owner.deployment.intervals_of("north")
        assert (await owner.opened(north)).recovered.low_watermark == 1_000
        for interval in (ahead, behind):
            opened = await owner.opened(interval)
            assert opened.cursors[north.interval_id] == (0, 1_000)
        assert owner.deployment.subscription_ids["north", "sums", 2]
        with pytest.raises(GraphError, match="no longer reads north"):
            await world.store.deploy(base, on_purpose=True)

    async def test_step_whose_sources_have_ended_takes_no_other(self, world: World) -> None:
        base = as_computation(with_horizons(10, 100))
        owner = await deployed(world, base)
        for interval in owner.deployment.intervals_of("sums"):
            await owner.commit(owner.checkpoint(interval, input_watermark=INSTANT_MAX, low_watermark=INSTANT_MAX))

        with pytest.raises(GraphError, match="all its sources have ended"):
            await world.store.deploy(with_north(base), on_purpose=True)

    async def test_stream_that_lags_behind_a_step_is_refused_and_nothing_changes(self, world: World) -> None:
        base = as_computation(with_horizons(10, 100))
        grown = with_north(base)
        apart = replace(grown, subscriptions=(*base.subscriptions, SubscriptionSpec("north", "alarms", 2, ("device",))))
        united = replace(grown, subscriptions=(*apart.subscriptions, grown.subscriptions[-1]))
        owner = await deployed(world, apart)
        (north,), sums = owner.deployment.intervals_of("north"), owner.deployment.intervals_of("sums")
        for interval, at in ((north, 300), (sums[0], 400), (sums[1], 200)):
            await owner.commit(owner.checkpoint(interval, input_watermark=Instant(at), low_watermark=Instant(at)))

        with pytest.raises(GraphError, match="sums cannot read north yet: its watermark"):
            await world.store.deploy(united, on_purpose=True)

        assert (await world.store.deploy(apart)).version == owner.deployment.version
        await owner.commit(owner.checkpoint(north, input_watermark=Instant(400), low_watermark=Instant(400)))
        owner = await deployed(world, united)
        cursors = [(await owner.opened(interval)).cursors[north.interval_id] for interval in sums]
        assert cursors == [(2, 400), (2, 400)]
