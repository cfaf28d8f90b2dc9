"""The server of a process: one for each address, with the sources of all graphs that listen there, by path.

Several processes of one machine listen at the same port, and the system spreads the connections among them
(SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web

from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import WorkerSetup
from millpy.ingest.request_traffic import RequestTraffic
from millpy.sources.http.address import URL_VARIABLE, ListenAddress
from millpy.sources.http.answers import RETRY_S, RefusedRequestError
from millpy.sources.http.connections import BoundedServer, connections_max
from millpy.sources.http.endpoint import Endpoint
from millpy.sources.http.port_check import check_port, graph_mark
from millpy.sources.http.relay import PEER_VARIABLE, PeerRelay, peer_address
from millpy.sources.http.renewed_tls import RenewedTls
from millpy.sources.http.tokens import TOKENS_VARIABLE, TokenList

if TYPE_CHECKING:
    from millpy.sources.http.source import Http

log = logging.getLogger(__name__)

STARTS_S = 10.0
"""Seconds after it began to listen in which a worker may still add sources."""


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
        self._servers: list[BoundedServer] = []
        self._left: set[str] = set()
        self._clock = SystemClock()
        self._opened_at = self._clock.monotonic()

    async def open(self) -> None:
        """Listen. Raises ConfigError."""
        tls, (host, port, machine) = RenewedTls(self.address, self._clock).context, peer_address()
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

    async def _listen(self, host: str, port: int, most: int, tls: ssl.SSLContext | None, *, of_peer: bool) -> int:
        respond = partial(self._respond, of_peer=of_peer)
        server = BoundedServer(respond, most, self._mark)
        if not of_peer:  # metrics count clients, not other workers
            server.on_refusal, server.on_change = self._note_refusal, self._note_connections
        try:
            found = await server.listen(host, port, tls, shared=not of_peer)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host or '*'}:{port}: {error.strerror or error}",
                hint=f"set {PEER_VARIABLE if of_peer else URL_VARIABLE} to a free address",
            ) from None
        self._servers.append(server)
        return found

    async def _respond(self, request: web.BaseRequest, *, of_peer: bool) -> web.Response:
        endpoint = self.endpoints.get(request.path)
        if endpoint is None:
            return self._without_source(request.path).answer()
        return await endpoint.respond(request, of_peer=of_peer)

    def _without_source(self, path: str) -> RefusedRequestError:
        """Return why a path has no source; 404 only if it stays so, because a client then drops its records."""
        starts = self._clock.monotonic() - self._opened_at < STARTS_S
        if starts or path in self._left:
            why = "there is no source at this path " + ("yet" if starts else "any more: the worker ends")
            return RefusedRequestError(503, why, retry_after_s=RETRY_S, closes=True)
        return RefusedRequestError(404, "there is no source at this path")

    def remove(self, endpoint: Endpoint) -> None:
        """Accept no more requests to a source."""
        del self.endpoints[endpoint.source.path]
        self._left.add(endpoint.source.path)

    def _note_refusal(self, status: int, reason: str) -> None:
        """Count at each source what did not reach any; a client that is not at fault will come again."""
        for endpoint in self.endpoints.values():
            endpoint.count_answer(status, reason)
            if status >= 500:
                endpoint.note_refusal()

    def _note_connections(self, count: int) -> None:
        for endpoint in self.endpoints.values():
            endpoint.traffic.connections = count

    async def close(self) -> None:
        """Accept nothing more, wait for the last answers, and end all connections."""
        for server in self._servers:
            await server.stop_listening()
        await asyncio.gather(*(server.close() for server in self._servers))
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
            listener.remove(endpoint)
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
async def serving(source: Http, setup: WorkerSetup) -> AsyncIterator[RequestTraffic]:
    """Accept requests inside the block, also while this worker owns no partition. Raises ConfigError."""
    endpoint = await acquire(source, setup)
    if setup.addresses is not None:
        endpoint.setup = setup  # an injector may have come first, which does not know the other workers
    try:
        yield endpoint.traffic
    finally:
        await endpoint.release()
