"""The socket under the client library, against a socket pair instead of a broker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from millpy.injectors.mqtt_packets import PacketCutter, Published
from millpy.injectors.mqtt_socket import PacketSocket

MESSAGE = b"\x32\x06\x00\x01t\x00\x07\x00"
PINGREQ, PINGRESP = b"\xc0\x00", b"\xd0\x00"


@dataclass
class World:
    """Our socket, the broker's end, and what was called."""

    socket: PacketSocket
    broker: socket.socket
    delivered: list[Published] = field(default_factory=list)
    failures: list[OSError] = field(default_factory=list)
    readable: asyncio.Event = field(default_factory=asyncio.Event)

    def read(self) -> bytes:
        """All that the library can read now."""
        found = b""
        while True:
            try:
                part = self.socket.recv(3)
            except BlockingIOError:
                return found
            if not part:
                return found + b"<end>"
            found += part


@pytest.fixture
async def world() -> Iterator[World]:
    ours, broker = socket.socketpair()
    ours.setblocking(False)
    delivered: list[Published] = []
    failures: list[OSError] = []
    readable = asyncio.Event()
    under = PacketSocket(
        ours,
        loop=asyncio.get_running_loop(),
        cutter=PacketCutter(five=True, packet_bytes_max=1_000, kept_bytes=100),
        deliver=delivered.append,
        failed=failures.append,
        readable=readable.set,
    )
    yield World(under, broker, delivered, failures, readable)
    under.close()
    broker.close()


async def test_library_sees_all_but_messages(world: World) -> None:
    world.broker.sendall(b"\x20\x03\x00\x00\x00" + MESSAGE + MESSAGE + PINGRESP)

    assert world.read() == b"\x20\x03\x00\x00\x00" + PINGRESP
    assert [len(published) for published in world.delivered] == [2]


async def test_end_of_the_connection_comes_after_what_came_before_it(world: World) -> None:
    world.broker.sendall(MESSAGE + PINGRESP)
    world.broker.close()

    assert world.read() == PINGRESP + b"<end>"
    assert len(world.delivered) == 1


async def test_ping_is_answered_while_nothing_is_read_and_still_reaches_the_broker(world: World) -> None:
    world.broker.sendall(MESSAGE)
    world.socket.pause()

    world.socket.send(PINGREQ)

    async with asyncio.timeout(60):
        await world.readable.wait()
    assert world.read() == PINGRESP
    assert world.broker.recv(10) == PINGREQ
    assert world.delivered == []
    world.socket.resume()
    assert world.read() == b""
    assert len(world.delivered) == 1


async def test_ping_that_is_out_when_reading_stops_is_answered(world: World) -> None:
    world.socket.send(PINGREQ)
    assert world.read() == b""

    world.socket.pause()

    assert world.read() == PINGRESP


async def test_anything_that_arrives_answers_a_ping(world: World) -> None:
    world.socket.send(PINGREQ)
    world.broker.sendall(MESSAGE)

    assert world.read() == PINGRESP


async def test_what_the_network_does_not_take_follows_in_order(world: World) -> None:
    acknowledged = list(range(1, 60_001)) * 5
    world.socket.acknowledge(acknowledged)
    world.socket.send(PINGREQ)
    loop = asyncio.get_running_loop()
    world.broker.setblocking(False)
    found = b""
    async with asyncio.timeout(60):
        while len(found) < 4 * len(acknowledged) + 2:
            found += await loop.sock_recv(world.broker, 1 << 20)

    assert found == b"".join(b"\x40\x02" + packet_id.to_bytes(2, "big") for packet_id in acknowledged) + PINGREQ


async def test_connection_that_breaks_while_writing_is_told(world: World) -> None:
    world.socket.acknowledge(list(range(1, 60_001)) * 5)
    world.broker.close()

    async with asyncio.timeout(60):
        while not world.failures:  # noqa: ASYNC110
            await asyncio.sleep(0)

    assert isinstance(world.failures[0], OSError)


async def test_nothing_is_written_to_a_closed_socket(world: World) -> None:
    world.socket.close()

    world.socket.acknowledge([1])

    assert world.broker.recv(10) == b""


async def test_all_is_processed_when_the_answer_to_a_ping_of_ours_has_come(world: World) -> None:
    world.socket.send(PINGREQ)  # the library's own, not yet answered
    waiting = asyncio.create_task(world.socket.processed())
    await asyncio.sleep(0)

    world.broker.sendall(PINGRESP)
    world.read()
    assert not waiting.done()
    world.broker.sendall(PINGRESP)
    world.read()

    async with asyncio.timeout(60):
        await waiting


async def test_nobody_waits_for_a_closed_socket(world: World) -> None:
    waiting = asyncio.create_task(world.socket.processed())
    await asyncio.sleep(0)

    world.socket.close()

    async with asyncio.timeout(60):
        await waiting
        await world.socket.processed()
