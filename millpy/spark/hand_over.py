"""The hand-over of a generation from Spark to workers: state, timers, windows, positions and cursors, in one cut.

A streaming query has written the rows, and nothing else. Behind its last bundle, each interval gets bundles with the
state: documents of bounded size, then its dedupe ids. The last bundles of all intervals are one transaction, which
moves all cursors: a consumer has consumed everything, and a worker continues as from any commit of its own. Until the
generation is given to workers, which comes last, none of them can claim any of it.

Each step is fenced, and the bundles are the same however often a hand-over is begun, because they come from the files
of one commit; so one that was killed continues behind the last bundle in the database.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import msgspec
import numpy as np

from millpy.errors import UsageError
from millpy.hosting.interval_state import COUNTED
from millpy.ingest.intake import NOTES_NAMESPACE, POSITION_NAMESPACE
from millpy.ingest.source_position import SourcePosition
from millpy.model.checkpoint import Checkpoint, Cursor, DedupeRun, Delta, Entries, Kind
from millpy.model.delta import decode_document, encode_documents
from millpy.model.deployment import DeployedInterval, GraphSpec
from millpy.model.ids import ID_BYTES
from millpy.model.time import INSTANT_MIN, Instant
from millpy.operators.parking import KEY_NAMESPACE
from millpy.spark.job import HostedPlan
from millpy.spark.stream_commits import StreamCommit
from millpy.spark.stream_state import IntervalHeader, StateDirectory
from millpy.spark.stream_store import StreamStore

DOCUMENT_BYTES_MAX = 4 << 20
RUN_IDS_MAX = 200_000
"""Ids of one run: 24 bytes each."""
OF_TABLES = ("emitted", "written")


@dataclass(frozen=True, slots=True)
class _Part:
    """What one bundle adds to an interval."""

    delta: Delta = ()
    run: DedupeRun | None = None


@dataclass(slots=True)
class _Position:
    """Where an interval ends.

    Attributes:
        bundle: its last bundle before the cut.
    """

    bundle: int
    input_watermark: Instant
    low_watermark: Instant
    processing_floor: Instant = INSTANT_MIN


@dataclass(slots=True)
class HandOver:
    """One hand-over, from the last commit of a query that has finished.

    Args:
        store: the database; the driver owns all intervals, and the tables have all rows of the commit.
        hosted: the graph.
        commit: the last commit.
        state: the state files that it names.
    """

    store: StreamStore
    hosted: HostedPlan
    commit: StreamCommit
    state: StateDirectory
    _spec: GraphSpec = field(init=False)
    _stored: dict[int, int] = field(init=False, default_factory=dict)
    _ends: dict[int, _Position] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._spec = self.hosted.live_graph.spec()

    def run(self) -> None:
        """Write the state, cut, and give the generation to workers.

        Raises:
            StaleSequencerError: another driver has taken the intervals.
            UsageError: the database is not where the commit says.
        """
        self._stored = {stored.interval_id: stored.bundle for stored in self.store.read()}
        for interval in self._in_order():
            self._write(interval)
        self._cut()
        self.store.give_to_workers()

    def _in_order(self) -> list[DeployedInterval]:
        """Return the deployed intervals, producers before consumers."""
        places = {spec.name: place for place, spec in enumerate(self._spec.computations)}
        return sorted(self.store.deployment.intervals, key=lambda i: (places[i.computation], i.index))

    def _write(self, interval: DeployedInterval) -> None:
        """Write the state of an interval, from the first part that is missing."""
        there = interval.interval_id
        end, parts = self._end_and_parts(interval)
        begin, bundle = end.bundle, self._stored[there]
        if bundle < begin:
            raise UsageError(
                f"interval {there} is at bundle {bundle} in the database, and at {begin} in the checkpoint",
                hint="start the backfill again: it writes the missing rows first",
            )
        for part in parts:
            end.bundle += 1
            if end.bundle <= bundle:
                continue
            self.store.commit([self._checkpoint(there, end, delta=part.delta, dedupe_run=part.run)])
            self.store.fold(there)
            self._stored[there] = end.bundle
        self._ends[there] = end

    def _end_and_parts(self, interval: DeployedInterval) -> tuple[_Position, Iterator[_Part]]:
        here = self._hosted_id(interval)
        if here is not None:
            header = self.commit.intervals[here]
            end = _Position(
                header.bundle,
                Instant(header.input_watermark),
                Instant(header.low_watermark),
                Instant(header.processing_floor),
            )
            return end, self._parts(here, header, replaced=interval.computation in self.hosted.job.replaced)
        producers = self._producers(interval)
        if producers:  # an archive: it has the records from now on
            watermark = min(self._ends[producer].low_watermark for producer in producers)
            return _Position(0, watermark, watermark), iter(())
        # A source partition that the history has as part of another: it knows the ids of all.
        first = self._first_of(interval)
        header = self.commit.intervals[first]
        watermark = Instant(header.low_watermark)
        known = (
            _Part(tuple(entries for entries in part.delta if entries.kind is Kind.POSITION), part.run)
            for part in self._parts(first, header, replaced=True)
        )
        return _Position(0, watermark, watermark), (part for part in known if part.delta or part.run)

    def _parts(self, here: int, header: IntervalHeader, *, replaced: bool) -> Iterator[_Part]:
        """Yield the state of an interval in parts, always the same."""
        changes = self.state.read(header.files)
        changes.forget_the_past()
        delta = self._with_stored_ids(changes.delta())
        if replaced:
            delta = tuple(_without_position(entries) for entries in delta if not _is_note(entries))
        for document in encode_documents(delta, DOCUMENT_BYTES_MAX):
            yield _Part(decode_document(document))
        for run in _merged(changes.runs()):
            yield _Part(run=run)

    def _with_stored_ids(self, delta: Delta) -> Delta:
        """Name subscriptions and tables as the database does."""
        ours, theirs = self.hosted.plan.deployment, self.store.deployment
        subscriptions = {str(own): str(theirs.subscription_ids[of]) for of, own in ours.subscription_ids.items()}
        tables = {str(own): str(theirs.table_ids[name]) for name, own in ours.table_ids.items()}
        found = []
        for entries in delta:
            if entries.kind is Kind.COUNTER and entries.namespace in COUNTED:
                ids = tables if entries.namespace in OF_TABLES else subscriptions
                entries = replace(entries, subkeys=[ids.get(subkey, subkey) for subkey in entries.subkeys])
            elif entries.kind is Kind.PARKED and entries.namespace != KEY_NAMESPACE:
                entries = replace(entries, namespace=subscriptions[entries.namespace])
            found.append(entries)
        return tuple(found)

    def _cut(self) -> None:
        """Move all cursors, in one transaction; do nothing if that has been done."""
        moved = [self._stored[there] > end.bundle for there, end in self._ends.items()]
        if all(moved):
            return
        assert not any(moved), self._stored
        last = []
        for interval in self.store.deployment.intervals:
            cursors = [
                Cursor(producer, self._ends[producer].bundle + 1, self._ends[producer].low_watermark)
                for producer in self._producers(interval)
            ]
            end = replace(self._ends[interval.interval_id], bundle=self._ends[interval.interval_id].bundle + 1)
            last.append(self._checkpoint(interval.interval_id, end, cursors=cursors))
        self.store.commit(last)

    def _checkpoint(
        self,
        there: int,
        end: _Position,
        *,
        delta: Delta = (),
        dedupe_run: DedupeRun | None = None,
        cursors: Sequence[Cursor] = (),
    ) -> Checkpoint:
        return Checkpoint(
            self.store.grants[there],
            end.bundle,
            end.input_watermark,
            end.low_watermark,
            processing_floor=end.processing_floor,
            delta=delta,
            dedupe_run=dedupe_run,
            cursors=cursors,
        )

    def _hosted_id(self, interval: DeployedInterval) -> int | None:
        """Return the interval as the query knows it; None for one that it does not have."""
        return next((here for here, there in self.store.ids.items() if there == interval.interval_id), None)

    def _first_of(self, interval: DeployedInterval) -> int:
        return self.hosted.plan.deployment.intervals_of(interval.computation)[0].interval_id

    def _producers(self, interval: DeployedInterval) -> list[int]:
        """Return the intervals that an interval reads."""
        producing = {stream.name: stream.producer for stream in self._spec.streams}
        names = {
            producing[stream]
            for stream, consumer, _ in self.store.deployment.subscription_ids
            if consumer == interval.computation
        }
        return [of.interval_id for name in sorted(names) for of in self.store.deployment.intervals_of(name)]


def _is_note(entries: Entries) -> bool:
    return entries.kind is Kind.POSITION and entries.namespace == NOTES_NAMESPACE


def _without_position(entries: Entries) -> Entries:
    """Leave out the position in the files that have replaced a source: it begins where its broker does."""
    if entries.kind is not Kind.POSITION or entries.namespace != POSITION_NAMESPACE:
        return entries
    (value,) = entries.values
    assert value is not None
    known = msgspec.json.decode(value, type=SourcePosition)
    begun = SourcePosition(
        watermark=known.watermark,
        promised=known.promised,
        max_event_time=known.max_event_time,
        newest_event_time=known.newest_event_time,
        arrived_at=known.arrived_at,
        unsure_us=known.unsure_us,
        dedupe_shift_us=known.dedupe_shift_us,
    )
    return replace(entries, values=[msgspec.json.encode(begun)])


def _merged(runs: Sequence[DedupeRun]) -> Iterator[DedupeRun]:
    """Merge runs that follow each other, up to `RUN_IDS_MAX` ids, or as many bytes of a join's log."""
    group: list[DedupeRun] = []
    for run in runs:
        if group and sum(map(_size, group)) + _size(run) > RUN_IDS_MAX * ID_BYTES:
            yield _one_of(group)
            group = []
        group.append(run)
    if group:
        yield _one_of(group)


def _size(run: DedupeRun) -> int:
    return len(run.ids) or len(run.times)


def _one_of(runs: Sequence[DedupeRun]) -> DedupeRun:
    if not any(run.ids for run in runs):  # logs of a join, which may be joined
        return DedupeRun(
            b"", b"".join(run.times for run in runs), max(r.expires_at for r in runs), max(r.clock for r in runs)
        )
    times = [np.frombuffer(run.times, "<i8") for run in runs]
    counts = [len(run.ids) // ID_BYTES for run in runs]
    each = chain.from_iterable(
        [np.repeat(seen, count) if len(seen) == 1 else seen] for seen, count in zip(times, counts, strict=True)
    )
    return DedupeRun(
        b"".join(run.ids for run in runs),
        np.concatenate(list(each)).astype("<i8").tobytes(),
        max(run.expires_at for run in runs),
        max(run.clock for run in runs),
        any(run.whole for run in runs),
    )
