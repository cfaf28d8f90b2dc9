"""Simulated brokers, one for each source partition.

There are two ways to acknowledge:

    a topic   (MQTT) keeps a message until it is acknowledged on the connection that delivered it, then drops it; a new
              connection gets everything unacknowledged again. It may deliver twice, and out of order
    a log     (Kafka) keeps everything, and is read from the position that was committed

Each generation of a graph has its own session, or reads the log by itself; both get everything that is published.

Both may fail while their publishers wait. A topic also remembers the messages of each batch: the batch's number
is the source position, so that the checkers can derive the input and its order from a committed position
(I9). The position in a log is an offset.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.deployment import permanent_name
from millpy.model.identity import Identity

PARTITION, MORE = "topic", "more"
"""The first partition of the source, and that of a source that a deployment adds."""
MARKER = -1


@dataclass(frozen=True, slots=True)
class PublishedMessage:
    """One publication; `number` identifies it, even among messages with the same payload."""

    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Batch:
    """The messages of one `take`."""

    messages: tuple[PublishedMessage, ...]
    arrived_at: int
    finished: bool = False


@dataclass(slots=True)
class Broker:
    """A topic with its session, or a log; it remembers everything that it ever delivered.

    Attributes:
        queue: messages that the present connection has not received.
        unacknowledged: messages that it has received, in order.
        waiting: messages published while the broker was away.
        ending: whether publishing has ended; the source ends after the last message.
        batches: by number, from 1.
        acknowledged: numbers of the messages that were acknowledged, in order.
        readers: the events to set when messages may be waiting in a log.
        furthest: the largest offset up to which a reader has read the log.
        shuffles: whether the next connection gets its messages in a random order.
    """

    rng: random.Random
    is_log: bool = False
    queue: deque[PublishedMessage] = field(default_factory=deque)
    unacknowledged: dict[int, PublishedMessage] = field(default_factory=dict)
    waiting: list[PublishedMessage] = field(default_factory=list)
    published: list[PublishedMessage] = field(default_factory=list)
    up: bool = True
    ending: bool = False
    shuffles: bool = False
    connection: SimulatedInjector | None = None
    batches: list[Batch] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    readers: list[asyncio.Event] = field(default_factory=list)
    furthest: int = 0

    def publish(self, payloads: Sequence[bytes]) -> None:
        """Accept publications; while the broker is away its publishers keep them."""
        messages = [PublishedMessage(len(self.published) + place, payload) for place, payload in enumerate(payloads, 1)]
        self.published.extend(messages)
        if self.up:
            self.queue.extend(() if self.is_log else messages)
            self.wake()
        else:
            self.waiting.extend(messages)

    def go_away(self) -> None:
        """Stop the broker, and break its connection."""
        self.up = False
        self.disconnect()

    def come_back(self) -> None:
        """Start the broker again; publishers deliver the messages that they kept."""
        self.up = True
        self.queue.extend(() if self.is_log else self.waiting)
        self.waiting.clear()
        self.wake()

    def end(self) -> None:
        """End publishing."""
        self.ending = True
        self.wake()

    def wake(self) -> None:
        """Wake the present reader: messages may be waiting."""
        if self.connection is not None:
            self.connection.ready.set()
        for ready in self.readers:
            ready.set()

    def written(self) -> int:
        """Return the number of messages in a log: all except those that publishers keep."""
        return len(self.published) - len(self.waiting)

    def all_read(self, by: int) -> bool:
        """Tell whether a reader at offset `by` of the log has read everything, and publishing has ended."""
        return self.ending and self.up and by == len(self.published)

    def is_drained(self) -> bool:
        """Tell whether the broker is up, and all messages are read."""
        waits = self.furthest < self.written() if self.is_log else bool(self.queue)
        return self.up and not waits

    def redeliver(self, count: int) -> int:
        """Redeliver some unacknowledged messages on the same connection, as brokers may."""
        again = list(self.unacknowledged.values())[:count]
        self.queue.extend(PublishedMessage(message.number, message.payload) for message in again)
        self.wake()
        return len(again)

    def shuffle(self) -> int:
        """Shuffle the waiting messages."""
        waiting = [message for message in self.queue if message.number != MARKER]
        self.rng.shuffle(waiting)
        self.queue = deque([*waiting, *(m for m in self.queue if m.number == MARKER)])
        return len(waiting)

    def connect(self, injector: SimulatedInjector) -> None:
        """Take the session over with a new connection: all unacknowledged messages come again, then a marker."""
        self.disconnect()
        self.connection = injector
        again = list(self.unacknowledged.values())
        self.unacknowledged.clear()
        known = {message.number for message in again}
        rest = [m for m in self.queue if m.number != MARKER and m.number not in known]
        self.queue = deque([*again, *rest])
        if self.shuffles:
            self.shuffle()
            self.shuffles = False
        self.queue.append(PublishedMessage(MARKER, b""))

    def disconnect(self) -> None:
        """Break the present connection."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.lost()

    def hand_over(self, records_max: int, arrived_at: int) -> tuple[Batch | None, bool]:
        """Return (a batch of waiting messages or None, whether the marker was met)."""
        messages: list[PublishedMessage] = []
        met = False
        while self.queue and len(messages) < records_max:
            message = self.queue.popleft()
            if message.number == MARKER:
                met = True
                continue
            self.unacknowledged[message.number] = message
            messages.append(message)
        finished = self.ending and self.up and not self.queue and not self.waiting
        if not messages and not finished:
            return None, met
        batch = Batch(tuple(messages), arrived_at, finished)
        self.batches.append(batch)
        return batch, met


