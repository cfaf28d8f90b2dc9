"""The server of a process: one for each address, with the sources of all graphs that listen there, by path.

Several processes of one machine listen at the same port, and the system spreads the connections among them
(SO_REUSEPORT). aiohttp parses requests, and bounds their heads; this module bounds connections.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError

from millpy.errors import ConfigError
from millpy.ingest.protocol import WorkerSetup
from millpy.sources.http.address import URL_VARIABLE, ListenAddress
from millpy.sources.http.answers import PROBLEM_TYPE, RefusedRequestError
from millpy.sources.http.endpoint import Endpoint
from millpy.sources.http.port_check import GRAPH_HEADER, check_port, graph_mark
from millpy.sources.http.relay import PEER_VARIABLE, PeerRelay, peer_address
from millpy.sources.http.tokens import TOKENS_VARIABLE, TokenList

if TYPE_CHECKING:
    from millpy.sources.http.source import Http

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 10_000
SPARE_FILES = 200
"""Files that a worker needs beside its connections to clients."""
IDLE_S = 30.0
"""Seconds until a connection ends on which no request is complete; also the time that a client has for its head."""
LINGER_S = 2.0
"""Seconds for which a client may still send a body that was refused, so that it reads the answer."""
HANDSHAKE_S = 10.0
LEAVE_S = 5.0
"""Seconds for which the last answers may take when a worker ends."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


def connections_max() -> int:
    """Return how many connections fit beside the other files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else max(16, min(CONNECTIONS_MAX, soft - SPARE_FILES))


class _RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Logs our own faults; malformed requests only at level debug, as anybody can send them."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **more: Any) -> None:
        """Log an error of a handler."""
        level = logging.DEBUG if isinstance(exc_info, HttpProcessingError) else logging.ERROR
        self.log(level, msg, *args, exc_info=exc_info, **more)


class BoundedServer(web.Server):
    """A server with a bounded number of connections.

    Beyond the bound, the oldest connection of the address with the most connections ends, if it has no request;
    otherwise the new one is refused.
    """

    def __init__(self, handler: _Handler, most: int, mark: str) -> None:
        super().__init__(
            self._handle,
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            max_headers=64,
            auto_decompress=False,
            access_log=None,
            logger=_RequestLog(log, {}),
        )
        self._handler = handler
        self._most = most
        self._mark = mark
        self._hosts: dict[Any, str] = {}
        self._busy: set[Any] = set()

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        connection = request.protocol
        self._busy.add(connection)
        try:
            answer = await self._handler(request)
        finally:
            self._busy.discard(connection)
        answer.headers["Server"] = "millpy"  # without the versions of libraries
        if answer.status in (404, 405):
            answer.headers[GRAPH_HEADER] = self._mark
        return answer

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Count a connection, and make room for it."""
        super().connection_made(handler, transport)
        if len(self._hosts) >= self._most and not self._make_room():
            transport.write(_FULL)
            transport.close()
            return
        peer = transport.get_extra_info("peername")
        self._hosts[handler] = str(peer[0]) if peer else ""

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._hosts.pop(handler, None)
        super().connection_lost(handler, exc)

    def _make_room(self) -> bool:
        """End a connection without a request, and tell whether there was one."""
        ((most, _),) = Counter(self._hosts.values()).most_common(1)
        for handler, host in self._hosts.items():
            if host == most and handler not in self._busy:
                del self._hosts[handler]
                handler.force_close()
                return True
        return False


