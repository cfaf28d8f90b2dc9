"""What every store promises about segments: polling (I3, I5), backlog, retention, accounting (I8), the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millpy.errors import SegmentChecksumError
from millpy.model.checkpoint import Checkpoint, Cursor, Kind
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.codec import decode_slice
from millpy.store.protocol import PollResult, SourceState
from tests.conformance.store_builders import READINGS, Owner, World, a_segment, a_slice, contents, counters, entries
from tests.conformance.store_reading_suite import a_run

RINGS_TURNED = 20


def a_bundle_for_sums(world: World, owner: Owner, seq: int) -> Checkpoint:
    """The source's bundle `seq`: one segment for each subscription of `sums`, watermark 10 * seq."""
    watermark = Instant(10 * seq)
    segments = [
        a_segment(sub, seq, [a_slice(seq), a_slice(seq, seq)], previous=seq - 1, watermark=watermark)
        for sub in (world.by_device, world.by_room)
    ]
    return owner.checkpoint(world.a, input_watermark=watermark, low_watermark=watermark, segments=segments)


def values_of(polled: PollResult) -> list[list[float]]:
    """The readings of each segment."""
    return [
        []
        if segment.payload is None
        else [reading.value for reading in decode_slice(READINGS, segment.payload, segment.checksum).objects()]
        for segment in polled.segments
    ]


