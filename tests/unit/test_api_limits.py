"""The bound on the bodies of all requests together."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from millpy.api.limits import BODIES_BYTES_MAX, BODY_BYTES_MAX, RequestLimits

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
