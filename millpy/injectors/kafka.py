"""Kafka as a source: each Kafka partition is a source partition, its offset is in our own commit.

So nothing is acknowledged at the broker: after a crash the next owner goes on at the committed offset, exactly once,
without a consumer group. Records of aborted transactions are not seen.

    connect   with backoff, in the background when the broker is away; aiokafka reconnects to one that restarts
    begin     the committed offset; without one `start=`, resolved once and committed at once. A partition that came
              to be after its source has begun is read from its beginning: nothing in it is older than the source
    lost      the committed offset is gone (retention, a topic made anew): stop, or go on at the oldest by `lost=`
    drained   the end, asked for when nothing came, has been reached; the proof is good for a few seconds
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.extras import to_install
from millpy.injectors.kafka_records import Fills, Payloads, Tombstones, offsets_of
from millpy.injectors.protocol import SourceSetup, TakeBound, Taken
from millpy.model.record import RecordType
from millpy.model.time import Instant, describe, instant
from millpy.secret import goes_elsewhere, secret

if TYPE_CHECKING:
    from millpy.injectors.kafka_client import Client, Cluster

log = logging.getLogger(__name__)

SERVERS_VARIABLE = "MILLPY_KAFKA_SERVERS"
USERNAME_VARIABLE, PASSWORD_VARIABLE = "MILLPY_KAFKA_USERNAME", "MILLPY_KAFKA_PASSWORD"
SASL = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
Start = Literal["earliest", "latest"] | datetime
_WAIT_S = 0.5
_PROOF_S = 3.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0
_LOOK_EVERY_S = 60.0
_MOVED_EVERY_S = 10.0
_BEYOND_S = 10.0
_DAMAGED_MAX = 3


class KafkaPosition(msgspec.Struct, frozen=True):
    """Where reading goes on; `begun` is the moment that `--from` named when it began."""

    offset: int
    begun: int | None = None


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Kafka:
    """The records of a topic; each value is one JSON record.

    Where the brokers are, who we are there, and what is done when something is lost is left out of the repr, and so
    of the graph's fingerprint.

    Args:
        topic: its name.
        partitions: how many of its partitions are read: as many as it has. Deploy again with more when it has got more.
        key: the field that gets the record's key (str, int or UUID; UTF-8 text).
        headers: header name -> the field that gets it; the last one of a name counts, a missing one is null.
        timestamp: the field that gets the record's timestamp: an int (ms since the epoch) or a datetime.
        start: where a partition begins that has no committed offset: "earliest", "latest" or a moment. One that comes
            to be later begins at its beginning, also with "latest".
        tombstones: records without a value: "dead_letter", "skip", or "record" (an object of key, headers and
            timestamp only).
        lost: when the committed offset is gone: "stop", or "continue" at the oldest there is, with an event.
        servers: `host:9092,other:9092`; default: environment variable MILLPY_KAFKA_SERVERS, else localhost:9092.
        username: for SASL; default: MILLPY_KAFKA_USERNAME.
        password: for SASL; default: MILLPY_KAFKA_PASSWORD, or the file that MILLPY_KAFKA_PASSWORD_FILE names.
        sasl: "PLAIN", "SCRAM-SHA-256" or "SCRAM-SHA-512".
        tls: encrypt, and verify the brokers' certificates and names. Left out: with `ca_file`, and when a password
            would go to another machine.
        ca_file: the authorities to trust instead of the system's.
    """

    topic: str
    count: int
    fills: Fills
    start: Start
    tombstones: Tombstones
    lost: Literal["stop", "continue"]
    servers: str | None
    username: str | None
    password: str | None
    sasl: str
    tls: bool | None
    ca_file: str | None

    def __init__(
        self,
        topic: str,
        *,
        partitions: int,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timestamp: str | None = None,
        start: Start = "earliest",
        tombstones: Tombstones = "dead_letter",
        lost: Literal["stop", "continue"] = "stop",
        servers: str | None = None,
        username: str | None = None,
        password: str | None = None,
        sasl: str = "PLAIN",
        tls: bool | None = None,
        ca_file: str | None = None,
    ) -> None:
        if not topic or partitions < 1:
            raise ConfigError("name a topic and how many partitions it has", hint='Kafka("readings", partitions=4)')
        if tls is False and ca_file:
            raise ConfigError("a file for TLS is named, and tls=False", hint="leave tls= out")
        if sasl not in SASL:
            raise ConfigError(f"sasl={sasl!r} is none that can be spoken", hint=f"one of {', '.join(SASL)}")
        if tombstones not in ("dead_letter", "skip", "record") or lost not in ("stop", "continue"):
            raise ConfigError(f"unknown policy: tombstones={tombstones!r}, lost={lost!r}")
        if not (start in ("earliest", "latest") or (isinstance(start, datetime) and start.tzinfo is not None)):
            raise ConfigError(
                f"a partition cannot begin at {start!r}", hint='"earliest", "latest" or a datetime in UTC'
            )
        fills = Fills(key, tuple((headers or {}).items()), timestamp)
        values = {
            "topic": topic, "count": partitions, "fills": fills, "start": start, "tombstones": tombstones, "lost": lost,
            "servers": servers, "username": username, "password": password, "sasl": sasl, "tls": tls,
            "ca_file": ca_file,
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        fills = self.fills
        parts = [repr(self.topic)]
        parts += [f"key={fills.key!r}"] if fills.key else []
        parts += [f"headers={dict(fills.headers)!r}"] if fills.headers else []
        parts += [f"timestamp={fills.timestamp!r}"] if fills.timestamp else []
        parts += [f"tombstones={self.tombstones!r}"] if self.tombstones != "dead_letter" else []
        return f"Kafka({', '.join(parts)})"

    def partitions(self) -> tuple[str, ...]:
        """One for each Kafka partition."""
        return tuple(f"{self.topic}/{number}" for number in range(self.count))

    def validate(self, record_type: RecordType) -> None:
        """Refuse fields that cannot be filled. Raises GraphError."""
        self.fills.validate(record_type)

    def begins_at(self) -> str:
        """By which time a moment in `start=` or `--from` is looked up."""
        return "the record's timestamp"

    def connect(self, setup: SourceSetup) -> KafkaInjector:
        """A reader of one partition, not yet connected.

        Raises:
            ConfigError: the package aiokafka is missing.
        """
        return KafkaInjector(setup, self, self.cluster())

    def cluster(self) -> Cluster:
        """Where the brokers are and who we are there: as given here, else by the environment.

        Raises:
            ConfigError: the package aiokafka is missing, or a file with the password cannot be read.
        """
        try:
            from millpy.injectors.kafka_client import Cluster  # an optional dependency
        except ImportError as error:
            raise ConfigError("Kafka needs the package aiokafka", hint=to_install("kafka")) from error
        ours = self.servers is None  # credentials belong to the address they were given with
        servers = self.servers or os.environ.get(SERVERS_VARIABLE) or "localhost:9092"
        username = self.username or (os.environ.get(USERNAME_VARIABLE) if ours else None)
        tls = self._tls(servers, username)
        return Cluster(
            servers=servers,
            username=username,
            password=self.password or (secret(PASSWORD_VARIABLE) if ours else None),
            sasl=self.sasl,
            tls=tls,
            ca_file=self.ca_file,
        )

    def _tls(self, servers: str, username: str | None) -> bool:
        if self.tls is not None:
            return self.tls
        return bool(self.ca_file) or (username is not None and goes_elsewhere(servers))


class _NotThereError(SourceUnavailableError):
    """The broker says that there is no such partition."""


@dataclass(slots=True)
class _Chunk:
    """Records as they were fetched, and their bytes."""

    records: Sequence[Any]
    size: int


class KafkaInjector:
    """One Kafka partition, live."""

    def __init__(self, setup: SourceSetup, source: Kafka, cluster: Cluster) -> None:
        self._setup = setup
        self._source = source
        self._cluster = cluster
        self._number = int(setup.partition.rpartition("/")[2])
        self._payloads = Payloads(source.fills, setup.record_type, source.tombstones)
        self._position: KafkaPosition | None = None  # handed over
        self._offset = -1  # fetched
        self._moved = False  # there is a position to hand over, without records
        self._moved_at = 0.0
        self._damaged = 0  # times in a row
        self._inbox: deque[_Chunk] = deque()
        self._fetched = self._total = 0  # records, since it was opened
        self._room = asyncio.Event()
        self._proven_at = float("-inf")
        self._beyond_since: float | None = None
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._told: set[str] = set()

    async def open(self, position: bytes | None) -> None:
        """Connect and begin; when the broker or the topic is away, keep trying in the background.

        Raises:
            ConfigError: the broker refuses us, the offset is gone, or `--from` would go back behind a position.
        """
        start = self._setup.start
        if position is not None:
            self._position = msgspec.json.decode(position, type=KafkaPosition)
            if start is not None and self._position.begun != start:
                raise ConfigError(
                    f"{self._setup.partition} has been read up to offset {self._position.offset} by graph "
                    f"{self._setup.graph!r}: beginning at {describe(start)} would count records twice or never",
                    hint="make the graph a new generation, which runs beside this one, or leave --from out",
                )
        try:
            await self._connect()
        except SourceUnavailableError as error:
            self._tell_once("source_unavailable", error.message)
        self._keeper = asyncio.create_task(self._keep(), name=f"millpy-kafka-{self._setup.partition}")
        self._keeper.add_done_callback(lambda _: self._setup.ready.set())

    # -- connection -----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        from millpy.injectors.kafka_client import Client

        setup = self._setup
        name = f"millpy-{setup.graph}-{setup.stream}-{self._number}"
        self._client = Client(self._cluster, self._source.topic, self._number, name)
        try:
            await self._client.start()
            await self._begin(self._client)
        except BaseException:
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    async def _begin(self, client: Client) -> None:
        """Check that the partition is there, and go to where reading goes on."""
        try:
            await self._look(client)
        except _NotThereError:
            if self._position is None and self._begins() == "latest":
                self._begin_at(0)  # whatever will be in it comes from now on
            raise
        oldest, end = await client.bounds()
        if self._position is None:
            self._begin_at(await self._first(client, oldest, end))
        elif self._offset < 0:
            self._offset = self._position.offset
        self._check(oldest, end)
        client.assign(self._offset)

    def _begin_at(self, offset: int) -> None:
        """Begin there, which is committed before anything else comes: it must not be looked for again."""
        self._offset = offset
        self._position = KafkaPosition(offset, self._setup.start)
        self._moved = True
        self._setup.ready.set()

    async def _look(self, client: Client) -> None:
        """How many partitions the topic has by now.

        Raises:
            _NotThereError: ours is not among them.
            SourceUnavailableError: nobody answers.
            ConfigError: we may not know.
        """
        found = await client.partitions()
        topic = self._source.topic
        if found <= self._number:
            has = f"has {found} partitions" if found else "is not there"
            raise _NotThereError(f"{self._setup.partition} cannot be read: topic {topic!r} {has}")
        if found > self._source.count and self._number == 0:
            self._tell_once(
                "source_grown", f"topic {topic!r} has {found} partitions, {self._source.count} of them are read: "
                f"run with Kafka({topic!r}, partitions={found})",
            )  # fmt: skip

    def _begins(self) -> Start | Instant:
        """Where a partition begins that has no committed offset."""
        start = self._source.start if self._setup.start is None else self._setup.start
        return "earliest" if start == "latest" and self._setup.joined else start

    async def _first(self, client: Client, oldest: int, end: int) -> int:
        start = self._begins()
        if start == "earliest":
            return oldest
        if start == "latest":
            return end
        at = instant(start) if isinstance(start, datetime) else Instant(int(start))
        found = await client.at_time(-(-at // 1_000))
        return end if found is None else found  # the end as it was before: what has come since may be of that time

    def _check(self, oldest: int, end: int) -> None:
        """Whether the log holds our offset.

        Raises:
            SourceUnavailableError: it ends before it; a broker that has just started may still find the rest.
            ConfigError: it is gone, and that stops us.
        """
        now = self._setup.clock.monotonic()
        if oldest <= self._offset <= end:
            self._beyond_since = None
            return
        text = f"{self._setup.partition}: offset {self._offset} is gone, the log holds {oldest} to {end}"
        if self._offset > end:
            self._beyond_since = now if self._beyond_since is None else self._beyond_since
            if now - self._beyond_since < _BEYOND_S:
                raise SourceUnavailableError(text)
        if self._source.lost == "stop":
            raise ConfigError(
                f"{text}: retention has passed us, or the topic was made anew",
                hint='Kafka(…, lost="continue") goes on at the oldest; a new graph begins anew',
            )
        self._tell("source_lost", f"{text}; going on at {oldest}")
        self._offset, self._beyond_since = oldest, None

    async def _keep(self) -> None:
        """Read; connect again when that fails."""
        retry_s = _RETRY_S_MIN
        while True:
            try:
                if self._client is None:
                    await self._connect()
                    self._tell("source_connected", f"{self._setup.partition} is read again")
                    self._told.discard("source_unavailable")
                assert self._client is not None
                retry_s = _RETRY_S_MIN
                await self._read(self._client)
            except SourceUnavailableError as error:
                self._tell_once("source_unavailable", error.message)
            await self._disconnect()
            await self._setup.clock.sleep(retry_s)
            retry_s = min(_RETRY_S_MAX, retry_s * 2)

    async def _read(self, client: Client) -> None:
        """Fetch as long as there is room, and prove from time to time that nothing is left."""
        from millpy.injectors.kafka_client import OutOfRangeError

        limits, clock = self._setup.limits, self._setup.clock
        looked_at = clock.monotonic()
        while True:
            while sum(len(c.records) for c in self._inbox) >= limits.bundle_records_max or (
                sum(c.size for c in self._inbox) >= limits.bundle_bytes_max
            ):
                self._room.clear()
                await self._room.wait()
            try:
                records = await client.fetch(limits.bundle_records_max, _WAIT_S)
            except OutOfRangeError:
                self._check(*await client.bounds())
                client.assign(self._offset)
                continue
            if records:
                self._note(records)
                continue
            await self._prove(client)
            if clock.monotonic() - looked_at > _LOOK_EVERY_S:
                looked_at = clock.monotonic()
                await self._look(client)

    def _note(self, records: Sequence[Any]) -> None:
        """Keep what was fetched.

        Raises:
            SourceUnavailableError: the last of it is damaged; perhaps it is whole when it is fetched again.
        """
        newest = records[-1]
        damaged = newest.value is None and getattr(newest, "damaged", False)
        again = damaged and self._damaged < _DAMAGED_MAX
        self._damaged = self._damaged + 1 if again else 0
        records = records[:-1] if again else records
        if records:
            self._offset = records[-1].offset + 1
            self._fetched += len(records)
            self._inbox.append(_Chunk(records, sum(map(_size, records))))
            self._setup.ready.set()
        if again:
            raise SourceUnavailableError(f"{self._setup.partition}@{newest.first}: {newest.detail}")

    async def _prove(self, client: Client) -> None:
        """Nothing came: is that because there is nothing?"""
        now = self._setup.clock.monotonic()
        end, position = await client.end(), await client.position()
        if position < end:
            return
        self._proven_at = now
        if position > self._offset and now - self._moved_at >= _MOVED_EVERY_S:
            # Behind transaction markers and what compaction took: retention may remove these and must find us behind.
            self._offset, self._moved, self._moved_at = position, True, now
            self._setup.ready.set()

    def _tell(self, what: str, text: str) -> None:
        log.warning("%s", text)
        self._setup.tell(what, {"partition": self._setup.partition, "stream": self._setup.stream, "what": text})

    def _tell_once(self, what: str, text: str) -> None:
        """Until it is over."""
        if what not in self._told:
            self._told.add(what)
            self._tell(what, text)

    # -- what the worker asks -------------------------------------------------------------------------------------

    async def take(self) -> Taken | None:
        """What was fetched, at most a bundle.

        Raises:
            ConfigError: reading has stopped for good.
        """
        if not self._inbox and not self._moved:
            if self._keeper is not None and self._keeper.done():
                self._keeper.result()
            return None
        assert self._position is not None
        records = self._take_records()
        after = records[-1].offset + 1 if records else self._offset if not self._inbox else self._position.offset
        self._moved = False
        self._position = KafkaPosition(after, self._position.begun)
        counted, payloads, refused = self._payloads.of(records)
        partition = self._setup.partition
        waiting = sum(len(chunk.records) for chunk in self._inbox)
        before, self._total = self._total, self._fetched - waiting - self._payloads.skipped
        return Taken(
            format="json",
            arrived_at=self._setup.clock.now_us(),
            payloads=payloads,
            refused=refused,
            describe=lambda row: f"{partition}@{offsets_of(counted[row])}",
            position=msgspec.json.encode(self._position),
            records=self._total - before,
            total=self._total,
        )

    def _take_records(self) -> Sequence[Any]:
        """From the front of the inbox, at most a bundle; a chunk that is too large alone is cut."""
        bound = self._setup.take_bound
        found: list[Any] = []
        size = 0
        while self._inbox:
            chunk = self._inbox[0]
            fits = len(found) + len(chunk.records) <= bound.records
            fits = fits and size + chunk.size <= bound.bytes
            if not fits and found:
                break
            self._inbox.popleft()
            if not fits:
                chunk, rest = _cut(chunk, bound)
                if rest is not None:
                    self._inbox.appendleft(rest)
            found.extend(chunk.records)
            size += chunk.size
            if not fits:
                break
        self._room.set()
        return found

    async def acknowledge(self, token: Any) -> None:
        """Nothing to do: the offset is ours."""

    def quiet(self) -> bool:
        """Whether everything up to the end was read, and the broker said a moment ago where that is."""
        return not self._inbox and not self._moved and self._setup.clock.monotonic() - self._proven_at < _PROOF_S

    async def close(self) -> None:
        """Disconnect."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])
            if not keeper.cancelled():
                keeper.exception()
        await self._disconnect()
        self._inbox.clear()


def _size(record: Any) -> int:
    size = len(record.value or b"") + len(record.key or b"")
    if record.headers:
        size += sum(len(name) + len(value or b"") for name, value in record.headers)
    return size


def _cut(chunk: _Chunk, bound: TakeBound) -> tuple[_Chunk, _Chunk | None]:
    """As many records as fit into a bundle, at least one; and the rest."""
    sizes = np.cumsum([_size(record) for record in chunk.records])
    count = min(bound.records, max(1, int(np.searchsorted(sizes, bound.bytes, side="right"))))
    if count >= len(chunk.records):
        return chunk, None
    size = int(sizes[count - 1])
    return _Chunk(chunk.records[:count], size), _Chunk(chunk.records[count:], chunk.size - size)
