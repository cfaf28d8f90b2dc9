"""Readings of a Redis stream in windows of a minute, by a source that millpy does not have.

Each entry has a field `record`, one JSON object:  XADD readings * record '{"device": "a", "at": 1763632800, …}'

The source keeps a position, the id of the last entry, so an entry counts exactly once: there is no consumer group, and
nothing to acknowledge. docs/own-source.md explains it; `tests/conformance/test_redis_streams.py` kills it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.exceptions import RedisError

from millpy import Count, EventTime, FixedWindows, Graph, Mean, minutes, seconds
from millpy.errors import ConfigError, SourceUnavailableError
from millpy.sources import Injector, RejectedRow, Source, SourceBatch, SourceSetup

READ_COUNT = 1_000
"""Entries of one read."""
WAIT_MS = 500
PROOF_S = 3.0
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
BEGINNING = b"0-0"
Entry = tuple[bytes, bytes | None]
"""The id of an entry, and its record."""


@dataclass(frozen=True)
class RedisStream(Source):
    """The entries of a stream; each has a record of JSON in its field `record`."""

    name: str
    url: str = "redis://localhost"

    def identity(self) -> dict[str, Any]:
        return {"kind": "redis_stream", "name": self.name}

    def partitions(self) -> tuple[str, ...]:
        return (self.name,)

    def connect(self, setup: SourceSetup) -> Injector:
        return RedisStreamInjector(self, setup)


class RedisStreamInjector:
    """The reader of a stream: a task reads ahead, and `take` hands over what has come."""

    def __init__(self, source: RedisStream, setup: SourceSetup) -> None:
        self.source, self.setup = source, setup
        self.read_to = self.taken_to = BEGINNING
        self.inbox: deque[Entry] = deque()
        self.bytes = self.total = 0
        self.room = asyncio.Event()
        self.proven_at = float("-inf")
        self.client: redis.Redis | None = None
        self.reader: asyncio.Task[None] | None = None
        self.closed = False

    async def open(self, position: bytes | None) -> None:
        if position is not None:
            self.read_to = self.taken_to = json.loads(position).encode()
        with suppress(SourceUnavailableError):  # the task goes on trying
            await self.connect()
        self.reader = asyncio.create_task(self.keep_reading(), name=f"redis-{self.source.name}")
        self.reader.add_done_callback(lambda _: self.setup.ready.set())

    async def connect(self) -> None:
        """Connect, and check that no entry behind our position has been deleted."""
        if not self.setup.trusted():
            raise SourceUnavailableError("the lease of this worker has ended")
        self.client = redis.Redis.from_url(self.source.url, socket_timeout=10, socket_connect_timeout=5)
        try:
            await self.check(self.client)
        except (RedisError, OSError) as error:
            await self.disconnect()
            raise SourceUnavailableError(f"Redis at {self.source.url}: {error!r}") from error
        except ConfigError:
            await self.disconnect()
            raise

    async def check(self, client: redis.Redis) -> None:
        """Check that the last entry that we have read is there: what is deleted is the oldest."""
        if self.read_to != BEGINNING and not await client.xrange(self.source.name, self.read_to, self.read_to):
            raise ConfigError(
                f"entry {self.read_to.decode()} of stream {self.source.name!r} is gone, so unread ones may be, too",
                hint="keep more entries (XADD … MAXLEN), and begin anew with another generation of the graph",
            )

    async def disconnect(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            with suppress(RedisError, OSError):
                await client.aclose()

    async def keep_reading(self) -> None:
        """Read ahead while there is room; connect again after a failure."""
        retry_s = RETRY_S_MIN
        while not self.closed:
            try:
                if self.client is None:
                    await self.connect()
                await self.read()
                retry_s = RETRY_S_MIN
            except (SourceUnavailableError, RedisError, OSError):
                await self.disconnect()
                await self.setup.clock.sleep(retry_s)
                retry_s = min(RETRY_S_MAX, 2 * retry_s)

    async def read(self) -> None:
        limits = self.setup.limits
        if len(self.inbox) >= limits.bundle_records_max or self.bytes >= limits.bundle_bytes_max:
            self.room.clear()
            await self.room.wait()
        assert self.client is not None
        count = min(READ_COUNT, limits.bundle_records_max)
        found = await self.client.xread({self.source.name: self.read_to}, count=count, block=WAIT_MS)
        if found:
            await self.check(self.client)  # else those between have been deleted while we waited
        for _, entries in found or ():
            for entry, fields in entries:
                record = fields.get(b"record")
                self.inbox.append((entry, record))
                self.bytes += len(record or b"")
                self.read_to = entry
        if found:
            self.setup.ready.set()
        else:
            self.proven_at = self.setup.clock.monotonic()

    async def take(self) -> SourceBatch | None:
        if not self.inbox:
            if self.reader is not None and self.reader.done():
                self.reader.result()  # raises why it has stopped
            return None
        bound, taken, size = self.setup.take_bound, list[Entry](), 0
        while self.inbox and len(taken) < bound.records:
            size += len(self.inbox[0][1] or b"")
            if taken and size > bound.bytes:
                break
            taken.append(self.inbox.popleft())
        self.bytes = sum(len(record or b"") for _, record in self.inbox)
        self.total += len(taken)
        self.taken_to = taken[-1][0]
        self.room.set()
        return SourceBatch(
            format="json",
            arrived_at=self.setup.clock.now_us(),
            payloads=[record or b"" for _, record in taken],
            refused=[
                RejectedRow(row, "no_record", "the entry has no field `record`")
                for row, (_, record) in enumerate(taken)
                if record is None
            ],
            describe=lambda row: f"{self.source.name}@{taken[row][0].decode()}",
            position=json.dumps(self.taken_to.decode()).encode(),
            total=self.total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: the position is in the commit."""

    def quiet(self) -> bool:
        return not self.inbox and self.setup.clock.monotonic() - self.proven_at < PROOF_S

    async def close(self) -> None:
        self.closed = True  # the client swallows a cancellation that comes as it begins to read
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait([self.reader])
        await self.disconnect()


class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float


graph = Graph("redis_streams")
readings = graph.inject(
    "readings",
    RedisStream("readings", os.environ.get("REDIS_URL", "redis://localhost")),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=seconds(10)),
)
windows = readings.key_by("device").window(FixedWindows(minutes(1)))
windows.aggregate(n=Count(), mean=Mean("temperature")).to_table("temperature_1m")
