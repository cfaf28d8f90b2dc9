"""Feeds an MQTT source through a real broker that is killed, instead of through files.

The tool publishes; workers read with the graph's own injector, behind `EndingMqtt`. A killed broker may lose messages
that it has acknowledged and not yet saved; that is not under test. The tool therefore publishes the last batches again
after each restart, in order and before anything else, and the graph's `Dedupe` drops the messages that it has.

    HELLO   published until a worker has seen it: before that, no session would keep a message
    END     the last message of a filter: the source has finished, like a feed of files at its end
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from millpy.embedded import EmbeddedBroker
from millpy.errors import SourceUnavailableError, UsageError
from millpy.formats.message import encoded_names
from millpy.graph import Graph, InjectorNode
from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.identity import Identity
from millpy.sources.mqtt.source import Mqtt, MqttSession
from millpy.sources.mqtt.topics import TopicPattern
from millpy.testing.crash_test.inputs import PreparedInput

ADDRESS_FILE = "broker.json"
HELLO = b'{"millpy_crash_test": "hello"}'
END = b'{"millpy_crash_test": "end"}'
MARK = b'{"millpy_crash_test"'
MEMORY = "/dev/shm"
BATCH = 100
AGAIN = 2 * BATCH
"""The number of newest messages that are published again to a broker that was killed: a batch in doubt, and one before.
"""
ACKNOWLEDGED_S_MAX = 5.0
RETRY_S = 0.1
GIVE_UP_S = 120.0


@contextmanager
def broker_in_memory() -> Iterator[EmbeddedBroker]:
    """Start a broker that saves after every change, in memory: the test kills the process, not the machine."""
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="millpy-broker-", dir=memory) as directory:
        with EmbeddedBroker(directory, save_always=True) as broker:
            yield broker


@contextmanager
def without_saving(broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    """Restart the broker without saving after every change, which is slow, for a period without crashes."""
    broker.stop()
    with EmbeddedBroker(broker.directory, port=broker.port) as faster:
        yield faster


class Address(msgspec.Struct, frozen=True):
    """The broker's host and port, which workers read from `broker.json`."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, repr=False)
class EndingMqtt(Source):
    """The graph's own MQTT source, but at the test's broker and with an end.

    Args:
        source: the graph's source with the address of the broker.
        directory: where a worker notes that it has seen a HELLO.
    """

    source: Mqtt
    directory: Path

    def identity(self) -> Identity:
        """Describe the graph's own source."""
        return self.source.identity()

    def partitions(self) -> tuple[str, ...]:
        """Return the topic filters."""
        return self.source.partitions()

    def connect(self, setup: SourceSetup) -> EndingInjector:
        """Return a reader of one filter, not yet connected."""
        place = self.source.partitions().index(setup.partition)
        return EndingInjector(self.source.connect(setup), self.directory / f"hello-{place}")


class EndingInjector:
    """Wraps an injector: removes HELLO and END from its batches, and finishes at END."""

    def __init__(self, inner: Injector, greeted: Path) -> None:
        self._inner = inner
        self._greeted = greeted
        self._marks = 0  # messages removed since the injector was opened

    async def open(self, position: bytes | None) -> None:
        """Connect."""
        await self._inner.open(position)

    async def take(self) -> SourceBatch | None:
        """Return everything that is waiting, without the tool's own messages."""
        taken = await self._inner.take()
        if taken is None:
            return None
        marks = sum(payload.startswith(MARK) for payload in taken.payloads)
        self._marks += marks
        total = None if taken.total is None else taken.total - self._marks
        if not marks:
            return replace(taken, total=total)
        self._greeted.touch()
        finished = any(_is(END, payload) for payload in taken.payloads)
        records = [payload for payload in taken.payloads if not payload.startswith(MARK)]
        if not records and not finished:
            await self._inner.acknowledge(taken.token)
            return None
        return replace(taken, payloads=records, finished=finished, records=taken.records - marks, total=total)

    async def acknowledge(self, token: Any) -> None:
        """Note that the batch with this token is committed."""
        await self._inner.acknowledge(token)

    def quiet(self) -> bool:
        """Tell whether the source is idle: never, because the clock must not move the watermark of a recording."""
        return False

    async def close(self) -> None:
        """Disconnect."""
        await self._inner.close()


def _is(message: bytes, payload: bytes) -> bool:
    """Tell whether a payload is this message, to which the source may have added fields of the topic."""
    return payload.startswith(message[:-1])


def injectors_over_broker(graph: Graph) -> list[InjectorNode]:
    """Return the injectors whose source is MQTT; a crash test can run and kill no other kind of broker.

    Raises:
        UsageError: one has a payload format.
    """
    found = [node for node in graph.injectors() if isinstance(node.source, Mqtt)]
    for node in found:
        if node.source.payload_format() is not None:
            raise UsageError(
                f"a crash test cannot mark the end of source {node.name!r}, because it has a payload format",
                hint="test the graph with its messages as lines of a File of the same format",
            )
    return found


