"""Viewers of an API: each has a stream of live events open, and asks for a list every five seconds.

    python -m benchmarks.viewers URL TOKEN VIEWERS SECONDS GRAPH [PAGE_VIEWERS]

PAGE_VIEWERS of them ask for views of the page instead. It prints one JSON object: how many streams and answers there
were, how long the answers took, what failed. The viewers are on other machines in life: this process leaves the
processor to the others when it is short (`nice`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from urllib.parse import urlsplit

from benchmarks.harness import percentile

EVERY_S = 5.0
LISTS = ("workers", "watermarks", "accounting", "backlog", "sources", "events", "tables", "series", "dead-letters", "")
PAGES = ("", "windows", "fleet", "set-aside", "workers", "state", "events", "accounting")
NICE = 10


class Crowd:
    """All viewers."""

    def __init__(self, url: str, token: str, graph: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._graph = parts.hostname, parts.port, graph
        self._head = f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
        self.took_ms: list[float] = []
        self.pages_ms: list[float] = []
        self.failures = self.events = 0

    async def watch(self) -> None:
        """Read a stream of events until cancelled."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(f"GET /v1/live HTTP/1.1\r\n{self._head}\r\n".encode())
            while part := await reader.read(65_536):
                self.events += part.count(b"event: ")
            self.failures += 1  # it ended by itself
        finally:
            writer.close()

    async def browse(self, seconds: float, *, pages: bool = False) -> None:
        """Ask for lists, or for pages, and measure."""
        await asyncio.sleep(random.uniform(0, EVERY_S))
        ended_at = time.monotonic() + seconds - EVERY_S
        while time.monotonic() < ended_at:
            asked_at = time.monotonic()
            try:
                status = await self._ask(self._target(pages=pages))
            except (OSError, asyncio.IncompleteReadError):
                status = b""
            (self.pages_ms if pages else self.took_ms).append((time.monotonic() - asked_at) * 1000)
            self.failures += b" 200 " not in status
            await asyncio.sleep(max(0.0, asked_at + EVERY_S - time.monotonic()))

    def _target(self, *, pages: bool) -> str:
        path = f"/graphs/{self._graph}/{random.choice(PAGES)}" if pages else ""
        return (path or f"/v1/graphs/{self._graph}/{random.choice(LISTS)}").rstrip("/")

    async def _ask(self, target: str) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(f"GET {target} HTTP/1.1\r\n{self._head}Connection: close\r\n\r\n".encode())
            answer = await reader.read()
            return answer.partition(b"\r\n")[0]
        finally:
            writer.close()


async def main(url: str, token: str, viewers: str, seconds: str, graph: str, page_viewers: str = "0") -> None:
    os.nice(NICE)
    crowd = Crowd(url, token, graph)
    streams = [asyncio.create_task(crowd.watch()) for _ in range(int(viewers))]
    every = range(int(viewers))
    await asyncio.gather(*(crowd.browse(float(seconds), pages=number < int(page_viewers)) for number in every))
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    print(
        json.dumps(
            {
                "streams": len(streams),
                "events": crowd.events,
                "answers": len(crowd.took_ms),
                "pages": len(crowd.pages_ms),
                "failures": crowd.failures,
                "p50_ms": percentile(crowd.took_ms, 0.5),
                "p95_ms": percentile(crowd.took_ms, 0.95),
                "page_p50_ms": percentile(crowd.pages_ms, 0.5),
                "page_p95_ms": percentile(crowd.pages_ms, 0.95),
                "max_ms": max(crowd.took_ms + crowd.pages_ms),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
