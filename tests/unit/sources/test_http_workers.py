"""HTTP and several workers: requests for partitions of others, and what is answered when clients and workers leave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import urllib.error
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from millpy import Http
from millpy.clock import SystemClock
from millpy.errors import TransientError
from millpy.ingest.protocol import WorkerSetup
from millpy.limits import Limits
from millpy.sources.http import injector as injectors
from millpy.sources.http import listener as listeners
from millpy.sources.http import relay as relays
from millpy.sources.http.endpoint import Endpoint
from millpy.sources.http.tokens import TokenList
from millpy.testing.clock import ManualClock
from tests.unit.sources.http_client import (
    URL,
    Client,
    accepting,
    half_a_body,
    reading,
    setups_of,
    until,
)

# -- several workers ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(source: Http, setup: WorkerSetup) -> AsyncIterator[Endpoint]:
    """Accept requests as a worker does."""
    async with listeners.serving(source, setup) as traffic:
        endpoint = await listeners.acquire(source, setup)
        assert endpoint.traffic is traffic
        try:
            yield endpoint
        finally:
            await endpoint.release()


async def test_worker_without_the_partition_passes_a_request_on_or_says_so() -> None:
    source = Http("/readings", url=URL, partitions=2, key_field="request")
    ours, theirs = setups_of(source, Limits())
    addresses: dict[str, str] = {}

    async def owners() -> dict[str, str]:
        return addresses

    injector = source.connect(ours)
    own = WorkerSetup(
        graph="g", stream="s", partitions=source.partitions(), limits=Limits(), clock=SystemClock(), secret="secret",
        addresses=owners,
    )  # fmt: skip
    async with aiohttp.ClientSession() as session, serving(source, own) as endpoint:
        await injector.open(None)
        client = Client(source, session, [ours], [injector])
        working = asyncio.create_task(client.work())
        # Another worker of the graph: the same process would share the listener, so it has one of its own.
        other = listeners._Listeners()
        far = await other.acquire(source, own, TokenList(SystemClock()))
        remote = source.connect(theirs)
        remote._acquire = lambda: _done(far)
        await remote.open(None)
        far_client = Client(source, session, [theirs], [remote])
        remote_working = asyncio.create_task(far_client.work())
        keys = [str(number) for number in range(8)]
        try:
            before = [(await client.post(reading(), Idempotency_Key=key)).status for key in keys]
            addresses[theirs.partition] = theirs.connection.address
            endpoint._relay._known_at = float("-inf")
            after = [(await client.post(reading(), Idempotency_Key=key)).status for key in keys]
            bad = [(await client.post([{}], Idempotency_Key=key)).status for key in keys]
            host, _, port = theirs.connection.address.partition(" ")[2].partition(":")
            raw = await asyncio.open_connection(host, int(port))
            raw[1].write(b"POST /readings HTTP/1.1\r\nHost: x\r\nMillpy-Relay: \xff\r\nContent-Length: 0\r\n\r\n")
            assert (await raw[0].readline()).split()[1] == b"401"
            raw[1].close()
            peer_url = f"http://{theirs.connection.address.partition(' ')[2]}/readings"
            sign, now, body = endpoint._relay._signature, endpoint._relay._now(), json.dumps(reading()).encode()
            digest = sha256(body).hexdigest()
            malformed = ["", "1 x", "² " + "0" * 64]
            others = [sign(now, "0" * 64, "0"), sign(now, digest, "1"), sign(now - 70, digest, "0")]  # body, key, time
            for header in (*malformed, *others, f"{now} {digest} {'0' * 64}"):
                own_headers = {"Idempotency-Key": "0", "Millpy-Relay": header, "Content-Type": "application/json"}
                async with session.post(peer_url, data=body, headers=own_headers) as unsigned:
                    assert unsigned.status == 401, header
        finally:
            working.cancel()
            remote_working.cancel()
            await remote.close()
            await injector.close()

    assert set(before) == {200, 503}
    assert after == [200] * 8
    assert bad == [400] * 8
    here = {record["request"] for record in client.payloads}
    there = {record["request"] for record in far_client.payloads}
    assert here | there == {f"{key}#0" for key in keys}
    assert here & there == set()


async def _done(value: Any) -> Any:
    return value


@pytest.mark.parametrize(("size", "signature"), [(13, b"0" * 64), (13, b"\xff"), (2_000_000, b"0" * 64)])
async def test_success_of_another_program_at_the_address_of_an_owner_is_none(size: int, signature: bytes) -> None:
    source = Http("/readings", url=URL)

    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"]")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nMillpy-Relay: %s\r\n\r\n" % (size, signature))
        writer.write(b'{"records":1}' + b" " * (size - 13))
        await writer.drain()
        writer.close()

    program = await asyncio.start_server(agree, "127.0.0.1", 0)
    address = f"{socket.gethostname()} 127.0.0.1:{program.sockets[0].getsockname()[1]}"
    setup = WorkerSetup(
        graph="g", stream="s", partitions=source.partitions(), limits=Limits(), clock=SystemClock(), secret="secret",
        addresses=lambda: _done({"/readings": address}),
    )  # fmt: skip
    async with program, aiohttp.ClientSession() as session, serving(source, setup) as endpoint:
        async with session.post(f"http://127.0.0.1:{endpoint.port}/readings", json=[reading()]) as answer:
            assert answer.status == 503
            assert "send the request again" in (await answer.json())["detail"]
    assert endpoint.traffic.requests == {2: 0, 4: 0, 5: 1}
    assert endpoint.traffic.refusals["uncommitted"] == 1


async def test_request_for_a_frozen_owner_does_not_wait_for_it_when_another_has_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relays, "OWNER_CHECK_S", 0.01)
    monkeypatch.setattr(relays, "_KNOWN_S", 0.0)
    source, reached = Http("/readings", url=URL), asyncio.Event()

    async def freeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"]")
        reached.set()
        await reader.read()
        writer.close()

    async def owners() -> dict[str, str]:
        return {"/readings": f"{socket.gethostname()} 127.0.0.1:{1 if reached.is_set() else port}"}

    setup = WorkerSetup(
        graph="g", stream="s", partitions=source.partitions(), limits=Limits(), clock=SystemClock(), secret="secret",
        addresses=owners,
    )  # fmt: skip
    async with (
        await asyncio.start_server(freeze, "127.0.0.1", 0) as frozen,
        aiohttp.ClientSession() as session,
        serving(source, setup) as endpoint,
    ):
        port = frozen.sockets[0].getsockname()[1]
        async with asyncio.timeout(10):
            async with session.post(f"http://127.0.0.1:{endpoint.port}/readings", json=[reading()]) as answer:
                assert answer.status == 503
                assert "another worker owns it" in (await answer.json())["detail"]
        assert endpoint.traffic.waiting_requests == 0


async def test_owners_are_asked_for_once_by_requests_of_one_moment() -> None:
    source, asked, gate = Http("/readings", url=URL), [], asyncio.Event()

    async def owners() -> dict[str, str]:
        asked.append(1)
        await gate.wait()
        raise TransientError("the database is away")

    setup = WorkerSetup(
        graph="g", stream="s", partitions=source.partitions(), limits=Limits(), clock=SystemClock(), secret="secret",
        addresses=owners,
    )  # fmt: skip
    async with aiohttp.ClientSession() as session, serving(source, setup) as endpoint:
        url = f"http://127.0.0.1:{endpoint.port}/readings"
        posts = [asyncio.create_task(session.post(url, json=[reading(number)])) for number in range(20)]
        await until(lambda: endpoint.traffic.waiting_requests == 20)
        gate.set()
        answers = await asyncio.gather(*posts)
        assert {answer.status for answer in answers} == {503}
        for answer in answers:
            answer.release()
    assert len(asked) == 1


# -- when clients and workers leave ------------------------------------------------------------------------------------


async def test_records_of_a_client_that_has_gone_are_committed() -> None:
    async with accepting() as client:
        client.committing = False
        post = asyncio.create_task(client.post([reading()]))
        await until(lambda: len(client.batches) == 1)
        post.cancel()
        await until(post.done)
        assert client.traffic.waiting_requests == 1

        await client.injectors[0].acknowledge(client.batches[0].token)
        await until(lambda: client.traffic.waiting_requests == client.traffic.connections == 0)
        assert client.traffic.records == 1
        client.committing = True
        assert (await client.post(reading())).status == 200


async def test_worker_that_ends_answers_what_is_committed_and_refuses_the_rest() -> None:
    async with accepting() as client:
        client.committing = False
        committed = asyncio.create_task(client.post([reading(1)]))
        await until(lambda: len(client.batches) == 1)
        taken = asyncio.create_task(client.post([reading(2)]))
        await until(lambda: len(client.batches) == 2)
        client.injectors[0].take = lambda: _done(None)
        waiting = asyncio.create_task(client.post([reading(3)]))
        await until(lambda: len(client.injectors[0]._waiting) == 1)
        port = client.port
        async with half_a_body(port) as half:
            await client.injectors[0].acknowledge(client.batches[0].token)
            await client.injectors[0].close()

            assert (await committed).status == 200
            assert (await taken).status == 503
            assert "does not own" in (await waiting).body["detail"]
            with suppress(ConnectionError):
                assert b" 200 " not in await half.read()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


def client_of_the_page() -> Callable[..., None]:
    """Return the function of docs/http.md that sends records."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def send(" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    send: Callable[..., None] = names["send"]
    return send


