"""A TCP proxy in front of PostgreSQL that injects network faults: lost connections, lost answers, delays.

It understands enough of the protocol to recognize the COMMIT of a checkpoint: a transaction in which `marker` was
called (`hold_grants`), ended by COMMIT in a simple query or in a pipeline, or by the Sync of a pipeline without BEGIN.

    proxy.cut()            close all connections now
    proxy.stall(True)      forward nothing until stall(False)
    proxy.forsake()        the present connections stay open and silent; new connections work
    proxy.bytes_per_s = n  each connection passes n bytes a second in each direction, like a slow link; None: no bound
    proxy.arm(CommitFault.SWALLOW)        the next checkpoint commits; its answer and the connection are lost
    proxy.arm(CommitFault.LATE_COMMIT)    the client loses its connection; its COMMIT arrives `delay_s` later
    proxy.arm(CommitFault.LATE_PIPELINE)  the same for the whole pipeline of the COMMIT, fence included
    proxy.arm(CommitFault.CUT_COMMIT)     the connection is cut before the COMMIT is forwarded
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Coroutine
from enum import StrEnum
from types import TracebackType
from typing import Any

from millpy.testing.proxy_thread import ProxyThread

BUFFER_BYTES = 65_536
"""The receive buffer of a connection with a rate; like that of a slow link, it has no room for whole messages."""
AT_ONCE_BYTES = 16_384
ENCRYPTION_REQUESTS = {80877103, 80877104}
CANCEL_REQUEST = 80877102


class CommitFault(StrEnum):
    """A fault of the next commit of a checkpoint."""

    SWALLOW = "swallow"
    LATE_COMMIT = "late_commit"
    LATE_PIPELINE = "late_pipeline"
    CUT_COMMIT = "cut_commit"


class PostgresProxy(ProxyThread):
    """Listens on a free port of 127.0.0.1, and forwards to one server.

    Attributes:
        bytes_per_s: the rate of each connection, in each direction; None for no bound.
        commits: the number of checkpoint commits seen.
        lost_answers: the server's answer to each commit whose client was gone.
        landed: set when such an answer is complete.
        may_land: delayed messages wait while a test has cleared it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        marker: bytes = b"hold_grants",
        delay_s: float = 0.3,
        bytes_per_s: float | None = None,
    ) -> None:
        super().__init__()
        self.server_address = (host, port)
        self.marker = marker
        self.delay_s = delay_s
        self.bytes_per_s = bytes_per_s
        self.port = 0
        self.commits = 0
        self.lost_answers: list[bytes] = []
        self.landed = threading.Event()
        self.may_land = threading.Event()
        self.may_land.set()
        self._fault: CommitFault | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.may_land.set()
        super().__exit__(kind, error, trace)

    def forsake(self) -> None:
        """Forward nothing more on the present connections, and keep them open, like a pooler that hangs."""
        self._call(self._forsake())

    def arm(self, fault: CommitFault) -> None:
        """Arm a fault for the next commit of a checkpoint."""
        self.landed.clear()
        self._fault = fault

    def take_fault(self) -> CommitFault | None:
        """Disarm the fault and return it; None if none is armed."""
        fault, self._fault = self._fault, None
        return fault

    async def wait_while_stalled(self, link: _Link) -> None:
        """Wait while the proxy is stalled; never return if the link is forsaken."""
        await self._flowing.wait()
        if link.forsaken:
            await asyncio.Event().wait()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background; the proxy cancels it when it shuts down."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> asyncio.Server:
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.bytes_per_s is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.port = listening.getsockname()[1]
        return await asyncio.start_server(self._accept, sock=listening)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        self._links.add(link)
        try:
            await link.run()
        except asyncio.CancelledError:
            pass  # the proxy shuts down; a cancelled handler would be logged as a failure
        finally:
            self._links.discard(link)

    async def _forsake(self) -> None:
        for link in self._links:
            link.forsaken = True


