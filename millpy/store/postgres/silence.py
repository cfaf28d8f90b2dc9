"""Connections that hang up on silence, and on nothing else.

A server ends its statements itself (`statement_timeout`), and TCP notices a peer that is gone. Neither helps when what
stands between is alive and does not answer: a pooler or proxy that hangs acknowledges every packet for ever. So a wait
in which no byte moves for a while is looked into: over a connection of its own the server is asked whether it is at
work for us. If it is, the wait goes on, however long; a slow link moves bytes, and is no silence either. If not, the
socket is shut, and the statement fails as if the server had closed the connection. What that means (perhaps a commit
whose outcome is unknown) is known already.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import RV, PQGen
from psycopg.rows import Row, TupleRow

LOOKS = 4
"""So often is looked whether bytes have left, within the silence that is too long."""


class BoundedAsyncConnection(AsyncConnection[TupleRow]):
    """Waits for the server as long as something moves, or the server is at work.

    Attributes:
        answer_s: seconds of silence that are too long; None: none is.
        works: says by another way whether the server is at work on what was sent last; None: nobody does.
        on_silence: called when it hangs up.
        on_progress: called for each sign of life in a wait.
    """

    answer_s: float | None = None
    works: Callable[[], Awaitable[bool]] | None = None
    on_silence: Callable[[], None] | None = None
    on_progress: Callable[[], None] | None = None

    async def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """As psycopg does, within the bound. Raises OperationalError after it."""
        if self.answer_s is None:
            return await super().wait(gen, *arguments, **options)
        watch = _Watch(self, self.answer_s)
        try:
            return await super().wait(watch.seen(gen), *arguments, **options)
        finally:
            await watch.end()

    def give_up(self) -> None:
        """Hang up, and say so."""
        hang_up(self)
        if self.on_silence is not None:
            self.on_silence()


class _Watch:
    """One wait for the server: when something has moved last."""

    def __init__(self, connection: BoundedAsyncConnection, answer_s: float) -> None:
        self._connection = connection
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._unsent = 0
        self._timer = self._loop.call_later(answer_s / LOOKS, self._look)
        self._asking: asyncio.Task[None] | None = None

    def seen(self, gen: PQGen[RV]) -> PQGen[RV]:
        """The same, noting whenever the socket has taken or brought something."""
        try:
            state = next(gen)
            while True:
                ready = yield state
                if ready:
                    self._moved()
                state = gen.send(ready)
        except StopIteration as end:
            value: RV = end.value
            return value

    async def end(self) -> None:
        """Look no more."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _moved(self) -> None:
        self._moved_at = self._loop.time()
        if self._connection.on_progress is not None:
            self._connection.on_progress()

    def _look(self) -> None:
        unsent = _unsent(self._connection)
        if unsent < self._unsent:
            self._moved()  # what was sent is on its way still
        self._unsent = unsent
        if self._loop.time() - self._moved_at >= self._answer_s * (1 - 0.5 / LOOKS):
            self._asking = self._loop.create_task(self._ask())
        else:
            self._look_again()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(self._answer_s / LOOKS, self._look)

    async def _ask(self) -> None:
        asked_at, works = self._moved_at, self._connection.works
        if works is not None and await works():
            self._moved()
        if self._moved_at == asked_at:
            self._connection.give_up()
        else:
            self._look_again()


def _unsent(connection: AsyncConnection[Any]) -> int:
    """Bytes that the other side has not acknowledged; 0 where that is not known."""
    with suppress(OSError, psycopg.OperationalError):
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])
    return 0


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
