"""The connections of one address: their number, which of them end to make room, and the answer to what is not HTTP.

A connection counts from its accept on, also while it shakes hands for TLS. aiohttp parses requests, bounds their heads,
and holds back what a client sends ahead of its answers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from millpy.clock import SystemClock
from millpy.config.addresses import client_of
from millpy.sources.http.answers import RETRY_S, RefusedRequestError
from millpy.sources.http.port_check import GRAPH_HEADER

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 10_000
SPARE_FILES = 200
"""Files that a worker needs beside its connections to clients."""
IDLE_S = 30.0
"""Seconds until a connection ends on which no request is complete; also the time that a client has for its head."""
LINGER_S = 2.0
"""Seconds for which a client may still send what was refused, so that it reads the answer."""
LINGER_BYTES_MAX = 1_000_000
"""Bytes of a request that is not HTTP, or has too long a head, that a client may still send."""
HANDSHAKE_S = 10.0
LEAVE_S = 2.0
"""Seconds for which the last answers may take when a worker ends."""
ACCEPT_AGAIN_S = 0.5
"""Seconds without accepting connections after the system has refused one, for example for want of files."""
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_REASON_CHARACTERS_MAX = 200
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


def connections_max() -> int:
    """Return how many connections fit beside the other files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else max(16, min(CONNECTIONS_MAX, soft - SPARE_FILES))


class Phase(Enum):
    """What a connection does; the later ones end last."""

    IDLE = 0
    READING = 1
    WAITING = 2


class Connection(web.RequestHandler):
    """One connection.

    Attributes:
        host: its client: an address, or a network of IPv6.
        phase: whether it has a request, and has read its body.
        opening: the task that accepts it; None afterwards.
        request: the one that is answered.
        has_ended: whether the client has sent all that it will send; it may still wait for answers.
    """

    def __init__(self, server: BoundedServer, host: str, **settings: Any) -> None:
        super().__init__(server, **settings)
        self._server = server
        self.host = host
        self.phase = Phase.IDLE
        self.opening: asyncio.Task[None] | None = None
        self.request: web.BaseRequest | None = None
        self.has_ended = False
        self._rest: StreamReader | None = None
        self._drained: asyncio.Future[None] | None = None
        self._drained_bytes = 0

    @property
    def has_more(self) -> bool:
        """Whether the client has sent further requests."""
        return bool(self._messages)

    def begin(self, request: web.BaseRequest) -> None:
        """Note the request that is answered."""
        self.phase, self.request, self._rest = Phase.READING, request, None
        self._cut_off()

    def eof_received(self) -> bool | None:  # type: ignore[override] # asyncio reads what it returns
        """Keep a connection on which a client that sends nothing more waits for an answer; TLS has no such state."""
        self.has_ended = True
        self._server.note_end(self)
        self._cut_off()
        self._end_rest()
        is_idle = self._waiter is not None and not self._waiter.done()
        if self._drained is not None or is_idle or self.ssl_context is not None:
            self._end_draining()
            return None
        return True

    def _cut_off(self) -> None:
        """Let the reader of a body fail that will not be complete."""
        if self.request is None or self.request.content.is_eof():
            return
        if self.has_ended:
            self.request.content.set_exception(web.RequestPayloadError("the client has stopped sending"))
        elif self.has_more:  # what the parser found behind a part of a body is an error
            self.request.content.set_exception(web.RequestPayloadError("it does not have the form of its head"))

    def data_received(self, data: bytes) -> None:
        """Parse what a client sends; after a head or body that was refused, drop a bounded amount of it."""
        if self._drained is None:
            super().data_received(data)
            self._cut_off()
            return
        self._drained_bytes += len(data)
        if self._drained_bytes > LINGER_BYTES_MAX:
            self._end_draining()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End what waits for the client."""
        self._end_draining()
        self._end_rest()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer. The one to a malformed head or body waits until the client has read it.

        Closing a socket with unread data resets the connection, and the client may lose the answer. aiohttp reads the
        rest of another body that was answered early, but fails if it will not be complete.
        """
        found = await super().finish_response(request, resp, start_time)
        self._rest = None if request.content.is_eof() else request.content
        is_broken = self._rest is not None and self._rest.exception() is not None
        if is_broken:
            self._drained = asyncio.get_running_loop().create_future()
        if self._drained is not None and self.transport is not None and not self.has_ended:
            if self.transport.can_write_eof():
                with suppress(OSError):  # the client has gone; asyncio has not told yet
                    self.transport.write_eof()
            self.transport.resume_reading()
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._drained
        if is_broken or self.has_ended or self.transport is None:
            self._end_rest()
        return found

    def _end_rest(self) -> None:
        """End a connection whose last request has its answer, and whose body will not be complete."""
        rest, self._rest = self._rest, None
        if rest is not None and not rest.is_eof():
            self.force_close()
            rest.feed_eof()

    def _end_draining(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is not HTTP as other errors are answered."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer is sent already")
        if status >= 500:
            log.error("cannot answer a request", exc_info=exc)
            why = "the worker has failed; its log says why"
            error = RefusedRequestError(500, why, retry_after_s=RETRY_S, closes=True)
        else:
            log.debug("malformed request of %s: %s", self.host, message)
            why = (message or "").partition("\n")[0].rstrip(": ")[:_REASON_CHARACTERS_MAX]
            is_long = isinstance(exc, LineTooLong) or (isinstance(exc, BadHttpMessage) and "Too many headers" in why)
            detail = f"the head is too long: {why}" if is_long else f"the request is malformed: {why}"
            error = RefusedRequestError(431 if is_long else 400, detail, closes=True, reason="malformed")
            self._drained = asyncio.get_running_loop().create_future()
        self._server.on_refusal(error.status, error.reason)
        return self._server.signed(error.answer())


