"""Webhooks without a network: what is refused, what requests have in them, and how failures are dealt with."""

from __future__ import annotations

import asyncio
import base64
import random
from collections import defaultdict
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
import yarl
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import EventTime, Graph, Tls, Webhook, WebhookAccess, WebhookTimeouts, seconds
from millpy.clock import SystemClock
from millpy.errors import ConfigError, GraphError, MessagesRefusedError, MillError, SinkUnavailableError
from millpy.sinks import SendBound, SinkMessages, SinkSetup
from millpy.sinks.webhook.address import allowed_origins, origin_of, parsed
from millpy.sinks.webhook.answers import RETRY_AFTER_S_MAX, Meaning, WebhookAnswer, answer_of, retry_after_s
from millpy.sinks.webhook.delivery import BEHIND, FAILURES_MAX, WebhookDelivery
from millpy.sinks.webhook.requests import HEADERS_BYTES_MAX, RequestBuilder, WebhookRequest, header_text
from millpy.sinks.webhook.signing import RequestSecrets, signature, signing_keys
from millpy.testing import GraphDriver, ManualSource
from tests.unit.test_sinks import QuickClock, Reading, reading

URL = "https://example.org/hook"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_settings_that_cannot_be_are_refused() -> None:
    for arguments, said in (
        ({"url": ""}, "needs the URL"),
        ({"url": "example.org/x"}, "begins with https://"),
        ({"url": "ftp://example.org/x"}, "begins with https://"),
        ({"url": "https:///x"}, "begins with https://"),
        ({"url": "https://me:hunter2@example.org/x"}, "has a login"),
        ({"url": "https://example.org/x#part"}, "has a fragment"),
        ({"url": "https://example.org/a b"}, "not allowed in URLs"),
        ({"url": "https://example.org\\@evil.org/"}, "not allowed in URLs"),
        ({"url": "https://exämple.org/"}, "not allowed in URLs"),
        ({"url": "https://example.org:99999/"}, "is no URL"),
        ({"url": "https://example.org/" + "x" * 2_000}, "characters"),
        ({"url": None}, "either a URL or a field"),
        ({"url_field": "text", "hosts": ["a.org"]}, "either a URL or a field"),
        ({"url": None, "url_field": "text"}, r"needs hosts=\(…\)"),
        ({"url": None, "url_field": "text", "hosts": ["*.example.org"]}, "takes whole hosts"),
        ({"url": None, "url_field": "text", "hosts": ["example.org/path"]}, "takes whole hosts"),
        ({"hosts": ["example.org"]}, "hosts= is for URLs from a field"),
        ({"headers": {"X Device": "device"}}, "is no name of a header"),
        ({"headers": {"Content-Length": "device"}}, "not yours to set"),
        ({"fixed_headers": {"Webhook-Id": "5"}}, "not yours to set"),
        ({"headers": {"X-A": "device"}, "fixed_headers": {"x-a": "5"}}, "is named twice"),
        ({"fixed_headers": {"X-A": "a\r\nX-B: b"}}, "not one line of ASCII"),
        ({"batch": "csv"}, "unknown batch"),
        ({"batch": "json", "value": "text", "content_type": "text/plain"}, "a batch has whole records"),
        ({"batch": "json", "headers": {"X-A": "device"}}, "a batch has whole records"),
        ({"value": "text"}, "needs content_type="),
        ({"content_type": "a\nb"}, "is no content type"),
        ({"in_flight": 0}, "from 1 to 100"),
        ({"message_bytes_max": 0}, "lets no message pass"),
        ({"url": "http://example.org/", "access": WebhookAccess(headers={"A": "B"})}, "unencrypted"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            Webhook(**({"url": URL} | arguments))
        assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="pair of timeouts"):
        WebhookTimeouts(connect_s=5, answer_s=1)
    assert Webhook("http://127.0.0.1:1/", access=WebhookAccess(headers={"A": "B"})).url  # it stays on this machine


def test_the_graph_refuses_fields_that_do_not_fit_and_stores_no_address() -> None:
    graph = Graph("plant")
    event_time = EventTime("at", max_disorder=seconds(0))
    stream = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
    for build, said in (
        (lambda: stream.to_webhook(URL, key="device", name="out", headers={"X-A": "nothing"}), "has no field"),
        (
            lambda: stream.to_sink(Webhook(url_field="value", hosts=["a.org"]), key="device", name="out"),
            "must be a str",
        ),
    ):
        with pytest.raises(MillError, match=said):
            build()
    secret = Webhook(URL + "?token=hunter2", access=WebhookAccess(headers={"Authorization": "ALERTS_AUTH"}))
    assert "hunter2" not in repr(secret)
    assert secret.identity() == Webhook("https://elsewhere.org/", batch="json").identity()
    stream.to_sink(secret, key="device", name="out", intervals=1)
    assert "hunter2" not in str(graph.spec().description())
    driver = GraphDriver(graph)
    driver.feed("readings", [reading("a"), reading("b")])
    assert [key for key, _ in driver.sent("out")] == [b"a", b"b"]
    driver.check_accounting()


def test_origins_compare_as_the_client_reads_them() -> None:
    assert str(origin_of("HTTPS://Example.ORG:443/x?y")) == "https://example.org"
    assert str(origin_of("http://[::1]:8080/")) == "http://[::1]:8080"
    assert allowed_origins(["a.org", "b.org:8443", "http://127.0.0.1"]) == {
        origin_of("https://a.org"), origin_of("https://b.org:8443"), origin_of("http://127.0.0.1/")
    }  # fmt: skip
    assert [origin_of(url).exposes_secrets for url in ("http://a.org", "http://127.0.0.1", "https://a.org")] == [
        True, False, False
    ]  # fmt: skip


def test_an_international_host_is_the_one_that_the_graph_allows() -> None:
    allowed = origin_of("https://xn--bcher-kva.example/alerts")
    assert parsed(yarl.URL("https://xn--bcher-kva.example/alerts", encoded=True)) == allowed
    assert parsed(yarl.URL("https://bücher.example/of-a-field")) == allowed, "as a field may have it"


def test_signatures_are_those_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", SECRET)
    (key,) = signing_keys("HOOK")
    known = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="  # of the test vector of the specification's libraries
    assert signature([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}') == known


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "has 0 signing secrets"),
        (" ".join([SECRET] * 6), "has 6 signing secrets"),
        ("whsec_h?nter2", "secret 1 is not base64"),
        (f"{SECRET} whsec_{base64.b64encode(b'hunter2').decode()}", "secret 2 has 7 bytes"),
    ],
)
def test_secrets_that_cannot_sign_are_refused_without_quoting_them(
    monkeypatch: pytest.MonkeyPatch, value: str, said: str
) -> None:
    monkeypatch.setenv("HOOK", value)
    with pytest.raises(ConfigError, match=said) as refused:
        signing_keys("HOOK")
    assert "nter2" not in str(refused.value) + refused.value.hint


