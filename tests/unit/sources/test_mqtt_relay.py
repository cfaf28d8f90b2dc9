"""The relay between broker and client library, with a server instead of the broker, and a socket as the library."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.relay import PacketRelay

CONNACK = b"\x20\x03\x00\x00\x00"
MESSAGE = b"\x32\x06\x00\x01t\x00\x07\x00"
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"


@dataclass
class Peer:
    """One end that talks to the relay."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.readexactly(count)

    async def read_to_the_end(self) -> bytes:
        async with asyncio.timeout(60):
            return await self.reader.read()


@dataclass
class World:
    """The relay, its two ends, and the delivered messages."""

    relay: PacketRelay
    broker: Peer
    library: Peer
    delivered: list[Messages] = field(default_factory=list)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    accepted: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Peer(reader, writer))

    delivered: list[Messages] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    relay = PacketRelay(five=True, packet_bytes_max=1_000, kept_bytes=100, deliver=delivered.append)
    await relay.connect("127.0.0.1", server.sockets[0].getsockname()[1], None)
    async with relay.entrance() as path:
        assert stat.S_IMODE(os.stat(Path(path).parent).st_mode) == 0o700
        library = Peer(*await asyncio.open_unix_connection(path))
        library.writer.write(b"\x10\x00")
        broker = await accepted
        assert await broker.read(2) == b"\x10\x00"
    assert not Path(path).parent.exists()
    yield World(relay, broker, library, delivered)
    for peer in (library, broker):
        peer.writer.close()
    await relay.close(timeout_s=60)
    server.close()


async def until(claim: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_library_sees_everything_except_messages(world: World) -> None:
    world.broker.writer.write(CONNACK + MESSAGE + MESSAGE + PINGRESP)

    assert await world.library.read(7) == CONNACK + PINGRESP
    assert [len(published) for published in world.delivered] == [2]


async def test_end_of_the_connection_follows_the_data_before_it(world: World) -> None:
    world.broker.writer.write(MESSAGE + PINGRESP)
    world.broker.writer.close()

    assert await world.library.read_to_the_end() == PINGRESP
    assert len(world.delivered) == 1


async def test_broker_receives_the_last_packet_of_a_closing_library(world: World) -> None:
    world.library.writer.write(b"\xe0\x00")
    world.library.writer.close()

    assert await world.broker.read_to_the_end() == b"\xe0\x00"
    async with asyncio.timeout(60):
        await world.relay.ended


async def test_ping_is_answered_during_a_pause_and_reaches_the_broker(world: World) -> None:
    world.relay.pause()
    world.broker.writer.write(MESSAGE)

    world.library.writer.write(PINGREQ)

    assert await world.library.read(2) == PINGRESP
    assert await world.broker.read(2) == PINGREQ
    assert world.delivered == []
    world.relay.resume()
    await until(lambda: world.delivered)


async def test_ping_in_flight_when_reading_stops_is_answered(world: World) -> None:
    world.library.writer.write(PINGREQ)
    assert await world.broker.read(2) == PINGREQ

    world.relay.pause()

    assert await world.library.read(2) == PINGRESP


async def test_any_arriving_data_answers_a_ping(world: World) -> None:
    world.library.writer.write(PINGREQ)
    assert await world.broker.read(2) == PINGREQ
    world.broker.writer.write(MESSAGE)

    assert await world.library.read(2) == PINGRESP


async def test_data_that_the_network_delays_follows_in_order(world: World) -> None:
    acknowledged = list(range(1, 60_001)) * 5
    world.relay.acknowledge(acknowledged)
    world.library.writer.write(PINGREQ)

    found = await world.broker.read(4 * len(acknowledged) + 2)

    assert found == b"".join(b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in acknowledged) + PINGREQ


async def test_slow_library_stops_the_reading(world: World) -> None:
    sent = 0
    async with asyncio.timeout(60):
        while world.relay.reads < 2 or not world.relay._is_library_blocked:
            world.broker.writer.write(PINGRESP * 50_000)
            sent += 100_000
            await asyncio.sleep(0)
    before = world.relay.reads
    world.broker.writer.write(PINGRESP)
    for _ in range(100):
        await asyncio.sleep(0)
    assert world.relay.reads == before

    assert await world.library.read(sent + 2) == PINGRESP * (sent // 2 + 1)


async def test_connection_that_breaks_during_a_write_ends(world: World) -> None:
    world.relay.acknowledge(list(range(1, 60_001)) * 5)
    world.broker.writer.transport.abort()

    assert await world.library.read_to_the_end() == b""
    assert isinstance(world.relay.error, OSError)


async def test_invalid_data_ends_the_connection_with_a_reason(world: World) -> None:
    world.broker.writer.write(b"\x90\xff\xff\xff\xff\x7f")

    assert await world.library.read_to_the_end() == b""
    assert "four bytes" in str(world.relay.error)


async def test_nothing_is_written_to_a_closed_relay(world: World) -> None:
    await world.relay.close(timeout_s=0)

    world.relay.acknowledge([1])

    assert await world.broker.read_to_the_end() == b""


async def test_answer_to_our_own_ping_confirms_everything_before_it(world: World) -> None:
    world.library.writer.write(PINGREQ)  # the library's own, not yet answered
    assert await world.broker.read(2) == PINGREQ
    waiting = asyncio.create_task(world.relay.processed())
    assert await world.broker.read(2) == PINGREQ

    world.broker.writer.write(PINGRESP)
    await until(lambda: world.relay.answered(1))
    assert not waiting.done()
    world.broker.writer.write(PINGRESP)

    async with asyncio.timeout(60):
        await waiting


async def test_closed_relay_blocks_no_caller(world: World) -> None:
    waiting = asyncio.create_task(world.relay.processed())
    await asyncio.sleep(0)

    await world.relay.close(timeout_s=0)

    async with asyncio.timeout(60):
        await waiting
        await world.relay.processed()
