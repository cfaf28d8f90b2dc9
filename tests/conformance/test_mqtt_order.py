"""What is acknowledged to a broker is acknowledged in the order in which it came, also what carries no records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from millpy.embedded import EmbeddedBroker
from millpy.limits import Limits
from tests.conformance.mqtt_subject import an_injector, publish, take, until_quiet

PUBACK = 4


class Recorder:
    """Stands before a broker and keeps what clients send."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.sent = bytearray()
        self._ended: list[asyncio.Event] = []

    async def listen(self) -> int:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        self._ended.append(ended)
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self._to)
        with suppress(OSError):
            await asyncio.gather(self._pass(reader, their_writer, self.sent), self._pass(their_reader, writer, None))
        ended.set()

    async def close(self) -> None:
        """Once its clients have gone."""
        self.server.close()
        for ended in self._ended:
            await ended.wait()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray | None) -> None:
        while data := await source.read(65_536):
            if kept is not None:
                kept += data
            sink.write(data)
        sink.close()

    def acknowledged(self) -> list[int]:
        """Packet ids of the PUBACKs, in order."""
        return [int.from_bytes(body[:2], "big") for kind, body in packets(bytes(self.sent)) if kind == PUBACK]


def packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        kind, length, shift = data[at] >> 4, 0, 0
        at += 1
        while True:
            length |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                break
        yield kind, data[at : at + length]
        at += length


async def test_a_message_without_records_waits_for_what_came_before_it(broker: EmbeddedBroker) -> None:
    recorder = Recorder(broker.port)
    injector = an_injector(await recorder.listen(), limits=Limits(bundle_records_max=1))
    await injector.open(None)
    await until_quiet(injector)

    await publish(broker.port, [b"1", b"2", b"[]"])
    first, second = await take(injector), await take(injector)
    session = injector._session
    assert session is not None
    async with asyncio.timeout(60):
        while sum(len(token.packet_ids) for token in session.outstanding) < 3:
            assert await injector.take() is None
            await asyncio.sleep(0)
    ids = [int(str(taken.describe(0)).partition("packet ")[2].rstrip(")")) for taken in (first, second)]
    await injector.acknowledge(first.token)
    await injector.acknowledge(second.token)
    async with asyncio.timeout(60):
        while ids[1] + 1 not in recorder.acknowledged():  # noqa: ASYNC110
            await asyncio.sleep(0)
    await injector.close()
    await recorder.close()

    assert [id for id in recorder.acknowledged() if id >= ids[0]] == [*ids, ids[1] + 1]
