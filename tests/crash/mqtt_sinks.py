"""Running sums that leave by an MQTT sink, a subscriber that keeps all of them, and what must be true of them.

A trap kills or freezes the worker inside a `send`: before it, with messages on their way, between two answers of the
broker, or behind the last one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from millpy import EventTime, File, Graph, MqttTopic, seconds
from millpy.sinks import SendBound, SinkMessages, SinkSetup
from millpy.sinks.mqtt.link import BrokerLink
from millpy.sinks.mqtt.publisher import MqttPublisher
from tests.crash.checks import Fault, differences
from tests.crash.harness import await_true
from tests.crash.sinks import TRAP, Reading, Total, Totals

POINTS = {"opened": 1, "before": 5, "published": 9, "answered": 33, "acknowledged": 5}
"""Point in a send -> the how-manieth time."""
BOUND = 20
INTERVALS = 2
TOPICS = "sums/#"


class TrappedTopic(MqttTopic):
    """A topic with a trap in each connection."""

    __slots__ = ()

    def publisher(self, setup: SinkSetup) -> MqttPublisher:
        return TrappedPublisher(self, setup, super().publisher(setup)._address)


class TrappedPublisher(MqttPublisher):
    async def open(self) -> None:
        await super().open()
        TRAP.reach("opened")

    async def send(self, messages: SinkMessages) -> None:
        TRAP.reach("before")
        await super().send(messages)
        TRAP.reach("acknowledged")


def set_traps() -> None:
    """Set those that are inside a link."""
    publish, take = BrokerLink._publish_ready, BrokerLink._take_answer

    def publish_ready(link: BrokerLink) -> None:
        publish(link)
        if link._places:
            TRAP.reach("published")

    def take_answer(link: BrokerLink, kind: int, packet: bytes) -> None:
        take(link, kind, packet)
        TRAP.reach("answered")

    BrokerLink._publish_ready = publish_ready  # type: ignore[method-assign]
    BrokerLink._take_answer = take_answer  # type: ignore[method-assign]


def graph_of(source: str, port: int, qos: int) -> Graph:
    """Return the graph."""
    graph = Graph("plant")
    event_time = EventTime("at", unit="s", max_disorder=seconds(5))
    readings = graph.inject("readings", File(source), schema=Reading, event_time=event_time)
    totals = readings.key_by("device").process(Totals(), name="totals", output=Total)
    sink = TrappedTopic(
        "sums/{device}", host="127.0.0.1", port=port, qos=1 if qos == 1 else 2, bound=SendBound(records=BOUND)
    )
    totals.to_sink(sink, key="device", name="to_mqtt", intervals=INTERVALS)
    return graph


class Subscriber:
    """Keeps what arrives under TOPICS, through restarts of the broker."""

    def __init__(self, port: int) -> None:
        self.got: list[tuple[str, str, bytes]] = []  # id, topic, payload
        self.repeated = 0
        """The number of repeats, without those that the broker itself redelivers after a restart."""
        self._seen: set[str] = set()
        self._subscribed = threading.Event()
        self._client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="subscriber", protocol=mqtt.MQTTv5)
        self._client.reconnect_delay_set(1, 1)
        self._client.on_message = self._take
        self._client.on_connect = lambda client, *_: client.subscribe(TOPICS, qos=2)
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        session: Any = Properties(PacketTypes.CONNECT)
        session.SessionExpiryInterval = 3_600
        self._client.connect("127.0.0.1", port, clean_start=False, properties=session)
        self._client.loop_start()

    def __enter__(self) -> Self:
        assert self._subscribed.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _take(self, _client: object, _data: object, message: mqtt.MQTTMessage) -> None:
        assert message.properties is not None
        ((name, identity),) = message.properties.UserProperty  # type: ignore[attr-defined]
        assert name == "millpy-id"
        self.got.append((identity, message.topic, message.payload))
        self.repeated += identity in self._seen and not message.dup
        self._seen.add(identity)

    def faults(self, expected: Mapping[str, Sequence[tuple[int, int]]]) -> list[Fault]:
        """Compare what has arrived with what must: whole, in order of the device, repeats under their id."""
        count = sum(map(len, expected.values()))
        await_true(lambda: len(self._seen) >= count, "all have arrived", 30)
        contents: dict[str, tuple[str, bytes]] = {}
        numbers: dict[str, set[int]] = defaultdict(set)
        newest: dict[tuple[str, str], int] = {}
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for identity, topic, payload in self.got:
            assert contents.setdefault(identity, (topic, payload)) == (topic, payload), "an id has two messages"
            interval, _, number = identity.rpartition("/")
            numbers[interval].add(int(number))
            if int(number) <= newest.get((interval, topic), -1):
                continue  # what a consumer drops
            newest[interval, topic] = int(number)
            total = msgspec.json.decode(payload, type=Total)
            assert topic == f"sums/{total.device}"
            found[total.device].append((total.number, total.total))
        assert len(numbers) <= INTERVALS, numbers.keys()
        for interval, of_interval in numbers.items():
            assert of_interval == set(range(len(of_interval))), f"gaps in {interval}"
        wanted = {device: (len(totals), *totals) for device, totals in expected.items()}
        return differences("mqtt", {device: (len(totals), *totals) for device, totals in found.items()}, wanted)
