"""What runs inside Spark's tasks: the intervals of one computation, by the worker's own walk.

A task gets parts and gives parts, which are rows of one schema (`PARTS`). A source task reads the history of a source
partition; a stage task gets, in order, what the intervals before it have produced. What a store would hand on between
commits, Spark's shuffle hands on: slices, the position of each producer, and its watermark there.

Order is the order of a `HostedGraph` with one batch of every source in a turn. So bundles, watermarks, lateness and the
last digit of every sum are the same in every run, however Spark places and repeats its tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa

from millpy.graph import InjectorNode
from millpy.hosting.host import LOAD_NOTHING, HostedInterval
from millpy.hosting.interval_state import intake_settings
from millpy.hosting.plan import ComputationPlan
from millpy.ingest.protocol import Injector, SourceBatch, SourceSetup
from millpy.model.checkpoint import Checkpoint, DedupeRun, Delta, Entries, Grant, Kind
from millpy.model.delta import encode_documents
from millpy.model.deployment import TableSpec
from millpy.model.time import INSTANT_MAX, Instant
from millpy.operators.keyed import ComputationLogic
from millpy.spark.archive_input import ArchivedBatch, ArchivedIntake, archived_batches
from millpy.spark.hosted_rows import dead_letter_batch, late_batch, result_batches, to_ipc
from millpy.spark.job import HostedPlan, plan_of
from millpy.store.protocol import OwnerSnapshot, PolledSegment, PollResult, SegmentQuery

PARTS = pa.schema(
    [
        ("owner", pa.int32()),  # the interval that a segment or position goes to; of all else, the interval it is from
        ("turn", pa.int64()),
        ("again", pa.int32()),  # how often a turn was continued, because work was left undone
        ("rank", pa.int32()),  # of the producer, in the order of steps
        ("kind", pa.string()),
        ("subject", pa.int32()),  # subscription or table
        ("producer", pa.int32()),
        ("seq", pa.int64()),
        ("previous", pa.int64()),
        ("watermark", pa.int64()),
        ("records", pa.int64()),
        ("checksum", pa.int64()),
        ("payload", pa.binary()),
    ]
)
PARTS_DDL = (
    "owner int, turn bigint, again int, rank int, kind string, subject int, producer int, seq bigint,"
    " previous bigint, watermark bigint, records bigint, checksum bigint, payload binary"
)
ORDER = ("owner", "turn", "again", "rank", "kind", "subject")
STATE_BYTES_MAX = 4 << 20
At = tuple[int, int]


class IntervalEnd(msgspec.Struct, frozen=True):
    """What an interval has counted and left undone at the end of its input.

    Attributes:
        counters: (counter, id of the subscription or table, or stream, count).
        parked: subscription -> number of records that wait behind a failed one.
        timers: time domain -> number of timers that have not fired.
        pending: subscription -> number of records that are not consumed.
    """

    counters: list[tuple[str, str, int]]
    parked: dict[str, int]
    timers: dict[str, int]
    pending: dict[str, int] = {}


def read_source(job: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read source partitions, given as interval ids, and yield their parts."""
    hosted = plan_of(job)
    for batch in batches:
        for interval_id in batch.column(0).to_pylist():
            task = IntervalTask(hosted, interval_id)
            for turn, bundle in _turns(hosted, interval_id):
                yield from task.step((turn, 0), taken=bundle)
            yield from task.end()


def _turns(hosted: HostedPlan, interval_id: int) -> Iterator[tuple[int, SourceBatch]]:
    """Yield the batches of a source partition, each with its turn."""
    of = hosted.plan.by_interval[interval_id]
    if of.name not in hosted.job.archives:
        yield from enumerate(taken(hosted, interval_id), start=1)
        return
    yield from archived_turns(hosted, interval_id)


