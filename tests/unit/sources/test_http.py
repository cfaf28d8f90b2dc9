"""HTTP as a source: what is accepted, what is answered, and that no answer comes before the commit."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
import zlib
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import trustme

from millpy import Csv, Graph, Http, HttpBounds, Json
from millpy.embedded import free_port
from millpy.errors import ConfigError, GraphError
from millpy.ingest.protocol import FixedBound
from millpy.limits import Limits
from millpy.model.finding import Severity
from millpy.model.time import Instant
from millpy.sources.http import endpoint as endpoints
from millpy.sources.http import injector as injectors
from millpy.sources.http import listener as listeners
from millpy.sources.http.address import listen_address
from millpy.sources.http.port_check import graph_mark
from millpy.sources.http.tokens import TokenList, parse_tokens
from millpy.testing.clock import ManualClock
from tests.unit.sources.http_client import (
    EVENT_TIME,
    TOKEN,
    TOKENS,
    URL,
    Client,
    Reading,
    accepting,
    half_a_body,
    reading,
    setups_of,
    until,
)

# -- what becomes records ----------------------------------------------------------------------------------------------


async def test_object_array_and_lines_become_records() -> None:
    async with accepting() as client:
        one = await client.post(reading(1))
        two = await client.post([reading(2), reading(3)])
        lines = b"\n".join([json.dumps(reading(n)).encode() for n in (4, 5)]) + b"\r\n\r\n"
        three = await client.post(lines, Content_Type="application/x-ndjson; charset=utf-8")
        none = await client.post([])

        assert [answer.status for answer in (one, two, three, none)] == [200] * 4
        assert [answer.body["records"] for answer in (one, two, three, none)] == [1, 2, 2, 0]
        assert client.payloads == [reading(n) for n in (1, 2, 3, 4, 5)]


async def test_formats_are_chosen_by_content_type_or_by_the_source() -> None:
    async with accepting() as client:
        table = b"device,at\na,1700000000\nb,1700000001\n"
        csv = await client.post(table, Content_Type="text/csv")
        packed = await client.post(msgspec.msgpack.encode([reading(1)]), Content_Type="application/msgpack")
        zipped = await client.post(gzip.compress(json.dumps(reading(2)).encode()), Content_Encoding="gzip")

        assert [csv.body, packed.body, zipped.body] == [{"records": 2}, {"records": 1}, {"records": 1}]
        assert [record["device"] for record in client.payloads] == ["a", "b", "a", "a"]

    async with accepting(format=Json(many="readings")) as client:
        nested = await client.post({"readings": [reading(1), reading(2)]})
        lines = await client.post(b'{"readings":[]}\n{"readings":[]}', Content_Type="application/x-ndjson")

        assert (nested.body, lines.body) == ({"records": 2}, {"records": 0})


@pytest.mark.parametrize(
    ("body", "headers", "status", "detail"),
    [
        (b"", {}, 400, "the body is empty"),
        (b"[{]", {}, 400, "not a JSON array"),
        (b'["\xff"]', {}, 400, "not a JSON array"),
        (b"[" * 100_000, {}, 400, "not a JSON array"),
        (b"{}", {"Content_Type": "application/x-www-form-urlencoded"}, 415, "send application/json"),
        (b"{}", {"Content_Type": "application/json; charset=latin1"}, 415, "send UTF-8"),
        (b"{}", {"Content_Encoding": "br"}, 415, "send gzip"),
        (b"{}", {"Content_Encoding": "gzip"}, 400, "the body cannot be decompressed: neither gzip nor zlib"),
        (b"\xff", {"Content_Encoding": "deflate"}, 400, "the body cannot be decompressed: not deflate"),
        (zlib.compress(b"{}", wbits=-15), {"Content_Encoding": "gzip"}, 400, "decompressed: neither gzip nor zlib"),
        (zlib.compress(b"{}")[:-4], {"Content_Encoding": "deflate"}, 400, "is cut off"),
        (gzip.compress(b"{}", mtime=0), {}, 415, "Content-Encoding: gzip"),
        (gzip.compress(b" " * 5_000_000, mtime=0), {"Content_Encoding": "gzip"}, 413, "expands to more than"),
        (b"[" + b"{}," * 10_000 + b"{}]", {}, 413, "10000 records"),
        (b" " * 1_000_001, {}, 413, "1000000 bytes"),
        (b"\n" * 20_001, {"Content_Type": "application/jsonl"}, 413, "10000 records"),
        (b"{}", {"Idempotency_Key": "x" * 256}, 400, "1 to 255 printable"),
        (b"{}", {"Idempotency_Key": '""'}, 400, "1 to 255 printable"),
    ],
)
async def test_body_that_cannot_be_read_is_refused(
    body: bytes, headers: dict[str, str], status: int, detail: str
) -> None:
    async with accepting() as client:
        answer = await client.post(body, **headers)

        assert answer.status == status
        assert detail in answer.body["detail"]
        assert client.batches == []
        assert (await client.post(reading())).status == 200


@pytest.mark.parametrize("wbits", [15, -15, 31], ids=["zlib", "bare", "gzip"])
async def test_deflate_is_read_with_and_without_the_header_of_zlib(wbits: int) -> None:
    async with accepting() as client:
        for level in (0, 1, 6, 9):
            body = zlib.compress(json.dumps([reading(n) for n in range(level + 1)]).encode(), level, wbits=wbits)

            assert (await client.post(body, Content_Encoding="deflate")).body == {"records": level + 1}


async def test_an_encoding_that_is_not_read_is_answered_with_those_that_are() -> None:
    async with accepting() as client:
        assert (await client.post(b"{}", Content_Encoding="br")).headers["Accept-Encoding"] == "gzip, deflate"


async def test_bad_record_is_named_and_none_of_its_request_is_taken() -> None:
    async with accepting() as client:
        future = {"device": "a", "at": 9_000_000_000}
        bad = [reading(), {"device": 7, "at": 1}, 3, {"device": "a", "at": 1e300}, future]
        answer = await client.post(bad)

        assert answer.status == 400
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert [(e["record"], e["reason"]) for e in answer.body["errors"]] == [
            (1, "undecodable"), (2, "undecodable"), (3, "undecodable"), (4, "future"),
        ]  # fmt: skip
        assert "Expected `str`, got `int`" in answer.body["errors"][0]["detail"]
        assert client.batches == []

        many = await client.post([{}] * 150)
        assert (len(many.body["errors"]), many.body["more_errors"]) == (100, 50)
        (kind, told), *later = client.events  # that of the next minute tells the second
        assert (kind, told["statuses"], later) == ("requests_refused", {"400": 1}, [])


async def test_bad_records_become_dead_letters_if_the_source_says_so() -> None:
    async with accepting(bad_records="dead_letter", format=Csv()) as client:
        answer = await client.post(b"device,at\na,1700000000\nb\n", Content_Type="text/csv")

        assert (answer.status, answer.body["records"], answer.body["dead_lettered"]) == (200, 1, 1)
        (batch,) = client.batches
        assert [bad.row for bad in batch.refused] == [1]
        assert batch.messages[1].payload == b"device,at\nb"
        assert batch.describe(1) == "/readings (request 1)[1]"


async def test_key_of_the_request_numbers_its_records() -> None:
    async with accepting(key_field="request") as client:
        without = await client.post([reading()])
        answer = await client.post([reading(1), reading(2)], Idempotency_Key='"k\\1"')

        assert (without.status, answer.status) == (400, 200)
        assert [record["request"] for record in client.payloads] == ["k\\1#0", "k\\1#1"]


async def test_attempts_under_one_key_have_one_partition_whatever_their_bytes() -> None:
    async with accepting(partitions=8, key_field="request") as client:
        for number in range(8):
            for body in ([reading(number)], [reading(number + 1), reading()]):
                assert (await client.post(body, Idempotency_Key=f"k{number}")).status == 200

        found: dict[str, set[str]] = {}
        for batch in client.batches:
            for row, payload in enumerate(batch.payloads):
                key = json.loads(payload)["request"].partition("#")[0]
                found.setdefault(key, set()).add(batch.describe(row).partition(" ")[0])
        assert len(found) == 8
        assert all(len(partitions) == 1 for partitions in found.values())
        assert len(set.union(*found.values())) > 1


# -- answers and commits -----------------------------------------------------------------------------------------------


async def test_answer_comes_after_the_commit_and_requests_share_a_bundle() -> None:
    async with accepting() as client:
        client.committing = False
        posts = [asyncio.create_task(client.post([reading(n), reading(n)])) for n in range(3)]
        await until(lambda: sum(batch.records for batch in client.batches) == 6)

        for _ in range(3):  # meanwhile others are answered
            assert (await client.post([])).status == 200
        assert not any(post.done() for post in posts)
        assert not client.injectors[0].quiet()
        for batch in client.batches:
            await client.injectors[0].acknowledge(batch.token)
        assert [(await post).status for post in posts] == [200] * 3
        assert client.batches[-1].total == 6


class TickingClock(ManualClock):
    """Later each time it is read."""

    def now_us(self) -> Instant:
        self.advance(1)
        return super().now_us()


async def test_records_are_judged_and_taken_at_one_time() -> None:
    async with accepting(clock=TickingClock()) as client:
        (injector,) = client.injectors
        judged: list[Instant] = []
        check = injector._check
        injector._check = lambda batch: judged.append(batch.arrived_at) or check(batch)
        answers = await asyncio.gather(client.post(reading()), client.post({}), client.post(reading()))

        assert [answer.status for answer in answers] == [200, 400, 200]
        assert {batch.arrived_at for batch in client.batches} <= set(judged)


async def test_requests_are_taken_whole_within_the_bound_of_a_turn() -> None:
    source = Http("/readings", url=URL)
    (setup,) = setups_of(source, Limits(), bound=FixedBound(3, 1_000_000))
    injector = source.connect(setup)
    await injector.open(None)
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(source, session, [setup], [injector], committing=False)
            posts = [asyncio.create_task(client.post([reading()] * count)) for count in (2, 2, 5)]
            await until(lambda: len(injector._waiting) == 3)
            sizes = []
            while (batch := await injector.take()) is not None:
                sizes.append(batch.records)
                await injector.acknowledge(batch.token)
            assert sorted(sizes) == [2, 2, 5]
            assert {(await post).status for post in posts} == {200}
    finally:
        await injector.close()


async def test_requests_are_refused_when_the_turn_fails_or_takes_too_long() -> None:
    async with accepting() as client:
        client.committing = False
        post = asyncio.create_task(client.post(reading()))
        await until(lambda: bool(client.batches))
        await client.injectors[0].close()

        answer = await post
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "not known whether" in answer.body["detail"]
        await client.injectors[0].acknowledge(client.batches[0].token)  # too late, and harmless

    async with accepting(bounds=HttpBounds(answer_s=0.05)) as client:
        client.committing = False
        answer = await client.post(reading())

        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "not known whether" in answer.body["detail"]


async def test_a_request_that_no_turn_has_taken_in_time_is_never_taken() -> None:
    (setup,) = setups_of(source := Http("/readings", url=URL, bounds=HttpBounds(answer_s=0.05)), Limits())
    injector = source.connect(setup)
    await injector.open(None)
    try:
        async with aiohttp.ClientSession() as session:
            answer = await Client(source, session, [setup], [injector]).post(reading())
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "has taken nothing" in answer.body["detail"]
        assert await injector.take() is None
    finally:
        await injector.close()


async def test_a_worker_whose_lease_has_ended_takes_nothing() -> None:
    is_trusted = True
    (setup,) = setups_of(source := Http("/readings", url=URL), Limits(), trusted=lambda: is_trusted)
    injector = source.connect(setup)
    await injector.open(None)
    try:
        async with aiohttp.ClientSession() as session:
            is_trusted = False
            answer = await Client(source, session, [setup], [injector]).post(reading())
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "does not own" in answer.body["detail"]
        assert await injector.take() is None
    finally:
        await injector.close()


async def test_too_much_that_waits_is_pushed_back() -> None:
    async with accepting(bounds=HttpBounds(waiting_requests=2, body_bytes=200, waiting_bytes=200)) as client:
        client.committing = False
        first = asyncio.create_task(client.post([reading()]))
        await until(lambda: len(client.batches) == 1)
        full = await client.post([reading()] * 4)
        second = asyncio.create_task(client.post([reading()]))
        await until(lambda: len(client.batches) == 2)
        third = await client.post([reading()])
        for batch in client.batches:
            await client.injectors[0].acknowledge(batch.token)

        assert (full.status, third.status) == (429, 429)
        assert "bytes" in full.body["detail"]
        assert "requests" in third.body["detail"]
        assert third.headers["Retry-After"] == "1"
        assert [(await post).status for post in (first, second)] == [200, 200]
        client.committing = True
        assert (await client.post([reading()])).status == 200


@pytest.mark.parametrize("status", [400, 408, 413, 429, 503])
async def test_source_is_not_quiet_while_a_client_will_come_again(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "BODY_S_MAX", 0.05)
    clock = ManualClock()
    bounds = {429: {"requests_per_s": 0.001}, 503: {"answer_s": 0.05}, 413: {"body_bytes": 10}}.get(status, {})
    async with accepting(clock=clock, bounds=HttpBounds(**bounds)) as client:
        if status == 429:
            assert (await client.post(reading())).status == 200
        clock.advance(injectors.REFUSED_LATELY_S + 1)
        assert client.injectors[0].quiet()

        client.committing = status != 503
        if status == 408:
            async with half_a_body(client.port) as reader:
                assert (await reader.read()).split()[1] == b"408"
        else:
            assert (await client.post([{}] if status == 400 else reading())).status == status
        for injector in client.injectors:
            injector._taken.clear()  # after 503, what is taken is not quiet either
        assert client.injectors[0].quiet() == (status in (400, 413))
        clock.advance(injectors.REFUSED_LATELY_S + 1)
        assert client.injectors[0].quiet()


async def test_bytes_that_wait_count_as_they_are_after_decompression() -> None:
    async with accepting(bounds=HttpBounds(body_bytes=1_000, waiting_bytes=10_000)) as client:
        body = json.dumps([reading()] * 250).encode()
        answer = await client.post(gzip.compress(body), Content_Encoding="gzip")

        assert len(gzip.compress(body)) < 1_000 < 10_000 < len(body)
        assert (answer.status, client.batches) == (429, [])
        assert (await client.post(reading())).status == 200


# -- who may send ------------------------------------------------------------------------------------------------------


async def test_token_is_needed_and_its_rate_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPY_INGEST_TOKENS", TOKENS)
    async with accepting(bounds=HttpBounds(requests_per_s=0.001)) as client:
        none = await client.post(reading())
        wrong = await client.post(reading(), Authorization="Bearer wrong")
        empty = await client.post(reading(), Authorization="Bearer ")
        right = await client.post(reading(), Authorization=f"bearer {TOKEN}")
        again = await client.post(reading(), Authorization=f"Bearer {TOKEN}")

        assert [answer.status for answer in (none, wrong, empty, right, again)] == [401, 401, 401, 200, 429]
        assert none.headers["WWW-Authenticate"] == "Bearer"
        assert 990 < int(again.headers["Retry-After"]) <= 1_000


async def test_pages_of_foreign_sites_cannot_send() -> None:
    async with accepting() as client:
        assert (await client.post(reading(), Origin="http://evil.example")).status == 403


def test_tokens_are_read_again_and_stay_when_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setenv("MILLPY_INGEST_TOKENS", TOKENS)
    tokens = TokenList(clock)
    assert tokens.name_of(f"Bearer {TOKEN}") == "gateway"

    monkeypatch.setenv("MILLPY_INGEST_TOKENS", f"new {sha256(b'new').hexdigest()}")
    assert tokens.name_of("Bearer new") is None
    clock.advance(11)
    assert (tokens.name_of("Bearer new"), tokens.name_of(f"Bearer {TOKEN}")) == ("new", None)
    monkeypatch.setenv("MILLPY_INGEST_TOKENS", "broken")
    clock.advance(11)
    assert tokens.name_of("Bearer new") == "new"


def test_a_comment_on_tokens_ends_with_its_line() -> None:
    hashes = [sha256(name).digest() for name in (b"a", b"b", b"c")]
    a, b, c = (digest.hex() for digest in hashes)
    assert parse_tokens(f"# of Alice, in plant 3\na {a}, b {b}  # until May\n# old {b}, withdrawn {c}\n") == {
        hashes[0]: "a", hashes[1]: "b"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "#", "name", "name abc", f"na me {'0' * 64}", f"x {'0' * 64}\nsecret-token"])
def test_malformed_tokens_are_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tokens(text)

    assert "secret-token" not in str(refused.value)


def test_open_address_needs_to_know_who_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    open_to_all = Http("/a", url="http://0.0.0.0:8081")
    with pytest.raises(ConfigError, match="open to other machines"):
        listeners.check_access(open_to_all, TokenList(clock))
    listeners.check_access(Http("/a", url="http://0.0.0.0:8081", anonymous=True), TokenList(clock))
    listeners.check_access(Http("/a", url="http://127.0.0.1:8081"), TokenList(clock))
    monkeypatch.setenv("MILLPY_INGEST_TOKENS", TOKENS)
    listeners.check_access(open_to_all, TokenList(clock))


async def test_certificates_are_shown_and_demanded(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = {name: tmp_path / name for name in ("ca", "certificate", "key", "client")}
    authority.cert_pem.write_to_path(str(names["ca"]))
    ours = authority.issue_cert("127.0.0.1")
    ours.cert_chain_pems[0].write_to_path(str(names["certificate"]))
    ours.private_key_pem.write_to_path(str(names["key"]))
    authority.issue_cert("client.example").private_key_and_cert_chain_pem.write_to_path(str(names["client"]))
    files = "&".join(f"{name}={names[name]}" for name in ("certificate", "key", "ca"))
    source = Http("/readings", url=f"https://127.0.0.1:{free_port()}?{files}")
    (setup,) = setups_of(source, Limits())
    injector = source.connect(setup)
    await injector.open(None)
    known = ssl.create_default_context(cafile=names["ca"])
    stranger = ssl.create_default_context(cafile=names["ca"])
    known.load_cert_chain(names["client"])
    url = f"https://127.0.0.1:{source.address().port}/readings"
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(url, ssl=known) as answer:
                assert answer.status == 405
                assert answer.headers["Server"] == "millpy"
            with pytest.raises(aiohttp.ClientError):
                await session.get(url, ssl=stranger)
            with pytest.raises(aiohttp.ClientError):
                await session.get(url.replace("https", "http"))
        findings = [finding async for finding in source.examine("g", "s")]
    finally:
        await injector.close()
    assert [(finding.check, finding.severity) for finding in findings] == [
        ("HTTP access", Severity.OK), ("HTTP source", Severity.OK),
    ]  # fmt: skip


async def test_doctor_says_who_may_send_and_whether_a_worker_answers() -> None:
    source = Http("/readings", url=f"http://127.0.0.1:{free_port()}")
    other = Http("/other", url=source.url, anonymous=True)
    (setup,) = setups_of(source, Limits())

    async def found(source: Http) -> list[Severity]:
        return [finding.severity async for finding in source.examine("g", "s")]

    assert await found(source) == [Severity.NOTE, Severity.ERROR]
    injector = source.connect(setup)
    await injector.open(None)
    try:
        assert await found(source) == [Severity.NOTE, Severity.OK]
        assert await found(other) == [Severity.NOTE, Severity.WARNING]  # no source there
    finally:
        await injector.close()
    everywhere = Http("/readings", url=str(source.address()).replace("127.0.0.1", "0.0.0.0"))
    assert await found(everywhere) == [Severity.ERROR, Severity.WARNING, Severity.ERROR]


# -- the description ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"path": "readings"},
        {"path": "/a b"},
        {"path": "/a", "partitions": 0},
        {"path": "/a", "bad_records": "skip"},
        {"path": "/a", "url": "ftp://x"},
        {"path": "/a", "url": "https://127.0.0.1:1"},
        {"path": "/a", "url": "http://127.0.0.1:1?certificate=a"},
        {"path": "/a", "url": "http://127.0.0.1:99999"},
    ],
)
def test_wrong_setting_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Http(**settings)


def test_key_needs_a_field_of_text() -> None:
    graph = Graph("g")
    with pytest.raises(GraphError, match="must be a str"):
        graph.inject("s", Http("/a", key_field="at"), schema=Reading, event_time=EVENT_TIME)


def test_repr_is_the_code_without_address_and_bounds() -> None:
    assert repr(Http("/a", url=URL, bounds=HttpBounds(answer_s=1.0))) == "Http('/a')"
    assert repr(Http("/a", partitions=2, key_field="k")) == "Http('/a', key_field='k', partitions=2)"
    assert Http("/a", partitions=2).partitions() == ("/a/0", "/a/1")


def test_bounds_fit_together() -> None:
    for wrong in ({"body_bytes": 0}, {"waiting_bytes": 10}, {"requests_per_s": 0.0}, {"answer_s": -1.0}):
        with pytest.raises(ConfigError):
            HttpBounds(**wrong)  # type: ignore[arg-type]


def test_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(listen_address(None)) == "http://127.0.0.1:8081"
    monkeypatch.setenv("MILLPY_INGEST_URL", "https://[::]:8443?certificate=c.pem&key=k.pem&ca=a.pem")
    found = listen_address(None)
    assert (found.host, found.port, found.certificate, found.key, found.ca) == ("::", 8443, "c.pem", "k.pem", "a.pem")
    assert found.is_open
    with pytest.raises(ConfigError, match=r"cannot use the TLS files c\.pem"):
        found.tls_context()


async def test_two_sources_cannot_have_one_path() -> None:
    async with accepting() as client:
        (setup,) = setups_of(client.source, Limits())
        with pytest.raises(ConfigError, match="a path of its own"):
            await client.source.connect(replace(setup, stream="t")).open(None)


async def test_port_is_shared_by_workers_of_one_graph_only() -> None:
    source = Http("/a", url=f"http://127.0.0.1:{free_port()}")
    (setup,) = setups_of(source, Limits())
    injector = source.connect(setup)
    await injector.open(None)
    try:
        for graph, secret in (("g", "secret"), ("g_2", "secret"), ("g", "another")):
            listener = listeners.Listener(source.address(), graph_mark(graph, secret))
            if (graph, secret) == ("g", "secret"):
                await listener.open()
                await listener.close()
                continue
            with pytest.raises(ConfigError, match="another graph"):
                await listener.open()
    finally:
        await injector.close()


async def test_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        source = Http("/a", url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        (setup,) = setups_of(source, Limits())
        with pytest.raises(ConfigError, match="cannot listen"):
            await source.connect(setup).open(None)
