"""The example of an own source (examples/redis_streams.py) keeps what docs/own-source.md promises, at a real Redis."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from examples.redis_streams import Reading, RedisStream, RedisStreamInjector
from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.testing import SourceSuite
from tests.redis_server import RedisServer

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if not RedisServer.is_installed():
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as client:
        yield client


def append(client: redis.Redis, name: str, numbers: Sequence[int]) -> None:
    with client.pipeline() as pipeline:
        for number in numbers:
            pipeline.xadd(name, {"record": b'{"device":"d","at":%d,"temperature":1.5}' % number})
        pipeline.execute()


class TestRedisStream(SourceSuite):
    record = Reading
    seeds = 2
    test_an_end_comes_once_and_stays = test_a_batch_that_was_not_acknowledged_comes_again = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _with_server(self, server: RedisServer, client: redis.Redis) -> None:
        self.client, self.url = client, server.url

    def source(self, count: int) -> RedisStream:
        self.name = f"stream-{next(_numbers)}"
        append(self.client, self.name, range(count))
        return RedisStream(self.name, self.url)

    def add(self, first: int, count: int) -> None:
        append(self.client, self.name, range(first, first + count))

    def number_of(self, record: Any) -> int:
        return int(record.at)


def injector_of(source: RedisStream, limits: Limits | None = None) -> RedisStreamInjector:
    setup = SourceSetup(
        graph="g",
        stream="s",
        partition=source.name,
        limits=limits or Limits(),
        clock=SystemClock(),
        ready=asyncio.Event(),
    )
    return RedisStreamInjector(source, setup)


async def test_entry_without_a_record_is_rejected_and_named(server: RedisServer, client: redis.Redis) -> None:
    entry = client.xadd("odd", {"other": b"1"})
    injector = injector_of(RedisStream("odd", server.url))
    await injector.open(None)
    try:
        async with asyncio.timeout(30):
            await injector.setup.ready.wait()
        taken = await injector.take()
    finally:
        await injector.close()

    assert taken is not None
    assert (taken.refused[0].reason, taken.describe(0)) == ("no_record", f"odd@{entry.decode()}")


async def test_position_whose_entry_was_deleted_stops_the_source(server: RedisServer, client: redis.Redis) -> None:
    append(client, "short", range(5))
    (first, _), *_ = client.xrange("short")
    client.xtrim("short", maxlen=2, approximate=False)

    with pytest.raises(ConfigError, match=f"entry {first.decode()} of stream 'short' is gone"):
        await injector_of(RedisStream("short", server.url)).open(b'"%s"' % first)


async def test_entries_that_are_deleted_before_they_are_read_stop_a_source_that_reads(
    server: RedisServer, client: redis.Redis
) -> None:
    """It was as a rule behind, with a full inbox, when the stream was trimmed, and continued behind the gap."""
    append(client, "trimmed", range(2))
    injector = injector_of(RedisStream("trimmed", server.url), Limits(bundle_records_max=2))
    await injector.open(None)
    try:
        async with asyncio.timeout(30):
            await injector.setup.ready.wait()
            append(client, "trimmed", range(2, 9))
            client.xtrim("trimmed", maxlen=2, approximate=False)
            injector.setup.ready.clear()
            assert await injector.take() is not None
            await injector.setup.ready.wait()
        with pytest.raises(ConfigError, match="is gone"):
            await injector.take()
    finally:
        await injector.close()