class SteppedClock(SystemClock):
    """A clock of which a test says the time."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def now_us(self) -> int:
        return 1_614_265_330_000_000 + int(self.at * 1e6)

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        await asyncio.sleep(0)


def test_secrets_are_read_again_and_all_of_them_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file, clock = tmp_path / "secret", SteppedClock()
    other = "whsec_" + base64.b64encode(bytes(32)).decode()
    file.write_text(SECRET + "\n")
    monkeypatch.setenv("HOOK_FILE", str(file))
    monkeypatch.setenv("HOOK_AUTH", "Bearer abc")
    secrets = RequestSecrets("HOOK", {"Authorization": "HOOK_AUTH"}, clock)
    first = secrets.headers("a-1", b"{}")
    assert (first["Authorization"], first["webhook-timestamp"]) == ("Bearer abc", "1614265330")
    file.write_text(f"{other}\n{SECRET}\n")
    assert secrets.headers("a-1", b"{}") == first
    clock.at = 11
    both = secrets.headers("a-1", b"{}")["webhook-signature"].split(" ")
    assert both == [
        signature(signing_keys("HOOK")[:1], "a-1", 1614265341, b"{}"),
        signature(signing_keys("HOOK")[1:], "a-1", 1614265341, b"{}"),
    ]
    file.write_text("nonsense")
    clock.at = 22
    assert len(secrets.headers("a-1", b"{}")["webhook-signature"].split(" ")) == 2  # those read before
    monkeypatch.setenv("HOOK_AUTH", "Bearer\r\nX-Evil: 1")
    with pytest.raises(ConfigError, match="no value of a header"):
        RequestSecrets(None, {"Authorization": "HOOK_AUTH"}, clock)
    with pytest.raises(ConfigError, match="NOTHING is not set"):
        RequestSecrets(None, {"Authorization": "NOTHING"}, clock)


def test_retry_after_is_a_number_or_a_date_within_bounds() -> None:
    now_s = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()
    date = format_datetime(datetime(2026, 11, 26, 12, 1, tzinfo=UTC), usegmt=True)
    past = format_datetime(datetime(2020, 1, 1, tzinfo=UTC), usegmt=True)
    far = format_datetime(datetime(2030, 1, 1, tzinfo=UTC), usegmt=True)
    found = {
        text: retry_after_s(text, now_s)
        for text in (None, "", "7", " 7 ", date, past, far, "99999999999999999999", "1" * 101, "-1", "1.5", "soon", "٣",
                     "Mon, 99 Foo 2026 00:00:00 GMT")
    }  # fmt: skip
    assert found == {
        None: None, "": None, "7": 7.0, " 7 ": 7.0, date: 60.0, past: 0.0, "99999999999999999999": RETRY_AFTER_S_MAX,
        far: RETRY_AFTER_S_MAX,
        "1" * 101: None, "-1": None, "1.5": None, "soon": None, "٣": None, "Mon, 99 Foo 2026 00:00:00 GMT": None,
    }  # fmt: skip


def test_each_status_has_one_meaning() -> None:
    found: dict[Meaning, list[int]] = defaultdict(list)
    for status in (200, 202, 204, 299, 301, 302, 304, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 422, 425, 429,
                   431, 500, 501, 502, 503, 504, 599, 600):  # fmt: skip
        found[answer_of(status, "", None, 0).meaning].append(status)
    assert found == {
        Meaning.DELIVERED: [200, 202, 204, 299],
        Meaning.REFUSED: [301, 302, 304, 401, 403, 404, 405, 409, 410, 415],
        Meaning.FINAL: [400, 413, 422, 431],
        Meaning.AGAIN: [408, 425, 429, 500, 501, 502, 503, 504, 599, 600],
    }


@given(st.binary(max_size=60))
def test_any_text_fits_into_a_header_and_is_read_back(value: bytes) -> None:
    text = header_text(value)
    assert unquote_to_bytes(text) == value
    assert text.isascii()
    assert text.isprintable()
    assert text == text.strip()


def setup_of(clock: Any = None, **more: Any) -> SinkSetup:
    return SinkSetup("plant_2", "out", 0, 17, 1, clock or QuickClock(), secret="s3cret", **more)


def messages_of(keys: str, positions: list[int] | None = None) -> SinkMessages:
    positions = positions or list(range(100, 100 + len(keys)))
    values: list[bytes | None] = [b'{"n":%d}' % position for position in positions]
    found = [key.encode() for key in keys]
    return SinkMessages(positions[0], found, values, [0] * len(keys), [], positions)


def test_a_request_is_identified_by_the_positions_of_its_messages() -> None:
    single = RequestBuilder(Webhook(URL), setup_of())
    requests = [request for of_key in single.by_key(messages_of("aba", [3, 4, 9])) for request in of_key]
    assert [(request.id.rpartition("-")[2], request.body) for request in requests] == [
        ("3", b'{"n":3}'), ("9", b'{"n":9}'), ("4", b'{"n":4}')
    ]  # fmt: skip
    assert requests[0].id.startswith("plant_2-out-17-")
    assert "s3cret" not in requests[0].id
    assert "." not in requests[0].id
    assert requests[0].headers["Idempotency-Key"] == requests[0].headers["webhook-id"] == requests[0].id
    other = RequestBuilder(Webhook(URL), SinkSetup("plant_2", "out", 0, 17, 1, QuickClock(), secret="other"))
    assert other.prefix != single.prefix  # another database
    for batch, body in (("json", b'[{"n":3},{"n":4}]'), ("ndjson", b'{"n":3}\n{"n":4}\n')):
        builder = RequestBuilder(Webhook(URL, batch=batch), setup_of())
        request = builder.batch(messages_of("ab", [3, 4]), [0, 1])
        assert (request.id.removeprefix(builder.prefix), request.body) == ("-3-4", body)


def test_headers_of_fields_are_encoded_and_bounded() -> None:
    webhook = Webhook(URL, headers={"X-Device": "device", "X-Note": "text"})
    messages = messages_of("ab")
    messages.headers = [[("device", b"a"), ("text", b"5 %\r\nX-Evil: 1")], [("text", b"x" * HEADERS_BYTES_MAX)]]
    (first,), (second,) = RequestBuilder(webhook, setup_of()).by_key(messages)
    assert (first.headers["X-Device"], first.headers["X-Note"], first.refused) == ("a", "5 %25%0D%0AX-Evil: 1", "")
    assert "X-Device" not in second.headers
    assert second.refused.startswith("headers of 6,006 bytes")


class Place:
    """An endpoint in memory, of which a test says how it answers."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.got: list[tuple[int, ...]] = []
        self.tried: set[int] = set()
        self.now = self.most = 0

    async def post(self, request: WebhookRequest) -> WebhookAnswer:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now -= 1
        numbers = request.id.split("-")[4:]
        positions = tuple(range(int(numbers[0]), int(numbers[-1]) + 1))
        self.tried |= set(positions)
        answer: WebhookAnswer = self.answers(positions)
        if answer.meaning is Meaning.DELIVERED:
            self.got.append(positions)
        return answer


