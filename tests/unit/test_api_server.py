"""How the API listens: with TLS, too, connections that never come to a request are bounded in number and time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest
import trustme
import uvicorn
from fastapi import FastAPI

from millpy.api import server as served
from millpy.api.configuration import ApiConfiguration
from millpy.api.protocol import BoundedProtocol

CONNECTIONS_MAX = 5


@contextmanager
def connected(tmp_path: Path, clients: int) -> Iterator[list[socket.socket]]:
    """Serve an app with TLS; yield clients that have sent nothing."""
    trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(tmp_path / "tls.pem")
    config = uvicorn.Config(
        FastAPI(), http=BoundedProtocol, ssl_certfile=str(tmp_path / "tls.pem"), ws="none", log_config=None
    )
    listening = served._bound("127.0.0.1", 0, CONNECTIONS_MAX)
    server, address = served._ApiServer(config), listening.getsockname()
    running = threading.Thread(target=server.run, args=([listening],))
    running.start()
    try:
        with ExitStack() as stack:
            yield [stack.enter_context(socket.create_connection(address, 20)) for _ in range(clients)]
    finally:
        server.should_exit = True
        running.join()


def ended(client: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        return client.recv(1) == b""
    return True


def test_connections_beyond_the_limit_are_closed_before_their_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "HEAD_S_MAX", 60.0)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connected(tmp_path, 3 * CONNECTIONS_MAX) as clients:
        assert all(ended(one) for one in clients[CONNECTIONS_MAX:])
        with context.wrap_socket(clients[0]) as first:
            first.sendall(b"GET / HTTP/1.0\r\n\r\n")

            assert first.recv(12) == b"HTTP/1.1 404"


def test_connections_without_a_handshake_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "HEAD_S_MAX", 0.2)
    with connected(tmp_path, CONNECTIONS_MAX) as clients:
        assert all(ended(one) for one in clients)


def test_connections_are_counted_where_uvloop_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))  # it accepts in C, without our socket
    own = ApiConfiguration(address=("127.0.0.1", 0), reader_url="", operator_url="", owner_url="")

    made = served._uvicorn_config(own, None, CONNECTIONS_MAX).get_loop_factory()

    assert made is asyncio.SelectorEventLoop