class _Link:
    """One client and its connection to the server."""

    def __init__(self, proxy: PostgresProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.client_reader, self.client_writer = reader, writer
        self.server_reader: asyncio.StreamReader | None = None
        self.server_writer: asyncio.StreamWriter | None = None
        self.statements: dict[bytes, bytes] = {}  # the text of each prepared statement
        self.fenced = False  # the transaction has called the marker
        self.explicit = False  # it began with BEGIN
        self.held: list[bytes] = []  # the pipeline since its last Sync
        self.syncs = 0  # sent to the server
        self.ended_by = b""  # what ended the last pipeline: Sync or simple Query
        self.answers = -1  # ReadyForQuery messages seen, except the first
        self.swallow_at = 0  # drop the server's answers from this one on
        self.hung_up = asyncio.Event()  # the server has closed its side
        self.lost = bytearray()  # the answers that the client does not see
        self.forsaken = False  # nothing passes any more
        self.detached = False  # the client is gone; the server's side remains

    async def run(self) -> None:
        try:
            self.server_reader, self.server_writer = await asyncio.open_connection(*self.proxy.server_address)
            if not await self._start_up():
                return
            back = asyncio.create_task(self._backward())
            try:
                await self._forward()
            finally:
                if not self.detached and not self.swallow_at:
                    back.cancel()
                await asyncio.gather(back, return_exceptions=True)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.client_writer.close()
            if self.server_writer is not None and not self.detached:
                self.server_writer.close()

    async def _parts(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """Yield the head (type and length) of a message, then its body, which a slow link cuts into parts."""
        head = await reader.readexactly(5)
        yield head
        left = struct.unpack("!I", head[1:])[0] - 4
        while left:
            rate = self.proxy.bytes_per_s
            part = await reader.readexactly(min(left, AT_ONCE_BYTES) if rate else left)
            if rate:
                await asyncio.sleep(len(part) / rate)
            left -= len(part)
            yield part

    def cut(self) -> None:
        for writer in (self.client_writer, self.server_writer):
            if writer is not None and writer.transport is not None:
                writer.transport.abort()

    async def _start_up(self) -> bool:
        """Pass the untyped messages of the startup. Return False after a cancel request, which nothing follows."""
        assert self.server_writer is not None
        while True:
            head = await self.client_reader.readexactly(8)
            length, code = struct.unpack("!II", head)
            body = await self.client_reader.readexactly(length - 8)
            if code in ENCRYPTION_REQUESTS:
                self.client_writer.write(b"N")
                continue
            self.server_writer.write(head + body)
            await self.server_writer.drain()
            return bool(code != CANCEL_REQUEST)

    async def _forward(self) -> None:
        """Pass messages from the client to the server."""
        assert self.server_writer is not None
        while True:
            message = b"".join([part async for part in self._parts(self.client_reader)])
            kind = message[:1]
            await self.proxy.wait_while_stalled(self)
            ends, commits = self._read(kind, message)
            self.held.append(message)
            if not ends:
                # Messages behind the fence wait for their Sync, which may be the one to lose. COPY data must not wait.
                if not self.fenced or kind in b"dcfH":
                    self._send()
                if kind in b"cf" and self.ended_by == b"S":
                    self.syncs -= 1  # a server that waits for COPY data ignores the Sync
                continue
            self.ended_by = kind
            if commits:
                self.proxy.commits += 1
                fault = self.proxy.take_fault()
                if fault is not None:
                    self.proxy.struck += 1
                    if await self._strike(fault):
                        return
            self._send()
            if self.server_writer.transport.get_write_buffer_size() > 1_000_000:
                await self.server_writer.drain()

    def _send(self) -> None:
        assert self.server_writer is not None
        self.syncs += sum(1 for message in self.held if message[:1] in b"SQ")
        if not self.server_writer.is_closing():
            self.server_writer.write(b"".join(self.held))
        self.held.clear()

    def _read(self, kind: bytes, message: bytes) -> tuple[bool, bool]:
        """Track the transaction. Return whether this message ends a pipeline, and whether it commits a checkpoint."""
        text = b""
        if kind == b"Q":
            text = message[5:-1]
        elif kind == b"P":
            name, query = message[5:].split(b"\0")[:2]
            self.statements[name] = query
        elif kind == b"B":
            text = self.statements.get(message[5:].split(b"\0")[1], b"")
        word = text.lstrip()[:8].upper()
        if word.startswith((b"BEGIN", b"START TR")):
            self.explicit, self.fenced = True, False
        if self.proxy.marker in text:
            self.fenced = True
        if word.startswith(b"COMMIT"):
            self.explicit = False
        elif word.startswith(b"ROLLBACK"):
            self.explicit = self.fenced = False
        ends = kind in (b"S", b"Q")
        commits = ends and self.fenced and not self.explicit
        if commits:
            self.fenced = False
        return ends, commits

    async def _strike(self, fault: CommitFault) -> bool:
        """Carry out the fault; return whether the client is gone."""
        if fault is CommitFault.CUT_COMMIT:
            self.cut()
        elif fault is CommitFault.SWALLOW:
            self.swallow_at = self.syncs + 1
            self._send()
            return False
        else:
            self.detached = True
            late = list(self.held)
            if fault is CommitFault.LATE_COMMIT:
                commit_from = self._commit_from(late)
                self._write(b"".join(late[:commit_from]) + (b"H\0\0\0\x04" if commit_from else b""))  # H: Flush
                late = late[commit_from:]
            self.client_writer.transport.abort()
            self.proxy.run_in_background(self._land(late))
        return True

    def _commit_from(self, messages: list[bytes]) -> int:
        """Return where the COMMIT begins among the messages of its pipeline; its Sync if there is no COMMIT."""
        for place, message in enumerate(messages):
            if message[:1] in (b"P", b"Q") and b"COMMIT" in message[:40].upper():
                return place
            if message[:1] == b"B" and self.statements.get(message[5:].split(b"\0")[1], b"").upper() == b"COMMIT":
                return place
        return len(messages) - 1

    def _write(self, data: bytes) -> None:
        assert self.server_writer is not None
        self.server_writer.write(data)

    async def _land(self, late: list[bytes]) -> None:
        """Deliver the messages that were held back, wait until the server has answered, and hang up."""
        assert self.server_writer is not None
        await asyncio.sleep(self.proxy.delay_s)
        await asyncio.to_thread(self.proxy.may_land.wait)
        try:
            self._write(b"".join(late))
            await self.server_writer.drain()
            self.server_writer.write(b"X\0\0\0\x04")  # Terminate, behind the COMMIT
            await self.server_writer.drain()
        except OSError:
            pass  # the server ended the session first
        await self.hung_up.wait()
        self._publish_lost_answer()
        self.server_writer.close()

    def _publish_lost_answer(self) -> None:
        self.proxy.lost_answers.append(bytes(self.lost))
        self.proxy.landed.set()

    async def _backward(self) -> None:
        """Pass messages from the server to the client, one by one, so that an answer can be dropped."""
        assert self.server_reader is not None and self.server_writer is not None
        try:
            while True:
                kind = b""
                async for part in self._parts(self.server_reader):
                    kind = kind or part[:1]
                    await self.proxy.wait_while_stalled(self)
                    if self.detached or (self.swallow_at and self.answers >= self.swallow_at - 1):
                        self.lost += part
                    elif not self.client_writer.is_closing():
                        self.client_writer.write(part)
                if kind == b"Z":
                    self.answers += 1
                    if self.swallow_at and self.answers >= self.swallow_at:
                        self._publish_lost_answer()
                        self.cut()
                        return
                if self.client_writer.transport.get_write_buffer_size() > 1_000_000:
                    await self.client_writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            self.server_writer.close()
            self.client_writer.close()
        finally:
            self.hung_up.set()
