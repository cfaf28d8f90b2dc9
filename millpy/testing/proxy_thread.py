"""A proxy of a test in a thread of its own: what those of PostgreSQL and of other servers have in common."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class ProxyThread(ABC):
    """Listens from `with` on, in its own thread.

    Attributes:
        struck: the number of armed faults that have happened.
    """

    def __init__(self) -> None:
        self.struck = 0
        self._links: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close all connections, on both sides, now."""
        self._call(self._cut())

    def stall(self, stalled: bool) -> None:
        """Pass nothing in either direction until called with False; connections stay open."""
        self._loop.call_soon_threadsafe(self._flowing.clear if stalled else self._flowing.set)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _begin(self) -> None:
        self._flowing.set()
        self._listener = await self._listen()

    @abstractmethod
    async def _listen(self) -> asyncio.Server:
        """Return the server that accepts connections."""

    async def _cut(self) -> None:
        for link in list(self._links):
            link.cut()

    async def _shut(self) -> None:
        """Stop listening, close all connections, and cancel what runs."""
        assert self._listener is not None
        self._listener.close()
        await self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
