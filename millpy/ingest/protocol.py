"""The contract of a source, and the interface between an injector and the runtime.

A `Source` is the description of a feed in a graph. Its `connect` makes an `Injector` for one source partition, which
lives in one worker under one grant. The event loop drives it:

    open(position) -> [take() -> SourceBatch … commit … acknowledge(token)]* -> close()

`take` returns everything that is waiting, at most `SourceSetup.take_bound`, and never waits for more. The runtime
acknowledges tokens in the order of the takes, after the commit. After a failed or unknown commit, or a failure of the
source, it closes the injector and opens a new one at the committed position. The source must then deliver again
whatever was not acknowledged.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import msgspec
import pyarrow as pa

from millpy.clock import Clock
from millpy.formats import Format, Message
from millpy.ingest.connection_state import ConnectionState
from millpy.ingest.request_traffic import RequestTraffic
from millpy.limits import Limits
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants, RecordType
from millpy.model.time import INSTANT_MIN, Instant

PayloadKind = Literal["json", "csv", "columns"]


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that is not a valid record. `reason` is the dead letter's code, `detail` its explanation."""

    row: int
    reason: str
    detail: str


@dataclass(slots=True)
class SourceBatch:
    """Undecoded records that were waiting at a source, as one of `payloads`, `block` and `batch`.

    Attributes:
        format: the format of `payloads` or `block`; "columns" for a batch.
        payloads: one payload per record (MQTT, Kafka, CSV with newlines in its fields).
        block: whole lines joined by newlines (files).
        batch: rows that the source already has as columns (Parquet).
        refused: rows of `payloads` that the source itself rejects; they are not decoded.
        header: CSV header fields, for format "csv".
        describe: returns the position of row i for a dead letter, e.g. "readings.ndjson.gz:12 (byte 1344)".
        position: the position after this batch, as JSON text; None if the source keeps no position.
        notes: small facts beside the position, as JSON text by name, committed with it; None deletes one.
        token: the argument of `acknowledge` for this batch.
        arrived_at: wall time of the take.
        arrivals: returns the time at which each row arrived at the broker or was first taken, int64 in µs, negative
            where that is unknown; called only for `EventTime.arrival`. None: all arrived with the take.
        records: number of records, as the source counted them on receipt, before decoding. Default: the number of
            records in this batch. A blank line does not count.
        total: number of records handed over since the source was opened, this batch included, by the source's own
            count. It reveals in the accounting a batch that is lost or delivered twice on its way (I8). None for a
            source that does not count.
        finished: whether the source has ended with this batch, which may be empty.
        watermark: the least event time still to come after this batch, from a source that knows one.
        origin: the name of what the batch is from, such as a file; for crash tests, which copy it.
        messages: rejected row -> the message of which it is a bad part (`Expansion.messages`), for a replay.
    """

    format: PayloadKind
    arrived_at: Instant
    payloads: Sequence[bytes] = ()
    block: bytes = b""
    header: Sequence[str] = ()
    describe: Callable[[int], str] = str
    position: bytes | None = None
    token: Any = None
    finished: bool = False
    batch: pa.RecordBatch | None = None
    refused: Sequence[RejectedRow] = ()
    notes: Mapping[str, bytes | None] = field(default_factory=dict)
    records: int = -1
    total: int | None = None
    watermark: Instant = INSTANT_MIN
    origin: str = ""
    arrivals: Callable[[], Instants] | None = None
    messages: Mapping[int, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_format(self.format)
        check_position(self.position)
        if self.records >= 0:
            return
        if self.batch is not None:
            self.records = len(self.batch)
        else:
            self.records = len(self.payloads) + sum(1 for line in self.block.split(b"\n") if line.strip())

    @property
    def has_records(self) -> bool:
        """Whether the batch has anything to decode."""
        return bool(self.block or self.payloads or self.batch is not None)


def check_format(format: object) -> None:
    """Raise ValueError for what is no format of a batch."""
    if format not in get_args(PayloadKind):
        raise ValueError(f"format={format!r} is none of {', '.join(get_args(PayloadKind))}")


def check_position(position: object) -> None:
    """Raise ValueError for what is no position of a source."""
    if position is None:
        return
    try:
        if not isinstance(position, bytes):
            raise TypeError(f"it is {type(position).__name__}")
        msgspec.json.decode(position, type=msgspec.Raw)
    except (TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"position={position!r} is not JSON text as bytes: {error}") from error


class TakeBound(Protocol):
    """The largest batch that the next take may return; it changes from turn to turn."""

    @property
    def records(self) -> int:
        """Number of records, at least one."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of payload; a single record may exceed them."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBound:
    """A bound that is the same for every take."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetup:
    """The parameters that the runtime passes to an injector.

    Attributes:
        graph: the name of this generation of the graph for brokers.
        generation: the generation, for names given by the user that two generations must not share.
        ready: an event that the injector sets whenever something may be waiting, so that the worker wakes.
        trusted: tells whether the grant is still valid; called before every (re)connect.
        record_type: the type of the stream's records; None in tests that look at bytes only.
        notes: the stored `SourceBatch.notes`.
        place: the number of the partition among those of the source, from 0. It stays when the source gets more.
        joined: whether the source was already running when it gained this partition, so that the partition holds
            nothing older than the source.
        start: event or publication time at which a source partition without a position begins, if the source can.
        tell: records an event of this source (kind, detail) in `millpy.events`.
        secret: the seed of names at brokers, so that others cannot guess them.
        bound: the bound of a take, read before each; None for a whole bundle of `limits` (see `take_bound`).
        connection: whether the source is connected; a source that connects in the background reports it here.
        deduplicated: whether records have ids (`Dedupe`), so that records of identical bytes are the same record.
        make_check: returns a function from a batch to the rows that the stream will reject, for a source that tells its
            clients. What depends on other records, or on later steps, it cannot tell. None in tests.
        database: the URL of the workers' database; empty outside of workers.
        gained: reports that the feed has more partitions than are deployed, by the names of all of its source
            partitions, in order; returns whether the worker has them or will add them to the deployed graph.
    """

    graph: str
    stream: str
    partition: str
    limits: Limits
    clock: Clock
    ready: asyncio.Event
    trusted: Callable[[], bool] = field(default=lambda: True)
    record_type: RecordType | None = None
    notes: Mapping[str, bytes] = field(default_factory=dict)
    start: Instant | None = None
    joined: bool = False
    place: int = 0
    tell: Callable[[str, dict[str, object]], None] = field(default=lambda _kind, _detail: None)
    generation: int = 1
    secret: str = field(default="", repr=False)
    bound: TakeBound | None = None
    deduplicated: bool = False
    connection: ConnectionState = field(default_factory=ConnectionState)
    make_check: Callable[[], Callable[[SourceBatch], Sequence[RejectedRow]]] | None = None
    database: str = field(default="", repr=False)
    gained: Callable[[Sequence[str]], bool] = field(default=lambda _partitions: False)

    @property
    def take_bound(self) -> TakeBound:
        """Bound of the next take."""
        if self.bound is not None:
            return self.bound
        return FixedBound(self.limits.bundle_records_max, self.limits.bundle_bytes_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The parameters that the runtime passes to what a source runs in each worker (`Source.serve`).

    Attributes:
        partitions: the partitions of the source.
        addresses: returns partition -> the `ConnectionState.address` that its live owner has reported; it raises
            TransientError. None without a database.

    The others are those of `SourceSetup`.
    """

    graph: str
    stream: str
    partitions: Sequence[str]
    limits: Limits
    clock: Clock
    secret: str = field(default="", repr=False)
    deduplicated: bool = False
    addresses: Callable[[], Awaitable[Mapping[str, str]]] | None = None


class Injector(Protocol):
    """An open source partition."""

    async def open(self, position: bytes | None) -> None:
        """Start at a stored position, or at the beginning if it is None.

        Raises:
            SourceUnavailableError: the broker or file cannot be reached.
            ConfigError: a setting is wrong.
        """
        ...

    async def take(self) -> SourceBatch | None:
        """Return everything that is waiting, at most a bundle, or None. Do not wait for more."""
        ...

    async def acknowledge(self, token: Any) -> None:
        """Acknowledge the batch with this token, which is committed."""
        ...

    def quiet(self) -> bool:
        """Tell whether the source is connected, has nothing waiting, and has drained its backlog.

        The backlog at the last (re)connect must be proven drained. Only then may the clock advance the watermark of an
        idle source.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Batches that were not acknowledged will come again."""
        ...


class Source(GraphPart, ABC):
    """The description of an external feed, as a graph names it. It is immutable, and opens nothing.

    A source of your own derives from this class and defines `identity`, `partitions` and `connect`; the other methods
    say what else it can do, and by default it cannot.

    The promises of a source:

    * Equal settings mean equal partitions. Each has one order of records, its own watermark, and one reader.
    * A source that can read again keeps a position: `SourceBatch.position` is committed with the effects of the batch,
      and `Injector.open` begins behind it, with the same records in the same order.
    * A source that cannot, because its broker keeps the position, delivers again whatever was not acknowledged, and
      acknowledges only when told that a batch is committed. What is committed but not acknowledged comes again: the
      graph needs `Dedupe`.
    * The batch that ends a partition is `finished`; then all its windows close.
    """

    __slots__ = ()

    @abstractmethod
    def identity(self) -> Identity:
        """Describe what stored positions and decoded records depend on: no addresses, credentials or limits.

        It is stored with the graph; a graph whose source has another identity is refused.
        """

    @abstractmethod
    def partitions(self) -> tuple[str, ...]:
        """Return the names of the source partitions, in order."""

    @abstractmethod
    def connect(self, setup: SourceSetup) -> Injector:
        """Return an injector for `setup.partition`, not yet open."""

    def serve(self, setup: WorkerSetup) -> AbstractAsyncContextManager[RequestTraffic | None] | None:
        """Return what a worker enters before its first turn and leaves after its last, whatever partitions it owns.

        For a source to which clients connect: a worker that owns no partition can say so, or pass requests on. What is
        entered is the traffic for the metrics, if the source counts it. None for nothing.
        """
        del setup
        return None

    def validate(self, record_type: RecordType) -> None:
        """Check the fields of a record that the source fills from outside the payload.

        Raises:
            GraphError: a field does not exist or cannot be filled.
        """
        del record_type

    def check(self) -> None:
        """Check before the first deployment that there is something to read, as a deployed source cannot change.

        Raises:
            ConfigError: there is not.
        """
        return

    def payload_format(self) -> Format | None:
        """Return the format by which the source expands its messages (`Expander`); None if it gives JSON or columns.

        A source that has one describes it in its `identity`, and sets `SourceBatch.messages`.
        """
        return None

    def begins_at(self) -> str | None:
        """Name the time of a record by which a partition without a position begins at `SourceSetup.start`.

        None if the source cannot begin at a time.
        """
        return None

    def ends(self) -> bool:
        """Tell whether every partition ends; a crash test then reads the source to its end, and replays it."""
        return False

    def unread(self, setup: SourceSetup) -> Sequence[str]:
        """Say what has come to a partition since it ended; by default nothing.

        If anything has, the worker connects to the partition again at its position, and it is read on; windows that
        its end has closed stay closed. It is called in a thread, beside the turns, once when a worker claims an ended
        partition. What it raises is logged, and stops nothing, except a BrokenFileError.
        """
        del setup
        return ()

    async def examine(self, graph: str, stream: str) -> AsyncIterator[Finding]:
        """Yield what `millpy doctor` is to report: whether the broker answers, and what is risky there.

        Raises:
            MillError: the broker cannot be reached or refuses us; the doctor reports that, too.
        """
        nothing: tuple[Finding, ...] = ()
        for finding in nothing:
            yield finding
