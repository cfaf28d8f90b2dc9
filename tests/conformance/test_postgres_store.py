"""PostgresStore keeps what every store promises."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import psycopg
import pytest
import pytest_asyncio
from psycopg.conninfo import conninfo_to_dict

from millpy.embedded import EmbeddedPostgres
from millpy.errors import GraphError, OwnershipError, StaleSequencerError, TransientError
from millpy.model.checkpoint import DeadLetter, Kind, OutboxState, Segment
from millpy.model.time import Instant
from millpy.store.postgres import poll
from millpy.store.postgres.connection import Connection
from millpy.store.postgres.fold import FoldPiece
from millpy.store.postgres.store import PostgresStore
from millpy.store.protocol import SourceReport
from tests.conformance.postgres_subject import PostgresSubject
from tests.conformance.store_builders import LEASE_S, World, a_segment, a_slice, a_world, entries
from tests.conformance.store_outbox_suite import filled, refused, report, state
from tests.conformance.store_request_suite import asked, people
from tests.conformance.store_suite import StoreSuite
from tests.databases import until_waiting

BUNDLES_POLLED = 40


@pytest_asyncio.fixture
async def world(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[World]:
    subject = PostgresSubject(postgres.tcp_url(str(conninfo_to_dict(database_url)["dbname"])))
    try:
        yield await a_world(subject)
    finally:
        await subject.close()


class TestPostgresStore(StoreSuite):
    """The whole suite."""


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_report_in_flight_at_a_takeover_is_read_by_the_new_owner(
    world: World, database_url: str, is_first: bool
) -> None:
    """The rows that a new owner has read must not leave the outbox behind its back."""
    first = await world.owner()
    interval = await filled(world, first)
    if not is_first:
        await first.store.record_delivered([report(first, interval, 1)])

    async def take_over() -> OutboxState:
        second = await world.owner(interval)
        return await state(second, interval)

    with psycopg.connect(database_url) as blocker:
        blocker.execute("SELECT FROM mill.outbox FOR UPDATE")  # the report has stored its position, and waits here
        reporting = asyncio.create_task(first.store.record_delivered([report(first, interval, 5)]))
        await until_waiting(database_url, 1)
        await first.expire()
        taking = asyncio.create_task(take_over())
        await asyncio.wait([taking], timeout=2)
        blocker.rollback()
    await reporting
    found = await taking
    assert (found.head, found.delivered, found.size) == (5, 5, 0)


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_report_that_stores_after_a_takeover_changes_nothing(
    world: World, database_url: str, is_first: bool
) -> None:
    """The report has found its grant current, and waits before it stores; meanwhile another owner reads the outbox."""
    first = await world.owner()
    interval = await filled(world, first)
    if not is_first:
        await first.store.record_delivered([report(first, interval, 1)])
    with psycopg.connect(database_url, autocommit=True) as blocker:
        blocker.execute("SELECT pg_advisory_lock(1)")
        blocker.execute("""
            CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN IF new.delivered = 5 THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN new; END';
            CREATE TRIGGER wait BEFORE INSERT ON mill.deliveries FOR EACH ROW EXECUTE FUNCTION public.wait();
        """)
        reporting = asyncio.create_task(first.store.record_delivered([report(first, interval, 5, refused(2))]))
        await until_waiting(database_url, 1)
        await first.expire()
        second = await world.owner(interval)
        before = await state(second, interval)
        blocker.execute("SELECT pg_advisory_unlock(1)")
    with pytest.raises(StaleSequencerError):
        await reporting
    assert before.delivered == (0 if is_first else 1)
    assert await state(second, interval) == before


@pytest.mark.parametrize("what", ["source", "sink"])
async def test_a_report_of_what_a_deployment_is_removing_may_be_tried_again(
    world: World, database_url: str, what: str
) -> None:
    """`deploy --reset` and `--back` delete intervals while their workers report on them."""
    owner = await world.owner()
    interval = await filled(world, owner)
    about = [SourceReport(world.a.interval_id, True, Instant(5), "", 0)]
    with psycopg.connect(database_url) as deployment:
        deployment.execute("DELETE FROM mill.intervals")
        reporting = asyncio.create_task(
            owner.store.report_sources(owner.worker_id, about)
            if what == "source"
            else owner.store.record_delivered([report(owner, interval, 1)])
        )
        await until_waiting(database_url, 1)
        deployment.commit()
    with pytest.raises(TransientError, match="source_connections" if what == "source" else "deliveries"):
        await reporting


async def test_a_dead_letter_that_is_no_record_cannot_be_requested(world: World) -> None:
    """Its request would wait for ever, and the graph with it."""
    owner = await world.owner()
    row = DeadLetter("refused", "no", b"[1]", "", "sums")
    await owner.commit(owner.checkpoint(world.sums[0], dead_letters=[row]))
    assert not await people(world).replay("dead_letters", 1)
    assert await asked(owner, world) == []


@pytest.mark.parametrize("segments_max", [2, 3, 7])
async def test_bounded_polls_read_each_segment_once(
    world: World, monkeypatch: pytest.MonkeyPatch, segments_max: int
) -> None:
    """One subscription has many more segments than the other, and the segments of both are in several slots."""
    rng, owner = random.Random(segments_max), await world.owner(world.a)
    stored: list[tuple[int, int, int]] = []
    last = {world.by_device: 0, world.by_room: 0}
    for seq in range(1, BUNDLES_POLLED + 1):
        segments: list[Segment] = []
        for subscription, share in ((world.by_device, 0.9), (world.by_room, 0.2)):
            if rng.random() < share:
                segments.append(a_segment(subscription, seq, [a_slice(seq), None], previous=last[subscription]))
                stored.append((seq, subscription, last[subscription]))
                last[subscription] = seq
        await owner.commit(owner.checkpoint(world.a, segments=segments))
        if rng.random() < 0.15:
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)

    monkeypatch.setattr(poll, "SEGMENTS_MAX", segments_max)
    after, polls = 0, 0
    while after < BUNDLES_POLLED:
        (polled,) = await owner.store.poll([world.query(world.sums[0], world.a, after)], 1_000_000)
        found = [(segment.seq, segment.subscription_id, segment.previous_seq) for segment in polled.segments]
        upto = found[-1][0] if polled.truncated else polled.head_seq
        assert found == sorted(each for each in stored if after < each[0] <= upto)
        after, polls = upto, polls + 1
    assert polls > 2


async def test_workers_are_forgotten_that_own_nothing_and_are_gone_for_an_hour(world: World, database_url: str) -> None:
    """Of one that is frozen in a commit, the next owner still finds the backend."""
    owns, gone, recent = await world.owner(world.a), await world.worker(), await world.worker()
    with psycopg.connect(database_url, autocommit=True) as connection:
        for worker, minutes in ((owns, 61), (gone, 61), (recent, 59)):
            ended = f"UPDATE mill.workers SET lease_deadline = clock_timestamp() - interval '{minutes} minutes'"
            connection.execute(f"{ended} WHERE worker_id = %s", [worker.worker_id])
        new = await world.worker()
        known = {row[0] for row in connection.execute("SELECT worker_id FROM mill.workers")}

    assert known == {owns.worker_id, recent.worker_id, new.worker_id}


async def test_a_worker_that_is_frozen_in_a_fold_does_not_block_the_takeover(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is locked by another backend than the recorded one, which the server has to end by itself."""
    old, delta = await world.owner(world.a), (entries(Kind.STATE, "cell", ("k", 1)),)
    await old.commit(old.checkpoint(world.a, delta=delta))
    inside, may_continue = asyncio.Event(), asyncio.Event()
    fold = FoldPiece.fold

    async def freeze(piece: FoldPiece, connection: Connection) -> None:
        await fold(piece, connection)
        inside.set()
        await may_continue.wait()

    monkeypatch.setattr(FoldPiece, "fold", freeze)
    folding = asyncio.ensure_future(old.fold(world.a))
    await inside.wait()
    await old.expire()
    new = await world.worker()

    async with asyncio.timeout(30):
        while not await new.claim(world.a):
            pass
    may_continue.set()
    (outcome,) = await asyncio.gather(folding, return_exceptions=True)

    assert isinstance(outcome, OwnershipError | TransientError), outcome
    monkeypatch.undo()
    await new.commit(new.checkpoint(world.a, delta=delta))
    await new.fold(world.a)


async def test_a_lease_from_before_the_clock_was_set_back_keeps_no_graph_from_being_dropped(
    world: World, database_url: str
) -> None:
    owner = await world.owner()
    async with PostgresStore(database_url) as operator:
        with pytest.raises(GraphError, match="live workers run it: 1"):
            await operator.drop("factory")

        assert await owner.store.heartbeat(owner.worker_id, 2 * LEASE_S + 30), "as if the clock had been ahead"

        assert (await operator.drop("factory")).graph == "factory"


async def test_a_generation_is_handed_over_only_as_a_whole_and_under_current_grants(
    world: World, database_url: str
) -> None:
    owner = await world.owner()
    first, *others = owner.grants.values()
    former = replace(first, sequencer=first.sequencer - 1)
    async with PostgresStore(database_url) as driver:
        for held in ([former, *others], others):
            with pytest.raises(StaleSequencerError):
                await driver.give_to_workers(world.deployment, held)
        await owner.commit(owner.checkpoint(world.a))

        await driver.give_to_workers(world.deployment, [first, *others])

    with pytest.raises(StaleSequencerError):
        await owner.commit(owner.checkpoint(world.a))
