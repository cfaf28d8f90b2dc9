"""Outboxes: appended by commits, emptied by their owner's reports, and read by the next owner without a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millpy.errors import CursorGapError, RequestWithdrawnError, StaleSequencerError
from millpy.model.checkpoint import DeadLetter, Kind, LateRows, OutboxState, RefusedMessage, Settlement
from millpy.model.deployment import DeployedInterval
from millpy.model.time import INSTANT_MAX, Instant
from millpy.sinks.messages import SinkMessages
from millpy.store.protocol import SinkReport
from tests.conformance.store_builders import Owner, World, a_graph, entries
from tests.conformance.store_request_suite import people

LETTER = DeadLetter("refused", "no", b"{}", "readings", "sums", event_time=7, key=b'"a"')


def messages(position: int, number: int) -> SinkMessages:
    values: list[bytes | None] = [b"%d" % at for at in range(position, position + number)]
    return SinkMessages(position, [b"a"] * number, values, [0] * number)


def refused(position: int, attempts: int = 1, *, parked: bool = False, key: bytes = b'"a"') -> RefusedMessage:
    why = f"no {position}\x00\ud800" if attempts else ""
    message = messages(position, 1).encode()
    return RefusedMessage(message, key, b"%d" % position, attempts, Instant(1_000_000 + position), why, parked)


def report(
    owner: Owner,
    interval: DeployedInterval,
    delivered: int,
    *set_aside: RefusedMessage,
    accepted: tuple[int, ...] = (),
    why: str = "",
) -> SinkReport:
    grant = owner.grants[interval.interval_id]
    return SinkReport(grant, delivered, not why, Instant(1), why, 0, tuple(set_aside), accepted)


async def state(owner: Owner, interval: DeployedInterval) -> OutboxState:
    return (await owner.opened(interval)).recovered.outbox


async def filled(world: World, owner: Owner, number: int = 5) -> DeployedInterval:
    interval = world.sums[0]
    await owner.commit(owner.checkpoint(interval, outbox=messages(0, number).encode()))
    return interval


class OutboxSuite:
    """Mixed into the store suite."""

    async def test_messages_follow_each_other_and_leave_when_they_are_delivered(self, world: World) -> None:
        owner = await world.owner()
        interval = world.sums[0]
        found = await state(owner, interval)
        assert (found.head, found.delivered, found.size, len(found.refused)) == (0, 0, 0, 0)
        await owner.commit(owner.checkpoint(interval, outbox=messages(0, 5).encode()))
        await owner.commit(owner.checkpoint(interval, outbox=messages(5, 3).encode()))
        with pytest.raises(CursorGapError):
            await owner.commit(owner.checkpoint(interval, outbox=messages(9, 1).encode()))
        grant = owner.grants[interval.interval_id]
        assert [row.position for row in await owner.store.read_outbox(grant, 0, 1_000_000)] == [0, 5]
        await owner.store.record_delivered([report(owner, interval, 6)])
        assert [row.position for row in await owner.store.read_outbox(grant, 6, 1_000_000)] == [5]
        await owner.store.record_delivered([report(owner, interval, 2, why="a\x00b\ud800")])  # behind: nothing changes
        found = await state(owner, interval)
        assert (found.head, found.delivered, found.size) == (8, 6, len(messages(5, 3).encode().payload))
        await owner.store.record_delivered([report(owner, interval, 8)])
        found = await state(owner, interval)
        assert (found.head, found.delivered, found.size) == (8, 8, 0)
        await owner.commit(owner.checkpoint(interval, outbox=messages(8, 1).encode()))

    async def test_refused_messages_are_kept_as_reported(self, world: World) -> None:
        owner = await world.owner()
        interval = await filled(world, owner)
        await owner.store.record_delivered([report(owner, interval, 5, refused(1), refused(3, 0), refused(4, 0))])
        again = replace(refused(1), attempts=2, parked=True, why="still no")
        await owner.store.record_delivered([report(owner, interval, 5, again, accepted=(4,))])
        found = await state(owner, interval)
        assert (found.head, found.delivered) == (5, 5)
        assert [(one.position, one.attempts, one.parked, one.why) for one in found.refused] == [
            (1, 2, True, "still no"),
            (3, 0, False, ""),
        ]
        assert found.refused[0].message == messages(1, 1).encode()
        assert (found.refused[0].since_us, found.refused[0].record) == (1_000_001, b"1")

    async def test_a_settlement_is_in_the_commit_with_its_dead_letter(self, world: World) -> None:
        owner = await world.owner()
        interval = await filled(world, owner)
        parked = [refused(2, parked=True, key=b'"b"'), refused(3, 0, key=b'"b"')]
        await owner.store.record_delivered([report(owner, interval, 5, refused(1), *parked)])
        stale = owner.checkpoint(interval, settlement=Settlement({1: LETTER}), dead_letters=[LETTER], bundle=9)
        with pytest.raises(StaleSequencerError):
            await owner.commit(stale)
        assert len((await state(owner, interval)).refused) == 3
        settlement = Settlement({1: LETTER}, [b'"b"'])
        await owner.commit(owner.checkpoint(interval, settlement=settlement, dead_letters=[LETTER]))
        assert [
            (one.position, one.attempts, one.parked, one.why) for one in (await state(owner, interval)).refused
        ] == [
            (2, 0, False, ""),
            (3, 0, False, ""),
        ]
        with pytest.raises(RequestWithdrawnError):
            await owner.commit(owner.checkpoint(interval, settlement=settlement, dead_letters=[LETTER]))

    async def test_outboxes_of_one_report_or_commit_keep_their_own_messages(self, world: World) -> None:
        """Positions and keys of two intervals may be equal."""
        owner = await world.owner()
        first, second = world.sums
        both = (first, second)
        await owner.commit(*(owner.checkpoint(each, outbox=messages(0, 6).encode()) for each in both))
        kept = (refused(1), refused(2), refused(4, parked=True))
        await owner.store.record_delivered([report(owner, each, 5, *kept) for each in both])

        await owner.store.record_delivered([report(owner, first, 5, accepted=(1,)), report(owner, second, 5)])
        settled = Settlement({2: LETTER}, [b'"a"'])
        await owner.commit(owner.checkpoint(first, settlement=settled, dead_letters=[LETTER]), owner.checkpoint(second))

        found = [(await state(owner, each)).refused for each in both]
        assert [(one.position, one.parked) for one in found[0]] == [(4, False)]
        assert [(one.position, one.parked) for one in found[1]] == [(1, False), (2, False), (4, True)]
        grant = owner.grants[second.interval_id]
        assert [row.position for row in await owner.store.read_outbox(grant, 5, 1_000_000)] == [0]

    async def test_an_owner_that_lost_its_interval_reports_in_vain(self, world: World) -> None:
        first = await world.owner()
        interval = await filled(world, first)
        late = report(first, interval, 5, refused(1))
        await first.expire()
        second = await world.owner(interval)
        with pytest.raises(StaleSequencerError) as raised:
            await first.store.record_delivered([late])
        assert raised.value.stale == (interval.interval_id,)
        assert (await state(second, interval)).refused in ([], ())
        assert (await state(second, interval)).delivered == 0

    async def test_a_graph_with_waiting_or_refused_messages_has_not_finished(self, world: World) -> None:
        owner = await world.owner()
        interval = await filled(world, owner)
        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        await owner.commit(*(owner.checkpoint(each, **end) for each in world.deployment.intervals))
        assert not await owner.store.finished(world.deployment.graph_id)
        await owner.store.record_delivered([report(owner, interval, 5, refused(1))])
        assert not await owner.store.finished(world.deployment.graph_id)
        await owner.store.record_delivered([report(owner, interval, 5, accepted=(1,))])
        assert await owner.store.finished(world.deployment.graph_id)

    async def test_a_graph_finishes_whatever_another_one_still_has_to_do(self, world: World) -> None:
        owner, deployed = await world.owner(), await world.store.deploy(a_graph("other"))
        other, interval = Owner(world.store, deployed), world.sums[0]
        await other.register()
        await other.claim()
        parked = entries(Kind.PARKED, "key", ("d", {"ticket": 3, "parked_at": 0}))
        late = LateRows("readings", "sums", [b'"d"'], [b"{}"], [1], [2], [0], [60])
        await owner.commit(
            owner.checkpoint(world.a, dead_letters=[LETTER]),
            owner.checkpoint(interval, late=[late], delta=(parked,), outbox=messages(0, 5).encode()),
        )
        await owner.store.record_delivered([report(owner, interval, 3, refused(1))])
        assert await people(world).replay("dead_letters", 1)
        assert await people(world).replay("late_records", 1)
        await people(world).release("sums", interval.interval_id, "d", 3)

        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        await other.commit(*(other.checkpoint(each, **end) for each in deployed.intervals))

        assert await other.store.finished(deployed.graph_id)
