"""HTTP clients that send nothing more, and heads that are too long: each gets its answer."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from millpy.sources.http import connections
from tests.unit.sources.http_client import Client, accepting, reading, until

HEAD = b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def request_of(count: int) -> bytes:
    body = json.dumps([reading()] * count).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def commit(client: Client, batch: int) -> None:
    await until(lambda: len(client.batches) == batch + 1)
    await client.injectors[0].acknowledge(client.batches[batch].token)


async def test_client_that_shuts_its_side_down_gets_the_answer_after_the_commit() -> None:
    async with accepting() as client, asyncio.timeout(60):
        client.committing = False
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_of(2))
        writer.write_eof()
        await until(lambda: len(client.batches) == 1)
        answered = asyncio.create_task(reader.read())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not answered.done(), "it comes after the commit"
        await commit(client, 0)
        answer = await answered  # to the end: the connection is closed
        writer.close()

        assert (answer.split()[1], answer[-13:]) == (b"200", b'{"records":2}')
        await until(lambda: client.traffic.connections == 0)


async def test_all_requests_before_the_end_are_answered_in_order() -> None:
    async with accepting() as client, asyncio.timeout(60):
        client.committing = False
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"".join(request_of(count) for count in (1, 2, 3)))
        writer.write_eof()
        for batch in range(3):
            await commit(client, batch)
        answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        writer.close()

    assert [(answer.split()[0], answer[-13:]) for answer in answers] == [
        (b"200", b'{"records":%d}' % count) for count in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    "body", [b"Content-Length: 90\r\n\r\n[", b"Transfer-Encoding: chunked\r\n\r\n5\r\n["], ids=["length", "chunked"]
)
async def test_body_that_the_end_cuts_off_is_refused_at_once(body: bytes) -> None:
    async with accepting() as client, asyncio.timeout(25):  # less than a client has for its body
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(HEAD + body)
        await until(lambda: client.traffic.waiting_requests == 1)
        writer.write_eof()
        answer = await reader.read()
        writer.close()

        assert (answer.split()[1], b"is cut off or malformed" in answer) == (b"400", True)
        assert client.traffic.refusals["cut_off"] == 1


async def test_connection_that_ends_between_requests_is_closed() -> None:
    async with accepting() as client, asyncio.timeout(25):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(request_of(1))
        assert (await reader.readuntil(b"}")).endswith(b'{"records":1}')
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "head",
    [b"X: " + b"y" * 600_000 + b"\r\n", b"X" * 600_000, b"".join(b"X%d: y\r\n" % number for number in range(60_000))],
    ids=["value", "name", "lines"],
)
async def test_answer_to_a_head_that_is_too_long_reaches_a_client_that_sends_all_of_it(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 60.0)
    async with accepting() as client, asyncio.timeout(60):
        connection = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", client.port), 60)
        with connection:
            await asyncio.to_thread(connection.sendall, HEAD + head + b"\r\n")
            answer = b""
            while more := await asyncio.to_thread(connection.recv, 65_536):
                answer += more

        assert answer.split()[1] == b"431"
        assert b"application/problem+json" in answer
        assert b"the head is too long" in answer
        assert client.traffic.refusals["malformed"] == 1
        assert (await client.post(reading())).status == 200
        await until(lambda: client.traffic.connections <= 1)


async def test_client_that_never_stops_sending_its_head_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 3600.0)
    async with accepting() as client, asyncio.timeout(60):
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"X" * 65_536)
                await writer.drain()
        writer.close()
        await until(lambda: client.traffic.connections == 0)
