"""The drains of a worker together: which of them end with a grant, and whose progress is recorded."""

from __future__ import annotations

import asyncio
import random
from datetime import datetime
from typing import Any, cast

import msgspec
import pytest

from millpy import EventTime, Graph, seconds
from millpy.clock import SystemClock
from millpy.errors import MessagesRefusedError, OwnershipError, StaleSequencerError, StoreUnavailableError
from millpy.hosting.plan import ComputationPlan, plan
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, OutboxRows, OutboxState, RefusedMessage
from millpy.model.time import Instant
from millpy.runtime.lease import Lease
from millpy.runtime.outbox_drain import OutboxDrain
from millpy.runtime.outbox_drains import OutboxDrains
from millpy.sinks import SinkMessages
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from millpy.store.protocol import SinkReport
from millpy.testing import ManualSource
from tests.unit.runtime.test_outbox_drain import Outbox, Place, drain_of, rows


class Reports:
    """A store that notes what it is to record, or refuses it."""

    def __init__(self) -> None:
        self.refuses: Exception | None = None
        self.recorded: list[dict[int, int]] = []

    async def record_delivered(self, reports: list[SinkReport]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.recorded.append({report.grant.interval_id: report.delivered for report in reports})


def drains_of(store: Reports, **drains: OutboxDrain) -> OutboxDrains:
    unused = cast(Any, None)
    found = OutboxDrains(cast(Any, store), unused, Limits(), unused, unused, unused, unused, asyncio.Event())
    found._drains = {int(name[1:]): drain for name, drain in drains.items()}
    return found


async def delivered(interval_id: int) -> OutboxDrain:
    """A drain of an interval whose only message has left."""
    drain = drain_of(Place(), Outbox(rows(1)), interval_id=interval_id)
    for _ in range(1_000):
        if drain.waiting.delivered:
            return drain
        await asyncio.sleep(0)
    raise AssertionError("nothing was delivered")


async def test_the_drains_of_lost_intervals_end_and_the_others_stay() -> None:
    lost, kept = await delivered(1), await delivered(2)
    drains = drains_of(Reports(), i1=lost, i2=kept)

    await drains.keep_only({2, 3})

    assert (lost._task.done(), kept._task.done()) == (True, False)
    assert list(drains._drains) == [2]
    await drains.close()
    assert kept._task.done()


async def test_progress_is_recorded_before_an_interval_is_released() -> None:
    """Else the next owner of a sink without positions would send the last messages again."""
    store, released, kept = Reports(), await delivered(1), await delivered(2)
    drains = drains_of(store, i1=released, i2=kept)

    await drains.release([1, 7])

    assert (released._task.done(), kept._task.done()) == (True, False)
    assert store.recorded == [{1: 1}]
    await drains.close()


@pytest.mark.parametrize("error", [StoreUnavailableError("away"), OwnershipError("the lease is over")])
async def test_an_interval_is_released_though_its_progress_cannot_be_recorded(error: Exception) -> None:
    store, drain = Reports(), await delivered(1)
    store.refuses = error

    await drains_of(store, i1=drain).release([1])

    assert drain._task.done()


async def test_only_what_is_stored_counts_as_recorded() -> None:
    """The fence refuses the report of a lost interval, and stores those of the others."""
    store, lost, kept = Reports(), await delivered(1), await delivered(2)
    drains = drains_of(store, i1=lost, i2=kept)
    store.refuses = StaleSequencerError("taken over", stale=[1])

    await drains._report([lost, kept])
    due = [drain.due_report() is not None for drain in (lost, kept)]

    store.refuses = StaleSequencerError("all of it")
    with pytest.raises(StaleSequencerError):
        await drains._report([lost])
    assert due == [True, False]
    assert lost.due_report() is not None
    await drains.close()


class Reading(msgspec.Struct):
    device: str
    at: datetime


def planned_sink(place: Place) -> tuple[OutboxDrains, ComputationPlan, Outbox]:
    """The drains of a worker of a graph with one sink, which has one interval, and its outbox."""
    graph, clock, outbox = Graph("plant"), SystemClock(), Outbox()
    times = EventTime("at", max_disorder=seconds(0))
    graph.inject("readings", ManualSource(), schema=Reading, event_time=times).to_sink(
        place, key="device", name="out", intervals=1
    )
    planned = plan(graph, MemoryState(MemoryDatabase(clock)).deploy(graph.spec()), Limits())
    lease = Lease(Limits(), clock)
    lease.renewed(clock.monotonic())
    store, unused = cast(Any, outbox), cast(Any, None)
    drains = OutboxDrains(store, planned, Limits(), clock, random.Random(1), lease, unused, asyncio.Event())
    return drains, next(computation for computation in planned if computation.delivers), outbox


def row(position: int, *values: bytes) -> OutboxRows:
    return SinkMessages(position, [b'["k"]'] * len(values), list(values), [0] * len(values)).encode()


def stored(*rows: OutboxRows, delivered: int = 0, refused: tuple[RefusedMessage, ...] = ()) -> OutboxState:
    return OutboxState(rows[-1].end, delivered, sum(len(found.payload) for found in rows), refused)


class Shelf(Place):
    """A place that keeps what it takes, once it may, except values that it refuses."""

    def __init__(self, *refuses: bytes) -> None:
        super().__init__()
        self.refuses, self.values = refuses, list[bytes | None]()
        self.asked, self.takes = asyncio.Event(), asyncio.Event()

    async def send(self, messages: SinkMessages) -> None:
        self.asked.set()
        await self.takes.wait()
        if refused := {at: "no" for at, value in enumerate(messages.values) if value in self.refuses}:
            raise MessagesRefusedError(refused)
        self.values += messages.values


async def passes(drain: OutboxDrain, position: int) -> None:
    """Let a drain run until it has passed a position, and store its progress."""
    for _ in range(1_000):
        if (report := drain.due_report()) is not None:
            drain.recorded(report)
        if drain.waiting.delivered >= position and not drain.refused.changes:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"at {drain.waiting.delivered}")