class Listener:
    """Accepts requests at one address, for several sources.

    Args:
        address: where it listens.
        mark: tells the graph.

    Attributes:
        endpoints: path -> the source there.
        port: the port at which it listens.
    """

    def __init__(self, address: ListenAddress, mark: str) -> None:
        self.address = address
        self._mark = mark
        self.endpoints: dict[str, Endpoint] = {}
        self.port = 0
        self.peer_address = ""
        self.session: aiohttp.ClientSession | None = None
        self._servers: list[tuple[asyncio.Server, BoundedServer]] = []

    async def open(self) -> None:
        """Listen. Raises ConfigError."""
        tls, (host, port, machine) = self.address.tls_context(), peer_address()
        most = connections_max()
        if self.address.port:
            await check_port(self.address, self._mark)
        try:
            self.port = await self._listen(self.address.host, self.address.port, most, tls, of_peer=False)
            peer_port = await self._listen(host, port, most, None, of_peer=True)
        except BaseException:
            await self.close()
            raise
        written = f"[{host}]" if ":" in host else host
        self.peer_address = f"{machine} {written}:{peer_port}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )
        log.info("http: listening at %s", self.address, extra={"port": self.port})

    async def _listen(self, host: str, port: int, most: int, tls: Any, *, of_peer: bool) -> int:
        server = BoundedServer(partial(self._respond, of_peer=of_peer), most, self._mark)
        try:
            listening = await asyncio.get_running_loop().create_server(
                server,
                host or None,
                port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
                backlog=1_024,
                reuse_port=True if not of_peer and hasattr(socket, "SO_REUSEPORT") else None,
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host or '*'}:{port}: {error.strerror or error}",
                hint=f"set {PEER_VARIABLE if of_peer else URL_VARIABLE} to a free address",
            ) from None
        self._servers.append((listening, server))
        found: int = listening.sockets[0].getsockname()[1]
        return found

    async def _respond(self, request: web.BaseRequest, *, of_peer: bool) -> web.Response:
        endpoint = self.endpoints.get(request.path)
        if endpoint is None:
            error = RefusedRequestError(404, "there is no source at this path")
            return web.Response(status=404, body=error.body(), content_type=PROBLEM_TYPE)
        return await endpoint.respond(request, of_peer=of_peer)

    async def close(self) -> None:
        """Accept nothing more, wait for the last answers, and end all connections."""
        for listening, server in self._servers:
            listening.close()
            server.pre_shutdown()
        for _, server in self._servers:
            await server.shutdown(LEAVE_S)
        if self.session is not None:
            await self.session.close()
        self._servers.clear()


class _Listeners:
    """The listeners of one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._open: dict[ListenAddress, Listener] = {}

    async def acquire(self, source: Http, setup: WorkerSetup, tokens: TokenList) -> Endpoint:
        """Return the endpoint of a source, with one more user. Raises ConfigError."""
        address = source.address()
        async with self._lock:
            listener = self._open.get(address)
            if listener is None:
                listener = Listener(address, graph_mark(setup.graph, setup.secret))
                await listener.open()
                self._open[address] = listener
            endpoint = listener.endpoints.get(source.path)
            if endpoint is None:
                assert listener.session is not None
                relay = PeerRelay(source, setup.clock, setup.secret, listener.session, listener.peer_address)
                endpoint = Endpoint(source, setup, tokens, relay, partial(self.release, listener), listener.port)
                listener.endpoints[source.path] = endpoint
            elif (endpoint.setup.graph, endpoint.setup.stream) != (setup.graph, setup.stream):
                raise ConfigError(
                    f"sources {endpoint.setup.stream!r} and {setup.stream!r} both accept {source.path!r} at {address}",
                    hint="give each a path of its own",
                )
            endpoint.users += 1
            return endpoint

    async def release(self, listener: Listener, endpoint: Endpoint) -> None:
        """Let go of an endpoint; end what has no user left."""
        async with self._lock:
            endpoint.users -= 1
            if endpoint.users:
                return
            del listener.endpoints[endpoint.source.path]
            if not listener.endpoints:
                del self._open[listener.address]
                await listener.close()


_LISTENERS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Listeners] = WeakKeyDictionary()


def check_access(source: Http, tokens: TokenList) -> None:
    """Refuse to listen for everybody without knowing who sends. Raises ConfigError."""
    address = source.address()
    if address.is_open and tokens.is_empty and address.ca is None and not source.anonymous:
        raise ConfigError(
            f"{address} is open to other machines, and requests need no token",
            hint=f"set {TOKENS_VARIABLE} (docs/http.md), or Http(…, anonymous=True) behind a proxy that checks clients",
        )


async def acquire(source: Http, setup: WorkerSetup) -> Endpoint:
    """Return the endpoint of a source in this process, with one more user, which calls its `release`.

    Raises:
        ConfigError: the process cannot listen, or the tokens cannot be read.
    """
    tokens = TokenList(setup.clock)
    check_access(source, tokens)
    listeners = _LISTENERS.setdefault(asyncio.get_running_loop(), _Listeners())
    return await listeners.acquire(source, setup, tokens)


@asynccontextmanager
async def serving(source: Http, setup: WorkerSetup) -> AsyncIterator[Endpoint]:
    """Accept requests inside the block, also while this worker owns no partition. Raises ConfigError."""
    endpoint = await acquire(source, setup)
    if setup.addresses is not None:
        endpoint.setup = setup  # an injector may have come first, which does not know the other workers
    try:
        yield endpoint
    finally:
        await endpoint.release()
