"""Serve health and metrics over HTTP from separate threads, which answer even when the worker does not.

/live      200, or 503 when the process should be restarted
/ready     200, or 503 while the worker can do no work; the JSON says why
/metrics   metrics for Prometheus

Beyond CONNECTIONS_MAX connections, the client with the most of them loses its oldest one. Every request has a deadline,
so a slow or silent client does not keep others out. At most REQUEST_BYTES_MAX of a request are read.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from millpy.clock import SystemClock
from millpy.config.addresses import client_of
from millpy.errors import ConfigError
from millpy.observability.health import HealthCheck

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)
PORT_MAX = 65_535
CONNECTIONS_MAX = 32
REQUEST_S_MAX = 10.0
REQUEST_BYTES_MAX = 16_384


def address_of(text: str, setting: str = "MILLPY_HTTP") -> tuple[str, int]:
    """Read "host:port"; an empty host listens on every address. An error names the setting.

    Raises:
        ConfigError: the text is not such an address.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"{setting}: {text!r} is not an address", hint="give host:port, for example 0.0.0.0:8080")
    return host.strip("[]"), int(port)


def application(
    live: Callable[[], HealthCheck], ready: Callable[[], HealthCheck], registry: CollectorRegistry
) -> WSGIApplication:
    """Return the application of the three pages."""
    metrics = make_wsgi_app(registry)
    probes = {"/live": live, "/ready": ready}

    def answer(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == "/metrics":
            return metrics(environment, start)  # type: ignore[no-any-return]
        probe = probes.get(path)
        if probe is None:
            start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"/live, /ready and /metrics are here\n"]
        verdict = probe()
        start(
            "200 OK" if verdict.well else "503 Service Unavailable",
            [("Content-Type", "application/json"), ("Cache-Control", "no-store")],
        )
        return [json.dumps({path[1:]: verdict.well, **verdict.detail}).encode() + b"\n"]

    return answer


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection: its client, its start, and whether the server has ended it."""

    client: str
    since: float
    ended: bool = False


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], *more: Any) -> None:
        self._clock = SystemClock()
        self._lock = Lock()
        self._clients: dict[socket.socket, _Peer] = {}
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, *more)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Make room for a connection; refuse it while too many threads of ended connections still run."""
        with self._lock:
            if len(self._clients) >= 2 * CONNECTIONS_MAX:
                return False
            live = {taken: peer for taken, peer in self._clients.items() if not peer.ended}
            if len(live) >= CONNECTIONS_MAX:
                ((most, _),) = Counter(peer.client for peer in live.values()).most_common(1)
                self._end(next(taken for taken, peer in live.items() if peer.client == most))
            self._clients[request] = _Peer(client_of(str(client_address[0])), self._clock.monotonic())
        return True

    def service_actions(self) -> None:
        """End requests that take too long; the server calls this twice a second."""
        due = self._clock.monotonic() - REQUEST_S_MAX
        with self._lock:
            for taken, client in self._clients.items():
                if client.since <= due and not client.ended:
                    self._end(taken)

    def _end(self, taken: socket.socket) -> None:
        """Wake the thread that reads or writes; it closes the connection."""
        self._clients[taken].ended = True
        with suppress(OSError):  # the client has closed it first
            taken.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has ended, and forget it."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Bind without looking up this machine's name, as the library does, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a request failed", exc_info=True)


class _BoundedSocket(RawIOBase):
    """The bytes of a connection. Reading more than REQUEST_BYTES_MAX raises ConnectionAbortedError."""

    def __init__(self, taken: socket.socket) -> None:
        self._taken = taken
        self._left = REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise ConnectionAbortedError("the request is too long")
        count = self._taken.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


class _Handler(WSGIRequestHandler):
    """A request handler that logs at level debug, because probes are frequent."""

    def setup(self) -> None:
        """Read through `_BoundedSocket`, because the library would read up to 6.5 MB of a request's head."""
        super().setup()
        self.rfile.close()
        self.rfile = BufferedReader(_BoundedSocket(self.connection))

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s: " + format, self.client_address[0], *args)


@contextmanager
def listening(address: tuple[str, int], app: WSGIApplication) -> Iterator[int]:
    """Serve inside the block; yield the port, which the system chooses if `address` has port 0.

    Raises:
        ConfigError: the server cannot listen on the address.
    """
    host, port = address
    try:
        server = make_server(host, port, app, server_class=_Server, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
            hint="set MILLPY_HTTP to a free address",
        ) from None
    with server:
        thread = Thread(target=server.serve_forever, name="http", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
