"""Run the API with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from millpy.api.app import create_app
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import check_databases
from millpy.api.protocol import HEAD_S_MAX, BoundedProtocol
from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError

log = structlog.get_logger(__name__)
CONNECTIONS_MAX = 2_000
SPARE_FILES = 100
"""Files besides the connections of clients."""
HEAD_BYTES_MAX = 16_384
STOP_S_MAX = 5
KEPT_S = 5
BACKLOG = 512


def serve_api(
    configuration: ApiConfiguration,
    add_site: Callable[[FastAPI], None] | None = None,
    served: Callable[[str], None] | None = None,
) -> None:
    """Serve an API until SIGTERM or SIGINT.

    Args:
        configuration: the settings.
        add_site: adds the page; None for the API alone.
        served: called with the address, once clients can connect.

    Raises:
        ConfigError: the address is taken, or a file for TLS cannot be used.
        MillError: the database cannot be reached, is not migrated, or lacks rights.
    """
    check_databases(configuration)
    connections_max = _connections_max()
    listening = _bound(*configuration.address, connections_max)
    host, port = listening.getsockname()[:2]
    try:
        server = _ApiServer(_uvicorn_config(configuration, add_site, connections_max))
        if not server.config.loaded:
            server.config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        listening.close()
        raise ConfigError(
            f"cannot use the certificate: {error}", hint="correct MILLPY_API_CERTIFICATE and MILLPY_API_KEY"
        ) from None
    scheme = "https" if configuration.certificate else "http"
    if scheme == "http" and is_other_machine(host) and not configuration.proxies:
        log.warning(
            "other machines reach the API without encryption", hint="set MILLPY_API_CERTIFICATE and MILLPY_API_KEY"
        )
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("the API is served", url=f"{address}/v1/openapi.json")
    if served is not None:
        served(address)
    os.nice(configuration.nice)  # viewers wait rather than workers
    server.run(sockets=[listening])


class _ApiServer(uvicorn.Server):
    """Serves with a deadline for the handshake of TLS, which uvicorn cannot be given."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the app, then listen."""
        await super().startup(sockets=[])
        tls = self.config.ssl
        protocol = partial(
            BoundedProtocol, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        for listening in sockets or ():
            made = await asyncio.get_running_loop().create_server(
                protocol, sock=listening, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=HEAD_S_MAX if tls else None
            )
            self.servers.append(made)


class _ListeningSocket(socket.socket):
    """Accepts connections, and closes those beyond a limit at once. It counts those before their handshake, too."""

    def __init__(self, family: int, connections_max: int) -> None:
        super().__init__(family)
        self._connections_max = connections_max
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection for the event loop, which ignores a ConnectionAbortedError."""
        taken, address = super().accept()
        self._accepted.add(taken)
        if sum(one.fileno() >= 0 for one in self._accepted) > self._connections_max:
            taken.close()
            raise ConnectionAbortedError
        return taken, address


def _uvicorn_config(
    configuration: ApiConfiguration, add_site: Callable[[FastAPI], None] | None, connections_max: int
) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(configuration, add_site),
        http=BoundedProtocol,
        ws="none",
        loop="asyncio",  # uvloop accepts connections without `_ListeningSocket`
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=connections_max,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        timeout_keep_alive=KEPT_S,
        timeout_graceful_shutdown=STOP_S_MAX,
        ssl_certfile=configuration.certificate or None,
        ssl_keyfile=configuration.key or None,
    )


def _connections_max() -> int:
    """Raise the soft limit of files as far as needed and allowed; return how many connections fit into it."""
    needed = CONNECTIONS_MAX + SPARE_FILES
    soft, hard = (needed if limit == resource.RLIM_INFINITY else limit for limit in _files())
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, _files()[1]))
    return max(16, min(CONNECTIONS_MAX, soft - SPARE_FILES))


def _files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _bound(host: str, port: int, connections_max: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = _ListeningSocket(family, connections_max)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
            hint="set MILLPY_API to a free address",
        ) from None
    return listening
