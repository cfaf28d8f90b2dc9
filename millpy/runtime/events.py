"""Events that a worker and its sources report, queued until they are stored for operators."""

from __future__ import annotations

from collections import deque
from uuid import UUID

from millpy.errors import TransientError
from millpy.store.protocol import Event, Store

EVENTS_MAX = 1_000


class EventQueue:
    """A queue of at most EVENTS_MAX events; a full queue drops its oldest.

    Args:
        store: the store of the events.
        graph_id: the graph to which they belong.
        worker_id: the worker that reports them.
    """

    def __init__(self, store: Store, graph_id: int, worker_id: UUID) -> None:
        self._store = store
        self._graph_id = graph_id
        self._worker_id = worker_id
        self._waiting: deque[Event] = deque(maxlen=EVENTS_MAX)

    def add(self, kind: str, detail: dict[str, object]) -> None:
        """Queue an event for the next `store_all`."""
        self._waiting.append(Event(kind, detail))

    def add_of_worker(self, kind: str, detail: dict[str, object]) -> None:
        """Queue an event of the worker itself; adds the worker's id to the detail."""
        self.add(kind, {"worker": str(self._worker_id), **detail})

    async def store_all(self) -> None:
        """Store the waiting events; keep them when the database cannot be reached. Raises TransientError."""
        events = list(self._waiting)
        self._waiting.clear()
        if not events:
            return
        try:
            await self._store.record_events(self._graph_id, events)
        except TransientError:
            self._waiting = deque([*events, *self._waiting], EVENTS_MAX)
            raise
