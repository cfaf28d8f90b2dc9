"""A broker that answers nonsense: the injector keeps trying, within bounded memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from contextlib import suppress
from typing import Any

import psutil
import pytest

from millpy.clock import SystemClock
from millpy.errors import ConfigError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.mqtt import connection as mqtt_connection
from millpy.sources.mqtt import injector as mqtt_injector
from millpy.sources.mqtt.packets import PacketCutter, PacketError
from millpy.sources.mqtt.source import Mqtt

CONNACK = b"\x20\x03\x00\x00\x00"
ANSWERS = {
    "no codes": b"\x90\x03\x00\x01\x00",
    "no properties": b"\x90\x02\x00\x01",
    "no packet id": b"\x90\x00",
    "two codes": b"\x90\x05\x00\x01\x00\x01\x01",
    "an unknown code": b"\x90\x04\x00\x01\x00\x7b",
    "cut properties": b"\x90\x04\x00\x01\x7f\x01",
    "a packet of no type": b"\x00\x00",
    "a CONNACK again": CONNACK,
    "a packet without an end": b"\x90\xff\xff\xff\x7f",
    "an authentication nobody asked for": b"\xf0\x02\x00\x00",
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_invalid_packets_end_the_connection_and_not_the_injector(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_connection, "_SILENCE_S_MAX", 0.3)  # what the library passes over is not waited for
    subscriptions = 0
    again = asyncio.Event()
    descriptors = psutil.Process().num_fds()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal subscriptions
        try:
            while head := await reader.readexactly(2):
                body = await reader.readexactly(head[1])
                if head[0] == 0x10:
                    writer.write(CONNACK)
                elif head[0] & 0xF0 == 0x80:
                    subscriptions += 1
                    again.set() if subscriptions > 1 else None
                    packet_id = body[:2]
                    writer.write(ANSWERS[answer].replace(b"\x00\x01", packet_id, 1))
                elif head[0] == 0xC0:
                    writer.write(b"\xd0\x00")
                elif head[0] == 0xE0:
                    break
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.05)
    setup = SourceSetup(
        graph="g", stream="s", partition="sensors/#", limits=limits, clock=SystemClock(), ready=asyncio.Event()
    )
    injector = Mqtt("sensors/#", host="127.0.0.1", port=port).connect(setup)
    try:
        async with asyncio.timeout(60):
            await injector.open(None)
            await again.wait()
        assert await injector.take() is None
    finally:
        await injector.close()
        server.close()
    async with asyncio.timeout(60):  # the library closes its sockets, whatever has failed in it
        while psutil.Process().num_fds() > descriptors:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize("unanswered", ["sensors/#", "millpy/marker/"])
async def test_broker_that_answers_pings_and_no_subscription_is_away(
    unanswered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt_connection, "_SILENCE_S_MAX", 0.3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                try:
                    async with asyncio.timeout(0.02):
                        head = await reader.readexactly(2)
                except TimeoutError:
                    writer.write(b"\xd0\x00")
                    continue
                body = await reader.readexactly(head[1])
                if head[0] == 0x10:
                    writer.write(CONNACK)
                elif head[0] & 0xF0 == 0x80 and unanswered.encode() not in body:
                    writer.write(b"\x90\x04" + body[:2] + b"\x00\x01")
                elif head[0] == 0xE0:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.05)
    setup = SourceSetup(
        graph="g", stream="s", partition="sensors/#", limits=limits, clock=SystemClock(), ready=asyncio.Event()
    )
    injector = Mqtt("sensors/#", host="127.0.0.1", port=port).connect(setup)
    try:
        async with asyncio.timeout(30):
            await injector.open(None)
        assert setup.connection.is_connected is False
        assert "cannot subscribe" in setup.connection.why and "does not answer" in setup.connection.why
    finally:
        await injector.close()
        server.close()


@pytest.mark.parametrize("code", [b"\x00", b"\x87"], ids=["dropped", "refused"])
async def test_marker_that_does_not_come_back_is_reported_once(
    code: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt_injector, "_MARKER_PATIENCE_S", 0.05)
    markers = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal markers
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readexactly(2):
                body = await reader.readexactly(head[1])
                if head[0] == 0x10:
                    writer.write(CONNACK)
                elif head[0] & 0xF0 == 0x80:
                    writer.write(b"\x90\x04" + body[:2] + b"\x00\x01")
                elif head[0] & 0xF0 == 0x30:
                    markers += 1
                    packet_id = 2 + int.from_bytes(body[:2])
                    writer.write(b"\x40\x03" + body[packet_id : packet_id + 2] + code)
                elif head[0] == 0xC0:
                    writer.write(b"\xd0\x00")
                elif head[0] == 0xE0:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    setup = SourceSetup(
        graph="g", stream="s", partition="a", limits=Limits(), clock=SystemClock(), ready=asyncio.Event()
    )
    injector = Mqtt("a", host="127.0.0.1", port=port).connect(setup)
    try:
        await injector.open(None)
        async with asyncio.timeout(30):
            while markers < 5:
                assert not injector.quiet()
                await asyncio.sleep(0)
    finally:
        await injector.close()
        server.close()
    said = [record for record in caplog.records if "does not return our marker" in record.getMessage()]
    assert len(said) == 1
    assert "millpy/marker/#" in said[0].hint  # type: ignore[attr-defined]


async def test_session_that_the_broker_has_forgotten_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    resumed = [b"\x00", b"\x01", b"\x00"]  # a new session, the same, and one that another broker begins
    told: list[tuple[str, dict[str, object]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readexactly(2):
                body = await reader.readexactly(head[1])
                if head[0] == 0x10:
                    # It keeps sessions for 60 s.
                    writer.write(b"\x20\x08" + resumed.pop(0) + b"\x00\x05\x11" + (60).to_bytes(4))
                elif head[0] & 0xF0 == 0x80:
                    writer.write(b"\x90\x04" + body[:2] + b"\x00\x01")
                elif head[0] == 0xC0:
                    writer.write(b"\xd0\x00")
                elif head[0] & 0xF0 == 0x30 and resumed:
                    break
                elif head[0] == 0xE0:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.01)
    setup = SourceSetup(
        graph="g", stream="s", partition="a", limits=limits, clock=SystemClock(), ready=asyncio.Event(),
        tell=lambda kind, detail: told.append((kind, detail)),
    )  # fmt: skip
    injector = Mqtt("a", host="127.0.0.1", port=port).connect(setup)
    try:
        await injector.open(None)
        async with asyncio.timeout(30):
            while not told:  # noqa: ASYNC110
                await asyncio.sleep(0)
    finally:
        await injector.close()
        server.close()
    assert not resumed
    ((kind, detail),) = told
    assert (kind, detail["partition"], detail["stream"]) == ("source_lost", "a", "s")
    assert "has no session of ours any more" in str(detail["what"])
    said = [record.getMessage() for record in caplog.records if "keeps messages for" in record.getMessage()]
    assert said == [
        f"a: the MQTT broker at 127.0.0.1:{port} keeps messages for 60 s without a worker, instead of 604,800 s"
    ]


async def test_refused_subscription_behind_a_backlog_is_reported_after_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = await reader.readexactly(2)
        await reader.readexactly(connected[1])
        message = b"\x32\x08\x00\x01a%b\x00{}"
        writer.write(CONNACK + b"".join(message % (i + 1).to_bytes(2, "big") for i in range(40_000)))
        subscribe = await reader.readexactly(2)
        packet_id = (await reader.readexactly(subscribe[1]))[:2]
        writer.write(b"\x90\x04" + packet_id + b"\x00\x87")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    setup = SourceSetup(
        graph="g", stream="s", partition="a", limits=Limits(bundle_records_max=1_000), clock=SystemClock(),
        ready=asyncio.Event(),
    )  # fmt: skip
    injector = Mqtt("a", host="127.0.0.1", port=port).connect(setup)
    await injector.open(None)

    taken = 0
    with pytest.raises(ConfigError, match=r"refuses the subscription to 'a': Not authorized \(0x87\)"):
        async with asyncio.timeout(60):
            while True:
                setup.ready.clear()
                found = await injector.take()
                taken += len(found.payloads) if found is not None else 0
                if found is None:
                    await setup.ready.wait()
    assert taken == 40_000
    await injector.close()
    server.close()


async def test_the_doctor_speaks_the_protocol_of_the_source_and_leaves_no_session() -> None:
    """The broker knows MQTT 3.1.1 only."""
    flags: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                first, length = await reader.readexactly(2)
                packet = await reader.readexactly(length)
                match first >> 4:
                    case 1:
                        flags.append(packet[7])
                        writer.write(b"\x20\x02\x00%c" % (packet[6] != 4))  # 1: this protocol is not spoken
                    case 8:
                        writer.write(b"\x90\x03" + packet[:2] + b"\x01")
                        topic = packet[2:-1]  # with its length
                        writer.write(b"\x30%c%b7" % (len(topic) + 1, topic))
                    case 12:
                        writer.write(b"\xd0\x00")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        source = Mqtt("a", host="127.0.0.1", port=server.sockets[0].getsockname()[1], protocol=311)
        found = [finding async for finding in source.examine("g", "s")]

    assert "7 at 127.0.0.1" in found[0].found, found
    assert {each & 2 for each in flags} == {2}, "each session is a clean one, which ends with its connection"


@pytest.mark.parametrize(
    ("protocol", "code", "said"),
    [
        (5, 0x97, r"refuses the subscription to 'a': Quota exceeded \(0x97\)"),
        (5, 0xA2, r"refuses the subscription to 'a': Wildcard subscription not supported \(0xa2\)"),
        (311, 0x80, r"refuses the subscription to 'a': Unspecified error \(0x80\)"),
        (5, 0x00, "granted 0 instead of QoS 1 for 'a'"),
    ],
)
async def test_refused_subscription_is_reported_with_the_reason(protocol: Any, code: int, said: str) -> None:
    five = protocol == 5

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected = await reader.readexactly(2)
        await reader.readexactly(connected[1])
        writer.write(CONNACK if five else b"\x20\x02\x00\x00")
        subscribe = await reader.readexactly(2)
        packet_id = (await reader.readexactly(subscribe[1]))[:2]
        answer = packet_id + (b"\x00" if five else b"") + bytes([code])
        writer.write(b"\x90%c%b" % (len(answer), answer))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    setup = SourceSetup(
        graph="g", stream="s", partition="a", limits=Limits(), clock=SystemClock(), ready=asyncio.Event()
    )
    injector = Mqtt("a", host="127.0.0.1", port=port, protocol=protocol).connect(setup)
    try:
        with pytest.raises(ConfigError, match=said):
            await injector.open(None)
    finally:
        await injector.close()
        server.close()


async def test_subscription_that_is_refused_for_a_while_is_an_outage() -> None:
    codes = iter([b"\x01", b"\x87", b"\x87", b"\x01"])
    states: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, StopIteration):
            connected = await reader.readexactly(2)
            await reader.readexactly(connected[1])
            states.append(setup.connection.why)
            writer.write(CONNACK)
            subscribe = await reader.readexactly(2)
            packet_id = (await reader.readexactly(subscribe[1]))[:2]
            writer.write(b"\x90\x04" + packet_id + b"\x00" + next(codes))
            await reader.readexactly(2)  # the next packet: the marker, or DISCONNECT
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.05)
    setup = SourceSetup(graph="g", stream="s", partition="a", limits=limits, clock=SystemClock(), ready=asyncio.Event())
    injector = Mqtt("a", host="127.0.0.1", port=port).connect(setup)
    try:
        await injector.open(None)
        async with asyncio.timeout(60):
            while len(states) < 4:
                assert await injector.take() is None
                await asyncio.sleep(0)
        assert [("refuses the subscription" in why) for why in states] == [False, False, True, True]
    finally:
        await injector.close()
        server.close()


async def test_bundle_is_read_and_acknowledged_before_the_subscription_is_answered() -> None:
    # Less than is read ahead: the broker would wait for the answer, which it gives last.
    count, acknowledged = 20_000, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = b""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readexactly(2):
                body = await reader.readexactly(head[1])
                if head[0] == 0x10:
                    message = b"\x32\x08\x00\x01a%b\x00{}"
                    writer.write(CONNACK + b"".join(message % (i + 1).to_bytes(2, "big") for i in range(count)))
                elif head[0] & 0xF0 == 0x80:
                    waiting += b"\x90\x04" + body[:2] + b"\x00\x01"
                elif head[0] == 0x40:
                    acknowledged.set()
                elif head[0] == 0xC0:
                    writer.write(b"\xd0\x00")
                if waiting and acknowledged.is_set():
                    writer.write(waiting)
                    waiting = b""
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    setup = SourceSetup(
        graph="g", stream="s", partition="a", limits=Limits(), clock=SystemClock(), ready=asyncio.Event()
    )  # fmt: skip
    injector = Mqtt("a", host="127.0.0.1", port=server.sockets[0].getsockname()[1]).connect(setup)
    taken = 0
    try:
        async with asyncio.timeout(30):
            await injector.open(None)
            while taken < count:
                setup.ready.clear()
                found = await injector.take()
                if found is None:
                    await setup.ready.wait()
                else:
                    taken += len(found.payloads)
                    await injector.acknowledge(found.token)
            await acknowledged.wait()
    finally:
        await injector.close()
        server.close()
    assert taken == count


def test_large_packet_that_is_not_a_message_is_refused() -> None:
    cutter = PacketCutter(five=True, packet_bytes_max=16_000_000, kept_bytes=1_000)
    tracemalloc.start()
    try:
        with pytest.raises(PacketError, match="type 9"):
            for _ in range(1_000):
                cutter.feed(b"\x90\xff\xff\xff\x7f" + bytes(100_000))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
