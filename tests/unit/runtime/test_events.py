"""The queue of a worker's events while the database cannot be reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from millpy.errors import StoreUnavailableError
from millpy.runtime.events import EVENTS_MAX, EventQueue
from millpy.store.protocol import Event


class Outage:
    """A store that takes no events while it is away; more come while it is asked."""

    def __init__(self) -> None:
        self.is_away = True
        self.stored: list[str] = []
        self.queue = EventQueue(cast(Any, self), 7, UUID(int=1))

    async def record_events(self, graph_id: int, events: Sequence[Event]) -> None:
        if self.is_away:
            self.queue.add("last", {})
            raise StoreUnavailableError("away")
        self.stored += [event.kind for event in events]


async def test_an_outage_that_fills_the_queue_costs_the_oldest_events_and_no_newer_one() -> None:
    store = Outage()
    for number in range(EVENTS_MAX):
        store.queue.add(str(number), {})

    with pytest.raises(StoreUnavailableError):
        await store.queue.store_all()
    store.is_away = False
    await store.queue.store_all()

    assert store.stored == [*map(str, range(1, EVENTS_MAX)), "last"]
