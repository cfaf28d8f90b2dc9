"""Run the API with uvicorn until a signal ends it."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable

import structlog
import uvicorn
from fastapi import FastAPI

from millpy.api.app import create_app
from millpy.api.configuration import ApiConfiguration
from millpy.api.database import check_databases
from millpy.api.protocol import BoundedProtocol
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
    listening = _bound(*configuration.address)
    host, port = listening.getsockname()[:2]
    try:
        server = uvicorn.Server(_uvicorn_config(configuration, add_site))
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


def _uvicorn_config(configuration: ApiConfiguration, add_site: Callable[[FastAPI], None] | None) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(configuration, add_site),
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_connections_max(),
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


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
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
