"""Requests for dead letters and late records: made once, settled with the commit that has the effects or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Protocol, cast
from uuid import UUID, uuid4

import pytest

from millpy.errors import RequestWithdrawnError, StaleSequencerError
from millpy.model.checkpoint import (
    Cursor,
    DeadLetter,
    ExpectedRecord,
    Kind,
    LateRows,
    Pause,
    RecordTableName,
    Request,
    RequestOutcome,
)
from millpy.model.lease import Renewal
from millpy.model.time import INSTANT_MAX, INSTANT_MIN
from tests.conformance.store_builders import MINUTE, Owner, World, entries, panes

ID = bytes(range(16))
LETTER = DeadLetter(
    "undecodable",
    "not JSON",
    b"\xff\x00{",
    "readings",
    "readings",
    position="a:1",
    event_time=7,
    wire="{}",
    dedupe_id=ID,
)
LATE = LateRows("readings", "sums", [b'"d"', b'"e"'], [b"{}", b"[]"], [1, 2], [2, 2], [0, 0], [60, 60], input=1)


class People(Protocol):
    """The requests and views of users on dead letters and late records."""

    async def replay(self, table: RecordTableName, number: int, payload: bytes | None = None) -> bool: ...

    async def replay_into_window(self, number: int) -> bool: ...

    async def discard(self, table: RecordTableName, number: int) -> bool: ...

    async def standing(self, table: RecordTableName, number: int) -> tuple[str, int]: ...

    async def resume(self, graph: str, stream: str, interval_id: int) -> None: ...

    async def release(self, computation: str, interval_id: int, key: str, ticket: int) -> None: ...

    async def drain(self, graph: str, worker_id: UUID) -> bool: ...


def people(world: World) -> People:
    return cast(People, world.subject)


async def asked(owner: Owner, world: World, **bounds: int) -> list[Request]:
    ids = [interval.interval_id for interval in world.deployment.intervals]
    found = await owner.store.read_requests(ids, **{"records_max": 100, "bytes_max": 10_000, **bounds})
    return list(found.requests)


class RequestSuite:
    """Mixed into the store suite."""

    async def test_request_contains_the_dead_letter(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(
            owner.checkpoint(world.a, dead_letters=[LETTER]), owner.checkpoint(world.sums[0], late=[LATE])
        )
        assert await asked(owner, world) == []

        assert await people(world).replay("dead_letters", 1, b"{}")
        assert await people(world).replay("late_records", 2)
        assert not await people(world).replay("dead_letters", 1)

        first, second = await asked(owner, world)
        assert first == Request(
            "dead_letters", 1, world.a.interval_id, "readings", "readings", b"{}", 0, "{}", "a:1", 7, ID
        )
        assert second == Request(
            "late_records", 2, world.sums[0].interval_id, "readings", "sums", b"[]", 1, event_time=2
        )
        assert await asked(owner, world, records_max=1) == [first, second]
        assert await asked(owner, world, bytes_max=1) == [first]
        assert (await owner.store.read_requests([world.b.interval_id], records_max=9, bytes_max=9)).requests == ()

    async def test_request_is_fulfilled_by_the_commit_and_only_once(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.a, dead_letters=[LETTER, LETTER]))
        for number in (1, 2):
            await people(world).replay("dead_letters", number)
        first, second = await asked(owner, world)
        again = DeadLetter("future", "too early", b"", "readings", "readings", event_time=8)

        await owner.commit(owner.checkpoint(world.a, outcomes=[RequestOutcome(first), RequestOutcome(second, again)]))

        assert await people(world).standing("dead_letters", 1) == ("replayed", 0)
        assert await people(world).standing("dead_letters", 2) == ("open", 1)
        assert await asked(owner, world) == []
        assert not await people(world).replay("dead_letters", 1)
        assert not await people(world).discard("dead_letters", 1)
        assert await people(world).replay("dead_letters", 2)
        assert [request.dedupe_id for request in await asked(owner, world)] == [ID]
        with pytest.raises(RequestWithdrawnError):
            await owner.commit(owner.checkpoint(world.a, outcomes=[RequestOutcome(first)]))

    async def test_correction_is_fulfilled_only_over_the_row_that_was_read(self, world: World) -> None:
        owner, table = await world.owner(), world.deployment.table_ids["sums_1m"]
        late = replace(LATE, window_starts=[0, 0], window_ends=[MINUTE, MINUTE])
        first = panes(table, ("d", 1.0, 0), first=True)
        await owner.commit(owner.checkpoint(world.sums[0], late=[late], results=[first]))
        for number in (1, 2):
            assert await people(world).replay_into_window(number)
        assert not await people(world).replay_into_window(1)
        one, other = await asked(owner, world)
        assert (one.window, other.window) != (None, None)
        assert one.window is not None
        assert other.window is not None
        assert (one.window.key, one.window.start, one.window.end, one.window.table_id) == (b'"d"', 0, MINUTE, table)
        assert json.loads(one.window.row or b"")["total"] == 1.0
        assert other.window.row is None
        stale = replace(one, window=replace(one.window, row=None))
        made_up = replace(other, window=replace(other.window, row=one.window.row))
        for wrong in (stale, made_up):
            with pytest.raises(RequestWithdrawnError):
                await owner.commit(owner.checkpoint(world.sums[0], outcomes=[RequestOutcome(wrong)]))

        second = panes(table, ("d", 3.0, 1))
        failed = RequestOutcome(other, watermark=99, detail="it cannot be")
        await owner.commit(owner.checkpoint(world.sums[0], results=[second], outcomes=[RequestOutcome(one), failed]))

        assert await people(world).standing("late_records", 1) == ("replayed", 0)
        assert await people(world).standing("late_records", 2) == ("open", 1)
        assert await asked(owner, world) == []
        with pytest.raises(RequestWithdrawnError):
            await owner.commit(owner.checkpoint(world.sums[0], outcomes=[RequestOutcome(one)]))

    async def test_expected_record_that_comes_too_late_is_requested_once_for_each_window(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.a, dead_letters=[LETTER]))
        await people(world).replay("dead_letters", 1)
        (letter,) = await asked(owner, world)
        expected = ExpectedRecord(1, "sums", 1, 1, b"{}")
        names = ["readings", "sums", [b'"d"'] * 6, [*[b"{}"] * 5, b"[]"], [1] * 6, [2] * 6]
        bounds: Any = ([0, 0, 30, 90, 0, 0], [60, 60, 90, 120, 61, 60])
        retracts = [False, False, False, True, False, False]
        late = LateRows(*names, *bounds, input=1, retracts=retracts)  # type: ignore[arg-type]

        replayed = owner.checkpoint(world.a, outcomes=[RequestOutcome(letter)], expected=[expected])
        await owner.commit(replayed, owner.checkpoint(world.sums[0], late=[late.select(range(4))]))
        await owner.commit(owner.checkpoint(world.sums[0], late=[late]))

        found = [(await people(world).standing("late_records", number))[0] for number in range(1, 11)]
        assert found == ["requested", "open", "requested", *["open"] * 5, "requested", "open"]
        requests = await asked(owner, world)
        assert [request.into_window and request.window and request.window.end for request in requests] == [60, 90, 61]

        strays = [
            LateRows("readings", "sums", [b'"d"'], [b"{}"], [at], [2], [200], [260], input=place)
            for place, at in ((0, 1), (1, 2))
        ]
        await owner.commit(owner.checkpoint(world.sums[0], late=strays))
        assert len(await asked(owner, world)) == len(requests), "a record of another input or time is another one"

    @pytest.mark.parametrize("of_stage", [False, True], ids=["of the source", "of the stage itself"])
    async def test_late_record_that_equals_an_expected_one_in_time_is_not_requested(
        self, world: World, of_stage: bool
    ) -> None:
        owner, step = await world.owner(), world.sums[0]
        rejected_by = step if of_stage else world.a
        await owner.commit(owner.checkpoint(rejected_by, dead_letters=[LETTER]))
        await people(world).replay("dead_letters", 1)
        (letter,) = await asked(owner, world)
        made = {"outcomes": [RequestOutcome(letter)], "expected": [ExpectedRecord(1, "sums", 1, 1, b"{}")]}
        late = LateRows("readings", "sums", [b'"d"'], [b"{}"], [1], [2], [0], [60], input=1)

        replayed = owner.checkpoint(rejected_by, **made)
        await owner.commit(replayed)
        if not of_stage:  # the step reads it later, in time
            read = Cursor(world.a.interval_id, replayed.bundle, INSTANT_MIN)
            await owner.commit(owner.checkpoint(step, cursors=[read]))
        await owner.commit(owner.checkpoint(step, late=[late]))

        assert (await people(world).standing("late_records", 1))[0] == "open"
        assert await asked(owner, world) == []

    async def test_expected_record_of_the_step_itself_is_requested_in_the_same_commit(self, world: World) -> None:
        owner, step = await world.owner(), world.sums[0]
        await owner.commit(owner.checkpoint(step, dead_letters=[LETTER]))
        await people(world).replay("dead_letters", 1)
        ids = [step.interval_id]
        (letter,) = (await owner.store.read_requests(ids, records_max=9, bytes_max=10_000)).requests
        late = LateRows("readings", "sums", [b'"d"'], [b"{}"], [1], [2], [0], [60], input=1)
        expected = [ExpectedRecord(1, "sums", 1, 1, b"{}")]

        replayed = owner.checkpoint(step, outcomes=[RequestOutcome(letter)], expected=expected, late=[late])
        await owner.commit(replayed)

        assert (await people(world).standing("late_records", 1))[0] == "requested"

    async def test_request_for_a_late_record_is_fulfilled_too(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.sums[0], late=[LATE]))
        for number in (1, 2):
            await people(world).replay("late_records", number)
        first, second = await asked(owner, world)

        await owner.commit(
            owner.checkpoint(world.sums[0], outcomes=[RequestOutcome(first), RequestOutcome(second, watermark=99)])
        )

        assert not await people(world).discard("late_records", 1), "it is replayed"
        assert await people(world).standing("late_records", 1) == ("replayed", 0)
        assert await people(world).standing("late_records", 2) == ("open", 1)

    async def test_late_record_that_is_in_another_window_is_not_replayed(self, world: World) -> None:
        """It would be counted there a second time."""
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.sums[0], late=[replace(LATE, whole=[False, True])]))

        assert not await people(world).replay("late_records", 1)
        assert await people(world).replay("late_records", 2)
        assert [request.id for request in await asked(owner, world)] == [2]

    async def test_late_record_that_belongs_to_no_window_cannot_be_added_to_one(self, world: World) -> None:
        """No commit would fulfill the request, and a graph with a request never finishes."""
        owner = await world.owner()
        late = replace(LATE, window_starts=[None, LATE.window_starts[1]], window_ends=[None, LATE.window_ends[1]])
        await owner.commit(owner.checkpoint(world.sums[0], late=[late]))

        assert not await people(world).replay_into_window(1)
        assert await people(world).replay_into_window(2)

    @pytest.mark.parametrize("table", ["dead_letters", "late_records"])
    async def test_withdrawn_request_is_not_fulfilled(self, world: World, table: RecordTableName) -> None:
        owner = await world.owner()
        step = world.a if table == "dead_letters" else world.sums[0]
        recorded: Any = {"dead_letters": [LETTER]} if table == "dead_letters" else {"late": [LATE]}
        await owner.commit(owner.checkpoint(step, **recorded))
        await people(world).replay(table, 1)
        (request,) = await asked(owner, world)
        assert await people(world).discard(table, 1)

        with pytest.raises(RequestWithdrawnError):
            await owner.commit(owner.checkpoint(step, outcomes=[RequestOutcome(request)]))

        assert await people(world).standing(table, 1) == ("discarded", 0)
        assert (await owner.opened(step)).recovered.bundle == 1

    async def test_stale_owner_fulfills_no_request(self, world: World) -> None:
        owner = await world.owner()
        await owner.commit(owner.checkpoint(world.a, dead_letters=[LETTER]))
        await people(world).replay("dead_letters", 1)
        (request,) = await asked(owner, world)
        stale = owner.checkpoint(world.a, outcomes=[RequestOutcome(request)])
        await owner.take_over_from_self()

        with pytest.raises(StaleSequencerError):
            await owner.commit(stale)

        assert await people(world).standing("dead_letters", 1) == ("requested", 0)

    async def test_source_pauses_until_it_is_resumed(self, world: World) -> None:
        owner = await world.owner()
        a, b = world.a.interval_id, world.b.interval_id

        await owner.commit(owner.checkpoint(world.a, pause=Pause("too much")))
        paused = await owner.store.read_requests([a, b], records_max=1, bytes_max=1)
        await people(world).resume("factory", "readings", a)
        resumed = await owner.store.read_requests([a, b], records_max=1, bytes_max=1)

        assert (paused.paused, resumed.paused) == ({a}, frozenset())

    async def test_renewals_tell_of_a_requested_drain_until_the_worker_leaves(self, world: World) -> None:
        owner, other = await world.owner(world.a), await world.worker()
        before = await owner.store.heartbeat(owner.worker_id, 60.0)

        requested = [await people(world).drain("factory", owner.worker_id) for _ in range(2)]
        renewals = [await one.store.heartbeat(one.worker_id, 60.0) for one in (owner, owner, other)]
        await owner.register()
        again = await owner.store.heartbeat(owner.worker_id, 60.0)
        await owner.store.unregister(owner.worker_id)
        await owner.register()
        left = await owner.store.heartbeat(owner.worker_id, 60.0)

        assert (before, requested) == (Renewal(False), [True, False])
        assert renewals == [Renewal(True), Renewal(True), Renewal(False)]
        assert again == Renewal(True), "a worker that registers anew after a lost lease is the same worker"
        assert left == Renewal(False)

    async def test_only_a_live_worker_can_be_requested_to_drain(self, world: World) -> None:
        worker = await world.worker()
        await worker.expire()

        assert not await people(world).drain("factory", worker.worker_id)
        assert not await people(world).drain("factory", uuid4())
        await worker.register()
        assert await worker.store.heartbeat(worker.worker_id, 60.0) == Renewal(False)

    @pytest.mark.parametrize("table", ["dead_letters", "late_records"])
    async def test_graph_with_a_request_has_not_finished(self, world: World, table: RecordTableName) -> None:
        owner = await world.owner()
        await owner.commit(
            owner.checkpoint(world.a, dead_letters=[LETTER]), owner.checkpoint(world.sums[0], late=[LATE])
        )
        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        await owner.commit(*(owner.checkpoint(i, **end) for i in world.deployment.intervals))
        assert await owner.store.finished(world.deployment.graph_id)

        await people(world).replay(table, 1 if table == "dead_letters" else 2)

        assert not await owner.store.finished(world.deployment.graph_id)

    async def test_graph_with_a_key_to_be_released_has_not_finished(self, world: World) -> None:
        # A key that had stopped at a late record holds nothing: a worker left before it looked at the release.
        owner = await world.owner()
        interval, _ = world.sums
        parked = entries(Kind.PARKED, "key", ("d", {"ticket": 3, "parked_at": 0}))
        end = {"input_watermark": INSTANT_MAX, "low_watermark": INSTANT_MAX}
        rest = [i for i in world.deployment.intervals if i != interval]
        await owner.commit(
            owner.checkpoint(interval, delta=(parked,), **end), *(owner.checkpoint(i, **end) for i in rest)
        )
        assert await owner.store.finished(world.deployment.graph_id)

        await people(world).release("sums", interval.interval_id, "d", 3)

        assert not await owner.store.finished(world.deployment.graph_id)

    async def test_release_of_a_parked_key_stays_requested_until_a_commit_fulfills_it(self, world: World) -> None:
        owner = await world.owner()
        interval, other = world.sums
        parked = entries(Kind.PARKED, "key", ("d", {"ticket": 3, "parked_at": 0}))
        waiting = entries(Kind.PARKED, str(world.by_device), ("d", {"record": {}}, "1/1", 5))
        await owner.commit(owner.checkpoint(interval, delta=(parked, waiting)))

        await people(world).release("sums", interval.interval_id, "d", 3)

        for _ in range(2):
            found = await owner.store.read_requests(
                [interval.interval_id, world.a.interval_id], records_max=9, bytes_max=9
            )
            (release,) = found.releases
            assert (release.interval_id, release.key, release.ticket) == (interval.interval_id, b'"d"', 3)
        assert (await owner.store.read_requests([other.interval_id], records_max=9, bytes_max=9)).releases == ()
        await owner.commit(owner.checkpoint(interval, release_ids=[release.release_id]))
        assert (await owner.store.read_requests([interval.interval_id], records_max=9, bytes_max=9)).releases == ()
        assert (await world.subject.balance(world.deployment))["readings>sums"]["parked"] == 1