DELIVERED = WebhookAnswer(Meaning.DELIVERED)
AWAY = WebhookAnswer(Meaning.AGAIN, "away")


async def send(place: Place, messages: SinkMessages, in_flight: int = 4, batch: Any = None, **more: Any) -> None:
    setup = setup_of(**more)
    builder = RequestBuilder(Webhook(URL, batch=batch), setup)
    delivery = WebhookDelivery(place.post, setup, in_flight)
    await (delivery.send_batch if batch else delivery.send_singly)(builder, messages)


async def test_messages_of_a_key_are_in_order_and_others_at_once_within_the_bound() -> None:
    rng = random.Random(1)
    place = Place(lambda positions: DELIVERED if rng.random() < 0.7 else AWAY)
    keys = "".join(rng.choice("abcdef") for _ in range(60))
    place.answers = lambda positions: DELIVERED  # nothing fails: all leave at once, key by key
    await send(place, messages_of(keys), in_flight=3)
    assert place.most == 3
    for key in "abcdef":
        own = [100 + n for n, k in enumerate(keys) if k == key]
        assert [p for (p,) in place.got if p in own] == own


async def test_a_refused_message_holds_its_key_alone() -> None:
    answers = {101: WebhookAnswer(Meaning.REFUSED, "no"), 102: WebhookAnswer(Meaning.FINAL, "never", 7.0)}
    place = Place(lambda positions: answers.get(positions[0], DELIVERED))
    with pytest.raises(MessagesRefusedError) as refused:
        await send(place, messages_of("abcabca"))
    assert refused.value.reasons == {1: "no", 2: "never", 4: BEHIND, 5: BEHIND}
    assert (refused.value.final, refused.value.retry_after_s) == ({2}, 7.0)
    assert sorted(place.got) == [(100,), (103,), (106,)]


