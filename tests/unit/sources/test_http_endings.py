"""HTTP clients that send nothing more, that have gone, or whose heads are too long."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import struct
from pathlib import Path

import pytest
import trustme

from millpy import HttpBounds
from millpy.sources.http import connections
from millpy.sources.http import endpoint as endpoints
from millpy.sources.http import listener as listeners
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


PATIENT = HttpBounds(answer_s=3600.0)


class Waiting:
    """A client that waits for the commit of one record, and may have shut its sending side down."""

    def __init__(self, client: Client, host: str = "127.0.0.1") -> None:
        self._client, self._host = client, host

    async def send(self, *, ends: bool) -> Waiting:
        before = len(self._client.batches)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self._client.port, local_addr=(self._host, 0), limit=1_000_000
        )
        self.reader, self.writer = reader, writer
        writer.write(request_of(1))
        if ends:
            writer.write_eof()
        await until(lambda: len(self._client.batches) == before + 1)
        return self

    async def answer(self) -> bytes:
        """Return the answer; empty if the connection ends without one."""
        found = await self.reader.readline()
        self.writer.close()
        return found


async def status_of_new_client(client: Client) -> bytes:
    """Return the status for a client that connects again while the server has not read the end of others."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /readings HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            status = (await reader.readline()).split()[1:2]
        except ConnectionError:
            status = []
        writer.close()
        if status and status != [b"503"]:
            return status[0]


async def test_clients_that_have_gone_make_room_and_their_records_are_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 3)
    async with accepting(bounds=PATIENT) as client, asyncio.timeout(60):
        client.committing = False
        for _ in range(3):
            gone = await Waiting(client).send(ends=False)
            gone.writer.close()
            await gone.writer.wait_closed()

        assert await status_of_new_client(client) == b"405"
        for batch in client.batches:
            await client.injectors[0].acknowledge(batch.token)
        await until(lambda: client.traffic.records == 3)
        await until(lambda: (client.traffic.connections, client.traffic.waiting_requests) == (0, 0))


async def test_idle_connection_ends_before_that_of_a_client_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 2)
    async with accepting(bounds=PATIENT) as client, asyncio.timeout(60):
        client.committing = False
        waiting = await Waiting(client).send(ends=True)
        idle = await asyncio.open_connection("127.0.0.1", client.port)
        await until(lambda: client.traffic.connections == 2)

        assert await status_of_new_client(client) == b"405"
        assert await idle[0].read() == b""
        await client.injectors[0].acknowledge(client.batches[0].token)
        assert (await waiting.answer()).split()[1] == b"200"
        idle[1].close()


async def test_client_that_sends_nothing_more_gives_room_first_if_its_address_has_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 4)
    async with accepting(bounds=PATIENT) as client, asyncio.timeout(60):
        client.committing = False
        other = await Waiting(client, "127.0.0.2").send(ends=True)
        sends_on = await Waiting(client).send(ends=False)
        own = [await Waiting(client).send(ends=True) for _ in range(2)]

        assert await status_of_new_client(client) == b"405"
        assert await own[0].answer() == b""
        third = await Waiting(client).send(ends=False)
        assert await status_of_new_client(client) == b"405"
        assert await own[1].answer() == b""
        fourth = await Waiting(client).send(ends=False)
        assert await status_of_new_client(client) == b"405"
        assert await other.answer() == b"", "of any address, before a client is refused"
        for batch in client.batches:
            await client.injectors[0].acknowledge(batch.token)
        for live in (sends_on, third, fourth):
            assert (await live.answer()).split()[1] == b"200"


HALVES = {
    "400": HEAD + b"Content-Length: 900\r\n\r\n[",
    "400 chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[",
    "400 malformed": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[[[[[z",
    "405": b"PUT /readings HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n[",
    "413": HEAD + b"Content-Length: 9000000\r\n\r\n[",
    "503": b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n[",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_upload_that_is_broken_off_is_not_logged_as_a_fault(
    half: bytes, tls: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 3600.0)  # a client that has gone is not awaited
    caplog.set_level(logging.WARNING)
    url, known = "http://127.0.0.1:0", None
    if tls:
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
        known = ssl.create_default_context()
        authority.configure_trust(known)
        url = f"https://127.0.0.1:0?certificate={tmp_path / 'pem'}&key={tmp_path / 'pem'}"
    async with accepting(url=url) as client, asyncio.timeout(60):
        traffic = client.traffic

        def is_read() -> bool:
            return sum(traffic.requests.values()) > before or traffic.waiting_requests > 0

        for ending in ("at once", "close", "answered", "abort", "reset"):
            before = sum(traffic.requests.values())
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port, ssl=known)
            writer.write(half)
            if ending != "at once":
                await until(lambda: is_read() or b"/other" in half)
            if ending == "answered" and not traffic.waiting_requests:
                assert (await reader.readline()).startswith(b"HTTP/1.")
            if ending == "abort":
                writer.transport.abort()
            elif ending == "reset":
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
            await until(lambda: (traffic.connections, traffic.waiting_requests) == (0, 0))
        if not tls:
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(half)
            writer.write_eof()
            answer = await reader.read()
            writer.close()
            assert answer.split()[1] in [name.split()[0].encode() for name in HALVES]
            await until(lambda: traffic.connections == 0)
    assert [record.getMessage() for record in caplog.records] == []


async def test_answer_to_a_malformed_body_comes_at_once_to_a_client_that_sends_all_of_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "BODY_S_MAX", 3600.0)
    monkeypatch.setattr(connections, "LINGER_S", 60.0)
    async with accepting() as client, asyncio.timeout(60):
        connection = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", client.port), 60)
        with connection:
            await asyncio.to_thread(connection.sendall, HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n[")
            await until(lambda: client.traffic.waiting_requests == 1)
            await asyncio.to_thread(connection.sendall, b"z" * 600_000)
            answer = b""
            while more := await asyncio.to_thread(connection.recv, 65_536):
                answer += more
        await until(lambda: client.traffic.connections == 0)

        assert (answer.split()[1], answer.count(b"HTTP/1."), b"cut off or malformed" in answer) == (b"400", 1, True)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
