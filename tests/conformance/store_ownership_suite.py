"""What every store promises about graphs, leases and ownership (I1)."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest

from millpy.errors import GraphError, GraphVersionError, OwnershipError, StaleSequencerError
from millpy.model.checkpoint import Grant
from millpy.model.deployment import ColumnSpec, ComputationSpec, GraphSpec, StreamSpec, SubscriptionSpec, TableSpec
from millpy.model.keys import KEY_SPACE
from millpy.model.time import INSTANT_MIN, Instant
from millpy.store.protocol import Event, SourceReport, WorkerInfo
from tests.conformance.store_builders import LEASE_S, MINUTE, Owner, World, a_graph


def with_totals(graph: GraphSpec) -> GraphSpec:
    """The graph with one more stage, which comes first, and its table."""
    readings, *others = graph.computations
    value = ColumnSpec("total", "double precision", True)
    stream = StreamSpec("totals", "totals", graph.streams[0].schema)
    table = TableSpec("totals", "records", "totals", "totals", (), (value,))
    return replace(
        graph,
        computations=(readings, ComputationSpec("totals", "stage", intervals=2), *others),
        streams=(*graph.streams, stream),
        subscriptions=(*graph.subscriptions, SubscriptionSpec("readings", "totals", 0, ("device",))),
        tables=(*graph.tables, table),
    )


class OwnershipSuite:
    """Mix into a test class that has a `world` fixture."""

    async def test_deploying_twice_finds_the_same_ids(self, world: World) -> None:
        again = await world.store.deploy(a_graph())

        assert again == world.deployment

    async def test_two_processes_that_deploy_at_once_agree(self, world: World) -> None:
        stores = [await world.subject.store() for _ in range(3)]

        first, *others = await asyncio.gather(*(store.deploy(a_graph("mine")) for store in stores))

        assert all(other == first for other in others)

    async def test_changed_graph_is_refused_and_the_difference_named(self, world: World) -> None:
        with pytest.raises(GraphError) as refused:
            await world.store.deploy(a_graph(intervals=3))

        assert "sums" in str(refused.value)
        assert refused.value.hint

    async def test_generation_runs_beside_the_one_before_it(self, world: World) -> None:
        beside = replace(a_graph(intervals=3), generation=2)
        new = await world.store.deploy(beside)

        assert (world.deployment.name, new.name) == ("factory", "factory_2")
        assert new.graph_id != world.deployment.graph_id
        assert not any(interval.joined for interval in new.intervals)
        assert not {i.interval_id for i in new.intervals} & {i.interval_id for i in world.deployment.intervals}
        assert await world.store.deploy(beside) == new
        assert await world.store.deploy(a_graph()) == world.deployment
        old, newer = await world.owner(), Owner(world.store, new)
        await newer.register()
        await newer.claim()
        for owner, interval in ((old, world.a), (newer, new.intervals_of("readings")[0])):
            await owner.commit(owner.checkpoint(interval))

    async def test_generation_older_than_the_newest_cannot_be_deployed_again(self, world: World) -> None:
        await world.store.deploy(replace(a_graph(), generation=3))

        with pytest.raises(GraphVersionError, match="generation 3"):
            await world.store.deploy(replace(a_graph(), generation=2))

    async def test_added_source_partition_starts_at_the_watermark_of_its_stream(self, world: World) -> None:
        old = await world.owner()
        for interval, at in ((world.a, 9), (world.b, 7), (world.sums[0], 5)):
            reached = Instant(at * MINUTE)
            await old.commit(old.checkpoint(interval, input_watermark=reached, low_watermark=reached))

        grown = await world.store.deploy(a_graph(partitions=("a", "b", "c")))
        await old.expire()
        new = Owner(world.store, grown)
        await new.register()
        await new.claim()

        added = grown.intervals_of("readings")[2]
        assert [(i.partition, i.joined) for i in grown.intervals_of("readings")] == [
            ("a", False),
            ("b", False),
            ("c", True),
        ]
        assert grown.intervals_of("readings")[:2] == world.deployment.intervals_of("readings")
        assert (await new.opened(added)).recovered.low_watermark == 7 * MINUTE
        cursors = [(await new.opened(stage)).cursors[added.interval_id] for stage in (*world.sums, world.alarms)]
        assert cursors == [(0, 5 * MINUTE), (0, INSTANT_MIN), (0, INSTANT_MIN)]

    async def test_worker_of_the_former_graph_cannot_commit_and_gets_the_grown_one(self, world: World) -> None:
        old = await world.owner()
        grown = await world.store.deploy(a_graph(partitions=("c", "a", "b")))

        with pytest.raises(GraphVersionError):
            await old.commit(old.checkpoint(world.a))

        assert grown.version == world.deployment.version + 1
        assert await world.store.deploy(a_graph()) == grown
        assert await world.store.deploy(a_graph(partitions=("a", "b", "c"))) == grown

    async def test_graph_with_an_addition_is_still_refused_if_its_meaning_changed(self, world: World) -> None:
        with pytest.raises(GraphError):
            await world.store.deploy(a_graph(intervals=3, partitions=("a", "b", "c")))

    async def test_added_computation_starts_where_its_producers_are(self, world: World) -> None:
        old = await world.owner()
        for interval, at in ((world.a, 9), (world.b, 7)):
            reached = Instant(at * MINUTE)
            await old.commit(old.checkpoint(interval, input_watermark=reached, low_watermark=reached))
        await old.commit(
            old.checkpoint(world.a, input_watermark=Instant(9 * MINUTE), low_watermark=Instant(9 * MINUTE))
        )

        grown = await world.store.deploy(with_totals(a_graph()))
        with pytest.raises(GraphVersionError):
            await old.commit(old.checkpoint(world.a))
        with pytest.raises(GraphVersionError):
            await world.store.deploy(a_graph())
        assert {o.worker_id for o in (await world.store.ownership(grown.graph_id)).intervals} == {None}
        new = Owner(world.store, grown)
        await new.register()
        await new.claim()

        assert grown.version == world.deployment.version + 1
        assert len(grown.changes) == 2
        assert await world.store.deploy(with_totals(a_graph())) == grown
        kept = [i for i in grown.intervals if i.computation != "totals"]
        assert kept == list(world.deployment.intervals)
        assert {grown.table_ids[name] for name in world.deployment.table_ids} == set(
            world.deployment.table_ids.values()
        )
        for interval in grown.intervals_of("totals"):
            opened = await new.opened(interval)
            assert opened.cursors == {
                world.a.interval_id: (2, 9 * MINUTE),
                world.b.interval_id: (1, 7 * MINUTE),
            }
            assert opened.recovered.input_watermark == opened.recovered.low_watermark == 7 * MINUTE
        subscription = grown.subscription_ids["readings", "totals", 0]
        assert (await new.opened(world.a)).last_segments.get(subscription, 0) == 0

    async def test_worker_of_another_version_of_the_graph_gets_nothing(self, world: World) -> None:
        old = await world.owner(world.a)
        grant = old.grants[world.a.interval_id]
        grown = await world.store.deploy(a_graph(partitions=("a", "b", "c")))

        assert (await world.store.ownership(grown.graph_id)).graph_version == grown.version == 2
        assert not await old.claim()
        assert not await world.store.take_over_from_self(old.worker_id, [grant])
        with pytest.raises(StaleSequencerError):
            await world.store.read([grant], state_rows_max=10)
        for version in (1, 3):
            with pytest.raises(GraphVersionError):
                await world.store.register(WorkerInfo(uuid.uuid4(), grown.graph_id, version), 60.0)
        await world.store.register(WorkerInfo(old.worker_id, grown.graph_id, 2), 60.0)
        assert len(await old.claim(*grown.intervals)) == len(grown.intervals)

    async def test_setting_changes_when_a_user_requests_it(self, world: World) -> None:
        readings, *others = a_graph().computations
        changed = replace(a_graph(), computations=(replace(readings, settings={"idle": "Wait()"}), *others))

        with pytest.raises(GraphVersionError, match="idle"):
            await world.store.deploy(changed)
        deployed = await world.store.deploy(changed, on_purpose=True)

        assert deployed.version == world.deployment.version + 1
        assert deployed.intervals == world.deployment.intervals

    async def test_two_graphs_share_nothing(self, world: World) -> None:
        other = await world.store.deploy(a_graph("other"))

        ids = {i.interval_id for i in world.deployment.intervals}
        assert other.graph_id != world.deployment.graph_id
        assert ids.isdisjoint(i.interval_id for i in other.intervals)
        assert set(other.table_ids.values()).isdisjoint(world.deployment.table_ids.values())

    async def test_intervals_of_a_stage_tile_the_key_space(self, world: World) -> None:
        bounds = [(i.keys.lo, i.keys.hi) for i in world.sums if i.keys is not None]

        assert bounds == [(0, KEY_SPACE // 2), (KEY_SPACE // 2, KEY_SPACE)]
        assert [i.partition for i in (world.a, world.b)] == ["a", "b"]

    async def test_two_workers_never_claim_the_same_interval(self, world: World) -> None:
        workers = [await world.worker() for _ in range(3)]

        claimed = await asyncio.gather(*(worker.claim() for worker in workers))

        ids = [grant.interval_id for grants in claimed for grant in grants]
        assert len(ids) == len(set(ids))
        assert sorted(ids) == sorted(i.interval_id for i in world.deployment.intervals)

    async def test_interval_of_a_live_worker_cannot_be_claimed(self, world: World) -> None:
        await world.owner(world.a)
        other = await world.worker()

        grants = await other.claim(world.a, world.b)

        assert [grant.interval_id for grant in grants] == [world.b.interval_id]

    async def test_interval_of_an_expired_worker_is_claimed_under_a_higher_sequencer(self, world: World) -> None:
        old = await world.owner(world.a)
        await old.expire()

        (grant,) = await (await world.worker()).claim(world.a)

        assert grant.sequencer > old.grants[world.a.interval_id].sequencer

    async def test_a_lease_from_before_the_clock_was_set_back_does_not_block_others(self, world: World) -> None:
        old = await world.owner(world.a)
        assert await old.store.heartbeat(old.worker_id, 2 * LEASE_S + 30), "as if the clock had been ahead"

        ownership = await old.store.ownership(world.deployment.graph_id)
        assert ownership.workers == (), "it would get a share"
        assert not any(interval.live for interval in ownership.intervals), "no worker would claim its intervals"
        new = await world.owner(world.a)

        assert new.grants[world.a.interval_id].sequencer > old.grants[world.a.interval_id].sequencer
        assert await old.store.heartbeat(old.worker_id, 5.0), "one that lives is not lost for it"

    async def test_expired_worker_claims_nothing_and_learns_it_from_its_heartbeat(self, world: World) -> None:
        worker = await world.worker()
        await worker.expire()

        assert not await worker.store.heartbeat(worker.worker_id, 60.0)
        assert not await worker.claim(world.a)

    async def test_heartbeat_of_an_unknown_worker_is_refused(self, world: World) -> None:
        assert not await world.store.heartbeat(uuid.uuid4(), 60.0)

    async def test_heartbeat_keeps_the_lease(self, world: World) -> None:
        worker = await world.owner(world.a)

        assert await worker.store.heartbeat(worker.worker_id, 60.0)
        assert not await (await world.worker()).claim(world.a)

    async def test_interval_whose_claim_got_no_answer_is_claimed_again(self, world: World) -> None:
        worker = await world.worker()
        (lost,) = await worker.claim(world.a)

        (grant,) = await worker.claim(world.a)

        assert grant.sequencer > lost.sequencer

    async def test_released_interval_is_claimable_at_once(self, world: World) -> None:
        old = await world.owner(world.a, world.b)
        await old.store.release(old.worker_id, [old.grants[world.a.interval_id]])

        (grant,) = await (await world.worker()).claim(world.a, world.b)

        assert grant.interval_id == world.a.interval_id
        assert grant.sequencer > old.grants[world.a.interval_id].sequencer

    async def test_released_interval_takes_no_commit_although_no_worker_has_claimed_it(self, world: World) -> None:
        owner = await world.owner(world.a)
        await owner.store.release(owner.worker_id, list(owner.grants.values()))

        with pytest.raises(StaleSequencerError):
            await owner.commit(owner.checkpoint(world.a))

    async def test_worker_that_registers_again_owns_nothing(self, world: World) -> None:
        owner = await world.owner(world.a)
        await owner.register()

        with pytest.raises(StaleSequencerError):
            await owner.commit(owner.checkpoint(world.a))
        ownership = await world.store.ownership(world.deployment.graph_id)
        assert {interval.worker_id for interval in ownership.intervals} == {None}

    async def test_outdated_grants_of_ones_own_release_and_raise_nothing(self, world: World) -> None:
        """A release may arrive late: when its worker has claimed the interval again."""
        owner = await world.owner(world.a)
        outdated = list(owner.grants.values())
        await owner.take_over_from_self()

        await owner.store.release(owner.worker_id, outdated)
        assert not await owner.store.take_over_from_self(owner.worker_id, outdated)

        await owner.commit(owner.checkpoint(world.a))

    async def test_stale_release_changes_nothing(self, world: World) -> None:
        old = await world.owner(world.a)
        await old.expire()
        new = await world.owner(world.a)

        await old.store.release(old.worker_id, list(old.grants.values()))

        await new.commit(new.checkpoint(world.a))
        ownership = await world.store.ownership(world.deployment.graph_id)
        assert {o.interval_id: o.worker_id for o in ownership.intervals}[world.a.interval_id] == new.worker_id

    async def test_ownership_lists_live_workers_and_their_intervals(self, world: World) -> None:
        expired = await world.owner(world.a)
        await expired.expire()
        live = await world.owner(world.b)

        ownership = await world.store.ownership(world.deployment.graph_id)

        owned = {o.interval_id: (o.worker_id, o.live) for o in ownership.intervals}
        assert [worker.worker_id for worker in ownership.workers] == [live.worker_id]
        assert owned[world.b.interval_id] == (live.worker_id, True)
        assert not owned[world.a.interval_id][1]
        assert owned[world.alarms.interval_id] == (None, False)

    async def test_ownership_lists_the_computations_of_each_worker(self, world: World) -> None:
        await world.store.register(WorkerInfo(uuid.uuid4(), world.deployment.graph_id, 1, only=("sums",)), 60.0)

        (worker,) = (await world.store.ownership(world.deployment.graph_id)).workers

        assert tuple(worker.only) == ("sums",)

    async def test_unregistered_worker_is_removed(self, world: World) -> None:
        worker = await world.worker()

        await worker.store.unregister(worker.worker_id)

        assert not (await world.store.ownership(world.deployment.graph_id)).workers

    async def test_taking_over_from_oneself_raises_only_intervals_still_owned(self, world: World) -> None:
        worker = await world.owner(world.a)
        ours = worker.grants[world.a.interval_id]
        stale = Grant(world.b.interval_id, 0)

        (fresh,) = await worker.store.take_over_from_self(worker.worker_id, [ours, stale])

        assert fresh.interval_id == ours.interval_id
        assert fresh.sequencer > ours.sequencer

    async def test_stale_owner_can_neither_read_nor_fold(self, world: World) -> None:
        old = await world.owner(world.a)
        await old.expire()
        await world.owner(world.a)

        with pytest.raises(OwnershipError):
            await old.opened(world.a)
        with pytest.raises(OwnershipError):
            await old.store.fold(old.grants[world.a.interval_id], bytes_max=1_000_000)

    async def test_hint_wakes_another_store(self, world: World) -> None:
        graph_id = world.deployment.graph_id
        listener = await world.subject.store()
        await listener.wait_hint(graph_id, 0.0)

        waiting = asyncio.ensure_future(listener.wait_hint(graph_id, 30.0))
        while not waiting.done():
            await world.store.notify(graph_id)
            await asyncio.wait([waiting], timeout=0.05)

        assert await waiting

    async def test_wait_ends_without_a_hint(self, world: World) -> None:
        assert not await world.store.wait_hint(world.deployment.graph_id, 0.01)

    async def test_server_clock_advances(self, world: World) -> None:
        before = await world.store.now_us()

        assert await world.store.now_us() >= before > 0

    async def test_events_are_stored(self, world: World) -> None:
        """Also if a broker says something, or a file has a name, that PostgreSQL cannot store."""
        detail: dict[str, object] = {"interval": 1, "why": "a\0b", "partitions": ["\udcff"]}
        await world.store.record_events(world.deployment.graph_id, [Event("takeover", detail)])

    async def test_seized_interval_leaves_its_live_owner_with_a_stale_grant(self, world: World) -> None:
        owner, other = await world.owner(world.a), await world.worker()

        (grant,) = await other.store.seize(other.worker_id, [world.a.interval_id])

        with pytest.raises(StaleSequencerError):
            await owner.commit(owner.checkpoint(world.a))
        await other.commit(other.checkpoint(world.a, grant=grant, bundle=1))
        assert await owner.claim(world.a) == []

    async def test_expired_worker_seizes_nothing(self, world: World) -> None:
        owner, other = await world.owner(world.a), await world.worker()
        await other.expire()

        assert not await other.store.seize(other.worker_id, [world.a.interval_id])

        await owner.commit(owner.checkpoint(world.a))

    async def test_address_is_that_of_the_live_owner(self, world: World) -> None:
        owner = await world.owner()
        a, b = (interval.interval_id for interval in world.deployment.intervals_of("readings"))
        reports = [SourceReport(a, True, Instant(5), "", 0, "one"), SourceReport(b, True, Instant(5), "", 0)]
        await owner.store.report_sources(owner.worker_id, reports)
        assert await world.store.source_addresses([a, b]) == {a: "one"}

        await owner.store.report_sources(owner.worker_id, [replace(reports[0], address="two")])
        assert await world.store.source_addresses([a]) == {a: "two"}
        await owner.store.report_sources(uuid.uuid4(), [replace(reports[0], address="foreign")])
        assert await world.store.source_addresses([a]) == {a: "two"}
        await owner.expire()
        assert await world.store.source_addresses([a, b]) == {}
        await world.owner()  # which has not reported yet
        assert await world.store.source_addresses([a, b]) == {}
