"""Connections that hang up on silence.

A server ends its statements itself (`statement_timeout`), and TCP notices a peer that is gone. Neither helps when what
stands between is alive and does not answer: a pooler or proxy that hangs acknowledges every packet for ever. So no
wait for the server is longer than a bound above the server's own; then the socket is shut, and the statement fails as
if the server had closed the connection. What that means (perhaps a commit whose outcome is unknown) is known already.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import RV, PQGen
from psycopg.rows import Row, TupleRow


class BoundedAsyncConnection(AsyncConnection[TupleRow]):
    """Waits at most `answer_s` for the server (None: without end), then hangs up and says so to `on_silence`."""

    answer_s: float | None = None
    on_silence: Callable[[], None] | None = None

    async def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """As psycopg does, within the bound. Raises OperationalError after it."""
        if self.answer_s is None:
            return await super().wait(gen, *arguments, **options)
        timer = asyncio.get_running_loop().call_later(self.answer_s, self._give_up)
        try:
            return await super().wait(gen, *arguments, **options)
        finally:
            timer.cancel()

    def _give_up(self) -> None:
        hang_up(self)
        if self.on_silence is not None:
            self.on_silence()


class BoundedConnection(psycopg.Connection[Row]):
    """The same for one thread that may block."""

    answer_s: float | None = None

    def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """As psycopg does, within the bound. Raises OperationalError after it."""
        if self.answer_s is None:
            return super().wait(gen, *arguments, **options)
        timer = threading.Timer(self.answer_s, hang_up, [self])
        timer.daemon = True
        timer.start()
        try:
            return super().wait(gen, *arguments, **options)
        finally:
            timer.cancel()


def hang_up(connection: AsyncConnection[Any] | psycopg.Connection[Any]) -> None:
    """Shut the socket under whoever waits on it."""
    with suppress(OSError, psycopg.OperationalError):  # it has ended by itself
        with socket.socket(fileno=os.dup(connection.fileno())) as plug:
            plug.shutdown(socket.SHUT_RDWR)
