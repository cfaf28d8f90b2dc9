"""What a source must promise, and how an injector talks to the runtime.

A `Source` is the frozen description in a graph. `connect` makes an `Injector` for one source partition, live in
one worker under one grant. It is driven on the event loop:

    open(position) -> [take() -> Taken … commit … acknowledge(token)]* -> close()

`take` hands over everything that is waiting, at most what `SourceSetup.take_bound` says, and never waits to fill.
Tokens are acknowledged in the order taken, only after the commit. After a failed or unknown commit the runtime closes
the injector and opens a new one at the stored position: what was taken and not acknowledged must come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import pyarrow as pa

from millpy.clock import Clock
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that is no record: `reason` is a word for dead letters, `detail` says what exactly."""

    row: int
    reason: str
    detail: str


@dataclass(slots=True)
class Taken:
    """What was waiting at a source, undecoded: one of `payloads`, `block` and `batch`.

    Attributes:
        format: how `payloads` or `block` is written; "columns" for a batch.
        payloads: one payload a record (MQTT, Kafka, CSV with newlines in its fields).
        block: whole lines joined by newlines (files).
        batch: rows that the source has as columns already (Parquet).
        refused: rows of `payloads` that the source itself sets aside; they are not decoded.
        header: CSV header fields, for format "csv".
        describe: position of row i for a dead letter, e.g. "readings.ndjson.gz:12 (byte 1344)".
        position: JSON text of where to go on after this batch; None when the source keeps none.
        notes: small facts beside the position, as JSON text by name, committed with it; None forgets one.
        token: what to hand back to `acknowledge`.
        arrived_at: wall time of taking.
        records: how many records these are, as the source has counted them when it received them, before anything is
            decoded; by default as many as are in here. A blank line is none.
        total: how many it has handed over since it was opened, these included, also by its own count; with it, a batch
            that is lost or comes twice on its way shows in the account (I8). None for a source that keeps no count.
        finished: the source has ended and this is the last of it (may be empty).
    """

    format: Literal["json", "csv", "columns"]
    arrived_at: Instant
    payloads: Sequence[bytes] = ()
    block: bytes = b""
    header: Sequence[str] = ()
    describe: Callable[[int], str] = str
    position: bytes | None = None
    token: Any = None
    finished: bool = False
    batch: pa.RecordBatch | None = None
    refused: Sequence[Refused] = ()
    notes: Mapping[str, bytes | None] = field(default_factory=dict)
    records: int = -1
    total: int | None = None

    def __post_init__(self) -> None:
        if self.records >= 0:
            return
        if self.batch is not None:
            self.records = len(self.batch)
        else:
            self.records = len(self.payloads) + sum(1 for line in self.block.split(b"\n") if line.strip())

    @property
    def has_records(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self.block or self.payloads or self.batch is not None)


class TakeBound(Protocol):
    """How much the next take may bring; it changes from turn to turn."""

    @property
    def records(self) -> int:
        """Records, at least one."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of payload; a single record may have more."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBound:
    """The same for every take."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSetup:
    """What the runtime tells an injector.

    Attributes:
        graph: what this generation of the graph is known by to brokers.
        generation: for names that a user has given, and that two generations must not share.
        ready: set by the injector whenever something may be waiting, so that the worker wakes.
        trusted: whether the grant may still be believed; checked before every (re)connect.
        record_type: of the stream's records; None in tests that look at bytes only.
        notes: what `Taken.notes` has left behind.
        joined: the source ran before it had this partition, so nothing in it is older than the source.
        start: event or publication time at which a source partition without a position begins, for sources that can.
        tell: notes an event of this source (kind, detail) for people, in `millpy.events`.
        secret: what names at brokers are made from, so that nobody else can guess them.
        bound: how much a take may bring, asked before each; None for a whole bundle of `limits` (see `take_bound`).
        deduplicated: records have ids (`Dedupe`), so one that is the same to the byte is the same record.
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
    tell: Callable[[str, dict[str, object]], None] = field(default=lambda _kind, _detail: None)
    generation: int = 1
    secret: str = field(default="", repr=False)
    bound: TakeBound | None = None
    deduplicated: bool = False

    @property
    def take_bound(self) -> TakeBound:
        """How much a take may bring."""
        if self.bound is not None:
            return self.bound
        return FixedBound(self.limits.bundle_records_max, self.limits.bundle_bytes_max)


class Injector(Protocol):
    """One source partition, live."""

    async def open(self, position: bytes | None) -> None:
        """Start at a stored position (None: from the beginning). Raises SourceUnavailableError, ConfigError."""
        ...

    async def take(self) -> Taken | None:
        """Everything that is waiting, at most a bundle; None when nothing is. Does not wait for more."""
        ...

    async def acknowledge(self, token: Any) -> None:
        """The batch with this token is committed."""
        ...

    def quiet(self) -> bool:
        """Connected, nothing waiting locally, and the backlog since (re)connecting is proven drained.

        Only then may the clock advance an idle source's watermark.
        """
        ...

    async def close(self) -> None:
        """Disconnect; what was not acknowledged will come again."""
        ...


class Source(Protocol):
    """The frozen description of an outside feed; its repr is part of the graph's fingerprint."""

    def partitions(self) -> tuple[str, ...]:
        """Names of the source partitions, in order."""
        ...

    def connect(self, setup: SourceSetup) -> Injector:
        """An injector for `setup.partition`, not yet open."""
        ...


@runtime_checkable
class FillsFields(Protocol):
    """A source that fills fields of the record from elsewhere than the payload."""

    def validate(self, record_type: RecordType) -> None:
        """Refuse fields that do not exist or cannot be filled. Raises GraphError."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A source that knows, before its graph is deployed, whether there is anything to read.

    What is deployed is kept: a graph that named the wrong file would have to be deployed again under another name.
    """

    def check(self) -> None:
        """Refuse what is not there. Raises ConfigError."""
        ...


@runtime_checkable
class BeginsAtMoment(Protocol):
    """A source that can begin at a moment (`SourceSetup.start`) where it has no position."""

    def begins_at(self) -> str:
        """By which time of a record it begins, for people."""
        ...