async def test_a_message_that_a_failover_has_lost_is_not_sent_in_place_of_another() -> None:
    """The standby lacks the newest row, and gets another one under its position."""
    shelf = Shelf()
    drains, of_sink, outbox = planned_sink(shelf)
    interval_id = of_sink.intervals[0].interval_id
    outbox.rows = [row(0, b"a")]
    await drains.open(Grant(interval_id, 1), of_sink, stored(*outbox.rows))
    await shelf.asked.wait()
    drains._drains[interval_id].committed(row(1, b"lost"))

    await drains.open(Grant(interval_id, 2), of_sink, stored(*outbox.rows))
    outbox.rows.append(row(1, b"b"))
    drains._drains[interval_id].committed(outbox.rows[-1])
    shelf.takes.set()
    await passes(drains._drains[interval_id], 2)
    await drains.close()

    assert shelf.values == [b"a", b"b"]


@pytest.mark.parametrize(
    ("sequencer", "delivered", "is_refused", "continues"),
    [(2, 2, True, True), (2, 1, True, False), (2, 2, False, False), (1, 1, False, True)],
    ids=["nothing is lost", "progress is lost", "a refusal is lost", "read before the last report"],
)
async def test_a_drain_continues_if_the_store_has_all_that_it_had_stored(
    sequencer: int, delivered: int, is_refused: bool, continues: bool
) -> None:
    """Else a message that it had stored as refused would be in no row of the standby, and behind the position."""
    shelf = Shelf(b"bad")
    drains, of_sink, outbox = planned_sink(shelf)
    interval_id = of_sink.intervals[0].interval_id
    outbox.rows = [row(0, b"bad", b"a")]
    await drains.open(Grant(interval_id, 1), of_sink, stored(*outbox.rows))
    before = drains._drains[interval_id]
    shelf.takes.set()
    await passes(before, 2)
    shelf.takes.clear()

    refused = tuple(waiting.as_stored() for waiting in before.refused) if is_refused else ()
    state = stored(*outbox.rows, delivered=delivered, refused=refused)
    await drains.open(Grant(interval_id, sequencer), of_sink, state)
    after = drains._drains[interval_id]
    await drains.close()

    assert (after is before) is continues
    assert after.waiting.delivered == (2 if continues else delivered)


async def test_a_message_that_was_taken_at_last_is_not_forgotten_where_the_store_has_it_again() -> None:
    shelf = Shelf()
    drains, of_sink, outbox = planned_sink(shelf)
    interval_id = of_sink.intervals[0].interval_id
    outbox.rows = [row(0, b"a")]
    await drains.open(Grant(interval_id, 1), of_sink, stored(*outbox.rows))
    shelf.takes.set()
    await passes(drains._drains[interval_id], 1)
    refused = RefusedMessage(outbox.rows[0], b'["k"]', b"{}", 1, Instant(0), "no", False)

    await drains.open(Grant(interval_id, 2), of_sink, stored(*outbox.rows, delivered=1, refused=(refused,)))
    for _ in range(1_000):
        if len(shelf.values) == 2:
            break
        await asyncio.sleep(0)
    await drains.close()

    assert shelf.values == [b"a", b"a"]
