"""The MQTT sink without a broker: topics, what becomes a dead letter, packets, and the order of a send."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from millpy import EventTime, Graph, MqttTopic, seconds
from millpy.errors import MessagesRefusedError, MillError
from millpy.sinks.mqtt.link import LinkEndError
from millpy.sinks.mqtt.packets import (
    Answer,
    BrokerLimits,
    answer_of,
    farewell_of,
    limits_of,
    message_properties,
    packet_type,
    publish,
    publish_end,
    publish_size,
    user_properties,
)
from millpy.sinks.mqtt.publisher import ENDS_MAX, CulpritSearch
from millpy.sinks.mqtt.send_progress import SendProgress
from millpy.sinks.mqtt.template import LEVELS_MAX, TOPIC_BYTES_MAX, topic_fault, unsendable
from millpy.sources.mqtt.packets import PacketCutter, PacketError
from millpy.testing import GraphDriver, ManualSource

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Level(Enum):
    HIGH = "high"


class Hall(msgspec.Struct):
    name: str


class Alert(msgspec.Struct):
    device: str
    at: datetime
    text: str | None = "x"
    number: int = 1
    level: Level = Level.HIGH
    id: UUID = UUID(int=7)
    hall: Hall | None = None
    share: float = 0.5
    raw: bytes = b"\x00"


def alerts() -> tuple[Graph, Any]:
    graph = Graph("plant")
    event_time = EventTime("at", max_disorder=seconds(0))
    return graph, graph.inject("alerts", ManualSource(), schema=Alert, event_time=event_time)


def sent(topic: Any, *records: Alert, **how: Any) -> tuple[list[tuple[Any, ...]], list[str]]:
    """What leaves, and why the others do not."""
    graph, stream = alerts()
    stream.to_mqtt(topic, key="device", name="out", intervals=1, **how)
    driver = GraphDriver(graph)
    driver.feed("alerts", list(records))
    driver.check_accounting()
    letters = driver.dead_letters()
    assert {letter.reason for letter in letters} <= {"refused"}
    return driver.sent("out"), [letter.detail for letter in letters]


def test_the_fields_of_a_record_fill_its_topic() -> None:
    record = Alert("d1", NOON, hall=Hall("north"), number=-5)
    topics, dead = sent("a/{device}/x-{number}/{level}/{id}/{hall.name}", record, value="text")
    assert topics == [(f"a/d1/x--5/high/{UUID(int=7)}/north".encode(), b"x")]
    assert dead == []
    assert sent(lambda alert: f"b/{alert.device}/c", record, value="text")[0] == [(b"b/d1/c", b"x")]


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("", "it is empty"),
        ("a/+/b", "wildcard '\\+'"),
        ("a/#", "wildcard '#'"),
        ("$SYS/{device}", "belong to the broker"),
        ("a\0b", "control character"),
        ("a/{device", "a brace that names no field"),
        ("a/{device!r}", "a brace that names no field"),
        ("a/{}", "a brace that names no field"),
        ("x" * (TOPIC_BYTES_MAX + 1), "1,025 bytes; the limit is 1,024"),
        ("/" * LEVELS_MAX, "129 levels; the limit is 128"),
        (7, "neither a text nor a function"),
        ("a/{nothing}", "has no field 'nothing'"),
        ("a/{share}", "'share' of Alert cannot be a part of a topic"),
        ("a/{raw}", "'raw' of Alert cannot be a part of a topic"),
        ("a/{hall}", "'hall' of Alert cannot be a part of a topic"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_when_the_graph_is_built(topic: Any, said: str) -> None:
    graph, stream = alerts()
    with pytest.raises(MillError, match=said):
        stream.to_mqtt(topic, key="device", name="out")
    assert len(graph.nodes) == 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"qos": 0}, "qos=0 is neither"),
        ({"expiry": timedelta(0)}, "expiry="),
        ({"keepalive_s": 0}, "keepalive_s=0"),
        ({"message_bytes_max": 0}, "lets no message pass"),
        ({"content_type": "text\n"}, "no content type"),
        ({"host": "broker:1883"}, "host= is neither"),
        ({"host": "broker", "port": 0}, "port=0 is not"),
    ],
)
def test_settings_that_cannot_be_are_refused(how: Any, said: str) -> None:
    with pytest.raises(MillError, match=said):
        MqttTopic("a", **how)
    _, stream = alerts()
    with pytest.raises(MillError, match="a user property is text"):
        stream.to_mqtt("a", key="device", name="out", headers="raw")


@pytest.mark.parametrize(
    "record",
    [
        Alert("", NOON),
        Alert("a/b", NOON),
        Alert("../a", NOON),
        Alert("+", NOON),
        Alert("a#", NOON),
        Alert("a\0", NOON),
        Alert("a\x85", NOON),
        Alert("\ufffe", NOON),
        Alert("\U0001ffff", NOON),
        Alert("d", NOON, text="a\nb"),
        Alert("d", NOON, text="x" * 65_536),
    ],
)
def test_a_record_that_no_broker_takes_is_a_dead_letter_and_the_others_leave(record: Alert) -> None:
    good = Alert("g", NOON)
    topics, dead = sent("a/{device}", good, record, good, headers="text")
    assert [topic for topic, _ in topics] == [b"a/g", b"a/g"]
    assert len(dead) == 1


def test_topics_of_the_broker_and_of_none_are_dead_letters() -> None:
    topics, dead = sent("{device}", Alert("$SYS", NOON), Alert("d", NOON))
    assert [topic for topic, _ in topics] == [b"d"]
    assert "belong to the broker" in dead[0]
    topics, dead = sent("a/{text}", Alert("d", NOON, text=None), Alert("d", NOON))
    assert [topic for topic, _ in topics] == [b"a/x"]
    assert "'text' is None" in dead[0]
    topics, dead = sent("a/{text}", Alert("d", NOON, text="x" * (TOPIC_BYTES_MAX - 1)), Alert("d", NOON))
    assert [topic for topic, _ in topics] == [b"a/x"]
    assert "1,025 bytes; the limit is 1,024" in dead[0]


@pytest.mark.parametrize("returned", [None, 5, b"a", "", "a/+", "$x", "a\0", "\ud800", [], "x" * 2_000])
def test_a_function_may_return_anything(returned: Any) -> None:
    topics, dead = sent(
        lambda alert: returned if alert.number else "good", Alert("d", NOON, number=0), Alert("d", NOON)
    )
    assert [topic for topic, _ in topics] == [b"good"]
    assert "no message can be sent to topic" in dead[0]


class UnknownError(BaseException):
    def __str__(self) -> str:
        raise self


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), UnknownError(), SystemExit(1), RecursionError()])
def test_a_function_may_raise_anything(error: BaseException) -> None:
    def topic(alert: Alert) -> str:
        if alert.number:
            raise error
        return "good"

    topics, dead = sent(topic, Alert("d", NOON, number=0), Alert("d", NOON), Alert("e", NOON, number=0))
    assert [found for found, _ in topics] == [b"good", b"good"]
    assert f"the function of the topic raised {type(error).__name__}" in dead[0]


def test_all_settings_may_change_with_a_deployment_and_no_secret_is_shown() -> None:
    sinks = [MqttTopic("a"), MqttTopic(lambda _: "b", host="elsewhere", qos=2, retain=True, value="text")]
    assert sinks[0].identity() == sinks[1].identity()
    assert repr(sinks[1]) == "MqttTopic()"
    assert [sink.calls_code for sink in sinks] == [False, True]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_a_topic_without_a_fault_can_be_encoded(topic: str) -> None:
    if not topic_fault(topic):
        assert 0 < len(topic.encode()) <= TOPIC_BYTES_MAX
        assert not set(topic) & set("+#\0")


SENDABLE = st.text(max_size=200).filter(lambda text: not unsendable(text))

# -- packets ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.binary(min_size=1, max_size=30),
    st.binary(max_size=20_000),
    st.integers(1, 65_535),
    st.lists(st.tuples(SENDABLE, SENDABLE), max_size=3),
    st.none() | st.integers(1, 2**32 - 1),
)
def test_packets_are_those_of_another_implementation(
    topic: bytes, payload: bytes, packet_id: int, pairs: list[tuple[str, str]], expiry: int | None
) -> None:
    fixed = message_properties("text/plain", expiry, is_text=True)
    properties = fixed + user_properties([(name.encode(), value.encode()) for name, value in pairs])
    end = publish_end(topic, properties, payload)
    packet = publish(end, packet_id, qos=1, retain=True)
    assert publish_size(end) == len(packet)
    cutter = PacketCutter(five=True, packet_bytes_max=1_000_000, kept_bytes=1_000_000)
    found, others = cutter.feed(packet)
    assert (found.topics, found.payloads, found.packet_ids, found.retained) == ([topic], [payload], [packet_id], [0])
    assert others == []
    theirs: Any = Properties(PacketTypes.PUBLISH)
    theirs.unpack(end[1])
    assert (theirs.ContentType, theirs.PayloadFormatIndicator) == ("text/plain", 1)
    assert getattr(theirs, "UserProperty", []) == pairs
    assert getattr(theirs, "MessageExpiryInterval", None) == expiry


def connack(**values: Any) -> bytes:
    properties = Properties(PacketTypes.CONNACK)
    for name, value in values.items():
        setattr(properties, name, value)
    body = b"\0\0" + properties.pack()
    return b"\x20" + bytes([len(body)]) + body


def test_the_limits_of_a_broker_are_read() -> None:
    assert limits_of(connack()) == BrokerLimits()
    assert limits_of(b"\x20\x02\0\0") == BrokerLimits()
    packet = connack(
        ReceiveMaximum=7, MaximumPacketSize=2_000, MaximumQoS=1, RetainAvailable=0, ServerKeepAlive=5,
        AssignedClientIdentifier="x" * 9, ReasonString="hi", UserProperty=[("a", "b"), ("c", "")],
    )  # fmt: skip
    assert limits_of(packet) == BrokerLimits(7, 2_000, 1, False)


@pytest.mark.parametrize(
    ("packet", "answer"),
    [
        (b"\x40\x02\x01\x02", Answer(258, 0, "")),
        (b"\x40\x03\0\x05\x10", Answer(5, 0x10, "")),
        (b"\x50\x03\0\x05\x87", Answer(5, 0x87, "not authorized (0x87)")),
        (b"\x40\x0a\0\x05\x97\x06\x1f\0\x03a\nb", Answer(5, 0x97, "quota exceeded (0x97): a\ufffdb")),
        (b"\x40\x04\0\x05\xff\0", Answer(5, 0xFF, "unknown reason (0xff)")),
    ],
)
def test_answers_are_read_with_the_reason(packet: bytes, answer: Answer) -> None:
    assert answer_of(packet) == answer


def test_a_farewell_says_why() -> None:
    assert farewell_of(b"\xe0\x00") == (0, "unknown reason (0x00)")
    assert farewell_of(b"\xe0\x01\x95") == (0x95, "packet too large (0x95)")
    assert packet_type(b"\xe0\x00") == 14


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=2, max_size=40), st.sampled_from([limits_of, answer_of, farewell_of]))
def test_any_packet_is_read_or_refused(body: bytes, read: Any) -> None:
    packet = b"\x40" + bytes([len(body)]) + body
    try:
        read(packet)
    except PacketError:
        return


# -- the order of a send ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=30), st.integers(0, 2**32), st.booleans())
def test_messages_of_a_key_leave_in_order_and_never_past_a_refused_one(
    keys: list[bytes], seed: int, ends: bool
) -> None:
    rng = random.Random(seed)
    progress = SendProgress(keys)
    taken: dict[bytes, list[int]] = {key: [] for key in keys}
    refused: set[int] = set()
    stopped: set[bytes] = set()
    while progress.left:
        while rng.random() < 0.7 and (place := progress.next()) is not None:
            assert keys[place] not in stopped
            assert [keys[other] for other in progress.on_way].count(keys[place]) == 1, "two of a key on their way"
        if not progress.on_way:
            continue
        place = rng.choice(list(progress.on_way))
        roll = rng.random()
        if roll < 0.1:
            progress.refused(place, "no", final=False)
            refused.add(place)
            stopped.add(keys[place])
        elif roll < 0.2 and ends:
            progress.restart()
        else:
            taken[keys[place]].append(place)
            progress.delivered(place)
    assert progress.next() is None
    reasons: dict[int, str] = {}
    try:
        progress.raise_refused()
    except MessagesRefusedError as error:
        reasons = dict(error.reasons)
    assert {place for place, why in reasons.items() if why == "no"} == refused
    for key, places in taken.items():
        ours = [place for place, other in enumerate(keys) if other == key]
        assert places == ours[: len(places)], "out of order"
        assert set(ours[len(places) :]) == reasons.keys() & set(ours)


def on_way(*keys: bytes) -> SendProgress:
    progress = SendProgress(keys)
    while progress.next() is not None:
        pass
    return progress


def test_one_message_because_of_which_a_broker_ends_connections_is_found() -> None:
    search, progress = CulpritSearch(), on_way(b"a", b"b", b"c")
    search.judge(progress, LinkEndError("too large", 0x95))
    assert search.is_on
    assert [progress.next(), progress.on_way] == [0, {0: None}]
    progress.delivered(0)
    assert progress.next() == 1
    search.judge(progress, LinkEndError("too large", 0x95))
    assert progress.next() == 2
    progress.delivered(2)
    with pytest.raises(MessagesRefusedError) as raised:
        progress.raise_refused()
    assert (raised.value.reasons, raised.value.final) == ({1: "too large"}, {1})


def test_a_broker_that_is_away_or_ends_every_connection_is_an_outage() -> None:
    for code in (0x8B, 0x8E, 0x97):  # shutting down, taken over, quota
        with pytest.raises(LinkEndError):
            CulpritSearch().judge(on_way(b"a", b"b"), LinkEndError("why", code))
    with pytest.raises(LinkEndError):
        CulpritSearch().judge(SendProgress(()), LinkEndError("why", None))
    search, progress = CulpritSearch(), SendProgress([b"a", b"b"])
    for _ in range(ENDS_MAX):
        assert progress.next() == 0
        search.judge(progress, LinkEndError("why", None))
    for number in range(ENDS_MAX):
        assert progress.next() == 1
        if number < ENDS_MAX - 1:
            search.judge(progress, LinkEndError("why", None))
    with pytest.raises(LinkEndError):
        search.judge(progress, LinkEndError("why", None))
