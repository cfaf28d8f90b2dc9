"""The drains of a worker together: which of them end with a grant, and whose progress is recorded."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from millpy.errors import OwnershipError, StaleSequencerError, StoreUnavailableError
from millpy.limits import Limits
from millpy.runtime.outbox_drain import OutboxDrain
from millpy.runtime.outbox_drains import OutboxDrains
from millpy.store.protocol import SinkReport
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
