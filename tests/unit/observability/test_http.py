"""The health port: slow or silent clients cost a bounded number of descriptors and do not keep others out."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from millpy.observability import http as web
from millpy.observability.health import HealthCheck
from millpy.observability.http import CONNECTIONS_MAX, address_of, application, listening

FLOOD = 300


@pytest.fixture
def port() -> Iterator[int]:
    well = HealthCheck(True, {})
    with listening(("127.0.0.1", 0), application(lambda: well, lambda: well, CollectorRegistry())) as port:
        yield port


def answer(port: int, path: str = "/live", host: str = "127.0.0.1") -> int:
    with closing(HTTPConnection(host, port, timeout=20)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def served(port: int) -> int:
    """How many connections the server has open: sockets of this process that end at its port."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            continue
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(line[1].endswith(f":{port:04X}") and line[9] in inodes and line[3] != "0A" for line in lines)


@pytest.mark.parametrize(("address", "host"), [("[::1]:0", "::1"), ("[::]:0", "::1"), ("[::]:0", "127.0.0.1")])
def test_an_ipv6_address_is_served(address: str, host: str) -> None:
    well = HealthCheck(True, {})
    with listening(address_of(address), application(lambda: well, lambda: well, CollectorRegistry())) as port:
        assert answer(port, host=host) == 200


@pytest.mark.parametrize("first", [b"", b"GET /live HTTP/1.1\r\nX-Slow: ", b"GET"])
def test_silent_connections_are_bounded_and_do_not_block_probes(port: int, first: bytes) -> None:
    with ExitStack() as stack:
        for number in range(FLOOD):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            client.sendall(first)
            if number % 50 == 0:
                assert answer(port) == 200

        assert answer(port) == 200
        assert served(port) <= 2 * CONNECTIONS_MAX
        assert threading.active_count() <= 2 * CONNECTIONS_MAX + 10
    assert answer(port) == 200


@pytest.mark.parametrize(
    "head",
    [b"GET /live HTTP/1.1\r\n" + b"X-Long: %b\r\n" % (b"x" * 60_000) * 90, b"GET /%b" % (b"x" * 60_000),
     b"GET /live HTTP/1.1\r\n" + b"X: y\r\n" * 50_000],
    ids=["long", "path", "many"],
)  # fmt: skip
def test_long_request_is_read_only_in_part(head: bytes, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        sent = 0
        client.settimeout(20)
        with suppress(ConnectionResetError, BrokenPipeError):
            while sent < len(head):
                sent += client.send(head[sent : sent + 10_000])
            client.shutdown(socket.SHUT_WR)
            assert client.recv(12)[9:10] in (b"", b"4")
    assert answer(port) == 200


@pytest.mark.parametrize("drop", [b"", b"x"])
def test_a_request_that_is_sent_slowly_ends_at_its_deadline(
    drop: bytes, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(web, "REQUEST_S_MAX", 1.0)
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        client.sendall(b"GET /live HTTP/1.1\r\nX-Slow: ")
        with suppress(ConnectionResetError, BrokenPipeError):  # a byte may meet the end
            while not select.select([client], [], [], 0.05)[0]:
                client.sendall(drop)
            assert client.recv(1) == b""

    assert 0.5 < time.monotonic() - started


def test_a_client_that_does_not_read_its_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "REQUEST_S_MAX", 1.0)
    ended = threading.Event()

    def endless(_environment: object, start: object) -> Iterator[bytes]:
        start("200 OK", [("Content-Type", "text/plain")])  # type: ignore[operator]
        try:
            while True:
                yield b"x" * 1_000_000
        finally:
            ended.set()

    with listening(("127.0.0.1", 0), endless) as port, socket.create_connection(("127.0.0.1", port), 20) as client:  # type: ignore[arg-type]
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")

        assert ended.wait(60)


def test_greedy_client_does_not_evict_another_one(port: int) -> None:
    with ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0)))
        slow.sendall(b"GET /live HTTP/1.0\r\n")
        for _ in range(FLOOD):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))

        slow.sendall(b"\r\n")

        assert slow.recv(100).startswith(b"HTTP/1.0 200 OK")