async def test_what_nothing_has_arrived_of_is_given_back_at_once() -> None:
    place = Place(lambda positions: WebhookAnswer(Meaning.AGAIN, "away", 9.0, True))
    with pytest.raises(SinkUnavailableError, match="away") as away:
        await send(place, messages_of("abcabca"), clock=SteppedClock())
    assert away.value.retry_after_s == 9.0
    with pytest.raises(SinkUnavailableError, match="does not own"):
        await send(place, messages_of("abc"), trusted=lambda: False)


async def test_a_message_that_always_fails_is_refused_when_others_arrive() -> None:
    place = Place(lambda positions: AWAY if 101 in positions else DELIVERED)
    with pytest.raises(MessagesRefusedError) as refused:
        await send(place, messages_of("abcb"))
    assert refused.value.reasons == {1: "away; 5 attempts have failed", 3: BEHIND}
    assert not refused.value.final


async def test_an_endpoint_that_goes_away_ends_the_send_and_keeps_what_has_arrived() -> None:
    place = Place(lambda positions: DELIVERED if len(place.got) < 10 else AWAY)
    with pytest.raises(MessagesRefusedError) as refused:
        await send(place, messages_of("abcdefghijklmnopqrstuvwxyz" * 3), in_flight=2)
    assert {100 + n for n in refused.value.reasons} | {p for (p,) in place.got} == set(range(100, 178))
    assert len(place.got) == 10
    behind = {n for n, why in refused.value.reasons.items() if why == BEHIND}
    assert {100 + n for n in refused.value.untried} == set(range(100, 178)) - place.tried - {100 + n for n in behind}


async def test_a_busy_endpoint_is_asked_when_it_wants_to_be() -> None:
    clock, asked = SteppedClock(), []

    def answers(positions: tuple[int, ...]) -> WebhookAnswer:
        asked.append(clock.at)
        return WebhookAnswer(Meaning.AGAIN, "busy", 30.0, True) if len(asked) == 2 else DELIVERED

    place = Place(answers)
    await send(place, messages_of("aaaa"), clock=clock)
    assert len(place.got) == 4
    assert asked[:2] == [0.0, 0.0]
    assert all(at >= 30.0 for at in asked[2:])