async def test_client_of_the_page_sends_again_until_it_is_committed() -> None:
    answers = [
        b"", b"HTTP/1.1 502 Bad Gateway\r\nRetry-After: Fri, 27 Nov 2026 00:00:00 GMT\r\n", b"nonsense\r\n",
        b"HTTP/1.1 429 Too Many\r\nRetry-After: 0\r\n", b"HTTP/1.1 500 Fault\r\n", b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 400 Bad\r\n",
    ]  # fmt: skip
    given: list[tuple[bytes, ...]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        keys = tuple(line for line in head.lower().splitlines() if line.startswith(b"idempotency-key"))
        given.append((*keys, await reader.readuntil(b"]")))
        if found := answers[len(given) - 1]:
            writer.write(found + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/readings"
        await asyncio.to_thread(client_of_the_page(), url, [reading()])
        assert len(given) == 6
        assert len(set(given)) == 1
        with pytest.raises(urllib.error.HTTPError, match="400"):
            await asyncio.to_thread(client_of_the_page(), url, [reading()])


async def test_only_a_path_that_never_had_a_source_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accepting("/a") as first, accepting("/b") as second:
        assert second.port == first.port

        async def status(path: str) -> int:
            async with first.session.post(f"http://127.0.0.1:{first.port}{path}", json=[]) as answer:
                return answer.status

        assert [await status(path) for path in ("/a", "/b", "/c")] == [200, 200, 503]
        await second.injectors[0].close()
        monkeypatch.setattr(listeners, "STARTS_S", 0.0)
        assert [await status(path) for path in ("/a", "/b", "/c")] == [200, 503, 404]


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with accepting() as client:
        client.committing = False
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for number in range(3):
            body = json.dumps([reading(number)] * (number + 1)).encode()
            head = b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            for number in range(3):
                await until(lambda number=number: len(client.batches) == number + 1)
                await client.injectors[0].acknowledge(client.batches[number].token)
                assert (await reader.readuntil(b"}")).endswith(b'{"records":%d}' % (number + 1))
        writer.close()


async def test_fault_of_ours_is_logged_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with accepting(clock=(clock := ManualClock())) as client:
        clock.advance(injectors.REFUSED_LATELY_S + 1)
        client.injectors[0]._read = lambda body: 1 // 0
        answer = await client.post(reading())

        assert (answer.status, answer.headers["Retry-After"]) == (500, "1")
        assert "division" not in answer.body["detail"]
        assert "cannot answer a request" in caplog.text
        assert not client.injectors[0].quiet()
