"""A real HTTP receiver in a process of its own, which keeps what it gets in a file, and may fail in every way.

Started as a script it is the server. Its plan has an action for the next requests, for those whose body or path has a
text, and for all others: {"status": 200, "headers": {}, "body": "", "delay_s": 0} and beside these {"reset": true},
{"stall": true}, {"endless": 10_000} for pieces of a body without end, and {"signal": 9} for the process whose number is
in the header X-Pid. A request is `stored` if its action has that, by default if the status is 2xx.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

START_S_MAX = 20.0
OK: Mapping[str, Any] = {"status": 200}


@dataclass(frozen=True)
class Received:
    """One request that has arrived."""

    path: str
    headers: dict[str, str]
    body: bytes
    stored: bool
    status: int
    at: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def positions(self) -> range:
        """The positions of its messages, by its id."""
        numbers = self.id.split("-")[4:]
        return range(int(numbers[0]), int(numbers[-1]) + 1)


class WebhookReceiver:
    """A server on a free port; with `certificate` it speaks TLS, with `clients` only to clients whose CA that is."""

    def __init__(self, directory: Path, certificate: Path | None = None, clients: Path | None = None) -> None:
        from millpy.embedded import free_port  # the server needs nothing of it, and starts quicker

        self.port, self._control = free_port(), free_port()
        self.url = f"{'https' if certificate else 'http'}://localhost:{self.port}/hook"
        self._log = directory / f"received-{self.port}.ndjson"
        self._log.touch()
        self._arguments = [
            str(self.port),
            str(self._control),
            str(self._log),
            str(certificate or ""),
            str(clients or ""),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WebhookReceiver:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it; what it has received before stays."""
        root = Path(__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.webhook_receiver", *self._arguments], cwd=root, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                self.plan()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def plan(self, *queue: Mapping[str, Any], match: Mapping[str, Any] | None = None, default: Any = OK) -> None:
        """Say what becomes of the next requests, of those with a text in them, and of all others."""
        plan = {"queue": queue, "match": match or {}, "default": default}
        request = urllib.request.Request(f"http://127.0.0.1:{self._control}/", json.dumps(plan).encode())
        with urllib.request.urlopen(request, timeout=5):
            return

    def received(self) -> list[Received]:
        """Return all requests, in the order of their arrival."""
        found = []
        for line in self._log.read_bytes().splitlines():
            read = json.loads(line)
            found.append(Received(**{**read, "body": read["body"].encode("latin-1")}))
        return found

    def stored(self) -> list[Received]:
        """Return the requests that were stored."""
        return [request for request in self.received() if request.stored]


async def serve(port: int, control: int, log: Path, certificate: str, clients: str) -> None:
    plan: dict[str, Any] = {"queue": [], "match": {}, "default": OK}

    async def replan(request: web.Request) -> web.Response:
        plan.update(json.loads(await request.read()))
        return web.Response()

    async def accept(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        text = request.path + body.decode("utf-8", "replace")
        action = next((found for part, found in plan["match"].items() if part in text), None)
        if action is None:
            action = plan["queue"].pop(0) if plan["queue"] else plan["default"]
        status = action.get("status", 200)
        stored = action.get("stored", 200 <= status < 300 and not action.get("reset") and not action.get("stall"))
        line = {
            "path": request.path_qs, "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": body.decode("latin-1"), "stored": stored, "status": status, "at": time.time(),
        }  # fmt: skip
        with log.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
        if "signal" in action:
            os.kill(int(request.headers["X-Pid"]), action["signal"])
        await asyncio.sleep(action.get("delay_s", 0))
        if action.get("reset"):
            assert request.transport is not None
            request.transport.abort()
        if action.get("stall"):
            await asyncio.sleep(3_600)
        if "endless" in action:
            answer = web.StreamResponse(status=status, headers=action.get("headers"))
            await answer.prepare(request)
            while True:
                await answer.write(b"x" * action["endless"])
                await asyncio.sleep(0.001)
        return web.Response(status=status, headers=action.get("headers"), text=action.get("body", ""))

    tls = None
    if certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate)
        if clients:
            tls.verify_mode = ssl.CERT_REQUIRED
            tls.load_verify_locations(clients)
    for handler, at, context in ((accept, port, tls), (replan, control, None)):
        app = web.Application(client_max_size=100_000_000)
        app.router.add_route("*", "/{tail:.*}", handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", at, ssl_context=context).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]))
