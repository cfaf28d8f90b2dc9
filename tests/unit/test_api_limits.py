"""What the API bounds and believes: bodies of all requests together, failures of an address, proxies, bearers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request
from starlette.types import Message, Receive, Scope, Send

from millpy.api.authentication import Gate, bearer_of
from millpy.api.configuration import ApiConfiguration, networks
from millpy.api.database import Databases
from millpy.api.failures import FAILURES_MAX, FailureLimit
from millpy.api.limits import BODIES_BYTES_MAX, BODY_BYTES_MAX, RequestLimits
from millpy.clock import SystemClock

FITTING = BODIES_BYTES_MAX // BODY_BYTES_MAX


class SlowApp:
    """Answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.large = 0
        self.filled = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.large += 1
        if self.large == FITTING:
            self.filled.set()
        if scope["method"] == "POST":
            await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def status(app: RequestLimits, method: str, body: bytes = b"", reads: asyncio.Event | None = None) -> int:
    """The status, for a client that does not read until it does."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)
        if reads is not None:
            await reads.wait()

    scope: dict[str, Any] = {"type": "http", "method": method, "path": "/", "headers": []}
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def test_requests_without_a_body_are_served_while_large_ones_fill_the_memory() -> None:
    inner = SlowApp()
    app = RequestLimits(inner, encrypted=False)
    large = [asyncio.create_task(status(app, "POST", b"x" * BODY_BYTES_MAX)) for _ in range(FITTING)]
    await inner.filled.wait()
    reads = asyncio.Event()
    refused = asyncio.create_task(status(app, "POST", b"x", reads))
    await asyncio.sleep(0)  # its answer waits, and so its body counts

    assert await status(app, "GET") == 200
    held = asyncio.create_task(status(app, "POST"))
    reads.set()
    assert await refused == 503
    inner.may_answer.set()
    assert set(await asyncio.gather(*large, held)) == {200}
    assert await status(app, "POST", b"x") == 200


async def asked(headers: list[tuple[bytes, bytes]], parts: list[bytes]) -> tuple[int, int]:
    """The status of a request with a body in parts, and how many of these were read."""
    sent: list[Message] = []
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    async def inner(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    await RequestLimits(inner, encrypted=False)(scope, receive, send)
    return int(sent[0]["status"]), len(parts) - len(left)


async def test_a_body_of_unknown_length_is_bounded() -> None:
    part = b"x" * (BODY_BYTES_MAX // 4)
    chunked = [(b"transfer-encoding", b"chunked")]

    assert await asked(chunked, [part] * 4) == (200, 4)
    assert await asked(chunked, [part] * 100) == (413, 5)


async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    said = [(b"content-length", str(BODY_BYTES_MAX + 1).encode())]

    assert await asked(said, [b"x"] * 3) == (413, 0)


def test_only_a_proxy_says_for_which_client_and_how_it_asks() -> None:
    own = ApiConfiguration(
        address=("", 0), reader_url="", operator_url="", owner_url="", proxies=networks("10.0.0.5")
    )  # fmt: skip
    gate = Gate(own, cast("Databases", SimpleNamespace(authenticating=None)), SystemClock())

    def request(peer: str) -> Request:
        headers = [(b"x-forwarded-for", b"203.0.113.9"), (b"x-forwarded-proto", b"https")]
        server = {"type": "http", "scheme": "http", "path": "/", "query_string": b"", "server": ("127.0.0.1", 80)}
        return Request({**server, "client": (peer, 1), "headers": headers})

    found = [(gate.address_of(one), gate.is_encrypted(one)) for one in map(request, ("10.0.0.5", "10.0.0.6"))]

    assert found == [("203.0.113.9", True), ("10.0.0.6", False)]


def test_an_address_that_is_mapped_to_ipv6_is_the_same_client_and_proxy() -> None:
    failures = FailureLimit(SystemClock())
    for number in range(FAILURES_MAX):
        failures.count(f"::ffff:198.51.100.{number}")
    urls = {"reader_url": "", "operator_url": "", "owner_url": ""}
    trusting = [
        ApiConfiguration(address=("", 0), **urls, proxies=networks(text)) for text in ("10.0.0.0/8", "::ffff:10.0.0.5")
    ]

    assert failures.wait_s("::ffff:198.51.100.99") == 0
    for _ in range(FAILURES_MAX):
        failures.count("::ffff:203.0.113.7")
    assert failures.wait_s("203.0.113.7") > 0
    assert [one.trusts("::ffff:10.0.0.5") for one in trusting] == [True, True]
    assert [one.trusts("10.0.0.5") for one in trusting] == [True, True]
    assert [one.trusts("::ffff:192.0.2.1") for one in trusting] == [False, False]


@pytest.mark.parametrize(
    ("header", "token"), [("Bearer a", "a"), ("bearer  a", "a"), ("Basic dXNlcjpw", None), ("Bearer", ""), ("", None)]
)
def test_only_a_bearer_is_a_token(header: str, token: str | None) -> None:
    request = Request({"type": "http", "headers": [(b"authorization", header.encode())]})

    assert bearer_of(request) == token