class PollSuite:
    """Segments and watermarks. Mix into a test class that has a `world` fixture."""

    async def test_each_consumer_gets_its_slice_of_every_subscription_in_order(self, world: World) -> None:
        owner = await world.owner(world.a)
        for seq in (1, 2):
            await owner.commit(a_bundle_for_sums(world, owner, seq))

        queries = [world.query(interval, world.a) for interval in world.sums]
        first, second = await owner.store.poll(queries, 1_000_000)

        places = [(1, world.by_device), (1, world.by_room), (2, world.by_device), (2, world.by_room)]
        assert [(s.seq, s.subscription_id) for s in first.segments] == places
        assert [s.previous_seq for s in first.segments] == [0, 0, 1, 1]
        assert [s.watermark for s in first.segments] == [10, 10, 20, 20]
        assert values_of(first) == [[1.0], [1.0], [2.0], [2.0]]
        assert values_of(second) == [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert [s.records for s in second.segments] == [2, 2, 2, 2]
        assert (first.query, second.query) == tuple(queries)
        assert (first.head_seq, first.head_watermark, first.truncated) == (2, 20, False)

    async def test_poll_begins_above_the_cursor(self, world: World) -> None:
        owner = await world.owner(world.a)
        for seq in (1, 2, 3):
            await owner.commit(a_bundle_for_sums(world, owner, seq))

        (polled,) = await owner.store.poll([world.query(world.sums[0], world.a, after=2)], 1_000_000)

        assert {(s.seq, s.previous_seq) for s in polled.segments} == {(3, 2)}

    async def test_other_producers_and_subscriptions_are_not_polled(self, world: World) -> None:
        owner = await world.owner(world.a, world.b)
        await owner.commit(a_bundle_for_sums(world, owner, 1))

        to_alarms, of_b = await owner.store.poll(
            [world.query(world.alarms, world.a), world.query(world.sums[0], world.b)], 1_000_000
        )

        assert (to_alarms.segments, to_alarms.head_seq) == ((), 1)
        assert (of_b.segments, of_b.head_seq) == ((), 0)

    async def test_empty_slice_is_polled_without_payload(self, world: World) -> None:
        owner = await world.owner(world.a)
        segment = a_segment(world.by_device, 1, [None, a_slice(1.0)], watermark=7)
        await owner.commit(owner.checkpoint(world.a, segments=[segment]))

        (polled,) = await owner.store.poll([world.query(world.sums[0], world.a)], 1_000_000)

        (found,) = polled.segments
        assert (found.seq, found.records, found.payload, found.watermark) == (1, 0, None, 7)

    @pytest.mark.parametrize("bytes_max", [1, 900, 2_000])
    async def test_poll_never_returns_part_of_a_seq(self, world: World, bytes_max: int) -> None:
        owner = await world.owner(world.a)
        for seq in range(1, 6):
            await owner.commit(a_bundle_for_sums(world, owner, seq))
        after, seen, polls = 0, [], 0

        while after < 5:
            (polled,) = await owner.store.poll([world.query(world.sums[0], world.a, after)], bytes_max)
            seqs = [segment.seq for segment in polled.segments]
            assert seqs, "a poll must get on, however small its limit"
            assert all(seqs.count(seq) == 2 for seq in seqs)
            assert polled.truncated == (seqs[-1] < 5)
            seen += seqs
            after, polls = seqs[-1], polls + 1

        assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert polls > 1

    async def test_head_watermark_belongs_to_the_position_polled(self, world: World) -> None:
        owner = await world.owner(world.a)
        reader = await world.subject.store()

        async def produce() -> None:
            for seq in range(1, 41):
                await owner.commit(a_bundle_for_sums(world, owner, seq))

        producing = asyncio.ensure_future(produce())
        try:
            while not producing.done():
                (polled,) = await reader.poll([world.query(world.sums[0], world.a)], 10_000_000)
                last = max((s.seq for s in polled.segments), default=0)
                assert not polled.truncated
                assert polled.head_seq == last, "a head ahead of its segments would make their records late"
                assert polled.head_watermark == (10 * last if last else -(2**62))
        finally:
            await asyncio.gather(producing, return_exceptions=True)
        await producing

    async def test_corrupted_slice_is_detected(self, world: World) -> None:
        owner = await world.owner(world.a)
        await owner.commit(a_bundle_for_sums(world, owner, 1))

        (polled,) = await owner.store.poll([world.query(world.sums[0], world.a)], 1_000_000)

        payload = polled.segments[0].payload
        assert payload is not None
        with pytest.raises(SegmentChecksumError):
            decode_slice(READINGS, payload[:-1] + b"\x01", polled.segments[0].checksum)

    async def test_backlog_counts_records_above_the_cursors(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(a_bundle_for_sums(world, owner, 1))
        at = {"input_watermark": Instant(10), "low_watermark": Instant(10)}
        await owner.commit(owner.checkpoint(world.a, **at))  # without records, ahead of the cursors
        graph_id = world.deployment.graph_id
        counts = [(await owner.store.backlog(graph_id))["readings"].records]

        for interval in world.sums:
            await owner.commit(owner.checkpoint(interval, cursors=[Cursor(world.a.interval_id, 1, Instant(10))]))
            backlog = (await owner.store.backlog(graph_id)).get("readings")
            counts.append(backlog.records if backlog is not None else 0)

        assert counts == [6, 4, 0]

    async def test_graph_is_finished_when_every_interval_has_reached_the_end(self, world: World) -> None:
        owner, nearly = await world.owner(), Instant(INSTANT_MAX - 1)
        found = []
        for interval in world.deployment.intervals:
            await owner.commit(owner.checkpoint(interval, input_watermark=nearly, low_watermark=nearly))
        for interval in world.deployment.intervals:
            found.append(await owner.store.finished(world.deployment.graph_id))
            await owner.commit(owner.checkpoint(interval, input_watermark=INSTANT_MAX, low_watermark=INSTANT_MAX))

        assert not any(found)
        assert await owner.store.finished(world.deployment.graph_id)

    async def test_graph_with_unread_records_at_the_end_has_not_finished(self, world: World) -> None:
        # They were taken again: the watermarks are where they were.
        owner = await world.owner()
        for interval in world.deployment.intervals:
            await owner.commit(owner.checkpoint(interval, input_watermark=INSTANT_MAX, low_watermark=INSTANT_MAX))
        again = a_segment(world.by_device, 2, [a_slice(7.0), None], watermark=INSTANT_MAX)
        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        await owner.commit(owner.checkpoint(world.a, segments=[again], **end))
        before = await owner.store.finished(world.deployment.graph_id)

        taken = [Cursor(world.a.interval_id, 2, INSTANT_MAX)]
        await owner.commit(owner.checkpoint(world.sums[0], cursors=taken, **end))

        assert not before
        assert await owner.store.finished(world.deployment.graph_id), "the other one has nothing to take"

    async def test_consumer_that_does_not_count_has_no_backlog_and_keeps_no_graph_from_finishing(
        self, world: World
    ) -> None:
        owner = await world.owner()
        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        unread = a_segment(world.by_device, 1, [a_slice(7.0), None], watermark=INSTANT_MAX)
        await owner.commit(owner.checkpoint(world.a, segments=[unread], **end))
        for interval in world.deployment.intervals:
            if interval.interval_id not in (world.a.interval_id, *(i.interval_id for i in world.sums)):
                await owner.commit(owner.checkpoint(interval, **end))

        graph_id, sums = world.deployment.graph_id, world.sums[0].computation
        backlog = await owner.store.backlog(graph_id, without=[sums])

        assert sum(pending.records for pending in backlog.values()) == 0
        assert await owner.store.finished(graph_id, without=[sums])
        assert not await owner.store.finished(graph_id)

    async def test_accounting_adds_up(self, world: World) -> None:
        owner = await world.owner()
        ids = {sub: str(sub) for sub in (world.by_device, world.to_alarms)}
        injected = counters(
            injected=("readings", 10),
            accepted=("readings", 7),
            duplicate=("readings", 2),
            dead_lettered=("readings", 1),
        )
        produced = (counters(produced=(ids[world.by_device], 7)), counters(produced=(ids[world.to_alarms], 2)))
        source = owner.checkpoint(
            world.a,
            delta=(*injected, *produced[0], *produced[1]),
            segments=[
                a_segment(world.by_device, 1, [None, a_slice(1, 2, 3)]),
                a_segment(world.to_alarms, 1, [a_slice(1, 2)]),
            ],
        )
        taken = counters(
            consumed=(ids[world.by_device], 2), late=(ids[world.by_device], 1), dead_lettered=(ids[world.by_device], 1)
        )
        cursor = Cursor(world.a.interval_id, 1, Instant(0))
        await owner.commit(source, owner.checkpoint(world.sums[0], delta=taken, cursors=[cursor]))

        balance = await world.subject.balance(world.deployment)

        assert balance["readings"] == {"injected": 10, "accepted": 7, "duplicate": 2, "dead_lettered": 1}
        assert balance["readings>sums"] == {"produced": 7, "consumed": 2, "late": 1, "dead_lettered": 1, "pending": 3}
        assert balance["readings>alarms"]["pending"] == 2

    async def test_sources_are_compared_by_their_owners_last_reports(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.a, input_watermark=Instant(5), low_watermark=Instant(5)))
        graph_id, a, b = world.deployment.graph_id, world.a.interval_id, world.b.interval_id

        first = await owner.store.compare_sources(graph_id, [SourceState(a, Instant(9), True)])
        second = await owner.store.compare_sources(graph_id, [SourceState(a, Instant(9), False)])

        assert [(s.interval_id, s.low_watermark, s.quiet) for s in first] == [(a, 5, True), (b, INSTANT_MIN, False)]
        assert [s.quiet for s in second] == [False, False]


class RetentionSuite:
    """Rings. Mix into a test class that has a `world` fixture."""

    async def test_retention_never_frees_what_a_cursor_still_needs(self, world: World) -> None:
        owner = await world.owner()
        for seq in range(1, 4):
            await owner.commit(a_bundle_for_sums(world, owner, seq))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        cursor = Cursor(world.a.interval_id, 3, Instant(30))
        await owner.commit(owner.checkpoint(world.sums[0], cursors=[cursor]))

        await turn(owner)

        (polled,) = await owner.store.poll([world.query(world.sums[1], world.a)], 1_000_000)
        assert [s.seq for s in polled.segments] == [1, 1, 2, 2, 3, 3]
        assert values_of(polled)[-1] == [3.0, 3.0]

    async def test_retention_frees_what_every_consumer_has_read(self, world: World) -> None:
        owner = await world.owner()
        for seq in range(1, 4):
            await owner.commit(a_bundle_for_sums(world, owner, seq))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        cursor = Cursor(world.a.interval_id, 3, Instant(30))
        await owner.commit(*(owner.checkpoint(i, cursors=[cursor]) for i in world.sums))

        assert await turn(owner) >= 1

        (polled,) = await owner.store.poll([world.query(world.sums[1], world.a)], 1_000_000)
        assert len(polled.segments) < 6
        assert (await owner.opened(world.a)).last_segments[world.by_device] == 3

        for _ in range(3):
            await turn(owner)
        (polled,) = await owner.store.poll([world.query(world.sums[1], world.a)], 1_000_000)
        assert list(polled.segments) == [], "the last that was consumed is not needed either"

    async def test_retention_keeps_deltas_until_they_are_folded(self, world: World) -> None:
        owner = await world.owner()
        for value in range(3):
            delta = (entries(Kind.STATE, "cell", (f"k{value}", value)),)
            await owner.commit(owner.checkpoint(world.sums[0], delta=delta))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        await turn(owner)
        before = contents((await owner.opened(world.sums[0])).recovered)
        await owner.fold(world.sums[0])

        freed = await turn(owner)

        assert len(before) == 3
        assert freed >= 1
        assert contents((await owner.opened(world.sums[0])).recovered) == before

    async def test_retention_keeps_dedupe_runs_until_they_expire(self, world: World) -> None:
        owner = await world.owner()
        runs = [a_run(1, expires_at=10, clock=1), a_run(2, expires_at=20, clock=2)]
        for run in runs:
            await owner.commit(owner.checkpoint(world.a, dedupe_run=run))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        await turn(owner)
        kept = list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id]))
        await owner.commit(owner.checkpoint(world.a, dedupe_run=a_run(3, expires_at=50, clock=40)))

        freed = await turn(owner)

        assert kept == runs
        assert freed >= 1
        (run,) = await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])
        assert run.expires_at == 50

    async def test_retention_keeps_a_dedupe_run_until_the_clock_is_past_it(self, world: World) -> None:
        owner = await world.owner()
        runs = [a_run(1, expires_at=10, clock=0), a_run(2, expires_at=20, clock=10)]
        await owner.commit(owner.checkpoint(world.a, dedupe_run=runs[0]))
        await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)
        await owner.commit(owner.checkpoint(world.a, dedupe_run=runs[1]))

        await turn(owner)

        assert list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])) == runs

    async def test_retention_keeps_the_run_that_replaces_those_before_it(self, world: World) -> None:
        owner = await world.owner()
        whole = replace(a_run(2, expires_at=90, clock=5), whole=True)
        for run in (a_run(1, expires_at=90, clock=0), whole):
            await owner.commit(owner.checkpoint(world.a, dedupe_run=run))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)

        await turn(owner)

        assert list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])) == [whole]

    async def test_full_rings_still_take_commits(self, world: World) -> None:
        owner = await world.owner()
        for seq in range(1, RINGS_TURNED + 1):
            await owner.commit(a_bundle_for_sums(world, owner, seq))
            await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1)

        (polled,) = await owner.store.poll([world.query(world.sums[0], world.a)], 10_000_000)

        assert [s.seq for s in polled.segments[::2]] == list(range(1, RINGS_TURNED + 1))


async def turn(owner: Owner) -> int:
    """Turn the rings more often than they have slots; how many slots were freed."""
    return sum([await owner.store.turn_rings(epoch_s=0.0, epoch_bytes=1) for _ in range(RINGS_TURNED)])
