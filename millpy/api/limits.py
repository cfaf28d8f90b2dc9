"""What every request and answer of the API has: a bounded body, and headers that keep browsers safe."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millpy.api.problems import ProblemError, answer

BODY_BYTES_MAX = 2_000_000
BODY_S_MAX = 10.0
WITHOUT_BODY = ("GET", "HEAD")
"""Their answers may be streams, which last: a body would count as long."""
BODIES_BYTES_MAX = 64_000_000
"""Bytes of all bodies that are being read or served."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
HSTS = "max-age=31536000"


class _BodyError(Exception):
    """The body of a request is too long, or too slow."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.problem = ProblemError(status, detail, headers={"Connection": "close"})


class RequestLimits:
    """An app around an app: reads its bodies within bounds, and adds the headers.

    Args:
        app: the app.
        encrypted: whether it is served by TLS.
    """

    def __init__(self, app: ASGIApp, *, encrypted: bool) -> None:
        self._app = app
        self._bytes = 0
        headers = {**HEADERS, "Strict-Transport-Security": HSTS} if encrypted else HEADERS
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._headers if pair[0] not in present)]
            await send(message)

        body = bytearray()
        try:
            if await self._read(scope, receive, body):
                await self._app(scope, _replay(bytes(body), receive), sent)
        except _BodyError as error:
            await answer(error.problem)(scope, receive, sent)
        finally:
            self._bytes -= len(body)

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Read the body; return whether the client is still there."""
        named = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        coded = any(name == b"transfer-encoding" for name, _ in scope["headers"])
        if scope["method"] in WITHOUT_BODY and (coded or named.strip(b"0")):
            raise _BodyError(HTTPStatus.BAD_REQUEST, f"{scope['method']} has no body")
        if named.isdigit() and int(named) > BODY_BYTES_MAX:
            raise _too_long()
        try:
            async with asyncio.timeout(BODY_S_MAX):
                while True:
                    message: Any = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part = message.get("body", b"")
                    body += part
                    self._bytes += len(part)
                    if len(body) > BODY_BYTES_MAX:
                        raise _too_long()
                    if part and self._bytes > BODIES_BYTES_MAX:
                        raise _BodyError(HTTPStatus.SERVICE_UNAVAILABLE, "too many large requests at once")
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise _BodyError(HTTPStatus.REQUEST_TIMEOUT, f"the body took longer than {BODY_S_MAX:g} s") from None


def _too_long() -> _BodyError:
    return _BodyError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {BODY_BYTES_MAX:,} bytes")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that gives the body, and then what else comes."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
