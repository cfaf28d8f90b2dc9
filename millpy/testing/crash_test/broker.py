"""Broker: feeds an MQTT source over a real broker that is killed, instead of by a tape.

The tool publishes; workers read with the graph's own injector, behind `Ending`. What a killed broker had acknowledged
and not yet saved is the broker's loss and not what is tested here, so the last batches are published again after each
restart: in their order, with nothing published behind them, and the graph's `Dedupe` drops what it has.

    HELLO   published until a worker has seen it: before, there is no session that would keep a message
    END     the last message of a filter: the source has finished, as a tape does at its end
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
from millpy.errors import SourceUnavailableError
from millpy.graph import InjectorNode
from millpy.injectors.mqtt import Mqtt
from millpy.injectors.mqtt_topics import TopicPattern
from millpy.injectors.protocol import Injector, SourceSetup, Taken
from millpy.testing.crash_test.inputs import Prepared

ADDRESS_FILE = "broker.json"
HELLO = b'{"millpy_crash_test": "hello"}'
END = b'{"millpy_crash_test": "end"}'
MARK = b'{"millpy_crash_test"'
MEMORY = "/dev/shm"
BATCH = 100
AGAIN = 2 * BATCH
"""So many of the newest messages are published again to a broker that was killed: a batch in doubt, and one before."""
ACKNOWLEDGED_S_MAX = 5.0
RETRY_S = 0.1
GIVE_UP_S = 120.0


@contextmanager
def broker_in_memory() -> Iterator[EmbeddedBroker]:
    """A broker that saves after every change, where that costs no disk: it is the process that is killed."""
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="millpy-broker-", dir=memory) as directory:
        with EmbeddedBroker(directory, save_always=True) as broker:
            yield broker


@contextmanager
def without_saving(broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    """Restart it in good order for a time without crashes: saving after every change is slow."""
    broker.stop()
    with EmbeddedBroker(broker.directory, port=broker.port) as faster:
        yield faster


class Address(msgspec.Struct, frozen=True):
    """Where the broker listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, repr=False)
class Ending:
    """The graph's own MQTT source, at our broker, with an end.

    Args:
        source: at our broker.
        directory: where a worker says that it has seen a HELLO.
    """

    source: Mqtt
    directory: Path

    def __repr__(self) -> str:
        return repr(self.source)

    def partitions(self) -> tuple[str, ...]:
        """The topic filters."""
        return self.source.partitions()

    def connect(self, setup: SourceSetup) -> EndingInjector:
        """A reader of one filter, not yet connected."""
        place = self.source.partitions().index(setup.partition)
        return EndingInjector(self.source.connect(setup), self.directory / f"hello-{place}")


class EndingInjector:
    """Takes HELLO and END out of what an injector hands over."""

    def __init__(self, inner: Injector, greeted: Path) -> None:
        self._inner = inner
        self._greeted = greeted
        self._marks = 0  # taken out since it was opened

    async def open(self, position: bytes | None) -> None:
        """Connect."""
        await self._inner.open(position)

    async def take(self) -> Taken | None:
        """Everything that is waiting, without our own messages."""
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
        """The batch with this token is committed."""
        await self._inner.acknowledge(token)

    def quiet(self) -> bool:
        """Never: the clock must not move the watermark of a recording."""
        return False

    async def close(self) -> None:
        """Disconnect."""
        await self._inner.close()


def _is(message: bytes, payload: bytes) -> bool:
    """Whether a payload is one of ours, perhaps with fields of its topic behind it."""
    return payload.startswith(message[:-1])


def redirected(source: Mqtt, directory: Path) -> Ending | None:
    """The source at the broker that a feed names; None when this feed is a tape."""
    file = directory / ADDRESS_FILE
    if not file.exists():
        return None
    address = msgspec.json.decode(file.read_bytes(), type=Address)
    there = Mqtt(
        *source.filters,
        host=address.host,
        port=address.port,
        protocol=5,
        retained=source.retained,
        keepalive_s=source.keepalive_s,
    )
    return Ending(there, directory)


class Publisher:
    """Publishes prepared lines, batch by batch; a batch is acknowledged before the next begins.

    Args:
        pause: waits so many seconds.

    Attributes:
        written: lines that the broker has acknowledged.
    """

    def __init__(
        self, prepared: Prepared, node: InjectorNode, directory: Path, broker: EmbeddedBroker, pause: threading.Event
    ) -> None:
        assert isinstance(node.source, Mqtt)
        directory.mkdir(parents=True)
        (directory / ADDRESS_FILE).write_bytes(msgspec.json.encode(Address(broker.host, broker.port)))
        self.source = prepared
        self.written = 0
        self._directory = directory
        self._broker = broker
        self._pause = pause
        self._topics = [_topic_of(TopicPattern.of(text), node) for text in node.source.filters]
        self._lines = (line for part in range(len(prepared.records)) for line in _lines(prepared.directory / str(part)))
        self._client: mqtt.Client | None = None
        self._newest: list[tuple[str, bytes]] = []

    def greet(self) -> None:
        """Publish until a worker has subscribed to every filter.

        Raises:
            SourceUnavailableError: none does.
        """
        for _ in range(int(GIVE_UP_S / RETRY_S)):
            waiting = [p for p in range(len(self._topics)) if not (self._directory / f"hello-{p}").exists()]
            if not waiting:
                return
            self._publish([(self._topics[place]({}), HELLO) for place in waiting])
            self._pause.wait(RETRY_S)
        raise SourceUnavailableError("the workers do not subscribe to the broker of the crash test")

    def write(self, count: int) -> None:
        """The next so many lines."""
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
        """Say that it was all, and leave."""
        if ended:
            self._publish([(topic({}), END) for topic in self._topics])
        self._drop()

    def _publish(self, batch: Sequence[tuple[str, bytes]]) -> None:
        """Publish until all is acknowledged; behind a new connection, the newest messages first."""
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
        raise SourceUnavailableError("the broker of the crash test does not come back")

    def _connected(self) -> mqtt.Client:
        # It must not reconnect by itself: what a broker had acknowledged and not saved would never be sent again.
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
    """From a record to a topic that the filter matches, with the record's own fields in its named levels."""
    encoded = dict(zip(node.record_type.fields, node.record_type.struct.__struct_encode_fields__, strict=True))
    names = {index: encoded[name] for index, name in pattern.levels}
    levels = pattern.filter.split("/")

    def topic(record: dict[str, Any]) -> str:
        return "/".join(
            str(record.get(names[index], 0)) if index in names else "0" if level in ("+", "#") else level
            for index, level in enumerate(levels)
        )

    return topic
