"""What every store promises about commits (I2, I5, I7), result rows, and commits of unknown outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millpy.errors import (
    CommitUnknownError,
    CorruptionError,
    CursorGapError,
    GraphVersionError,
    OwnershipError,
    PaneOrderError,
    PoisonError,
    StaleSequencerError,
    TransientError,
    WatermarkRegressedError,
)
from millpy.model.checkpoint import Cursor, DeadLetter, DeletedRows, Grant, Kind, LateRows
from millpy.model.time import Instant
from tests.conformance.store_builders import (
    MINUTE,
    Owner,
    World,
    a_segment,
    a_slice,
    alarm_rows,
    contents,
    entries,
    panes,
)


class FenceSuite:
    """Which commits are allowed. Mix into a test class that has a `world` fixture."""

    async def test_cursor_moves_neither_back_nor_past_its_producer(self, world: World) -> None:
        owner = await world.owner()

        def reading(seq: int) -> Any:
            return owner.checkpoint(world.sums[0], cursors=[Cursor(world.a.interval_id, seq, Instant(0))])

        for _ in range(2):
            await owner.commit(owner.checkpoint(world.a))
        await owner.commit(reading(2))

        for seq in (0, 1, 3, 2**40):
            with pytest.raises(CursorGapError):
                await owner.commit(reading(seq))
        await owner.commit(owner.checkpoint(world.a), reading(3))  # in one turn it has got so far

        assert (await owner.opened(world.sums[0])).cursors[world.a.interval_id][0] == 3

    async def test_one_wrong_cursor_of_several_refuses_the_turn(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.a), owner.checkpoint(world.b))
        wrong = [Cursor(world.a.interval_id, 1, Instant(0)), Cursor(world.b.interval_id, 2, Instant(0))]

        with pytest.raises(CursorGapError):
            await owner.commit(owner.checkpoint(world.sums[0], cursors=wrong))

        assert {seq for seq, _ in (await owner.opened(world.sums[0])).cursors.values()} == {0}

    async def test_grant_that_the_store_has_not_given_cannot_commit(self, world: World) -> None:
        """After a failover to a standby that was behind, a worker has a higher sequencer than the store."""
        owner = await world.owner(world.a)
        grant = owner.grants[world.a.interval_id]
        unknown = Grant(grant.interval_id, grant.sequencer + 1)

        with pytest.raises(StaleSequencerError):
            await owner.commit(owner.checkpoint(world.a, grant=unknown))

        await owner.commit(owner.checkpoint(world.a))

    async def test_stale_sequencer_cannot_commit(self, world: World) -> None:
        old = await world.owner(world.a, world.b)
        await old.expire()
        new = await world.owner(world.a)

        with pytest.raises(StaleSequencerError) as refused:
            await old.commit(old.checkpoint(world.a, low_watermark=Instant(5), input_watermark=Instant(5)))

        assert tuple(refused.value.stale) == (world.a.interval_id,)
        assert (await new.opened(world.a)).recovered.bundle == 0

    async def test_bundle_cannot_commit_twice(self, world: World) -> None:
        owner = await world.owner(world.a)
        checkpoint = owner.checkpoint(world.a, delta=(entries(Kind.STATE, "cell", ("k", 1)),))
        await owner.commit(checkpoint)

        with pytest.raises(OwnershipError):
            await owner.commit(checkpoint)

        assert (await owner.opened(world.a)).recovered.bundle == 1

    async def test_bundle_number_cannot_be_skipped(self, world: World) -> None:
        owner = await world.owner(world.a)

        with pytest.raises(OwnershipError):
            await owner.commit(owner.checkpoint(world.a, bundle=2))

    async def test_turn_of_several_intervals_commits_completely(self, world: World) -> None:
        owner = await world.owner()

        await owner.commit(*(owner.checkpoint(i) for i in reversed(world.deployment.intervals)))

        for interval in world.deployment.intervals:
            assert (await owner.opened(interval)).recovered.bundle == 1

    async def test_turn_with_one_stale_grant_commits_nothing(self, world: World) -> None:
        old = await world.owner(world.a, world.sums[0])
        thief = await world.worker()
        await old.store.release(old.worker_id, [old.grants[world.a.interval_id]])
        await thief.claim(world.a)
        first = old.checkpoint(world.sums[0], results=[panes(world.table_id("sums_1m"), ("d", 1.0, 0), first=True)])

        with pytest.raises(StaleSequencerError) as refused:
            await old.commit(first, old.checkpoint(world.a))

        assert tuple(refused.value.stale) == (world.a.interval_id,)
        assert await world.rows("sums_1m") == []
        assert (await old.opened(world.sums[0])).recovered.bundle == 0

    async def test_turn_that_fails_late_commits_nothing(self, world: World) -> None:
        owner = await world.owner()
        table = world.table_id("sums_1m")
        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("d", 1.0, 0), first=True)]))
        segment = a_segment(world.to_alarms, 1, [a_slice(1.0)])
        source = owner.checkpoint(world.a, segments=[segment], delta=(entries(Kind.STATE, "cell", ("k", 1)),))

        with pytest.raises(CorruptionError):
            await owner.commit(source, owner.checkpoint(world.sums[0], results=[panes(table, ("d", 2.0, 7))]))

        (polled,) = await owner.store.poll([world.query(world.alarms, world.a)], 1_000_000)
        assert polled.segments == ()
        assert polled.head_seq == 0
        assert contents((await owner.opened(world.a)).recovered) == {}

    @pytest.mark.parametrize(("input_watermark", "low_watermark"), [(10, 9), (9, 10)], ids=["low", "input"])
    async def test_watermarks_cannot_go_back(self, world: World, input_watermark: int, low_watermark: int) -> None:
        owner = await world.owner(world.a)
        await owner.commit(owner.checkpoint(world.a, input_watermark=Instant(10), low_watermark=Instant(10)))

        back = {"input_watermark": Instant(input_watermark), "low_watermark": Instant(low_watermark)}
        with pytest.raises(WatermarkRegressedError):
            await owner.commit(owner.checkpoint(world.a, **back))

        recovered = (await owner.opened(world.a)).recovered
        assert (recovered.bundle, recovered.input_watermark, recovered.low_watermark) == (1, 10, 10)

    @pytest.mark.parametrize("further", [-1, 1])
    async def test_another_version_of_the_graph_cannot_commit(self, world: World, further: int) -> None:
        """Not even under a grant that is current."""
        owner = await world.owner(world.a)

        with pytest.raises(GraphVersionError):
            await owner.store.commit([owner.checkpoint(world.a)], graph_version=world.deployment.version + further)

        assert (await owner.opened(world.a)).recovered.bundle == 0

    async def test_taking_over_from_oneself_waits_for_a_commit_in_flight(self, world: World) -> None:
        owner = await world.owner(world.a)
        inside, may_continue = asyncio.Event(), asyncio.Event()
        commit = asyncio.ensure_future(owner.commit(owner.checkpoint(world.a), inside=holding(inside, may_continue)))
        await inside.wait()

        takeover = asyncio.ensure_future(owner.take_over_from_self())
        await asyncio.wait([takeover], timeout=0.1)
        waited = not takeover.done()
        may_continue.set()
        await asyncio.gather(commit, takeover)

        assert waited
        assert (await owner.opened(world.a)).recovered.bundle == 1

    async def test_owner_frozen_between_fence_and_commit_does_not_block_the_takeover(self, world: World) -> None:
        old = await world.owner(world.a)
        inside, may_continue = asyncio.Event(), asyncio.Event()
        commit = asyncio.ensure_future(old.commit(old.checkpoint(world.a), inside=holding(inside, may_continue)))
        await inside.wait()
        await old.expire()
        new = await world.worker()

        async with asyncio.timeout(60):
            while not await new.claim(world.a):
                pass
        may_continue.set()
        (outcome,) = await asyncio.gather(commit, return_exceptions=True)

        assert isinstance(outcome, OwnershipError | TransientError), outcome
        assert (await new.opened(world.a)).recovered.bundle == 0
        await new.commit(new.checkpoint(world.a))

    @pytest.mark.parametrize("lands", ["before", "later", "never"])
    async def test_unknown_commit_is_resolved_by_taking_over_from_oneself(self, world: World, lands: str) -> None:
        owner = await world.owner(world.a)
        checkpoint = owner.checkpoint(world.a, delta=(entries(Kind.STATE, "cell", ("k", 1)),))
        inside = world.subject.lose_answer_of_next_commit(owner.store, lands)

        with pytest.raises(CommitUnknownError):
            await owner.commit(checkpoint, inside=inside)
        takeover = asyncio.ensure_future(take_over(owner))
        if lands == "later":
            # The store may wait for the lost commit or end it; either way nothing lands after the takeover.
            await asyncio.wait([takeover], timeout=0.1)
            await world.subject.land_lost_commits()
        await takeover

        landed = (await owner.opened(world.a)).recovered.bundle
        assert landed in {"before": (1,), "later": (0, 1), "never": (0,)}[lands]
        assert len(contents(await owner.store.load_state(owner.grants[world.a.interval_id], [b'"k"']))) == landed
        with pytest.raises(OwnershipError):
            await owner.commit(checkpoint)
        await owner.commit(owner.checkpoint(world.a))


class ResultSuite:
    """Result rows, dead letters and late records. Mix into a test class that has a `world` fixture."""

    async def test_pane_replaces_the_pane_before_it(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        table = world.table_id("sums_1m")
        await owner.commit(
            owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0), ("b", None, 0), first=True)])
        )

        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 2.5, 1))]))

        rows = {row["device"]: row for row in await world.rows("sums_1m")}
        assert len(rows) == 2
        assert (rows["a"]["total"], rows["a"]["pane_index"], rows["a"]["bundle"]) == (2.5, 1, 2)
        assert (rows["b"]["total"], rows["b"]["pane_index"], rows["b"]["bundle"]) == (None, 0, 1)
        assert (rows["a"]["window_start"], rows["a"]["window_end"]) == (0, 60_000_000)
        assert rows["a"]["interval_id"] == world.sums[0].interval_id

    async def test_commit_deletes_absorbed_rows_and_no_others(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        table = world.table_id("sums_1m")
        three = panes(table, ("a", 1.0, 0), ("b", 2.0, 0), ("c", 3.0, 0), first=True)
        await owner.commit(owner.checkpoint(world.sums[0], results=[three]))
        gone = DeletedRows(table, [["a", "c", "deleted before"], [0, 0, 0], [MINUTE, MINUTE, MINUTE]], 3)
        other_window = DeletedRows(table, [["b"], [0], [2 * MINUTE]], 1)

        await owner.commit(owner.checkpoint(world.sums[0], deleted=[gone, other_window]))

        assert [row["device"] for row in await world.rows("sums_1m")] == ["b"]

    @pytest.mark.parametrize("index", [0, 2])
    async def test_pane_that_skips_an_index_is_refused(self, world: World, index: int) -> None:
        owner = await world.owner(world.sums[0])
        table = world.table_id("sums_1m")
        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0))]))

        with pytest.raises(PaneOrderError):
            await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 2.0, index))]))

        (row,) = await world.rows("sums_1m")
        assert row["total"] == 1.0

    async def test_first_pane_that_already_exists_is_refused(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        table = world.table_id("sums_1m")
        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0), first=True)]))

        with pytest.raises(CorruptionError):
            await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0), first=True)]))

    async def test_pane_is_stored_after_users_deleted_its_row(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        table = world.table_id("sums_1m")
        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0))]))
        await world.subject.delete_rows(world.deployment, "sums_1m")

        await owner.commit(owner.checkpoint(world.sums[0], results=[panes(table, ("a", 2.0, 1))]))

        (row,) = await world.rows("sums_1m")
        assert (row["total"], row["pane_index"]) == (2.0, 1)

    async def test_record_rows_are_appended(self, world: World) -> None:
        owner = await world.owner(world.alarms)
        table = world.table_id("alarms")

        await owner.commit(owner.checkpoint(world.alarms, results=[alarm_rows(table, 1.0, 2.0)]))
        await owner.commit(owner.checkpoint(world.alarms, results=[alarm_rows(table, 3.0)]))

        rows = sorted(await world.rows("alarms"), key=lambda row: (row["bundle"], row["ordinal"]))
        assert [(row["total"], row["bundle"], row["ordinal"]) for row in rows] == [
            (1.0, 1, 0),
            (2.0, 1, 1),
            (3.0, 2, 0),
        ]
        assert rows[0]["event_time"] == 60_000_000

    async def test_row_that_violates_a_users_constraint_is_poison_and_nothing_is_committed(self, world: World) -> None:
        owner = await world.owner(world.sums[0], world.alarms)
        table = world.table_id("sums_1m")
        await world.subject.forbid_negative(world.deployment, "sums_1m", "total")
        alarms = owner.checkpoint(world.alarms, results=[alarm_rows(world.table_id("alarms"), 1.0)])

        for first in (True, False):
            with pytest.raises(PoisonError) as refused:
                rows = panes(table, ("a", 1.0, 0), ("b", -1.0, 0), first=first)
                await owner.commit(alarms, owner.checkpoint(world.sums[0], results=[rows]))
            assert refused.value.sqlstate == "23514"

        assert await world.rows("sums_1m") == []
        assert await world.rows("alarms") == []
        await owner.commit(alarms, owner.checkpoint(world.sums[0], results=[panes(table, ("a", 1.0, 0))]))

    async def test_trial_reports_what_is_refused_and_changes_nothing(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        table, version = world.table_id("sums_1m"), world.deployment.version
        await world.subject.forbid_negative(world.deployment, "sums_1m", "total")
        accepted = owner.checkpoint(
            world.sums[0], results=[panes(table, ("a", 1.0, 0))], delta=(entries(Kind.STATE, "cell", ("k", 1)),)
        )
        refused = owner.checkpoint(world.sums[0], results=[panes(table, ("a", -1.0, 0))])

        await owner.store.commit([accepted], graph_version=version, trial=True)
        with pytest.raises(PoisonError):
            await owner.store.commit([refused], graph_version=version, trial=True)

        opened = await owner.opened(world.sums[0])
        assert (opened.recovered.bundle, contents(opened.recovered)) == (0, {})
        assert await world.rows("sums_1m") == []
        await owner.commit(accepted)

    @pytest.mark.parametrize("first", [True, False])
    async def test_text_with_nul_is_poison(self, world: World, first: bool) -> None:
        owner = await world.owner(world.sums[0])
        rows = panes(world.table_id("sums_1m"), ("a", 1.0, 0), first=first, label="a\x00b")

        with pytest.raises(PoisonError):
            await owner.commit(owner.checkpoint(world.sums[0], results=[rows]))

        assert (await owner.opened(world.sums[0])).recovered.bundle == 0

    async def test_record_dead_lettered_is_stored_with_the_commit(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        late = LateRows("readings", "sums", [b'"d"'], [b"{}"], [1], [2], [0], [60_000_000])
        dead_letter = DeadLetter("undecodable", "not JSON", b"\xff\x00{", "readings", "readings")

        await owner.commit(owner.checkpoint(world.sums[0], late=[late], dead_letters=[dead_letter, dead_letter]))

        assert await world.subject.dead_and_late(world.deployment) == (1, 2)


def holding(inside: asyncio.Event, may_continue: asyncio.Event) -> Any:
    """Return a failpoint of a commit that reports when the fence is passed, and waits until it may continue."""

    async def hold() -> None:
        inside.set()
        await may_continue.wait()

    return hold


async def take_over(owner: Owner) -> None:
    """Take over from oneself, again after a transient error, as a worker does."""
    async with asyncio.timeout(60):
        while True:
            try:
                await owner.take_over_from_self()
                return
            except TransientError:
                await asyncio.sleep(0)
