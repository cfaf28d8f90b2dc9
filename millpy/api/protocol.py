"""HTTP/1.1 as uvicorn speaks it, with deadlines: a client that is slow, or silent, is disconnected.

uvicorn bounds only the time between two requests. Here the head of a request has a deadline, too, and so has a client
that does not read its answer; `millpy.api.limits` bounds the body.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S_MAX = 10.0
UNREAD_S_MAX = 10.0


class BoundedProtocol(H11Protocol):
    """A connection with deadlines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Read bytes; wait on for the rest of a head."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        elif self._head is not None:
            self._head.cancel()
            self._head = None

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(UNREAD_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End all waiting."""
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_S_MAX, self.transport.abort)