def source_at_broker(source: Source, directory: Path) -> EndingMqtt | None:
    """Return the source at the broker that a directory names; None if the directory holds a feed."""
    file = directory / ADDRESS_FILE
    if not file.exists():
        return None
    assert isinstance(source, Mqtt), "only these are fed over a broker"
    address = msgspec.json.decode(file.read_bytes(), type=Address)
    there = Mqtt(
        *source.filters,
        host=address.host,
        port=address.port,
        protocol=5,
        retained=source.retained,
        session=MqttSession(keepalive_s=source.session.keepalive_s),
    )
    return EndingMqtt(there, directory)


class Publisher:
    """Publishes prepared lines, batch by batch; each batch is acknowledged before the next begins.

    Args:
        pause: never set; its `wait` sleeps.

    Attributes:
        written: lines that the broker has acknowledged.
    """

    def __init__(
        self,
        prepared: PreparedInput,
        node: InjectorNode,
        directory: Path,
        broker: EmbeddedBroker,
        pause: threading.Event,
    ) -> None:
        assert isinstance(node.source, Mqtt)
        directory.mkdir(parents=True)
        (directory / ADDRESS_FILE).write_bytes(msgspec.json.encode(Address(broker.host, broker.port)))
        self.source = prepared
        self.written = 0
        self._directory = directory
        self._broker = broker
        self._pause = pause
        self._topics = [_topic_of(TopicPattern.parse(text), node) for text in node.source.filters]
        self._lines = (line for part in range(len(prepared.records)) for line in _lines(prepared.directory / str(part)))
        self._client: mqtt.Client | None = None
        self._newest: list[tuple[str, bytes]] = []

    def await_subscribers(self) -> None:
        """Publish HELLO until a worker has subscribed to every filter.

        Raises:
            SourceUnavailableError: no worker subscribes in time.
        """
        for _ in range(int(GIVE_UP_S / RETRY_S)):
            waiting = [p for p in range(len(self._topics)) if not (self._directory / f"hello-{p}").exists()]
            if not waiting:
                return
            self._publish([(self._topics[place]({}), HELLO) for place in waiting])
            self._pause.wait(RETRY_S)
        raise SourceUnavailableError("the workers do not subscribe to the broker of the crash test")

    def write(self, count: int) -> None:
        """Publish the next lines."""
        while count > 0:
            batch = []
            for place in range(self.written, self.written + min(BATCH, count)):
                line = next(self._lines)
                batch.append((self._topics[place % len(self._topics)](_object(line)), line))
            self._publish(batch)
            self._newest = [*self._newest, *batch][-AGAIN:]
            self.written += len(batch)
            count -= len(batch)

    def close(self, *, ended: bool) -> None:
        """Disconnect; if all lines were written, publish END first."""
        if ended:
            self._publish([(topic({}), END) for topic in self._topics])
        self._drop()

    def _publish(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Publish until all is acknowledged; on a new connection, publish the newest messages again first."""
        for _ in range(int(GIVE_UP_S / RETRY_S)):
            try:
                if self._client is None:
                    self._client = self._connected()
                    self._send(self._client, self._newest)
                self._send(self._client, batch)
                return
            except (OSError, ValueError, RuntimeError):
                self._drop()
                self._pause.wait(RETRY_S)
        raise SourceUnavailableError("the broker of the crash test does not restart")

    def _connected(self) -> mqtt.Client:
        # No reconnecting by itself: the client would never resend what a broker acknowledged and did not save.
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2,
            client_id="crash-test-feeder",
            protocol=mqtt.MQTTv5,
            reconnect_on_failure=False,
        )
        client.max_inflight_messages_set(BATCH)
        client.connect(self._broker.host, self._broker.port)
        client.loop_start()
        return client

    @staticmethod
    def _send(client: mqtt.Client, batch: Sequence[tuple[str, bytes]]) -> None:
        for message in [client.publish(topic, payload, qos=1) for topic, payload in batch]:
            for _ in range(int(ACKNOWLEDGED_S_MAX / RETRY_S)):
                message.wait_for_publish(RETRY_S)
                if message.is_published() or not client.is_connected():
                    break
            if not message.is_published():
                raise OSError("not acknowledged")

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.disconnect()
            client.loop_stop()


def _lines(path: Path) -> Any:
    with path.open("rb") as file:
        for line in file:
            yield line.rstrip(b"\n")


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _topic_of(pattern: TopicPattern, node: InjectorNode) -> Callable[[dict[str, Any]], str]:
    """Return a topic that the filter matches, with the record's own fields in its named levels."""
    encoded = encoded_names(node.record_type)
    names = {index: encoded[name] for index, name in pattern.levels}
    levels = pattern.filter.split("/")

    def topic(record: dict[str, Any]) -> str:
        return "/".join(
            str(record.get(names[index], 0)) if index in names else "0" if level in ("+", "#") else level
            for index, level in enumerate(levels)
        )

    return topic
