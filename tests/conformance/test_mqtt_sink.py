"""The MQTT sink against a real mosquitto: what arrives, what is refused, and what becomes of a lost connection."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from millpy import Graph, Login, MqttTopic, Tls
from millpy.admin.doctor_sources import examine_sources
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedBroker, mosquitto_program
from millpy.errors import MessagesRefusedError, SinkUnavailableError
from millpy.model.finding import Finding, Severity
from millpy.sinks import SinkMessages, SinkSetup
from millpy.sinks.messages import TOPIC
from millpy.sinks.mqtt import link
from millpy.sinks.mqtt.packets import BrokerLimits
from millpy.sinks.mqtt.publisher import ENDS_MAX, MqttPublisher
from millpy.sinks.mqtt.template import unsendable
from millpy.testing import SinkSuite
from tests.conformance.guarded_broker import PASSWORD, GuardedBroker
from tests.conformance.mqtt_subject import SettledBroker
from tests.conformance.test_mqtt_tls import Certificates, certificates, tls_broker
from tests.crash.test_sinks import readings
from tests.feed import Feed
from tests.tcp_proxy import tcp_proxy

__all__ = ["certificates", "tls_broker"]
pytestmark = pytest.mark.skipif(mosquitto_program() is None, reason="mosquitto is not installed")
ID = "g.s.0.1"


def setup(number: int = 1, trusted: Callable[[], bool] = lambda: True) -> SinkSetup:
    return SinkSetup("g", "s", 0, number, 1, SystemClock(), trusted=trusted)


def messages(*made: tuple[str, str, bytes | None], position: int = 0, fields: Any = ()) -> SinkMessages:
    """Messages of (key, topic, value)."""
    keys, topics, values = zip(*made, strict=True)
    headers = [[(TOPIC, topic.encode()), *fields] for topic in topics]
    return SinkMessages(position, [key.encode() for key in keys], list(values), [0] * len(made), headers)


def numbered(count: int, keys: int = 5, position: int = 0) -> SinkMessages:
    return messages(
        *[(f"k{i % keys}", f"t/{i % keys}", b"%d" % (position + i)) for i in range(count)], position=position
    )


@asynccontextmanager
async def opened(port: int, *, of: SinkSetup | None = None, **how: Any) -> AsyncIterator[MqttPublisher]:
    connection = MqttTopic("t", host="127.0.0.1", port=port, **how).publisher(of or setup())
    try:
        await connection.open()
        yield connection
    finally:
        await connection.close()


class Reader:
    """A subscriber that keeps what arrives."""

    def __init__(self) -> None:
        self.got: list[aiomqtt.Message] = []
        self.news = asyncio.Event()

    def values(self) -> list[bytes]:
        return [bytes(message.payload) for message in self.got]  # type: ignore[arg-type]

    def ids(self) -> list[int]:
        """The numbers of the messages in the interval."""
        found = []
        for message in self.got:
            (text,) = [value for name, value in user_properties(message) if name == "millpy-id"]
            interval, _, number = text.rpartition("/")
            assert interval == ID
            found.append(int(number))
        return found

    async def until(self, claim: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not claim():
                self.news.clear()
                await self.news.wait()


def user_properties(message: aiomqtt.Message) -> list[tuple[str, str]]:
    assert isinstance(message.properties, Properties)
    return getattr(message.properties, "UserProperty", [])


@asynccontextmanager
async def reading(port: int, topic: str = "#", **how: Any) -> AsyncIterator[Reader]:
    reader = Reader()

    async def read(client: aiomqtt.Client) -> None:
        async for message in client.messages:
            reader.got.append(message)
            reader.news.set()

    async with aiomqtt.Client("127.0.0.1", port, protocol=aiomqtt.ProtocolVersion.V5, **how) as client:
        await client.subscribe(topic, qos=2)
        task = asyncio.create_task(read(client))
        try:
            yield reader
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.mark.parametrize("qos", [1, 2])
async def test_messages_arrive_once_in_order_with_all_that_belongs_to_them(broker: EmbeddedBroker, qos: int) -> None:
    how = {"qos": qos, "expiry": timedelta(minutes=5), "content_type": "text/plain"}
    async with reading(broker.port) as reader, opened(broker.port, **how) as connection:
        fields = [("site", "Süd".encode()), ("level", b"3")]
        await connection.send(messages(("k", "alerts/d1", b"hot"), ("l", "alerts/ü", None), position=40, fields=fields))
        for position in range(42, 42 + 300, 100):
            await connection.send(numbered(100, position=position))
        await reader.until(lambda: len(reader.got) >= 302)
        assert sorted(reader.ids()) == list(range(40, 342))
        first, second = sorted(reader.got[:2], key=lambda message: message.topic.value)
        assert (first.topic.value, first.payload, first.qos, first.retain) == ("alerts/d1", b"hot", qos, False)
        assert user_properties(first) == [("millpy-id", f"{ID}/40"), ("site", "Süd"), ("level", "3")]
        assert first.properties.ContentType == "text/plain"  # type: ignore[union-attr]
        assert 298 <= first.properties.MessageExpiryInterval <= 300  # type: ignore[union-attr]
        assert (second.topic.value, second.payload) == ("alerts/ü", b"")
        for key in range(5):
            of_key = [int(bytes(m.payload)) for m in reader.got if m.topic.value == f"t/{key}"]  # type: ignore[arg-type]
            assert of_key == sorted(of_key), "out of order"


async def test_whole_records_are_marked_as_json(broker: EmbeddedBroker) -> None:
    async with reading(broker.port) as reader, opened(broker.port) as connection:
        await connection.send(messages(("k", "a", b"{}")))
        await reader.until(lambda: bool(reader.got))
        properties = reader.got[0].properties
        assert (properties.ContentType, properties.PayloadFormatIndicator) == ("application/json", 1)  # type: ignore[union-attr]


async def test_every_character_that_may_leave_is_one_that_the_broker_takes(broker: EmbeddedBroker) -> None:
    """One that it did not take would end the connection of each attempt."""
    places = [*range(0x1_0000), *range(0x1_FF00, 0x2_0100), *range(0x10_FF00, 0x11_0000)]
    sendable = [chr(place) for place in places if not unsendable(chr(place))]
    assert len(sendable) > 60_000
    made = []
    for start in range(0, len(sendable), 200):
        text = "".join(sendable[start : start + 200])
        made.append((str(start), "".join(set(text) - set("+#/$")), text.encode()))
    async with opened(broker.port) as connection:
        for topic in made:
            await connection.send(messages(topic, fields=[("text", topic[2])]))


async def test_a_retained_message_is_deleted_by_one_without_a_value(broker: EmbeddedBroker) -> None:
    async with opened(broker.port, retain=True) as connection:
        await connection.send(
            messages(("k", "a/1", b"old"), ("k", "a/1", b"new"), ("l", "a/2", b"x"), ("l", "a/2", None))
        )
        async with reading(broker.port) as reader:
            await connection.send(messages(("m", "a/3", b"last"), position=4))
            await reader.until(lambda: b"last" in reader.values())
            assert [(m.topic.value, m.payload, m.retain) for m in reader.got] == [
                ("a/1", b"new", True),
                ("a/3", b"last", False),
            ]


# -- refused messages -------------------------------------------------------------------------------------------------


async def refused_of(connection: MqttPublisher, sent: SinkMessages) -> MessagesRefusedError:
    with pytest.raises(MessagesRefusedError) as raised:
        await connection.send(sent)
    return raised.value


async def test_a_topic_without_rights_refuses_its_messages_and_no_others(tmp_path: Path) -> None:
    with GuardedBroker(tmp_path / "broker") as broker:
        topics = next(iter((tmp_path / "broker-files").glob("acl"))).read_text()
        assert "user fleet" in topics
        async with opened(broker.port, login=Login("fleet", PASSWORD)) as connection:
            sent = messages(("a", "secret", b"1"), ("b", "sensors/x", b"2"), ("a", "sensors/x", b"3"))
            error = await refused_of(connection, sent)
            assert error.reasons[0] == "the broker says: not authorized (0x87)"
            assert error.reasons.keys() >= {0, 2}, "what is behind a refused message of its key has left"
            assert error.final == frozenset()
            await connection.close()
        with pytest.raises(SinkUnavailableError, match="refuses user 'fleet'"):
            async with opened(broker.port, login=Login("fleet", "wrong")):
                pass


async def test_a_message_beyond_the_limit_of_the_broker_is_refused_before_it_leaves(tmp_path: Path) -> None:
    with SettledBroker(tmp_path, ["max_packet_size 2000"]) as broker:
        async with reading(broker.port) as reader, opened(broker.port) as connection:
            error = await refused_of(connection, messages(("a", "t", b"x" * 2_000), ("b", "t", b"1"), ("a", "t", b"2")))
            assert "the broker takes at most 2,000" in error.reasons[0]
            assert (error.reasons.keys(), error.final) == ({0, 2}, {0})
            await reader.until(lambda: reader.values() == [b"1"])
            await connection.send(messages(("a", "t", b"2"), position=2))
            await reader.until(lambda: reader.values() == [b"1", b"2"])


async def test_a_broker_that_ends_connections_at_large_messages_refuses_only_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "limits_of", lambda packet: BrokerLimits())  # a broker that does not say its limit
    with SettledBroker(tmp_path, ["max_packet_size 2000"]) as broker:
        async with reading(broker.port) as reader, opened(broker.port) as connection:
            made = [(f"k{i % 7}", "t", b"x" * 2_000 if i in (3, 8) else b"%d" % i) for i in range(20)]
            error = await refused_of(connection, messages(*made))
            assert error.final == {3, 8}
            assert error.reasons.keys() == {3, 10, 17, 8, 15}
            assert "packet too large (0x95)" in error.reasons[3]
            expected = set(range(20)) - error.reasons.keys()
            await reader.until(lambda: set(reader.ids()) >= expected)
            assert set(reader.ids()) == expected
            await connection.send(messages(("k", "t", b"end"), position=20))  # the connection stays in use


async def test_a_payload_limit_of_the_broker_refuses_the_message(tmp_path: Path) -> None:
    with SettledBroker(tmp_path, ["message_size_limit 100"]) as broker:
        async with opened(broker.port) as connection:
            error = await refused_of(connection, messages(("a", "t", b"x" * 101), ("b", "t", b"1")))
            assert error.reasons == {0: "the broker says: packet too large (0x95)"}
            assert error.final == {0}


# -- limits and outages -----------------------------------------------------------------------------------------------


async def test_no_more_are_on_their_way_than_the_broker_allows(tmp_path: Path) -> None:
    with SettledBroker(tmp_path, ["max_inflight_messages 3"]) as broker:
        async with reading(broker.port) as reader, opened(broker.port, qos=2) as connection:
            assert connection._link is not None
            assert connection._link.limits.receive_max == 3
            most = 0
            next_id = connection._link._next_id

            def counted(place: int) -> int:
                nonlocal most
                found = next_id(place)
                most = max(most, len(connection._link._places))  # type: ignore[union-attr]
                return found

            connection._link._next_id = counted  # type: ignore[method-assign]
            await connection.send(numbered(60, keys=20))
            assert most == 3
            await reader.until(lambda: len(reader.got) == 60)


async def test_a_send_that_is_cancelled_publishes_nothing_more(tmp_path: Path) -> None:
    with SettledBroker(tmp_path, ["max_inflight_messages 3"]) as broker:
        async with opened(broker.port) as connection:
            link_, published = connection._link, 0
            assert link_ is not None
            next_id, answered = link_._next_id, asyncio.Event()

            def counted(place: int) -> int:
                nonlocal published
                published += 1
                if published == 10:
                    answered.set()
                return next_id(place)

            link_._next_id = counted  # type: ignore[method-assign]
            sending = asyncio.create_task(connection.send(numbered(2_000, keys=20)))
            await answered.wait()
            sending.cancel()
            await asyncio.wait([sending])
            before = published
            await connection.close()
            assert published == before < 2_000


async def test_a_network_that_is_cut_anywhere_repeats_only_known_messages(quick_broker: EmbeddedBroker) -> None:
    async with reading(quick_broker.port) as reader, tcp_proxy("127.0.0.1", quick_broker.port) as proxy:
        places = [1, 50, 333, 700, 2_000]  # one send has about 4,000 bytes
        async with opened(proxy.port) as connection:
            for place, size in enumerate(places):
                proxy.cut_after(size)
                await connection.send(numbered(50, position=50 * place))
        assert proxy.made == 1 + len(places)
        end = 50 * len(places)
        await reader.until(lambda: set(reader.ids()) == set(range(end)))
        assert len(reader.got) < 2 * end
        for key in range(5):
            seen: list[int] = []
            for number, message in zip(reader.ids(), reader.got, strict=True):
                if message.topic.value == f"t/{key}" and (not seen or number > seen[-1]):
                    seen.append(number)  # a consumer that drops what it has seen
            assert seen == [place for place in range(end) if place % 5 == key]


async def test_a_broker_that_is_killed_is_unavailable_until_it_is_back(quick_broker: EmbeddedBroker) -> None:
    async with opened(quick_broker.port) as connection:
        await connection.send(numbered(10))
        quick_broker.kill()
        with pytest.raises(SinkUnavailableError, match="cannot connect"):
            await connection.send(numbered(10, position=10))
    with pytest.raises(SinkUnavailableError, match="cannot connect"):
        async with opened(quick_broker.port):
            pass
    quick_broker.start()
    async with reading(quick_broker.port) as reader, opened(quick_broker.port) as connection:
        await connection.send(numbered(10, position=10))
        await reader.until(lambda: sorted(reader.ids()) == list(range(10, 20)))


async def test_a_frozen_broker_is_given_up(quick_broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER_S_MAX", 0.3)
    async with opened(quick_broker.port) as connection:
        os.kill(quick_broker.pid(), signal.SIGSTOP)
        try:
            with pytest.raises(SinkUnavailableError, match=r"no message for 0\.3 s"):
                await connection.send(numbered(5))
        finally:
            os.kill(quick_broker.pid(), signal.SIGCONT)


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_slow_reader_delays_no_acknowledgement(quick_broker: EmbeddedBroker, qos: int) -> None:
    """The broker keeps what a subscriber has not read."""
    async with aiomqtt.Client("127.0.0.1", quick_broker.port, protocol=aiomqtt.ProtocolVersion.V5) as client:
        await client.subscribe("#", qos=qos)
        client._misc_task.cancel()  # type: ignore[union-attr]
        asyncio.get_running_loop().remove_reader(client._client.socket().fileno())  # type: ignore[union-attr]
        async with opened(quick_broker.port, qos=qos) as connection:
            for position in range(0, 2_000, 100):
                await connection.send(numbered(100, keys=100, position=position))
        with suppress(aiomqtt.MqttError):
            client._client.disconnect()


async def test_a_new_owner_ends_the_connection_of_the_one_before(broker: EmbeddedBroker) -> None:
    async with reading(broker.port) as reader, opened(broker.port) as first:
        await first.send(numbered(5))
        async with opened(broker.port) as second, opened(broker.port, of=setup(2)) as other:
            with pytest.raises(SinkUnavailableError, match="has ended: the broker closed it"):
                await first.send(numbered(5, position=5))
            await second.send(numbered(5, position=5))
            await reader.until(lambda: len(reader.got) == 10)
            assert sorted(reader.ids()) == list(range(10))
            assert other.interval != second.interval
            await other.send(numbered(1))  # other intervals are not concerned


async def test_a_worker_whose_lease_is_over_does_not_connect(broker: EmbeddedBroker) -> None:
    with pytest.raises(SinkUnavailableError, match="lease"):
        async with opened(broker.port, of=setup(trusted=lambda: False)):
            pass


async def test_a_broker_without_mqtt_5_is_refused() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1_000)
        writer.write(b"\x20\x02\x00\x01")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(SinkUnavailableError, match="does not speak protocol 5") as raised:
            async with opened(server.sockets[0].getsockname()[1]):
                pass
    assert "needs a broker with MQTT 5" in raised.value.hint


@pytest.mark.parametrize(
    ("lines", "how", "said"),
    [
        (["max_qos 1"], {"qos": 2}, "no messages of QoS 2"),
        (["retain_available false"], {"retain": True}, "keeps no messages"),
    ],
)
async def test_what_the_broker_does_not_offer_is_said(tmp_path: Path, lines: list[str], how: Any, said: str) -> None:
    with SettledBroker(tmp_path, lines) as broker:
        with pytest.raises(SinkUnavailableError, match=said):
            async with opened(broker.port, **how):
                pass


async def test_tls_verifies_the_broker(tls_broker: SettledBroker, certificates: Certificates) -> None:
    async with opened(tls_broker.port, tls=Tls(ca=certificates.ca)) as connection:
        await connection.send(numbered(100))
    with pytest.raises(SinkUnavailableError, match="not trusted"):
        async with opened(tls_broker.port, tls=True):
            pass


CONNACK = b"\x20\x03\0\0\0"


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([b""], "the broker closed it"),
        ([b"\x40\x02\x00\x63"], "answered message 99, which was not sent"),
        ([b"\x50\x02\x00\x01"], "answered message 1, which was not sent"),
        ([b"\x40\x01\x00"], "names no message"),
        ([b"\x40\x05\x00\x01\x87\x7f\x1f"], "ends within its properties"),
        ([b"\x40\xff\xff\xff\xff\xff"], "a length of more than four bytes"),
        ([b"\xe0\x01\x8b"], "server shutting down"),
        ([b"\xe0\x01\x97"], "quota exceeded"),
        ([b"\xe0\x04\x00\x07\x1f\xff"], "ends within its properties"),
    ],
)
async def test_a_broker_that_answers_anything_is_given_up_after_a_few_connections(
    answers: list[bytes], said: str
) -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(10_000)
        writer.write(CONNACK)
        await reader.read(10_000)
        writer.write(b"".join(answers))
        with suppress(OSError):
            await writer.drain()
            if answers[0]:
                await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(SinkUnavailableError, match=said):
            async with opened(server.sockets[0].getsockname()[1]) as connection:
                await connection.send(numbered(50))
    assert connections <= 2 * ENDS_MAX + 2


# -- the doctor -------------------------------------------------------------------------------------------------------


async def findings(**how: Any) -> list[Finding]:
    return [finding async for finding in MqttTopic("t", host="127.0.0.1", **how).examine("g", "s")]


async def test_the_doctor_says_what_the_broker_takes_and_publishes_nothing(tmp_path: Path) -> None:
    with SettledBroker(tmp_path, ["max_packet_size 100000"]) as broker:
        async with reading(broker.port) as reader, opened(broker.port) as connection:
            large, login = await findings(port=broker.port)
            assert (large.severity, login.severity) == (Severity.WARNING, Severity.NOTE)
            assert "packets of up to 100,000 bytes; the sink makes messages of up to 1,000,000" in large.found
            (small, _) = await findings(port=broker.port, message_bytes_max=50_000)
            assert small.severity is Severity.OK
            await connection.send(messages(("k", "t", b"1")))  # its session was not taken over
            await reader.until(lambda: bool(reader.got))
            assert reader.values() == [b"1"]
        broker.stop()
        graph = Graph("plant")
        readings(graph, Feed()).to_mqtt("t", key="device", name="out", host="127.0.0.1", port=broker.port)
        (unreachable,) = await examine_sources(graph)
        assert (unreachable.severity, unreachable.check) == (Severity.ERROR, "sink")
        assert unreachable.found.startswith("out: cannot connect to the MQTT broker")


class TestMqttTopic(SinkSuite):
    """The promises of every sink; the tests above are those of MQTT alone."""

    seeds = 2
    topics = itertools.count(1)
    test_a_new_connection_shuts_out_the_one_before = None  # type: ignore[assignment]
    test_a_place_that_is_away_is_unavailable = test_refused_messages_are_named = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def _with_broker(self, broker: EmbeddedBroker) -> None:
        self.port = broker.port

    async def sink(self) -> MqttTopic:
        self.topic, self.got = f"suite/{next(self.topics)}", list[int]()
        assert await self.delivered() == []
        return MqttTopic(self.topic, host="127.0.0.1", port=self.port, message_bytes_max=100_000)

    def headers_of(self, number: int) -> list[tuple[str, bytes]]:
        return [(TOPIC, self.topic.encode())]

    async def delivered(self) -> list[int]:
        """Continue a session, in which the broker keeps what has come meanwhile, up to a message of our own."""
        lasts = Properties(PacketTypes.CONNECT)
        lasts.SessionExpiryInterval = 600
        how: Any = {"protocol": aiomqtt.ProtocolVersion.V5, "clean_start": False, "properties": lasts}
        async with aiomqtt.Client("127.0.0.1", self.port, identifier=self.topic.replace("/", "-"), **how) as client:
            await client.subscribe(self.topic, qos=1)
            await client.publish(self.topic, b"", qos=1)
            async for message in client.messages:
                if not message.payload:
                    return self.got
                self.got.append(json.loads(bytes(message.payload))["number"])  # type: ignore[arg-type]
        raise AssertionError("the broker has ended the session")
