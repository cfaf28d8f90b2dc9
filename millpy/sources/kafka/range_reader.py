"""A reader of one Kafka partition up to an offset that is known before, for a caller that reads in batches.

It has no task in the background: it is opened for a batch, taken from, and closed. The bundles depend on nothing but
the records, their offsets and the limits, so the same range is the same bundles however often it is read.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from millpy.errors import ConfigError, SourceUnavailableError
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.sources.kafka.beginning import NotThereError, begins, check_lost, first_offset, gone, look, replaced
from millpy.sources.kafka.client import Client, OutOfRangeError
from millpy.sources.kafka.fetch_inbox import FetchInbox
from millpy.sources.kafka.position import KafkaPosition
from millpy.sources.kafka.record_columns import RecordColumns
from millpy.sources.kafka.records import ExpandedRecords, Payloads, batch_of
from millpy.sources.kafka.source import Kafka

FETCH_WAIT_S = 0.5
FETCHES_EMPTY_MAX = 40
"""Fetches in a row that bring nothing from before the end; then the broker counts as unavailable."""
LOOKS_BEYOND = 20
"""Looks, half a second apart, at a log that ends before our offset."""
DAMAGED_MAX = 3
"""Fetches of a damaged batch after which it becomes a dead letter."""


class KafkaRangeReader:
    """One partition, read up to an offset.

    Attributes:
        offset: the offset after the bundles taken so far.
        lost: whether offsets were gone, and the reader has gone on at the oldest.
    """

    def __init__(self, source: Kafka, setup: SourceSetup) -> None:
        self.offset = -1
        self.lost = False
        self._source = source
        self._setup = setup
        self._payloads = Payloads(source.fields, setup.record_type, source.tombstones)
        self._expander: Expander | None = None
        if source.format is not None and setup.record_type is not None:
            self._expander = Expander(source.format, setup.record_type, setup.limits)
        self._stored: int | None = None  # the offset of the committed position
        self._topic_id: UUID | None = None
        self._next = -1  # offset to fetch
        self._inbox = FetchInbox()
        self._total = 0
        self._damaged = 0
        self._client: Client | None = None

    async def open(self, position: bytes | None) -> int:
        """Connect, and find the beginning; return the offset after the newest committed record.

        Raises:
            SourceUnavailableError: no broker answers, or the partition does not exist.
            ConfigError: the broker rejects us, the offset is gone, or the topic is another one by now.
        """
        setup, source = self._setup, self._source
        number = int(setup.partition.rpartition("/")[2])
        self._client = client = Client(
            source.cluster(), source.topic, number, f"millpy-{setup.graph}-{setup.stream}-{number}"
        )
        await client.start()
        begin = begins(source, setup)
        try:
            topic = await look(client, source, setup, self._tell)
        except NotThereError:
            if position is None and begin == "latest":
                self.offset = self._next = 0  # all of its records will be newer than now
                return 0
            raise
        self._topic_id = topic.topic_id
        if position is None:
            oldest, end = await client.bounds()
            self._next = await first_offset(client, begin, oldest, end)
        else:
            stored = msgspec.json.decode(position, type=KafkaPosition)
            if None not in (stored.topic_id, topic.topic_id) and stored.topic_id != topic.topic_id:
                text = replaced(setup.partition, source.topic, stored.offset)
                raise ConfigError(text, hint="make the graph a new generation, which begins at the new topic")
            self._next = self._stored = stored.offset
            end = await self._check(client)
        self.offset = self._next
        client.assign(self._next, self._topic_id)
        return end

    async def end_before(self, until_us: int | None, end: int) -> int:
        """Return the offset of the first message from a time on, or the given end if there is none or no time."""
        assert self._client is not None
        found = None if until_us is None else await self._client.at_time(-(-until_us // 1_000))
        return end if found is None else min(end, found)

    async def take(self, until: int) -> SourceBatch | None:
        """Return a bundle of the records before an offset; None when there is nothing left, not even a new position.

        Raises:
            SourceUnavailableError: the broker does not answer.
            ConfigError: an offset is gone.
        """
        bound, inbox = self._setup.take_bound, self._inbox
        while self._next < until and inbox.records < bound.records and inbox.bytes < bound.bytes:
            await self._fetch(until)
        records = inbox.take(bound)
        now_us = self._setup.clock.now_us()
        skipped = self._payloads.skipped
        expanded: ExpandedRecords | None = None
        if self._expander is not None:
            expanded = self._payloads.expand(records, self._source.topic, self._expander, bound, now_us)
            inbox.put_back(records.rows(expanded.taken))
            records = records.rows(0, expanded.taken)
        if inbox:
            self.offset = inbox.first_offset
        elif len(records) or self._next >= until:
            self.offset = self._next
        if self.offset == self._stored:
            return None
        self._stored = self.offset
        batch = batch_of(records, expanded, self._payloads, self._setup.partition, now_us)
        batch.records = len(batch.payloads) if expanded else len(records) - (self._payloads.skipped - skipped)
        self._total += batch.records
        batch.total = self._total
        batch.position = msgspec.json.encode(KafkaPosition(self.offset, topic_id=self._topic_id))
        return batch

    async def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            await client.stop()

    async def _fetch(self, until: int) -> None:
        """Fetch once, or more often if nothing comes.

        Raises:
            SourceUnavailableError: nothing has come.
        """
        assert self._client is not None
        client, count = self._client, self._setup.take_bound.records
        for _ in range(FETCHES_EMPTY_MAX):
            try:
                runs = await client.fetch(count, FETCH_WAIT_S)
            except OutOfRangeError:
                await self._check(client)
                client.assign(self._next, self._topic_id)
                if self._next >= until:
                    return
                continue
            if runs:
                self._keep(self._intact(client, RecordColumns.joined(runs)), until)
                return
            if await client.position() >= until:  # only transaction markers and compacted records were left
                self._next = until
                return
        raise SourceUnavailableError(
            f"{self._setup.partition}: no records come from offset {self._next}, and the log goes to {until}"
        )

    def _intact(self, client: Client, records: RecordColumns) -> RecordColumns:
        """Leave out a damaged batch at the end, which another fetch may return intact."""
        newest = records.damaged
        if newest is None or self._damaged >= DAMAGED_MAX:
            self._damaged = 0
            return records
        self._damaged += 1
        client.assign(newest.first, self._topic_id)
        return records.rows(0, len(records) - 1)

    def _keep(self, records: RecordColumns, until: int) -> None:
        records = records.cut_before(until)
        self._inbox.add(records)
        if len(records):
            self._next = records.next_offset
        elif not self._damaged:  # all of them are behind
            self._next = until

    async def _check(self, client: Client) -> int:
        """Check that our offset is in the log; when it is lost and `lost="continue"`, move to the oldest offset.

        Return the end of the log. A broker that has just started may still recover the end, so one before our offset
        is looked at for a while.

        Raises:
            ConfigError: the offset is lost, and `lost="stop"`.
        """
        oldest, end = await client.bounds()
        for _ in range(LOOKS_BEYOND):
            if self._next <= end:
                break
            await self._setup.clock.sleep(FETCH_WAIT_S)
            oldest, end = await client.bounds()
        if not oldest <= self._next <= end:
            text = gone(self._setup.partition, self._next, oldest, end)
            check_lost(self._source, text)
            self._tell("source_lost", f"{text}; resuming at {oldest}")
            self._next, self.lost = oldest, True
        return end

    def _tell(self, what: str, text: str) -> None:
        self._setup.tell(what, {"partition": self._setup.partition, "stream": self._setup.stream, "what": text})