async def test_the_longest_wait_that_an_endpoint_asks_for_counts() -> None:
    clock, asked = SteppedClock(), []

    def answers(positions: tuple[int, ...]) -> WebhookAnswer:
        asked.append(clock.at)
        waits = {2: 30.0, 3: 5.0}
        return WebhookAnswer(Meaning.AGAIN, "busy", waits[len(asked)], True) if len(asked) in waits else DELIVERED

    place = Place(answers)
    await send(place, messages_of("aabc"), in_flight=3, clock=clock)
    assert len(place.got) == 4
    assert all(at >= 30.0 for at in asked[4:]), asked


async def test_a_batch_with_a_refused_message_is_divided_until_it_is_found() -> None:
    bad = {103, 110}
    place = Place(lambda positions: WebhookAnswer(Meaning.FINAL, "bad") if bad & set(positions) else DELIVERED)
    with pytest.raises(MessagesRefusedError) as refused:
        await send(place, messages_of("abcdabcdabcdabcd"), batch="json")
    assert {100 + n for n in refused.value.final} == bad
    behind = {107, 111, 115, 114}  # 103 is of d, 110 of c
    assert {100 + n for n in refused.value.reasons} == bad | behind
    arrived = [p for positions in place.got for p in positions]
    assert arrived == sorted(set(range(100, 116)) - bad - behind)


async def test_a_batch_is_refused_for_its_content_alone() -> None:
    place = Place(lambda positions: WebhookAnswer(Meaning.REFUSED, "401", 5.0))
    with pytest.raises(SinkUnavailableError, match="401") as refused:
        await send(place, messages_of("ab"), batch="json")
    assert refused.value.retry_after_s == 5.0


async def test_a_batch_has_no_gaps_and_is_alone_in_flight() -> None:
    place = Place(lambda positions: DELIVERED)
    await send(place, messages_of("abcdef", [1, 2, 3, 7, 8, 20]), batch="ndjson")
    assert place.got == [(1, 2, 3), (7, 8), (20,)]
    assert place.most == 1


async def test_an_endpoint_that_goes_away_within_a_batch_is_left_after_as_few_attempts_as_before_it() -> None:
    tried: list[tuple[int, ...]] = []

    def answer(positions: tuple[int, ...]) -> WebhookAnswer:
        tried.append(positions)
        return DELIVERED if positions == (1, 2, 3) else AWAY

    with pytest.raises(SinkUnavailableError, match="away"):
        await send(Place(answer), messages_of("abcde", [1, 2, 3, 7, 8]), batch="ndjson", clock=SteppedClock())

    assert tried == [(1, 2, 3), *[(7, 8)] * FAILURES_MAX]


@settings(max_examples=150, deadline=None)
@given(st.text("abc", min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([None, "json"]), st.randoms())
def test_every_send_ends_and_accounts_for_each_message_in_the_order_of_its_key(
    keys: str, in_flight: int, batch: Any, rng: random.Random
) -> None:
    meanings = [Meaning.DELIVERED] * 4 + [Meaning.AGAIN] * 2 + [Meaning.REFUSED, Meaning.FINAL]
    place = Place(
        lambda positions: WebhookAnswer(rng.choice(meanings), "why", rng.choice([None, 1.0]), rng.random() < 0.5)
    )
    reasons: dict[int, str] = {}
    is_known = True
    try:
        asyncio.run(send(place, messages_of(keys), in_flight, batch, clock=SteppedClock()))
    except MessagesRefusedError as refused:
        reasons = refused.reasons
        assert refused.final <= set(reasons)
    except SinkUnavailableError:
        is_known = False
    arrived = [p - 100 for positions in place.got for p in positions]
    assert len(arrived) == len(set(arrived))
    if is_known:
        assert set(arrived).isdisjoint(reasons)
        assert set(arrived) | set(reasons) == set(range(len(keys)))
    else:
        assert len(arrived) < in_flight or batch  # a request that was in flight may arrive
    for key in set(keys):
        own = [place for place, k in enumerate(keys) if k == key]
        got = [place for place in arrived if place in own]
        assert got == own[: len(got)]


def test_the_file_of_a_certificate_must_be_readable(tmp_path: Any) -> None:
    for tls in (Tls(ca=tmp_path / "nothing.pem"), Tls(certificate=tmp_path / "nothing.pem")):
        webhook = Webhook(URL, access=WebhookAccess(tls=tls))
        with pytest.raises(MillError, match=r"cannot use .*nothing\.pem"):
            asyncio.run(webhook.connect(setup_of()).open())


def test_a_bound_is_that_of_a_batch() -> None:
    assert Webhook(URL).bound == SendBound(records=100, bytes=1_000_000)
    assert Webhook(URL, batch="json", in_flight=9).in_flight == 1
    with pytest.raises(GraphError):
        SendBound(records=0)
