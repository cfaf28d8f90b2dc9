"""The control of the API's benchmark: a bare uvicorn app that answers every request with the same bytes.

    python -m benchmarks.constant_api

It prints its address. Beside W2, its viewers cost what clients, HTTP and the streams cost, without a database.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

EVENT_S = 1.0
EVENT = b"event: progress\ndata: [" + b"x" * 600 + b"]\n\n"
"""About as long as the progress of W2, once a second as of the hub."""
ANSWER = b"[" + b"x" * 1_000 + b"]"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer a request; a stream until its client has gone."""
    if scope["type"] != "http":
        return
    live = scope["path"] == "/v1/live"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    gone = asyncio.create_task(_gone(receive))
    while live and not gone.done():
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.wait([gone], timeout=EVENT_S)
    gone.cancel()
    await send({"type": "http.response.body", "body": b"" if live else ANSWER})


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)).run([listening])


if __name__ == "__main__":
    main()
