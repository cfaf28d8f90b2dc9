"""HTTP and hostile clients: slow, malformed, too many."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme

from millpy import Http
from millpy.clock import SystemClock
from millpy.config.addresses import client_of
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.limits import Limits
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading
from millpy.sources.http import connections
from millpy.sources.http import endpoint as endpoints
from millpy.sources.http import listener as listeners
from millpy.sources.http.rates import CLIENTS_MAX, RateLimiter
from tests.unit.sources.http_client import (
    EVENT_TIME,
    RECORD_TYPE,
    accepting,
    half_a_body,
    reading,
    setups_of,
    until,
)


async def test_half_open_and_slow_clients_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.05)
    monkeypatch.setattr(connections, "LINGER_S", 0.05)
    monkeypatch.setattr(endpoints, "BODY_S_MAX", 0.05)
    async with accepting() as client:
        silent = await asyncio.open_connection("127.0.0.1", client.port)
        slow = await asyncio.open_connection("127.0.0.1", client.port)
        slow[1].write(b"POST /readings HTTP/1.1\r\nHost: x\r\nX: ")
        async with half_a_body(client.port) as body:
            assert await silent[0].read() == b""
            assert await slow[0].read() == b""
            assert (await body.read()).split()[1] == b"408"
        for _, writer in (silent, slow):
            writer.close()
        assert (await client.post(reading())).status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01",
        b"POST /readings HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(100)) + b"\r\n",
        b"POST /readings HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",
        b"POST /readings HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /readings HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /readings HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n",
        b"POST /readings HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n",
        b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Type: text/csv\r\n"
        b"Content-Length: 2\r\n\r\n[]",
        b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: a\r\n"
        b"Idempotency-Key: b\r\nContent-Length: 2\r\n\r\n[]",
        b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json; \xff\r\nContent-Length: 2\r\n\r\n[]",
        b"GET /readings HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /other HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_malformed_head_is_refused_and_not_logged_as_a_fault(
    head: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "STARTS_S", 0.0)
    async with accepting() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(10):
            status = (await reader.readline()).split()
            head_of_answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()

        assert status[1:2] in ([b"400"], [b"404"], [b"405"], [b"431"])
        assert b"application/problem+json" in head_of_answer
        assert b"server: millpy\r\n" in head_of_answer
        assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
        assert (await client.post(reading())).status == 200


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 3)
    async with accepting() as client:
        idle = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(5)]
        async with asyncio.timeout(10):
            assert await idle[0][0].read() == b""
            assert await idle[1][0].read() == b""
            assert (await client.post(reading())).status == 200
        for _, writer in idle:
            writer.close()


async def test_flood_of_connections_leaves_time_for_requests() -> None:
    async with accepting() as client:
        flood = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(100)]
        most_at_once = before = 0
        async with asyncio.timeout(10):
            while client.traffic.connections < 100:
                await asyncio.sleep(0)
                most_at_once = max(most_at_once, client.traffic.connections - before)
                before = client.traffic.connections
        for connection in flood:
            connection.close()
        assert most_at_once <= 2


async def test_busy_connections_make_room_for_other_clients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 3)
    async with accepting() as client, AsyncExitStack() as slow:
        client.committing = False
        waiting = asyncio.create_task(client.post(reading()))
        await until(lambda: len(client.batches) == 1)
        bodies = [await slow.enter_async_context(half_a_body(client.port)) for _ in range(2)]
        await until(lambda: client.traffic.waiting_requests == 3)

        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            assert (await reader.readline()).split()[1] == b"503"
            writer.close()
            other = await asyncio.open_connection("127.0.0.1", client.port, local_addr=("127.0.0.2", 0))
            assert await bodies[0].read() == b""
            other[1].write(b"GET /readings HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await other[0].readline()).split()[1] == b"405"
            other[1].close()
        assert (client.traffic.refusals["connections"], client.traffic.refusals["cut_off"]) == (1, 1)
        await client.injectors[0].acknowledge(client.batches[0].token)
        assert (await waiting).status == 200


async def test_connections_count_before_their_handshake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(listeners, "connections_max", lambda: 3)
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca"))
    source = Http("/readings", url=f"https://127.0.0.1:0?certificate={tmp_path / 'pem'}&key={tmp_path / 'pem'}")
    (setup,) = setups_of(source, Limits())
    injector = source.connect(setup)
    await injector.open(None)
    traffic, port = injector._endpoint.traffic, injector._endpoint.port
    try:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        async with asyncio.timeout(10):
            assert await silent[0][0].read() == b""
            assert await silent[1][0].read() == b""
            assert traffic.connections == 3
            silent[2][1].close()  # in its handshake
            silent[3][1].write(b"GET / HTTP/1.1\r\n\r\n")  # no handshake
            await until(lambda: traffic.connections == 1)
            known = ssl.create_default_context(cafile=tmp_path / "ca")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"https://127.0.0.1:{port}/readings", ssl=known) as answer:
                    assert answer.status == 405
                assert traffic.connections == 2
        for _, writer in silent:
            writer.close()
        await until(lambda: traffic.connections == 0)
    finally:
        await injector.close()


async def test_expectation_is_met_before_the_body() -> None:
    async with accepting() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = b"POST /readings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        body = b'{"device":"a","at":1700000000}'
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
        async with asyncio.timeout(10):
            assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"100"
            writer.write(body)
            assert (await reader.readline()).split()[1] == b"200"
        writer.close()


def test_client_is_an_address_or_a_network() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1"
    assert client_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert client_of("2001:db8::1") == client_of("2001:db8::2") == "2001:db8::/64"
    assert client_of("unix") == "unix"


def test_rate_is_kept_for_each_client_and_for_a_bounded_number() -> None:
    rates = RateLimiter(2)

    assert [rates.delay_s("a", 0.0) for _ in range(3)] == [0, 0, 1]
    assert rates.delay_s("b", 0.0) == 0
    assert [rates.delay_s("a", 0.5), rates.delay_s("a", 0.5)] == [0, 1]
    for number in range(CLIENTS_MAX):
        rates.delay_s(str(number), 1.0)
    assert len(rates._buckets) == CLIENTS_MAX
    assert RateLimiter(None).delay_s("a", 0.0) == 0


def test_a_client_that_has_come_again_is_not_the_first_to_be_forgotten() -> None:
    rates = RateLimiter(1)
    for number in range(CLIENTS_MAX):
        rates.delay_s(str(number), 0.0)

    assert [rates.delay_s(client, 0.0) for client in ("0", "another", "0")] == [1, 0, 1]


GOOD = b'{"device":"a","at":1700000000}'
PAYLOADS = [
    b'{"device":"a","at":1700000000,"x":' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"device":"a","at":1e400}',
    b'{"device":"a","at":NaN}',
    b'{"device":"a","at":1700000000,"value":1e999}',
    b'{"device":"\\ud800","at":1700000000}',
    b'{"device":"\\u0000","at":1700000000}',
    b'{"device":"\xff","at":1700000000}',
    b'{"device":"a","at":99999999999999999999999}',
    b'{"device":"a","at":1700000000.0}',
    b'{"device":"a","at":1700000000,"request":"forged#0"}',
    b'{"device":"a","at":1700000000,"device":"b"}',
    b'{"device":"a",\n"at":1700000000}\r\n',
    GOOD + b"\n" + GOOD,
    GOOD + b"}",
    b'{"device":"' + b"x" * 500_000 + b'","at":1700000000}',
    b'{"device":"a","at":1700000000,' + b",".join(b'"f%d":1' % n for n in range(10_000)) + b"}",
    *(b"{}", b"null", b'""', b"{", b"}"),
]


@pytest.mark.parametrize("settings", [{}, {"key_field": "request"}, {"bad_records": "dead_letter"}], ids=str)
@pytest.mark.parametrize("many", [1, 150])
async def test_answer_says_what_the_intake_does(settings: dict[str, Any], many: int) -> None:
    stream = IntakeSettings(stream="s", record_type=RECORD_TYPE, event_time=EVENT_TIME)
    intake, clock = Intake(stream, StoredInterval(1, 1)), ClockReading.certain(SystemClock().now_us())
    async with accepting(**settings) as client:
        for number, payload in enumerate(p for p in PAYLOADS if len(p) * many < 1_000_000):
            body = payload if many == 1 else b"[" + b",".join([payload] * many) + b"]"
            client.batches.clear()
            answer = await client.post(body, Idempotency_Key=f"k{number}")

            assert answer.status in (200, 400), payload[:80]
            if answer.status == 400:
                assert client.batches == []
                continue
            (batch,) = client.batches
            result = intake.step(batch, clock=clock, quiet=False)
            assert (answer.body["records"], answer.body.get("dead_lettered", 0)) == (
                result.accepted, len(result.dead_letters),
            ), payload[:80]  # fmt: skip
            if "key_field" in settings:
                assert [record.request for record in result.records.objects()] == [
                    f"k{number}#{n}" for n in range(many)
                ]
