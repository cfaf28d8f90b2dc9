"""A worker's injectors of an HTTP source, and a client that posts to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import aiohttp
import msgspec

from millpy import EventTime, Http
from millpy.clock import Clock, SystemClock
from millpy.ingest.connection_state import ConnectionState
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.ingest.record_check import record_check
from millpy.ingest.request_traffic import RequestTraffic
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import ClockReading, seconds

URL = "http://127.0.0.1:0"
TOKEN = "a-long-random-token"
TOKENS = f"gateway {sha256(TOKEN.encode()).hexdigest()}\nother sha256:{'0' * 64} # a comment"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float = 0.0
    request: str = ""


RECORD_TYPE = RecordType(Reading)
EVENT_TIME = EventTime("at", unit="s", max_disorder=seconds(10))


def certain(clock: Clock) -> Callable[[], ClockReading]:
    return lambda: ClockReading.certain(clock.now_us())


def reading(number: int = 0) -> dict[str, Any]:
    return {"device": "a", "at": 1_700_000_000 + number, "value": 1.5}


@dataclass
class Answer:
    status: int
    body: Any
    headers: dict[str, str]


@dataclass
class Client:
    """A worker's injector of each partition, and a client that posts to it."""

    source: Http
    session: aiohttp.ClientSession
    setups: list[SourceSetup]
    injectors: list[Any]
    committing: bool = True
    batches: list[SourceBatch] = field(default_factory=list)
    events: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def port(self) -> int:
        return next(i._endpoint.port for i in self.injectors if i._endpoint)

    @property
    def traffic(self) -> RequestTraffic:
        found: RequestTraffic = self.injectors[0]._endpoint.traffic
        return found

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for batch in self.batches for payload in batch.payloads]

    async def turn(self) -> None:
        """Take what waits, as a worker does, and commit it unless told otherwise."""
        for injector in self.injectors:
            batch = await injector.take()
            if batch is not None:
                self.batches.append(batch)
                if self.committing:
                    await injector.acknowledge(batch.token)

    async def work(self) -> None:
        while True:
            await self.setups[0].ready.wait()
            self.setups[0].ready.clear()
            await self.turn()

    async def post(self, body: Any, **headers: str) -> Answer:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | given
        url = f"http://127.0.0.1:{self.port}{self.source.path}"
        async with self.session.post(url, data=content, headers=given) as answer:
            text = await answer.read()
            with suppress(ValueError):
                return Answer(answer.status, json.loads(text), dict(answer.headers))
            return Answer(answer.status, text, dict(answer.headers))


def setups_of(source: Http, limits: Limits, clock: Clock | None = None, **more: Any) -> list[SourceSetup]:
    ready, clock = asyncio.Event(), clock or SystemClock()
    return [
        SourceSetup(
            graph="g",
            stream="s",
            partition=partition,
            limits=limits,
            clock=clock,
            ready=ready,
            record_type=RECORD_TYPE,
            secret="secret",
            connection=ConnectionState(),
            make_check=lambda: record_check(RECORD_TYPE, EVENT_TIME, None, (), limits, certain(clock)),
            **more,
        )
        for partition in source.partitions()
    ]


@asynccontextmanager
async def accepting(
    path: str = "/readings",
    *,
    url: str = URL,
    limits: Limits | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Client]:
    source = Http(path, url=url, **settings)
    events: list[tuple[str, Any]] = []
    setups = setups_of(source, limits or Limits(), clock, tell=lambda kind, detail: events.append((kind, detail)))
    made = [source.connect(setup) for setup in setups]
    for injector in made:
        await injector.open(None)
    async with aiohttp.ClientSession() as session:
        client = Client(source, session, setups, made, events=events)
        working = asyncio.create_task(client.work())
        try:
            yield client
        finally:
            working.cancel()
            for injector in made:
                await injector.close()


@asynccontextmanager
async def half_a_body(port: int) -> AsyncIterator[asyncio.StreamReader]:
    """Send a head and the first byte of its body, and no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    writer.write(head + b"{")
    try:
        async with asyncio.timeout(10):
            yield reader
    finally:
        writer.close()


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not claim():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
