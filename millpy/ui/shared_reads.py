"""Share queries between requests that wait for the same answer, so that many viewers of a view cost like one.

A request shares only a query that begins after it came: what it shows is never older than it is. So for each key one
query runs, and one more waits, for all requests that came meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Flight:
    """The query of a key that runs, and the one that waits for its end."""

    running: asyncio.Task[Any]
    waiting: asyncio.Task[Any] | None = None


class SharedReads:
    """The queries that run or wait, by their keys: no more keys than requests."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, _Flight] = {}

    async def run(self, key: Hashable, query: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a query that begins now or later; queries with equal keys have equal results."""
        flight = self._flights.get(key)
        if flight is None:
            task = _started(self._fly(key, query))
            self._flights[key] = _Flight(task)
        elif flight.waiting is None:
            task = flight.waiting = _started(self._fly_after(flight.running, key, query))
        else:
            task = flight.waiting
        # A client that has gone does not end the query of the others.
        return await asyncio.shield(task)

    async def _fly(self, key: Hashable, query: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await query()
        finally:
            waiting = self._flights.pop(key).waiting
            if waiting is not None:
                self._flights[key] = _Flight(waiting)

    async def _fly_after(self, before: asyncio.Task[Any], key: Hashable, query: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.wait([before])
        return await self._fly(key, query)


def _started(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(coroutine)
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps all who waited have gone
    return task
