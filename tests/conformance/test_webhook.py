"""Webhooks at a real receiver that fails in every way: answers, TLS, certificates, bounds, and the doctor."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import trustme

from millpy import Tls, Webhook, WebhookAccess, WebhookTimeouts
from millpy.clock import SystemClock
from millpy.config import tls_files
from millpy.embedded import free_port
from millpy.errors import ConfigError, MessagesRefusedError, SinkUnavailableError
from millpy.model.finding import Finding, Severity
from millpy.sinks import SinkMessages, SinkSetup
from millpy.testing import SinkSuite
from tests.crash.harness import await_true
from tests.crash.posts import listens
from tests.docs.blocks import ROOT, blocks_of
from tests.webhook_receiver import WebhookReceiver

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[WebhookReceiver]:
    with WebhookReceiver(tmp_path) as receiver:
        yield receiver


def messages_of(*bodies: str, keys: str = "", headers: Any = ()) -> SinkMessages:
    found = [key.encode() for key in keys or "abcdefghijklmnopqrstuvwxyz"[: len(bodies)]]
    return SinkMessages(5, found, [body.encode() for body in bodies], [0] * len(bodies), list(headers))


@asynccontextmanager
async def connected(webhook: Webhook) -> AsyncIterator[Any]:
    connection = webhook.connect(SinkSetup("plant", "out", 0, 17, 1, SystemClock(), secret="x"))
    try:
        await connection.open()
        yield connection
    finally:
        await connection.close()


async def test_a_signed_request_is_what_a_receiver_can_verify(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setenv("HOOK_AUTH", "Bearer hunter2")
    access = WebhookAccess(signing="HOOK_SECRET", headers={"Authorization": "HOOK_AUTH"})
    webhook = Webhook(
        receiver.url + "?a=b%2Fc", access=access, headers={"X-Device": "device"}, fixed_headers={"X-Plant": "north"}
    )
    async with connected(webhook) as connection:
        await connection.send(messages_of('{"device":"ä"}', headers=[[("device", "ä".encode())]]))
    (got,) = receiver.received()
    assert (got.path, got.body) == ("/hook?a=b%2Fc", '{"device":"ä"}'.encode())
    wanted = {
        "content-type": "application/json", "x-device": "%C3%A4", "x-plant": "north", "authorization": "Bearer hunter2",
        "idempotency-key": got.id,
    }  # fmt: skip
    assert {name: got.headers[name] for name in wanted} == wanted
    assert got.positions == range(5, 6)
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < 60
    signed = f"{got.id}.{got.headers['webhook-timestamp']}.".encode() + got.body
    digest = hmac.new(bytes(range(32)), signed, hashlib.sha256).digest()
    assert got.headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    assert {"cookie", "content-encoding", "transfer-encoding"}.isdisjoint(got.headers)


async def test_failures_are_repeated_under_the_same_id_and_nothing_else_is(receiver: WebhookReceiver) -> None:
    at_once = [{"status": 503}, {"reset": True}, {"status": 408}, {"stall": True}]
    receiver.plan({"status": 200}, *at_once)
    webhook = Webhook(receiver.url, in_flight=1, timeouts=WebhookTimeouts(answer_s=1, connect_s=1))
    async with connected(webhook) as connection:
        await connection.send(messages_of("1", "2", "3"))
    ids = [request.id for request in receiver.received()]
    assert len(set(ids)) == 3
    assert len(ids) == 7
    assert sorted(request.body for request in receiver.stored()) == [b"1", b"2", b"3"]


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_receiver_says_when_to_be_asked_again(receiver: WebhookReceiver, form: str) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
    receiver.plan({}, {"status": 429, "headers": {"Retry-After": "2" if form == "seconds" else date}})
    async with connected(Webhook(receiver.url, in_flight=1)) as connection:
        await connection.send(messages_of("1", "2", "3"))
    first, busy, *others = receiver.received()
    assert (first.status, busy.status, len(others)) == (200, 429, 2)
    assert others[0].at - busy.at > 1.5
    receiver.plan(default={"status": 429, "headers": {"Retry-After": "7"}})
    async with connected(Webhook(receiver.url)) as connection:
        with pytest.raises(SinkUnavailableError, match="answers 429") as busy_now:
            await asyncio.wait_for(connection.send(messages_of("1", "2", "3")), 5)
    assert busy_now.value.retry_after_s == 7


async def test_what_is_refused_says_why_and_no_redirect_is_followed(receiver: WebhookReceiver) -> None:
    receiver.plan(
        match={
            "bad": {"status": 422, "body": "no such device\nTraceback: password=hunter2"},
            "moved": {"status": 307, "headers": {"Location": receiver.url + "/elsewhere"}},
            "unknown": {"status": 401},
        }
    )
    async with connected(Webhook(receiver.url + "?token=hunter2")) as connection:
        with pytest.raises(MessagesRefusedError) as refused:
            await connection.send(messages_of('"bad"', '"moved"', '"unknown"', '"good"'))
    origin = f"http://localhost:{receiver.port}"
    assert refused.value.reasons == {
        0: f"{origin} answers 422 {HTTPStatus(422).phrase}: no such device Traceback: password=***",
        1: f"{origin} answers 307 Temporary Redirect: a redirect is not followed; name its target in the graph",
        2: f"{origin} answers 401 Unauthorized",
    }
    assert refused.value.final == {0}
    assert len(receiver.received()) == 4


@pytest.mark.parametrize("piece", [10_000, 0])
async def test_an_answer_without_end_is_read_to_a_bound_and_its_status_counts(
    receiver: WebhookReceiver, piece: int
) -> None:
    receiver.plan(match={"1": {"status": 200, "endless": piece}, "2": {"status": 400, "endless": piece}})
    async with connected(Webhook(receiver.url)) as connection:
        with pytest.raises(MessagesRefusedError) as refused:
            await asyncio.wait_for(connection.send(messages_of("1", "2", "3")), 10)
    assert list(refused.value.reasons) == [1]
    assert len(refused.value.reasons[1]) < 400


async def test_a_message_of_a_megabyte_and_one_without_a_value_arrive(receiver: WebhookReceiver) -> None:
    messages = messages_of("x" * 2_000_000, "")
    messages.values[1] = None
    async with connected(Webhook(receiver.url, value="text", content_type="text/plain")) as connection:
        await connection.send(messages)
    assert sorted(len(request.body) for request in receiver.stored()) == [0, 2_000_000]


@pytest.mark.parametrize(("batch", "body"), [("json", b"[1,2,3]"), ("ndjson", b"1\n2\n3\n")])
async def test_a_batch_is_one_request(receiver: WebhookReceiver, batch: Any, body: bytes) -> None:
    receiver.plan({"status": 500}, {"status": 200})
    async with connected(Webhook(receiver.url, batch=batch)) as connection:
        await connection.send(messages_of("1", "2", "3"))
    failed, got = receiver.received()
    assert (got.body, got.id, got.positions) == (body, failed.id, range(5, 8))


async def test_a_url_from_a_field_reaches_no_host_that_is_not_named(receiver: WebhookReceiver) -> None:
    origin = f"http://localhost:{receiver.port}"
    urls = [
        origin + "/a", f"http://127.0.0.1:{receiver.port}/b", f"http://localhost:{receiver.port + 1}/c",
        f"http://localhost:{receiver.port}@127.0.0.1:{receiver.port}/d", "http://169.254.169.254/latest", "file:///etc",
        f"http://127.0.0.1:{receiver.port}\\@localhost:{receiver.port}/e", "", "http://[", origin.upper() + "/f",
        f"http://evil.org#@localhost:{receiver.port}/g",
    ]  # fmt: skip
    headers = [[("to", url.encode())] if url else [] for url in urls]
    webhook = Webhook(url_field="to", hosts=[origin])
    async with connected(webhook) as connection:
        with pytest.raises(MessagesRefusedError) as refused:
            await connection.send(messages_of(*["1"] * len(urls), headers=headers))
    assert set(refused.value.reasons.values()) == {"the URL in 'to' has no host of hosts=(…)"}
    assert refused.value.final == set(range(len(urls))) - {0, 9}
    assert sorted(request.path for request in receiver.received()) == ["/a", "/f"]


async def test_no_proxy_and_no_login_of_the_environment_is_used(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    receiver.plan({"status": 200, "headers": {"Set-Cookie": "a=b"}})
    async with connected(Webhook(receiver.url)) as connection:
        await connection.send(messages_of("1"))
        await connection.send(messages_of("2"))
    assert all({"authorization", "cookie"}.isdisjoint(request.headers) for request in receiver.stored())
    assert len(receiver.stored()) == 2


async def test_a_receiver_that_restarts_gets_everything(receiver: WebhookReceiver) -> None:
    async with connected(Webhook(receiver.url)) as connection:
        await connection.send(messages_of("1"))
        receiver.kill()
        with pytest.raises(SinkUnavailableError, match=r"no connection to|broke"):
            await connection.send(messages_of("2"))
        receiver.start()
        await connection.send(messages_of("2"))
    assert [request.body for request in receiver.stored()] == [b"1", b"2"]


@pytest.mark.parametrize("batch", [None, "json"])
async def test_an_answer_without_a_request_delivers_nothing(batch: Any) -> None:
    taken, clients = list[tuple[int, bytes]](), list[Any]()
    delivered, twice = asyncio.Event(), asyncio.Event()
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer each request, and the first one twice."""
        clients.append(asyncio.current_task())
        number = len(clients)
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                taken.append((number, body.strip(b"[]")))
                writer.write(ok)
                if len(taken) == 1:
                    await delivered.wait()
                    writer.write(ok)
                    twice.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(Webhook(f"http://127.0.0.1:{port}/", batch=batch)) as connection:
            await connection.send(messages_of("1"))
            delivered.set()
            await twice.wait()
            for _ in range(50):  # until the client has it
                await asyncio.sleep(0)
            await connection.send(messages_of("2"))
        await asyncio.gather(*clients)
    assert taken == [(1, b"1"), (2, b"2")]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nerhält".encode(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\nend",
    ],
    ids=["no body", "length", "chunks"],
)
async def test_a_status_counts_though_the_body_behind_it_is_malformed(answer: bytes) -> None:
    """The receiver had the message; it came again with each attempt, for ever."""
    taken = list[bytes]()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                taken.append(await reader.readexactly(size))
                writer.write(answer)

    async with await asyncio.start_server(receive, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(Webhook(f"http://127.0.0.1:{port}/")) as connection:
            for message in ("1", "2"):
                await connection.send(messages_of(message))
    assert taken == [b"1", b"2"]


@pytest.fixture
def documented(tmp_path: Path) -> Iterator[str]:
    """Run the receiver of the documentation; return its URL."""
    (block,) = (block for block in blocks_of(ROOT / "docs" / "sinks.md") if block.options.get("title") == "receiver.py")
    port = free_port()
    (tmp_path / "receiver.py").write_text(block.body.replace("8090", str(port)))
    variables = {**os.environ, "ALERTS_SECRET": SECRET}
    process = subprocess.Popen([sys.executable, "receiver.py"], cwd=tmp_path, env=variables, stderr=subprocess.DEVNULL)
    try:
        await_true(lambda: listens(port), "it listens")
        yield f"http://127.0.0.1:{port}/alerts"
    finally:
        process.kill()
        process.wait(10)


async def test_the_documented_receiver_verifies_requests_and_drops_repeats(
    documented: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    webhook = Webhook(documented, access=WebhookAccess(signing="ALERTS_SECRET"))
    monkeypatch.setenv("ALERTS_SECRET", f"{other} {SECRET}")
    async with connected(webhook) as connection:
        for _ in range(3):
            await connection.send(messages_of('"1"', '"2"'))
    monkeypatch.setenv("ALERTS_SECRET", other)
    async with connected(webhook) as connection:
        with pytest.raises(MessagesRefusedError, match="401"):
            await connection.send(messages_of('"forged"'))
    with closing(sqlite3.connect(tmp_path / "alerts.db")) as database:
        assert sorted(database.execute("SELECT alert FROM alerts")) == [('"1"',), ('"2"',)]


class Authority:
    """A certificate authority, with the files of a server and a client."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        authority = trustme.CA()
        self.ca, self.server, self.client = directory / "ca.pem", directory / "server.pem", directory / "client.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(str(self.server))
        authority.issue_cert("me@plant").private_key_and_cert_chain_pem.write_to_path(str(self.client))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def test_a_receiver_is_verified_and_knows_us_by_our_certificate(authority: Authority, tmp_path: Path) -> None:
    with WebhookReceiver(tmp_path, authority.server, authority.ca) as receiver:
        ours = Tls(ca=authority.ca, certificate=authority.client)
        async with connected(Webhook(receiver.url, access=WebhookAccess(tls=ours))) as connection:
            await connection.send(messages_of("1", "2"))
        assert len(receiver.stored()) == 2
        for url, tls, said in (
            (receiver.url, Tls(ca=authority.ca), "broke|TLS|no connection"),
            (receiver.url, Tls(certificate=authority.client), "is not trusted"),
            (receiver.url.replace("localhost", "127.0.0.1"), ours, "is not trusted"),
        ):
            async with connected(Webhook(url, access=WebhookAccess(tls=tls))) as connection:
                with pytest.raises(SinkUnavailableError, match=said):
                    await connection.send(messages_of("3"))
        assert len(receiver.stored()) == 2


async def test_a_certificate_that_is_replaced_is_ours_from_the_next_send_on(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read when the interval connected: a receiver that answers an old one with 400 made dead letters of all."""
    monkeypatch.setattr(tls_files, "LOOK_EVERY_S", 0.0)
    other = Authority(tmp_path / "other")
    with WebhookReceiver(tmp_path, authority.server, authority.ca) as receiver:
        ours = Tls(ca=authority.ca, certificate=other.client)
        async with connected(Webhook(receiver.url, access=WebhookAccess(tls=ours))) as connection:
            with pytest.raises(SinkUnavailableError):
                await connection.send(messages_of("1"))
            renewed = authority.client.read_bytes()
            other.client.write_text("half")
            with pytest.raises(SinkUnavailableError):
                await connection.send(messages_of("1"))
            other.client.write_bytes(renewed)
            await connection.send(messages_of("1"))
        assert [request.body for request in receiver.stored()] == [b"1"]


async def findings(webhook: Webhook) -> list[Finding]:
    return [finding async for finding in webhook.examine("plant", "out")]


async def test_the_doctor_connects_and_sends_nothing(
    receiver: WebhookReceiver, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, reached = await findings(Webhook(receiver.url))
    assert (note.severity, note.found) == (Severity.NOTE, "out: its requests are not signed")
    assert (reached.severity, reached.found) == (
        Severity.OK, f"out: http://localhost:{receiver.port} accepts connections"
    )  # fmt: skip
    with WebhookReceiver(tmp_path, authority.server, authority.ca) as secure:
        for tls, severity, said in (
            (Tls(ca=authority.ca, certificate=authority.client), Severity.OK, "its certificate is valid for"),
            (Tls(certificate=authority.client), Severity.ERROR, "no connection to"),
            (Tls(ca=authority.ca), Severity.ERROR, "no connection to"),
        ):
            *_, found = await findings(Webhook(secure.url, access=WebhookAccess(tls=tls)))
            assert found.severity is severity, found
            assert said in found.found
        assert secure.received() == []
    receiver.kill()
    *_, away = await findings(Webhook(receiver.url))
    assert away.severity is Severity.ERROR
    *_, nowhere = await findings(Webhook("https://host.invalid/"))
    assert nowhere.severity is Severity.ERROR
    with pytest.raises(ConfigError, match="HOOK_SECRET has 0"):
        await findings(Webhook(receiver.url, access=WebhookAccess(signing="HOOK_SECRET")))
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    signed = Webhook("http://host.invalid/", access=WebhookAccess(signing="HOOK_SECRET"))
    assert [finding.severity for finding in await findings(signed)] == [Severity.WARNING, Severity.ERROR]
    assert receiver.received() == []


async def test_the_doctor_warns_of_a_certificate_that_ends_soon(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, server = tmp_path / "ca.pem", tmp_path / "server.pem"
    authority.cert_pem.write_to_path(str(ca))
    soon = datetime.now(UTC) + timedelta(days=5)
    authority.issue_cert("localhost", not_after=soon).private_key_and_cert_chain_pem.write_to_path(str(server))
    with WebhookReceiver(tmp_path, server) as receiver:
        *_, found = await findings(Webhook(receiver.url, access=WebhookAccess(tls=Tls(ca=ca))))
    assert found.severity is Severity.WARNING
    assert "for 5 more days" in found.found


async def test_nothing_secret_is_logged(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setenv("HOOK_AUTH", "Bearer hunter2")
    access = WebhookAccess(signing="HOOK_SECRET", headers={"Authorization": "HOOK_AUTH"})
    receiver.plan(default={"reset": True})
    async with connected(Webhook(receiver.url + "/hunter2?a=hunter2", access=access)) as connection:
        with pytest.raises(SinkUnavailableError) as away:
            await connection.send(messages_of('"hunter2"'))
    said = caplog.text + str(away.value) + away.value.hint
    assert "hunter2" not in said
    assert SECRET not in said


@pytest.fixture(scope="module")
def shared_receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebhookReceiver]:
    with WebhookReceiver(tmp_path_factory.mktemp("webhook")) as receiver:
        yield receiver


class TestWebhook(SinkSuite):
    """The promises of every sink; the tests above are those of webhooks alone."""

    seeds = 2
    send_s = 0.03
    test_a_new_connection_shuts_out_the_one_before = None  # type: ignore[assignment]

    places = itertools.count()

    @pytest.fixture(autouse=True)
    def _with_receiver(self, shared_receiver: WebhookReceiver) -> None:
        self.receiver = shared_receiver

    def sink(self) -> Webhook:
        self.receiver.plan()
        self.place = f"place={next(self.places)}"
        return Webhook(f"{self.receiver.url}?{self.place}", message_bytes_max=100_000)

    def delivered(self) -> list[int]:
        return [json.loads(got.body)["number"] for got in self.receiver.stored() if got.path.endswith(self.place)]

    def refuse(self, number: int) -> None:
        self.receiver.plan(match={f'"number": {number}}}': {"status": 400}})

    def stop(self) -> None:
        self.receiver.kill()

    def start(self) -> None:
        self.receiver.start()
