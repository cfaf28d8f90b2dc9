"""Connections that hang up on silence, and on nothing else.

A server ends its statements itself (`statement_timeout`), and TCP notices a vanished peer. Neither helps when a pooler
or proxy hangs, because it still acknowledges every packet. So when no byte has moved for a while, a separate connection
asks the server whether it is at work for this one. If it is, the wait continues, however long. If not, the socket is
shut, and the statement fails as if the server had closed the connection, which the callers handle (perhaps as a commit
with an unknown outcome). A slow link moves bytes, so it is not silent.
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
"""How often a watch looks for acknowledged bytes within the longest permitted silence."""


class BoundedAsyncConnection(AsyncConnection[TupleRow]):
    """A connection that waits for the server as long as bytes move or the server is at work.

    Attributes:
        answer_s: longest permitted silence in seconds; None for no limit.
        works: asks by another connection whether the server is at work on the last statement; None if this is unknown.
        on_silence: called when the connection hangs up.
        on_progress: called for each sign of life in a wait.
        was_silent: whether it has hung up.
    """

    answer_s: float | None = None
    was_silent = False
    works: Callable[[], Awaitable[bool]] | None = None
    on_silence: Callable[[], None] | None = None
    on_progress: Callable[[], None] | None = None
    _watch: _SilenceWatch | None = None

    async def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """Wait as psycopg does, within the bound. Raises OperationalError after it."""
        if self.answer_s is None:
            return await super().wait(gen, *arguments, **options)
        if self._watch is None:
            self._watch = _SilenceWatch(self)
        try:
            return await super().wait(self._watch.observe(gen, self.answer_s), *arguments, **options)
        finally:
            if (asking := self._watch.end()) is not None:
                await asyncio.gather(asking, return_exceptions=True)

    def report_silence(self) -> None:
        """Hang up, and call `on_silence`."""
        self.was_silent = True
        hang_up(self)
        if self.on_silence is not None:
            self.on_silence()


class _SilenceWatch:
    """The waits of a connection, of which there is one at a time, with the time at which a byte last moved.

    One timer serves all waits: it ends at its first look between two of them, and the next wait begins another one.
    """

    def __init__(self, connection: BoundedAsyncConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._answer_s = 0.0
        self._waits = False
        self._moved_at = 0.0
        self._unsent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    def observe(self, gen: PQGen[RV], answer_s: float) -> PQGen[RV]:
        """Run psycopg's generator, and note each time at which the socket can send or receive."""
        self._answer_s, self._waits, self._unsent = answer_s, True, 0
        self._moved_at = self._loop.time()
        if self._timer is None:
            self._look_again()
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

    def end(self) -> asyncio.Task[None] | None:
        """End the wait; return the question to the server that it leaves, which is cancelled."""
        self._waits = False
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
        return asking

    def _moved(self) -> None:
        self._moved_at = self._loop.time()
        if self._connection.on_progress is not None:
            self._connection.on_progress()

    def _look(self) -> None:
        self._timer = None
        if not self._waits:
            return
        unsent = _unsent(self._connection)
        if unsent < self._unsent:
            self._moved()  # the other side still acknowledges bytes
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
            self._connection.report_silence()
        else:
            self._look_again()


def _unsent(connection: AsyncConnection[Any]) -> int:
    """Return the number of bytes that the other side has not acknowledged; 0 where that is unknown."""
    with suppress(OSError, psycopg.OperationalError):
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])
    return 0


class BoundedConnection(psycopg.Connection[Row]):
    """A synchronous connection that hangs up when one wait for the server takes longer than `answer_s`."""

    answer_s: float | None = None

    def wait(self, gen: PQGen[RV], *arguments: Any, **options: Any) -> RV:
        """Wait as psycopg does, within the bound. Raises OperationalError after it."""
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
    """Shut the socket, which wakes the task or thread that waits on it."""
    with suppress(OSError, psycopg.OperationalError):  # the connection has already ended
        with socket.socket(fileno=os.dup(connection.fileno())) as plug:
            plug.shutdown(socket.SHUT_RDWR)