def archived_turns(hosted: HostedPlan, interval_id: int) -> Iterator[tuple[int, ArchivedBatch]]:
    """Yield the archived bundles of a source partition, each with its number, and at last its end."""
    of = hosted.plan.by_interval[interval_id]
    assert isinstance(of.node, InjectorNode)
    deployed = next(interval for interval in of.intervals if interval.interval_id == interval_id)
    now_us = Instant(hosted.job.now_us)
    yield from archived_batches(hosted.job.archives[of.name], deployed.place, of.node.record_type, now_us)


def host_stage(job: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Step the intervals of a stage over parts that are sorted by `ORDER`, and yield their parts."""
    hosted = plan_of(job)
    rows = (row for batch in batches for row in batch.to_pylist())
    for interval_id, own in groupby(rows, key=lambda row: row["owner"]):
        task = IntervalTask(hosted, interval_id)
        for (turn, again), group in groupby(own, key=lambda row: (row["turn"], row["again"])):
            yield from task.finish_before((turn, again))
            yield from task.step((turn, again), polled=task.answers(group))
        yield from task.finish_before((INSTANT_MAX, 0))
        yield from task.end()


def taken(hosted: HostedPlan, interval_id: int) -> Iterator[SourceBatch]:
    """Read a source partition from its beginning to its end."""
    of = hosted.plan.by_interval[interval_id]
    assert isinstance(of.node, InjectorNode)
    deployed = next(interval for interval in of.intervals if interval.interval_id == interval_id)
    with asyncio.Runner() as runner:
        ready = asyncio.Event()
        setup = SourceSetup(
            graph=hosted.plan.permanent_name,
            stream=of.name,
            partition=deployed.partition,
            limits=hosted.job.limits,
            clock=hosted.job.clock,
            ready=ready,
            record_type=of.node.record_type,
            deduplicated=of.keeps_runs,
        )
        injector = of.node.source.connect(setup)
        runner.run(injector.open(None))
        try:
            finished = False
            while not finished:
                batch = runner.run(_next(injector, ready))
                finished = batch.finished
                yield batch
        finally:
            runner.run(injector.close())


async def _next(injector: Injector, ready: asyncio.Event) -> SourceBatch:
    while True:
        ready.clear()
        batch = await injector.take()
        if batch is not None:
            return batch
        await ready.wait()


class IntervalTask:
    """One interval, stepped from its beginning to its end."""

    def __init__(
        self,
        hosted: HostedPlan,
        interval_id: int,
        *,
        snapshot: OwnerSnapshot | None = None,
        runs: Sequence[DedupeRun] = (),
    ) -> None:
        self._hosted = hosted
        self._id = interval_id
        self._of = hosted.plan.by_interval[interval_id]
        keeps = {Kind.COUNTER, Kind.TIMER, Kind.PARKED}
        if hosted.job.keeps_state:
            keeps.update(Kind)
        elif _loads_state(self._of):
            keeps.add(Kind.STATE)
        self._kept = KeptEntries(frozenset(keeps))
        if snapshot is not None:
            self._kept.add(tuple(snapshot.recovered.entries))
        load = replace(LOAD_NOTHING, state=self._kept.load)
        self._host = HostedInterval(
            hosted.plan, interval_id, hosted.job.limits, snapshot=snapshot, runs=runs, load=load
        )
        if self._of.name in hosted.job.archives and not hosted.job.streams:
            self._host.interval.intake = ArchivedIntake(intake_settings(self._of, hosted.job.limits))
        elif self._of.name in hosted.job.followed:
            recovered = None if snapshot is None else snapshot.recovered
            self._host.interval.intake = ArchivedIntake(intake_settings(self._of, hosted.job.limits), recovered)
        self._now = Instant(hosted.job.now_us)
        self._at: At = (0, 0)
        self._pending: dict[str, int] = {}

    def finish_before(self, at: At) -> Iterator[pa.RecordBatch]:
        """Step without input while due work is left undone, up to the turn of the next input."""
        while self._host.interval.unfinished and (self._at[0], self._at[1] + 1) < at:
            yield from self.step((self._at[0], self._at[1] + 1))

    def step(
        self, at: At, *, taken: SourceBatch | None = None, polled: Sequence[PollResult] = (), quiet: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Step once, and yield what a worker would commit."""
        self._at = at
        checkpoint = self._host.step(self._now, taken=taken, polled=polled, quiet=quiet)
        if checkpoint is not None:
            yield from self.keep(checkpoint)

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> list[PollResult]:
        """Return the parts of one turn as a store would answer, one answer a producer."""
        return [self._answer(producer, group) for producer, group in groupby(rows, key=lambda row: row["producer"])]

    def _answer(self, producer: int, rows: Iterable[Mapping[str, Any]]) -> PollResult:
        interval = self._host.interval
        after = interval.cursors[producer].seq
        query = SegmentQuery(self._id, interval.deployed.index, producer, self._of.producers[producer], after)
        segments, head = [], (after, interval.cursors[producer].watermark)
        for row in rows:
            if row["kind"] == "position":
                head = (row["seq"], Instant(row["watermark"]))
                continue
            segments.append(
                PolledSegment(
                    subscription_id=row["subject"],
                    seq=row["seq"],
                    previous_seq=row["previous"],
                    watermark=Instant(row["watermark"]),
                    records=row["records"],
                    payload=row["payload"],
                    checksum=row["checksum"],
                )
            )
        return PollResult(query, tuple(segments), *head, truncated=False)

    def keep(self, checkpoint: Checkpoint) -> Iterator[pa.RecordBatch]:
        """Keep what a checkpoint changes, and yield its parts."""
        self._kept.add(checkpoint.delta)
        yield from self._commit(checkpoint)

    def _commit(self, checkpoint: Checkpoint) -> Iterator[pa.RecordBatch]:
        parts = self._sent(checkpoint)
        for rows in checkpoint.results:
            for batch in result_batches(self._table(rows.table_id), rows.columns, checkpoint.bundle):
                parts.add(
                    "rows" if rows.first else "later_rows", to_ipc(batch), subject=rows.table_id, records=len(batch)
                )
        for gone in checkpoint.deleted:
            for batch in result_batches(self._table(gone.table_id), gone.columns, checkpoint.bundle):
                parts.add("deleted", to_ipc(batch), subject=gone.table_id, records=len(batch))
        for late in checkpoint.late:
            parts.add("late", to_ipc(late_batch(late)), records=len(late))
        if checkpoint.dead_letters:
            letters = dead_letter_batch(checkpoint.dead_letters)
            parts.add("dead_letters", to_ipc(letters), records=len(letters))
        yield from parts.batches()

    def _sent(self, checkpoint: Checkpoint) -> CheckpointParts:
        """Return what goes to other intervals: slices, and the position after the checkpoint."""
        parts = CheckpointParts(self._id, self._at, self._hosted.ranks[self._id], checkpoint)
        for segment in checkpoint.segments:
            consumers = self._consumers(segment.subscription_id)
            for consumer, part in zip(consumers, segment.slices, strict=True):
                if part is not None:
                    parts.add(
                        "segment", part.payload, owner=consumer, subject=segment.subscription_id,
                        records=part.records, previous=segment.previous_seq, checksum=part.checksum,
                        **self._address(consumer, checkpoint),
                    )  # fmt: skip
        self._add_positions(parts)
        return parts

    def _address(self, consumer: int, checkpoint: Checkpoint) -> Mapping[str, int]:
        """Return what says when a consumer takes a checkpoint's records, if that is not the turn that made them."""
        return {}

    def _add_positions(self, parts: CheckpointParts) -> None:
        for consumer in self._of.consumers:
            parts.add("position", None, owner=consumer)

    def count_pending(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the records of parts that the interval does not consume."""
        for row in rows:
            if row["kind"] == "segment":
                of = str(row["subject"])
                self._pending[of] = self._pending.get(of, 0) + row["records"]

    def end(self) -> Iterator[pa.RecordBatch]:
        """Yield what the interval has counted, and its final state if that is wanted."""
        parts = CheckpointParts(self._id, (INSTANT_MAX, 0), self._hosted.ranks[self._id], None)
        if self._hosted.job.keeps_state:
            for document in encode_documents(self._kept.delta(), STATE_BYTES_MAX):
                parts.add("state", document)
        parts.add("end", msgspec.json.encode(self._kept.end(self._pending)))
        yield from parts.batches()

    def _consumers(self, subscription_id: int) -> tuple[int, ...]:
        return next(s.consumer_ids for s in self._of.outgoing if s.subscription_id == subscription_id)

    def _table(self, table_id: int) -> TableSpec:
        return self._hosted.database.tables[table_id].spec


@dataclass(slots=True)
class CheckpointParts:
    """Parts of one checkpoint; None for the end of an interval."""

    interval_id: int
    at: At
    rank: int
    checkpoint: Checkpoint | None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, payload: bytes | None, *, owner: int = 0, **more: int) -> None:
        """Add a part, for `owner` or else of the interval itself."""
        self.rows.append(
            {
                "owner": owner or self.interval_id,
                "turn": self.at[0],
                "again": self.at[1],
                "rank": self.rank,
                "kind": kind,
                "subject": 0,
                "producer": self.interval_id,
                "seq": 0 if self.checkpoint is None else self.checkpoint.bundle,
                "watermark": 0 if self.checkpoint is None else self.checkpoint.low_watermark,
                "payload": payload,
                **more,
            }
        )

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the parts, in one batch."""
        if self.rows:
            yield pa.RecordBatch.from_pylist(self.rows, schema=PARTS)


class KeptEntries:
    """The entries that an interval has committed, with each change in place of the one before it."""

    def __init__(self, kinds: frozenset[Kind]) -> None:
        self._kinds = kinds
        self._entries: dict[tuple[Kind, str], dict[bytes, dict[str, tuple[int, bytes, int]]]] = {}

    def add(self, delta: Delta) -> None:
        """Apply the changes of one checkpoint."""
        for entries in delta:
            if entries.kind not in self._kinds:
                continue
            of_kind = self._entries.setdefault((entries.kind, entries.namespace), {})
            columns = (entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats)
            for key, key_hash, subkey, value, fire_at in zip(*columns, strict=True):
                if value is not None:
                    of_kind.setdefault(key, {})[subkey] = (key_hash, value, fire_at)
                elif key in of_kind:
                    of_kind[key].pop(subkey, None)
                    if not of_kind[key]:
                        del of_kind[key]

    def load(self, grant: Grant, keys: Sequence[bytes]) -> list[Entries]:
        """Return the state of some keys, as a store does."""
        del grant
        return [
            _entries(kind, namespace, {key: of_kind[key] for key in keys if key in of_kind})
            for (kind, namespace), of_kind in self._entries.items()
            if kind is Kind.STATE
        ]

    def delta(self) -> Delta:
        """Return everything that is kept."""
        return tuple(_entries(*name, of_kind) for name, of_kind in self._entries.items())

    def end(self, pending: dict[str, int] | None = None) -> IntervalEnd:
        """Return the counters, and how much is left undone."""
        counters, parked, timers = [], {}, {}
        for (kind, namespace), of_kind in self._entries.items():
            number = sum(map(len, of_kind.values()))
            if kind is Kind.COUNTER:
                counters += [(namespace, of, int(v)) for row in of_kind.values() for of, (_, v, _) in row.items()]
            elif kind is Kind.PARKED and number:
                parked[namespace] = number
            elif kind is Kind.TIMER and number:
                timers[namespace] = number
        return IntervalEnd(counters, parked, timers, pending or {})


def _entries(kind: Kind, namespace: str, of_kind: Mapping[bytes, Mapping[str, tuple[int, bytes, int]]]) -> Entries:
    entries = Entries(kind, namespace)
    for key, row in of_kind.items():
        for subkey, (key_hash, value, fire_at) in row.items():
            entries.add(key, key_hash, subkey, value, fire_at)
    return entries


def _loads_state(of: ComputationPlan) -> bool:
    """Tell whether a stage may drop values from its cache, and ask for them again."""
    return not isinstance(of.node, InjectorNode) and isinstance(of.node.logic, ComputationLogic)
