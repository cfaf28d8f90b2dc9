"""The reader of one Kafka partition in a worker: it fetches ahead, and hands over what has come.

connect   with backoff, in the background while the broker is unreachable; aiokafka reconnects after a restart
begin     at the committed offset, or else at `start=`, which is resolved once and committed at once. A partition
that is created after its source has begun is read from its beginning: it has no older records
lost      the committed offset is gone (retention): stop, or resume at the oldest, by `lost=`
replaced  the topic was deleted and created again: stop, or begin at its oldest offset, by `lost=`
drained   the end, requested when no record arrives, has been reached; the proof is valid for a few seconds. While
a transaction is open there, records may wait behind its begin: nothing is proven, and after a while it is reported
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.model.time import describe
from millpy.sources.kafka.beginning import NotThereError, begins, check_lost, first_offset, gone, look, replaced
from millpy.sources.kafka.client import Client, OutOfRangeError
from millpy.sources.kafka.connect_errors import RefusalError
from millpy.sources.kafka.fetch_inbox import FetchInbox
from millpy.sources.kafka.position import KafkaPosition
from millpy.sources.kafka.record_columns import RecordColumns
from millpy.sources.kafka.records import ExpandedRecords, Payloads, batch_of
from millpy.sources.kafka.source import Kafka
from millpy.sources.kafka.topic_ids import TopicMetadata

log = logging.getLogger(__name__)

_WAIT_S = 0.5
_PROOF_S = 3.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.1, 5.0
_LOOK_EVERY_S = 10.0
_MOVED_EVERY_S = 10.0
_BEYOND_S = 10.0
_DAMAGED_MAX = 3
_OPEN_S = 10.0
"""Seconds after which an open transaction that holds records back is reported."""


class KafkaInjector:
    """The injector of one Kafka partition."""

    def __init__(self, setup: SourceSetup, source: Kafka) -> None:
        self._setup = setup
        self._source = source
        self._number = int(setup.partition.rpartition("/")[2])
        self._payloads = Payloads(source.fields, setup.record_type, source.tombstones)
        self._expander: Expander | None = None
        if source.format is not None and setup.record_type is not None:
            self._expander = Expander(source.format, setup.record_type, setup.limits, setup)
        self._grown = 0  # records of expanded messages beyond one each, since `open`
        self._position: KafkaPosition | None = None  # of the records returned by `take`
        self._offset = -1  # of the next record to fetch
        self._topic_id: UUID | None = None  # of the topic to which `_offset` belongs
        self._moved = False  # `take` must return a position without records
        self._moved_at = 0.0
        self._damaged = 0  # consecutive fetches of damaged records
        self._inbox = FetchInbox()
        self._fetched = self._total = 0  # records since `open`
        self._room = asyncio.Event()
        self._proven_at = float("-inf")
        self._beyond_since: float | None = None
        self._open_since: tuple[int, float] | None = None  # where a transaction is open, and since when we know
        self._open_told = ""
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._told: set[str] = set()

    async def open(self, position: bytes | None) -> None:
        """Connect and begin; when the broker or the topic is missing, keep trying in the background.

        Raises:
            ConfigError: the broker rejects us and has not accepted us before, the offset is gone, or `--from`
                contradicts a committed position.
        """
        start = self._setup.start
        if position is not None:
            self._position = msgspec.json.decode(position, type=KafkaPosition)
            self._topic_id = self._position.topic_id
            if start is not None and self._position.begun != start:
                raise ConfigError(
                    f"{self._setup.partition} has been read up to offset {self._position.offset} by graph "
                    f"{self._setup.graph!r}: starting at {describe(start)} would repeat or lose records",
                    hint="deploy a new generation of the graph, which runs beside this one, or leave out --from",
                )
        self._setup.connection.managed = True
        try:
            await self._connect()
            self._setup.connection.connected()
        except (SourceUnavailableError, RefusalError) as error:
            if not self._setup.connection.is_outage(error, RefusalError):
                raise
            self._setup.connection.disconnected(error.message, attempted=True)
            log.warning("%s; trying again", error.message)
        self._keeper = asyncio.create_task(self._keep(), name=f"millpy-kafka-{self._setup.partition}")
        self._keeper.add_done_callback(lambda _: self._setup.ready.set())

    # -- connection -----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        setup = self._setup
        name = f"millpy-{setup.graph}-{setup.stream}-{self._number}"
        try:  # the files with our password and the authorities may be others by now, or about to be replaced
            self._client = Client(self._source.cluster(), self._source.topic, self._number, name)
        except ConfigError as error:
            raise RefusalError(error.message, hint=error.hint) from error
        try:
            await self._client.start()
            await self._begin(self._client)
        except BaseException:
            await self._disconnect()
            raise
        setup.connection.accepted = True

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    async def _begin(self, client: Client) -> None:
        """Check that the partition exists, and seek to the position at which reading resumes."""
        begin = begins(self._source, self._setup)
        try:
            topic = await self._look(client)
        except NotThereError:
            if self._position is None and begin == "latest":
                self._begin_at(0)  # all of its records will be newer than now
            raise
        oldest, end = await client.bounds()
        if self._position is None:
            self._topic_id = topic.topic_id
            self._begin_at(await first_offset(client, begin, oldest, end))
        elif self._offset < 0:
            self._offset = self._position.offset
        await self._check_topic(client, topic.topic_id, oldest)
        self._check(oldest, end)
        client.assign(self._offset, self._topic_id)

    def _begin_at(self, offset: int) -> None:
        """Begin at an offset. It is committed before any record, so that it is never resolved again."""
        self._offset = offset
        self._position = KafkaPosition(offset, self._setup.start, self._topic_id)
        self._moved = True
        self._setup.ready.set()

    async def _look(self, client: Client) -> TopicMetadata:
        return await look(client, self._source, self._setup, self._tell_once)

    async def _check_topic(self, client: Client, topic_id: UUID | None, oldest: int) -> None:
        """Check that our offset is one of this topic; else, when `lost="continue"`, begin at the oldest offset of it.

        Raises:
            SourceUnavailableError: brokers disagree, or records of the topic before must be handed over first.
            ConfigError: the topic is another one, and `lost="stop"`.
        """
        if topic_id is None or self._topic_id is None or self._topic_id == topic_id:
            self._topic_id = topic_id or self._topic_id
            return
        text = replaced(self._setup.partition, self._source.topic, self._offset)
        if not await client.has_lost(self._topic_id):
            raise SourceUnavailableError(f"{text}, or one of the brokers is behind: they know it by different ids")
        check_lost(self._source, text, "its records are others")
        if self._inbox:
            raise SourceUnavailableError(f"{text}; what was read of the topic before comes first")
        self._tell("source_recreated", f"{text}; resuming at {oldest}")
        assert self._position is not None, "an id without a position"
        # All that was read of the topic before has been taken, and no offset of it may be committed with the new id.
        self._position = KafkaPosition(oldest, self._position.begun, topic_id)
        self._offset, self._topic_id, self._moved, self._beyond_since = oldest, topic_id, True, None
        self._setup.ready.set()

    def _check(self, oldest: int, end: int) -> None:
        """Check that our offset is in the log; when it is lost and `lost="continue"`, move to the oldest offset.

        Raises:
            SourceUnavailableError: the log ends before the offset; a broker that has just started may recover the rest.
            ConfigError: the offset is lost, and `lost="stop"`.
        """
        now = self._setup.clock.monotonic()
        if oldest <= self._offset <= end:
            self._beyond_since = None
            return
        text = gone(self._setup.partition, self._offset, oldest, end)
        if self._offset > end:
            self._beyond_since = now if self._beyond_since is None else self._beyond_since
            if now - self._beyond_since < _BEYOND_S:
                raise SourceUnavailableError(text)
        check_lost(self._source, text)
        self._tell("source_lost", f"{text}; resuming at {oldest}")
        self._offset, self._beyond_since = oldest, None

    async def _keep(self) -> None:
        """Read; reconnect after a failure."""
        clock, retry_s = self._setup.clock, _RETRY_S_MIN
        while True:
            begun_at = clock.monotonic()
            try:
                if self._client is None:
                    await self._connect()
                    self._setup.connection.connected()
                assert self._client is not None
                await self._read(self._client)
            except (SourceUnavailableError, ConfigError) as error:
                self._setup.connection.disconnected(error.message, attempted=self._client is None)
                if not self._setup.connection.is_outage(error, RefusalError):
                    raise  # `take` raises it
            await self._disconnect()
            if clock.monotonic() - begun_at > _RETRY_S_MAX:
                retry_s = _RETRY_S_MIN
            await clock.sleep(retry_s)
            retry_s = min(_RETRY_S_MAX, retry_s * 2)

    async def _read(self, client: Client) -> None:
        """Fetch while there is room, and prove from time to time that the partition is drained."""
        limits, clock = self._setup.limits, self._setup.clock
        looked_at = clock.monotonic()
        while True:
            while self._inbox.records >= limits.bundle_records_max or self._inbox.bytes >= limits.bundle_bytes_max:
                self._room.clear()
                await self._room.wait()
            try:
                runs = await client.fetch(limits.bundle_records_max, _WAIT_S)
            except OutOfRangeError:
                self._check(*await client.bounds())
                client.assign(self._offset, self._topic_id)
                continue
            if runs:
                self._note(runs)
            else:
                await self._prove(client)
            if clock.monotonic() - looked_at > _LOOK_EVERY_S:
                looked_at = clock.monotonic()
                topic = await self._look(client)
                if topic.topic_id not in (None, self._topic_id):
                    raise SourceUnavailableError(replaced(self._setup.partition, self._source.topic, self._offset))

    def _note(self, runs: Sequence[RecordColumns]) -> None:
        """Put fetched records into the inbox.

        Raises:
            SourceUnavailableError: the last record is damaged; another fetch may return it intact.
        """
        newest = runs[-1].damaged
        again = newest is not None and self._damaged < _DAMAGED_MAX
        self._damaged = self._damaged + 1 if again else 0
        self._forget_transaction()
        for run in [*runs[:-1], runs[-1].rows(0, len(runs[-1]) - 1)] if again else runs:
            if len(run):
                self._offset = run.next_offset
                self._fetched += len(run)
                self._inbox.add(run)
                self._setup.ready.set()
        if again:
            assert newest is not None
            raise SourceUnavailableError(f"{self._setup.partition}@{newest.first}: {newest.detail}")

    async def _prove(self, client: Client) -> None:
        """Find out after an empty fetch whether the end of the partition has been reached."""
        now = self._setup.clock.monotonic()
        end, position = await client.end(), await client.position()
        if position < end or self._waits_for_transaction(client, end, now):
            return
        self._proven_at = now
        if position > self._offset and now - self._moved_at >= _MOVED_EVERY_S:
            # Transaction markers and compacted records were skipped: commit a position behind them, because retention
            # may delete them.
            self._offset, self._moved, self._moved_at = position, True, now
            self._setup.ready.set()

    def _waits_for_transaction(self, client: Client, end: int, now: float) -> bool:
        """Tell whether records wait behind the begin of an open transaction; report one that stays open."""
        newest = client.newest()
        is_open = newest is not None and newest > end
        if not is_open or self._open_since is None or self._open_since[0] != end:
            self._forget_transaction()
            self._open_since = (end, now) if is_open else None
        elif now - self._open_since[1] >= _OPEN_S and not self._open_told:
            assert newest is not None
            self._open_told = (
                f"{self._setup.partition}: a transaction is open since offset {end}, and {newest - end} offsets wait "
                "for its end; if its producer is gone, see kafka-transactions.sh find-hanging"
            )
            self._setup.connection.hold(self._open_told)
        return is_open

    def _forget_transaction(self) -> None:
        """Note that no transaction holds records back, or another one."""
        if self._open_told and self._setup.connection.held == self._open_told:
            self._setup.connection.release()
        self._open_told, self._open_since = "", None

    def _tell(self, what: str, text: str) -> None:
        log.warning("%s", text)
        self._setup.tell(what, {"partition": self._setup.partition, "stream": self._setup.stream, "what": text})

    def _tell_once(self, what: str, text: str) -> None:
        """Report a condition once, until it is over."""
        if what not in self._told:
            self._told.add(what)
            self._tell(what, text)

    # -- called by the worker -------------------------------------------------------------------------------------

    async def take(self) -> SourceBatch | None:
        """Return the fetched records, at most a bundle.

        Raises:
            ConfigError: reading has stopped for good.
        """
        if not self._inbox and not self._moved:
            if self._keeper is not None and self._keeper.done():
                self._keeper.result()
            return None
        assert self._position is not None
        records = self._inbox.take(self._setup.take_bound)
        self._room.set()
        now_us = self._setup.clock.now_us()
        expanded: ExpandedRecords | None = None
        if self._expander is not None:
            bound = self._setup.take_bound
            expanded = self._payloads.expand(records, self._source.topic, self._expander, bound, now_us)
            self._inbox.put_back(records.rows(expanded.taken))
            records = records.rows(0, expanded.taken)
            if not len(records) and not self._moved:
                return None  # the first message waits for its schema
            self._grown += len(expanded.payloads) - len(expanded.rows)
        after = self._offset  # behind all that was fetched, and behind markers that may be deleted
        if self._inbox:
            after = records.next_offset if len(records) else self._position.offset
        self._moved = False
        self._position = KafkaPosition(after, self._position.begun, self._topic_id)
        batch = batch_of(records, expanded, self._payloads, self._setup.partition, now_us)
        before, self._total = self._total, self._fetched - self._inbox.records - self._payloads.skipped + self._grown
        batch.position = msgspec.json.encode(self._position)
        batch.records, batch.total = self._total - before, self._total
        return batch

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: we keep the offset."""

    def quiet(self) -> bool:
        """Tell whether all records up to the end were read, and the broker confirmed the end a moment ago."""
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
