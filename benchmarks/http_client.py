"""Clients that post a file of readings over several connections, each request after the answer to the one before.

    python -m benchmarks.http_client --port 8081 --file readings.ndjson --batch 100 --connections 50

It prints one JSON object: the seconds from the first byte to the last answer, and the answers by status. A request that
is answered by 429 or 503 is sent again after its Retry-After, as any client should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def requests_of(path: Path, batch: int) -> Iterator[bytes]:
    """Yield the bytes of each request."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, start in enumerate(range(0, len(lines), batch)):
        body = b"".join(lines[start : start + batch])
        head = (
            "POST /readings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
            f"Idempotency-Key: {number}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        yield head.encode() + body


class Connection:
    """One client; it connects anew when the server has closed the connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, request: bytes) -> tuple[int, float]:
        """Send one request; return its status, and after how many seconds to send it again."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        await reader.readexactly(int(fields.get("content-length", 0)))
        if fields.get("connection") == "close":
            writer.close()
            self.streams = None
        return int(head.split()[1]), float(fields.get("retry-after", 0))


async def run(options: argparse.Namespace) -> dict[str, object]:
    waiting = iter(list(requests_of(options.file, options.batch)))
    answers: Counter[int] = Counter()
    latencies: list[float] = []

    async def client() -> None:
        connection = Connection(options.port)
        for request in waiting:
            status = 0
            while status != 200:
                began = time.monotonic()
                try:
                    status, delay_s = await connection.post(request)
                except (OSError, asyncio.IncompleteReadError):
                    connection.streams, status, delay_s = None, 0, 0.1
                answers[status] += 1
                latencies.append(time.monotonic() - began)
                if status not in (0, 200, 429, 503):
                    raise SystemExit(f"answered by {status}")
                if status != 200:
                    await asyncio.sleep(delay_s)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(options.connections)))
    seconds = time.monotonic() - began
    ordered = sorted(latencies)
    return {
        "seconds": seconds,
        "answers": dict(answers),
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[len(ordered) * 99 // 100] * 1e3,
        "cpu_s": time.process_time(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--connections", type=int, default=50)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))
