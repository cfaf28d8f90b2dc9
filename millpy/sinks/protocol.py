"""The contract of a sink, and the interface between its connection and the runtime.

A `Sink` is the description of a place outside, in a graph. A step of the graph makes messages of its records and stores
them in an outbox, in the commit of the turn. After the commit, the owner of each interval delivers them, in order, by a
`SinkConnection` that `connect` makes for the interval:

    open() -> [send(messages)]* -> close()

`send` returns when the other side has all of the messages. The runtime then records the position behind them, and
deletes their rows. It never has two calls of `send` at once for an interval. After an error it closes the connection,
opens a new one, and sends again from the position that is known.

What a crash repeats: a sink whose `open` returns a position repeats nothing. Another one repeats at most the messages
of one `send` for each interval, with the same positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millpy.clock import Clock
from millpy.errors import GraphError
from millpy.ingest.connection_state import ConnectionState
from millpy.model.arguments import is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import RecordType, getter
from millpy.sinks.messages import SinkMessages, field_headers
from millpy.sinks.refusal_policy import RefusalPolicy

UNDELIVERED = "its messages wait in the outbox; then its input waits, and at last the sources"
"""What it means that a sink delivers nothing, for the doctor."""


@dataclass(frozen=True, slots=True)
class SendBound:
    """The most messages of one `send`.

    Attributes:
        records: their number.
        bytes: bytes of their keys, values and headers; a single message may exceed it.
    """

    records: int = 1_000
    bytes: int = 4_000_000

    def __post_init__(self) -> None:
        if not (is_whole(self.records, 1) and is_whole(self.bytes, 1)):
            raise GraphError(f"{self!r} lets no message pass", hint="use whole numbers from 1")


@dataclass(frozen=True, slots=True)
class SinkSetup:
    """The parameters that the runtime passes to a connection.

    Attributes:
        graph: the name of this generation of the graph for brokers, which a switch does not change.
        sink: the name of the step.
        interval: number of the interval among those of the step, from 0; it never changes.
        number: number of the interval in the database. A sink that is removed or reset, and deployed again, has other
            numbers, and its positions begin at 0.
        intervals: how many intervals the step has.
        clock: the clock.
        trusted: tells whether the lease is still valid. The runtime calls it before each `open`; a connection that
            reconnects by itself calls it before that.
        connection: whether the sink is connected; a sink that reconnects by itself reports it here.
        secret: the seed of names at brokers, so that others cannot guess them.
    """

    graph: str
    sink: str
    interval: int
    number: int
    intervals: int
    clock: Clock
    trusted: Callable[[], bool] = field(default=lambda: True)
    connection: ConnectionState = field(default_factory=ConnectionState)
    secret: str = field(default="", repr=False)


class SinkConnection(Protocol):
    """A connection for one interval of a sink."""

    async def open(self) -> int | None:
        """Connect, and shut out earlier connections of the interval where the other side can.

        Returns:
            The position behind the last message that the other side has, if it stores it with the messages; None if it
            does not, so that the stored progress counts.

        Raises:
            SinkUnavailableError: the other side cannot be reached, or refuses us now; the runtime tries again.
        """
        ...

    async def send(self, messages: SinkMessages) -> None:
        """Deliver messages, those of a key in order, and return when the other side has all of them.

        Their numbers are `messages.positions`. They may have gaps, and a message that was refused comes again later.

        Raises:
            SinkUnavailableError: it may have some of them. They are sent again, by another connection.
            MessagesRefusedError: it has all of them but those that the error names; of a key, no message behind one
                that it names. The connection stays in use. If `open` returns a position, the other side must have
                none of the messages, and the position must be the one before: the others are sent again without those.
        """
        ...

    async def close(self) -> None:
        """Disconnect; messages that are not known to be delivered come again."""
        ...


class Sink(GraphPart, ABC):
    """The description of a place that messages leave to. It is immutable, and opens nothing.

    A sink of your own derives from this class, and defines `identity` and `connect`.

    Attributes:
        value: the field whose bytes or text is the value of a message; "" for the whole record, as JSON. A message of a
            record in which it is None has no value.
        headers: the fields that become headers of a message: text, or JSON for other types; those with None are left
            out.
        bound: the most messages of one `send`.
        message_bytes_max: the most bytes of key, value and headers of a message. A record with a larger message becomes
            a dead letter, before its message is in the outbox.
        refusals: when to stop trying a message that the other side refuses. By default only one that the other side
            will never take is given up, and becomes a dead letter.
        calls_code: whether `header_reader` calls code of users, which may be slow; it then runs in a thread.
        stable_sends: whether a `send` that is repeated has the same messages, for a sink that sends them as one.
            It then has messages of one commit only.
    """

    __slots__ = ()

    value: str = ""
    headers: tuple[str, ...] = ()
    bound: SendBound = SendBound()
    message_bytes_max: int = 1_000_000
    refusals: RefusalPolicy = RefusalPolicy()
    calls_code: bool = False
    stable_sends: bool = False

    @abstractmethod
    def identity(self) -> Identity:
        """Describe what delivered positions belong to: no addresses, credentials or limits.

        It is stored with the graph; a graph whose sink has another identity is refused.
        """

    @abstractmethod
    def connect(self, setup: SinkSetup) -> SinkConnection:
        """Return a connection for an interval, not yet open."""

    def validate(self, record_type: RecordType) -> None:
        """Check that messages can be made of the records.

        Raises:
            GraphError: they cannot.
            SchemaError: a field does not exist.
        """
        del record_type

    def header_reader(self, record_type: RecordType) -> Callable[[Any], list[tuple[str, bytes]]] | None:
        """Return a function from a record to the headers of its message; None if none has any.

        The function raises RefusedValueError for a record that cannot be sent, which then becomes a dead letter.
        """
        del record_type
        readers = [(name, getter(name)) for name in self.headers]
        return (lambda record: field_headers(record, readers)) if readers else None

    def encoder(self, record_type: RecordType) -> Callable[[Any], bytes | None] | None:
        """Return what makes the value of a message of a record; None for the field `value`, or JSON.

        It raises ValueError for a record of which there can be no message.
        """
        del record_type
        return None

    async def prepare(self, record_types: Sequence[RecordType]) -> None:
        """Get what messages need from elsewhere, such as the id of a schema.

        It is called when a graph is deployed, and by each owner before its interval takes input.

        Raises:
            ConfigError: the other side refuses, so the graph is not deployed; one that is deployed already waits.
            SinkUnavailableError: the other side cannot be reached now; the input of the step waits.
        """
        return

    def assume_prepared(self, record_types: Sequence[RecordType]) -> None:
        """Do as `prepare`, without the other side: for tests by `GraphDriver`."""
        return

    async def examine(self, graph: str, sink: str) -> AsyncIterator[Finding]:
        """Yield what `millpy doctor` is to report: whether the other side answers, and what is risky there.

        Raises:
            MillError: the other side cannot be reached or refuses us; the doctor reports that, too.
        """
        nothing: tuple[Finding, ...] = ()
        for finding in nothing:
            yield finding
