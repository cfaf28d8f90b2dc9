"""The other side of a simulated sink: like Kafka it fences by epochs, and keeps a position with the messages.

A request may be lost, its answer may be lost, or it arrives late: then it is refused if a higher epoch came first. A
message that arrives under a number that is taken, or beyond the next one, is a fault of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

import msgspec

from millpy.errors import SinkUnavailableError
from millpy.graph.streams import Stream
from millpy.model.identity import Identity
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup

SENT: Final = "sent"
"""The name of the step."""
FAILS = 0.25
"""The share of requests that fail while there are faults."""
ANSWERS_S_MAX = 0.02


class SentReading(msgspec.Struct):
    """The part of a message that is compared."""

    device: str
    seq: int


@dataclass(slots=True)
class Inbox:
    """What one interval has sent.

    Attributes:
        epoch: that of the newest connection.
        readings: those that have arrived.
    """

    epoch: int = 0
    readings: list[SentReading] = field(default_factory=list)


@dataclass(slots=True)
class OtherSide:
    """The place where messages arrive.

    Attributes:
        is_sound: whether requests fail no more.
        inboxes: what has arrived, by the number of the interval.
        late: requests that are on their way: the number of the interval, the epoch, and the messages.
        wrong: messages whose position was not the next one.
    """

    rng: random.Random
    is_sound: bool = False
    inboxes: dict[int, Inbox] = field(default_factory=dict)
    late: list[tuple[int, int, SinkMessages]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def inbox(self, number: int) -> Inbox:
        """Return that of an interval."""
        return self.inboxes.setdefault(number, Inbox())

    def fails(self) -> bool:
        """Draw whether something fails."""
        return not self.is_sound and self.rng.random() < FAILS

    def arrive(self, number: int, epoch: int, messages: SinkMessages) -> bool:
        """Take messages, unless a newer connection has shut theirs out; return whether they were taken."""
        inbox = self.inbox(number)
        if epoch < inbox.epoch:
            return False
        if messages.position != len(inbox.readings):
            self.wrong.append(f"interval {number}: messages from {messages.position} on, behind {len(inbox.readings)}")
        inbox.readings += [msgspec.json.decode(value or b"", type=SentReading) for value in messages.values]
        return True

    def land(self) -> None:
        """Let some of the late requests arrive."""
        coming, self.late = self.late, []
        for request in coming:
            if self.is_sound or self.rng.random() < 0.5:
                self.arrive(*request)
            else:
                self.late.append(request)

    def faults(self) -> Iterator[str]:
        """Yield what arrived out of order."""
        yield from self.wrong[:3]


SIDE: ContextVar[OtherSide] = ContextVar("other_side")
"""The one of the world that runs."""


class SimulatedSink(Sink):
    """A sink to the other side of the world."""

    __slots__ = ()
    bound = SendBound(records=5)

    def identity(self) -> Identity:
        """Describe the sink."""
        return {"kind": "simulated"}

    def connect(self, setup: SinkSetup) -> SinkConnection:
        """Return a connection, not yet open."""
        return SimulatedConnection(SIDE.get(), setup)


class SimulatedConnection:
    """A connection of one interval."""

    def __init__(self, side: OtherSide, setup: SinkSetup) -> None:
        self._side = side
        self._setup = setup
        self._epoch = 0

    async def open(self) -> int:
        """Raise the epoch, and return the position."""
        await self._pass_time()
        if self._side.fails():
            raise SinkUnavailableError("the other side is away")
        inbox = self._side.inbox(self._setup.number)
        inbox.epoch += 1
        self._epoch = inbox.epoch
        await self._pass_time()
        return len(inbox.readings)

    async def send(self, messages: SinkMessages) -> None:
        """Deliver messages; their request or its answer may be lost, or they arrive later."""
        side, number = self._side, self._setup.number
        await self._pass_time()
        if side.fails():
            if side.rng.random() < 0.5:
                side.late.append((number, self._epoch, messages))
            raise SinkUnavailableError("the request is lost")
        if not side.arrive(number, self._epoch, messages):
            raise SinkUnavailableError("another connection has taken over")
        await self._pass_time()
        if side.fails():
            raise SinkUnavailableError("the answer is lost")

    async def close(self) -> None:
        """Leave what is on its way."""

    async def _pass_time(self) -> None:
        await self._setup.clock.sleep(self._side.rng.random() * ANSWERS_S_MAX)
        self._side.land()


def add_sink(readings: Stream) -> None:
    """Send all readings to the other side."""
    readings.to_sink(SimulatedSink(), key="device", name=SENT, intervals=2)