class BoundedServer(web.Server):
    """A server with a bounded number of connections.

    Beyond the bound, the oldest connection without a request ends of the client that has the most connections; else the
    oldest one, first of that client, whose client sends nothing more, and has mostly gone; else the oldest one of that
    client that is still sending a body, unless the new one is of the same client. Otherwise the new one is refused.

    Args:
        handler: answers requests.
        most: the bound.
        mark: tells the graph.

    Attributes:
        on_refusal: called with status and reason of a connection that is refused, and of a request that is not HTTP.
        on_change: called with the number of connections.
    """

    def __init__(self, handler: _Handler, most: int, mark: str) -> None:
        super().__init__(self._handle)
        self._answer = handler
        self._most = most
        self._mark = mark
        self._by_host: dict[str, dict[Connection, None]] = {}
        self._ended: dict[Connection, None] = {}
        self._open = 0
        self._accepting: list[tuple[socket.socket, asyncio.Task[None]]] = []
        self.on_refusal: Callable[[int, str], None] = lambda _status, _reason: None
        self.on_change: Callable[[int], None] = lambda _count: None

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None, *, shared: bool) -> int:
        """Accept connections; return the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        shared = shared and hasattr(socket, "SO_REUSEPORT")
        failed: OSError | None = None
        for family, address in sorted({(family, address) for family, _, _, _, address in found}):
            try:
                listening = socket.create_server(address, family=family, backlog=1_024, reuse_port=shared)
            except OSError as error:
                failed = error
                if error.errno in _NO_SUCH_ADDRESS:  # a name may also have addresses that this machine lacks
                    continue
                break
            listening.setblocking(False)
            self._accepting.append((listening, loop.create_task(self._accept(listening, tls))))
        if failed is not None and (failed.errno not in _NO_SUCH_ADDRESS or not self._accepting):
            await self.stop_listening()
            raise failed
        chosen: int = self._accepting[0][0].getsockname()[1]
        return chosen

    async def stop_listening(self) -> None:
        """Accept no more connections."""
        accepting, self._accepting = self._accepting, []
        for _, task in accepting:
            task.cancel()
        # The event loop must forget a socket before it is closed, because another file may get its number at once.
        await asyncio.gather(*(task for _, task in accepting), return_exceptions=True)
        for listening, _ in accepting:
            listening.close()

    async def close(self) -> None:
        """Wait for the last answers, and end all connections."""
        await self.stop_listening()
        for connection in [x for connections in self._by_host.values() for x in connections]:
            if connection.opening is not None:
                connection.opening.cancel()
        self.pre_shutdown()
        await self.shutdown(LEAVE_S)

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # or a flood of connections would leave no time for anything else
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await SystemClock().sleep(ACCEPT_AGAIN_S)
                continue
            host = client_of(str(address[0]))
            if self._open >= self._most and not self._make_room(host):
                if tls is None:
                    with suppress(OSError):
                        accepted.send(_FULL)
                accepted.close()
                self.on_refusal(503, "connections")
                continue
            connection = Connection(
                self, host, loop=loop, keepalive_timeout=IDLE_S, lingering_time=LINGER_S, max_headers=64,
                auto_decompress=False, access_log=None, logger=log,
            )  # fmt: skip
            self._by_host.setdefault(host, {})[connection] = None
            self._count(1)
            connection.opening = loop.create_task(self._connect(connection, accepted, tls))

    async def _connect(self, connection: Connection, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        timeout_s = None if tls is None else HANDSHAKE_S
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            log.debug("a client did not connect: %s", error)
        finally:
            connection.opening = None
            if connection.transport is None:  # it has ended before, or while it shook hands
                self._forget(connection)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._forget(handler)
        super().connection_lost(handler, exc)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin(request)
        try:
            answer = await self._answer(request)
        finally:
            connection.phase, connection.request = Phase.IDLE, None
        if connection.has_ended and not connection.has_more:
            answer.force_close()
        return self.signed(answer)

    def signed(self, answer: web.Response) -> web.Response:
        """Add who answers: the name without versions, and the graph, so that those of another keep away."""
        answer.headers["Server"] = "millpy"
        if answer.status >= 400:
            answer.headers[GRAPH_HEADER] = self._mark
        return answer

    def note_end(self, connection: Connection) -> None:
        """Note that the client of a connection sends nothing more."""
        if connection in self._by_host.get(connection.host, {}):
            self._ended[connection] = None

    def _make_room(self, host: str) -> bool:
        """End a connection for a new one of this host, and tell whether there was one."""
        connection = self._to_end(host)
        if connection is None:
            return False
        self._forget(connection)
        if connection.opening is not None:
            connection.opening.cancel()
        connection.force_close()
        return True

    def _to_end(self, host: str) -> Connection | None:
        """Return the connection that ends for a new one of this host; None if there is none.

        A client that has gone looks like one that waits for its last answer. Its records are committed all the same.
        """
        of_host = max(self._by_host, key=lambda host: len(self._by_host[host]))
        most = self._by_host[of_host]
        idle = next((x for x in most if x.phase is Phase.IDLE), None)
        if idle is not None:
            return idle
        if self._ended:
            return next((x for x in self._ended if x.host == of_host), next(iter(self._ended)))
        return next((x for x in most if x.phase is Phase.READING), None) if of_host != host else None

    def _forget(self, connection: Connection) -> None:
        self._ended.pop(connection, None)
        of_host = self._by_host.get(connection.host, {})
        if connection in of_host:
            del of_host[connection]
            if not of_host:
                del self._by_host[connection.host]
            self._count(-1)

    def _count(self, more: int) -> None:
        self._open += more
        self.on_change(self._open)


def await_commit(request: web.BaseRequest) -> None:
    """Note that the body of a request has been read, so that its connection does not end to make room."""
    if isinstance(request.protocol, Connection):
        request.protocol.phase = Phase.WAITING