BROKER: ContextVar[Mapping[str, Broker]] = ContextVar("broker")
"""The brokers of the running world, by the `permanent_name` of source partition and generation.

Worlds share cached graphs, so a source cannot hold its brokers.
"""


def names_of(partitions: int) -> tuple[str, ...]:
    """Return the names of source partitions."""
    return (PARTITION, *(f"{PARTITION}{number}" for number in range(1, partitions)))


def session(setup: SourceSetup) -> Broker:
    """Return the broker of a source partition, with the session of the generation that reads it."""
    return BROKER.get()[permanent_name(setup.partition, setup.generation)]


@dataclass(frozen=True, slots=True)
class Topic(Source):
    """Topics as a source, one for each source partition.

    Attributes:
        count: the number of partitions.
        is_more: whether it is the source that a deployment adds, which has one.
    """

    count: int = 1
    is_more: bool = False
    kind: ClassVar[str] = "topic"

    def identity(self) -> Identity:
        """Describe the source."""
        return {"kind": self.kind, "partitions": self.count}

    def partitions(self) -> tuple[str, ...]:
        """Return the names of the source partitions."""
        return (MORE,) if self.is_more else names_of(self.count)

    def connect(self, setup: SourceSetup) -> Injector:
        """Return a reader, not yet open."""
        return SimulatedInjector(session(setup), setup)


@dataclass(frozen=True, slots=True)
class Log(Topic):
    """Logs as a source, one for each source partition."""

    kind = "log"

    def connect(self, setup: SourceSetup) -> Injector:
        """Return a reader, not yet open."""
        return LogInjector(session(setup), setup)


class SimulatedInjector:
    """One connection to the topic, which reconnects by itself like a client library."""

    def __init__(self, broker: Broker, setup: SourceSetup) -> None:
        self._broker = broker
        self._setup = setup
        self.ready: asyncio.Event = setup.ready
        self._retry_at: float | None = None
        self._drained = False
        self._ended = False
        self._total = 0
        self._delivered: dict[int, tuple[PublishedMessage, ...]] = {}

    async def open(self, position: bytes | None) -> None:
        """Connect; the position is for the checkers, not for the broker."""
        await asyncio.sleep(0)
        self._retry_at = self._setup.clock.monotonic()
        self._connect()

    def _connect(self) -> None:
        """Connect if it is time for an attempt, the broker is up and the grant is trusted."""
        now = self._setup.clock.monotonic()
        if self._retry_at is None or now < self._retry_at or self._broker.connection is self:
            return
        self._retry_at = now + self._setup.limits.lease_ttl_s
        if self._broker.up and self._setup.trusted():
            self._broker.connect(self)

    def lost(self) -> None:
        """Drop the connection; the broker will deliver unacknowledged messages again."""
        self._delivered.clear()
        self._drained = False
        if self._retry_at is not None:
            self._retry_at = self._setup.clock.monotonic() + self._setup.limits.lease_ttl_s / 4

    async def take(self) -> SourceBatch | None:
        """Return a batch of the waiting messages."""
        self._connect()
        if self._broker.connection is not self or self._ended:
            return None
        batch, met = self._broker.hand_over(self._setup.limits.bundle_records_max, self._setup.clock.now_us())
        self._drained |= met
        if batch is None:
            return None
        number = len(self._broker.batches)
        self._delivered[number] = batch.messages
        self._total += len(batch.messages)
        self._ended = batch.finished
        return SourceBatch(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=[message.payload for message in batch.messages],
            describe=lambda row: f"message {batch.messages[row].number}",
            position=b"%d" % number,
            token=number,
            finished=batch.finished,
            records=len(batch.messages),
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Acknowledge a batch, if the connection that delivered it still exists."""
        messages = self._delivered.pop(token, None)
        if messages is None:
            return
        for message in messages:
            self._broker.acknowledged.append(message.number)
            self._broker.unacknowledged.pop(message.number, None)

    def quiet(self) -> bool:
        """Tell whether no message waits and the backlog since connecting has been read."""
        return self._broker.connection is self and self._drained and not self._broker.queue

    async def close(self) -> None:
        """Disconnect for good."""
        self._retry_at = None
        if self._broker.connection is self:
            self._broker.disconnect()


class LogInjector:
    """A reader of a log from an offset on. It needs no session, so a reader that was replaced may continue to read."""

    def __init__(self, broker: Broker, setup: SourceSetup) -> None:
        self._broker = broker
        self._setup = setup
        self._offset = 0
        self._total = 0
        self._ended = False

    async def open(self, position: bytes | None) -> None:
        """Continue at the position of the last commit."""
        await asyncio.sleep(0)
        self._offset = 0 if position is None else int(position)
        self._broker.readers.append(self._setup.ready)

    async def take(self) -> SourceBatch | None:
        """Return the messages from the present offset on."""
        broker = self._broker
        if not broker.up or self._ended or not self._setup.trusted():
            return None
        start = self._offset
        stop = min(broker.written(), start + self._setup.take_bound.records)
        finished = broker.all_read(stop)
        if stop == start and not finished:
            return None
        messages = broker.published[start:stop]
        self._offset, self._ended = stop, finished
        broker.furthest = max(broker.furthest, stop)
        self._total += len(messages)
        return SourceBatch(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=[message.payload for message in messages],
            describe=lambda row: f"offset {start + row}",
            position=b"%d" % stop,
            token=stop,
            finished=finished,
            records=len(messages),
            total=self._total,
        )

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: the position is in the commit."""

    def quiet(self) -> bool:
        """Tell whether the whole log has been read."""
        return self._broker.up and self._offset == self._broker.written()

    async def close(self) -> None:
        """Stop reading."""
        if self._setup.ready in self._broker.readers:
            self._broker.readers.remove(self._setup.ready)
