"""The history of a simulation: the calls that workers make to the store, the answers, and the effects.

`RecordingStore` is the outermost layer of a worker's store: it records calls and answers and changes nothing.
`RunHistory.collect_commits` compares the headers with those of the last call. Each change becomes a `CommittedBundle`,
and updates a model of the interval's keyed state, read from the stored documents by plain JSON, for the checkers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from millpy.errors import CommitUnknownError
from millpy.model.checkpoint import Checkpoint, DeadLetter, DedupeRun, Grant, LateRows, Segment
from millpy.model.deployment import Deployment, GraphSpec
from millpy.store.memory.store import MemoryDatabase, MemoryStore
from millpy.store.memory.tables import DeployedSubscription, Header, Row, StoredTable
from millpy.store.protocol import CommitFailpoint, PollResult, SegmentQuery
from millpy.testing.simulation.names import Names, routed_by_name

Name = tuple[str, str, Any, str]
"""(kind, namespace, key, subkey)."""


@dataclass(slots=True)
class Attempt:
    """One call of `commit`: everything that must be committed together, and its worker.

    Attributes:
        switches: the number of switches between generations when the worker looked its graph up.
        version: the version of the graph that the worker ran.
    """

    worker: UUID
    checkpoints: tuple[Checkpoint, ...]
    switches: int = 0
    version: int = 0


@dataclass(slots=True)
class UnreadSegment:
    """A segment that a consumer has not read yet."""

    producer: int
    segment: Segment
    subscription: DeployedSubscription


@dataclass(slots=True)
class ObservedInterval:
    """An interval at the last look.

    Attributes:
        keyed: the newest value and fire time of each keyed entry, from the stored documents.
        changed: the bundle that last wrote each entry, tombstones included.
        lows: the low watermark by bundle.
    """

    header: Header
    computation: str
    owner: UUID | None = None
    sequencer: int = 0
    bundle: int = 0
    folded: int = 0
    input_watermark: int = -(2**62)
    low_watermark: int = -(2**62)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)
    keyed: dict[Name, tuple[Any, int]] = field(default_factory=dict)
    changed: dict[Name, int] = field(default_factory=dict)
    lows: dict[int, int] = field(default_factory=dict)

    @property
    def interval_id(self) -> int:
        """The id of the interval."""
        return self.header.interval.interval_id

    @property
    def moved(self) -> bool:
        """Whether the header has changed since the last look."""
        return state_of(self.header) != (
            self.bundle, self.sequencer, self.folded, self.owner, self.low_watermark, self.input_watermark
        )  # fmt: skip

    def count(self, what: str, of: str) -> int:
        """Return the counter `what` of a stream or subscription (I8); 0 if there is none yet."""
        found = self.keyed.get(("counter", what, "", of))
        return 0 if found is None else int(found[0])


def state_of(header: Header) -> tuple[Any, ...]:
    """Return the parts of a header that change."""
    return (
        header.bundle, header.sequencer, header.folded_bundle, header.owner,
        header.low_watermark, header.input_watermark,
    )  # fmt: skip


@dataclass(slots=True)
class CommittedBundle:
    """A bundle that has become visible: header before and after, submitted and stored data.

    Attributes:
        attempts: everything that was submitted under this bundle number.
        changes: name -> (value, fire time), None for a tombstone, by the stored document.
        rows: table -> result rows of this bundle.
    """

    observed: ObservedInterval
    bundle: int
    bundle_before: int
    sequencer: int
    input_before: int
    low_before: int
    cursors_before: dict[int, tuple[int, int]]
    attempts: list[Attempt]
    changes: dict[Name, tuple[Any, int] | None]
    segments: list[Segment]
    runs: list[DedupeRun]
    rows: dict[str, list[Row]]

    @property
    def name(self) -> str:
        """Name the bundle and its interval."""
        return f"bundle {self.bundle} of {self.observed.computation} {self.observed.interval_id}"

    @property
    def attempt(self) -> Attempt | None:
        """Return the attempt under the interval's sequencer."""
        interval_id = self.observed.interval_id
        for attempt in reversed(self.attempts):
            grants = [checkpoint.grant for checkpoint in attempt.checkpoints]
            if Grant(interval_id, self.sequencer) in grants:
                return attempt
        return None

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Return this interval's part of the attempt."""
        attempt = self.attempt
        if attempt is None:
            return None
        return next(c for c in attempt.checkpoints if c.grant.interval_id == self.observed.interval_id)


class RunHistory:
    """The history of one graph in a run.

    Attributes:
        names: the names of the generations.
        given: (worker, consumer, producer, subscription, seq) of every slice that a poll handed out.
        granted: (interval, sequencer) -> worker.
        version: the version of the graph.
        dropped_to: result table -> the end of the newest partition that was dropped.
        dropped: (result table, key, start, end) of each row that was dropped.
        kept: segments above some cursor, or passed by the newest commits.
        trace: one line an event.
    """

    def __init__(self, database: MemoryDatabase, graph_id: int, names: Names, trace: list[str]) -> None:
        self.database = database
        self.graph_id = graph_id
        self.names = names
        self.deployed = database.graphs[graph_id]
        self.by_interval = {
            interval_id: ObservedInterval(header, header.interval.computation)
            for interval_id, header in database.headers.items()
            if header.graph_id == graph_id
        }
        for observed in self.by_interval.values():
            observed.cursors = dict(observed.header.cursors)
        self.submitted: dict[tuple[int, int], list[Attempt]] = {}
        self.given: set[tuple[UUID, int, int, int, int]] = set()
        self.granted: dict[tuple[int, int], UUID] = {}
        self.granted_twice: list[tuple[int, int, UUID, UUID]] = []
        self.unread: list[UnreadSegment] = []
        self.freed = False
        self.version = self.deployed.deployment.version
        self.dropped_to: dict[str, int] = {}
        self.dropped: set[tuple[Any, ...]] = set()
        self.trace = trace
        self._headers = [observed.header for observed in self.by_interval.values()]
        self._states: list[tuple[Any, ...]] = []

    def follow_deployment(self) -> tuple[list[ObservedInterval], list[ObservedInterval]]:
        """Follow the intervals that a deployment has added, and forget those that are gone. Return both."""
        deployed = {interval.interval_id for interval in self.deployed.deployment.intervals}
        gone = [self.by_interval.pop(interval_id) for interval_id in self.by_interval.keys() - deployed]
        added = []
        for interval_id in sorted(deployed - self.by_interval.keys()):
            header = self.database.headers[interval_id]
            observed = self.by_interval[interval_id] = ObservedInterval(header, header.interval.computation)
            observed.cursors = dict(header.cursors)
            observed.input_watermark, observed.low_watermark = header.input_watermark, header.low_watermark
            observed.lows[header.bundle] = header.low_watermark
            added.append(observed)
        numbers = {sub.subscription_id for sub in self.deployed.subscriptions}
        self.unread = [unread for unread in self.unread if unread.subscription.subscription_id in numbers]
        self._headers = [observed.header for observed in self.by_interval.values()]
        self.version = self.deployed.deployment.version
        return added, gone

    def intervals_of(self, computation: str) -> Iterator[ObservedInterval]:
        """Yield the histories of a computation's intervals."""
        return (observed for observed in self.by_interval.values() if observed.computation == computation)

    def tables(self) -> Iterator[StoredTable]:
        """Return the result tables of this graph."""
        return (table for table in self.database.tables.values() if table.graph_id == self.graph_id)

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a result table of this graph."""
        return [row for table in self.tables() if table.spec.name == name for row in table.rows.values()]

    def dead_letters(self) -> Iterator[tuple[int, int, int, DeadLetter]]:
        """Return (number, interval, bundle, dead letter) for this graph."""
        for number, (interval_id, bundle, letter) in enumerate(self.database.dead_letters, start=1):
            if interval_id in self.by_interval:
                yield number, interval_id, bundle, letter

    def late_records(self) -> Iterator[tuple[int, LateRows]]:
        """Return (interval, late records) for this graph."""
        return ((where, late) for where, _, late in self.database.late_records if where in self.by_interval)

    def note_submitted(self, attempt: Attempt) -> None:
        """Record a commit."""
        for checkpoint in attempt.checkpoints:
            self.submitted.setdefault((checkpoint.grant.interval_id, checkpoint.bundle), []).append(attempt)

    def note_given(self, worker: UUID, answers: Sequence[PollResult]) -> None:
        """Record the segments that a worker receives."""
        for answer in answers:
            for segment in answer.segments:
                if segment.payload is not None:
                    query = answer.query
                    place = (worker, query.consumer, query.producer, segment.subscription_id, segment.seq)
                    self.given.add(place)

    def note_granted(self, worker: UUID, grants: Sequence[Grant]) -> None:
        """Record the intervals that a worker receives."""
        for grant in grants:
            name = (grant.interval_id, grant.sequencer)
            before = self.granted.setdefault(name, worker)
            if before != worker:
                self.granted_twice.append((*name, before, worker))

    def nothing_moved(self) -> bool:
        """Tell whether no header has changed since the last call."""
        states = [state_of(header) for header in self._headers]
        if states == self._states:
            return True
        self._states = states
        return False

    def collect_commits(self) -> list[CommittedBundle]:
        """Return the bundles committed since the last call, producers before consumers, and update the history."""
        moved = [observed for observed in self.by_interval.values() if observed.moved]
        if moved:
            self.unread = [unread for unread in self.unread if not self.is_read(unread)]
        commits = [self._read_commit(observed) for observed in moved if observed.header.bundle != observed.bundle]
        for observed in moved:
            self._write_trace(observed)
            self._catch_up(observed)
        for commit in commits:
            self._apply(commit)
        return commits

    def _read_commit(self, observed: ObservedInterval) -> CommittedBundle:
        interval_id, bundle = observed.interval_id, observed.header.bundle
        documents = [d for d in self.database.deltas if d.interval_id == interval_id and d.bundle > observed.bundle]
        rows = {
            table.spec.name: found
            for table in self.tables()
            if table.spec.computation == observed.computation
            and (found := [r for r in table.rows.values() if r["interval_id"] == interval_id and r["bundle"] == bundle])
        }
        changes: dict[Name, tuple[Any, int] | None] = {}
        for document in documents:
            changes.update(read_document(document.document))
        return CommittedBundle(
            observed=observed,
            bundle=bundle,
            bundle_before=observed.bundle,
            sequencer=observed.sequencer,
            input_before=observed.input_watermark,
            low_before=observed.low_watermark,
            cursors_before=dict(observed.cursors),
            attempts=self.submitted.get((interval_id, bundle), []),
            changes=changes,
            segments=[
                s.segment
                for s in self.database.segments
                if s.interval_id == interval_id and s.segment.seq > observed.bundle
            ],
            runs=[r.run for r in self.database.dedupe_runs if r.interval_id == interval_id][-1:],
            rows=rows,
        )

    def _write_trace(self, observed: ObservedInterval) -> None:
        """Write a line of the trace."""
        header, what = observed.header, f"{observed.computation} {observed.interval_id}"
        if header.owner != observed.owner or header.sequencer != observed.sequencer:
            self.trace.append(f"{what} sequencer {header.sequencer} owner {header.owner}")
        if header.bundle != observed.bundle:
            watermarks = f"watermarks {header.input_watermark} {header.low_watermark}"
            self.trace.append(f"{what} bundle {header.bundle} {watermarks} cursors {header.cursors}")
        elif header.folded_bundle != observed.folded:
            self.trace.append(f"{what} folded {header.folded_bundle}")

    def _catch_up(self, observed: ObservedInterval) -> None:
        header = observed.header
        observed.owner, observed.sequencer, observed.bundle = header.owner, header.sequencer, header.bundle
        observed.folded = header.folded_bundle
        observed.input_watermark, observed.low_watermark = header.input_watermark, header.low_watermark
        observed.lows[header.bundle] = header.low_watermark
        observed.cursors = dict(header.cursors)

    def _apply(self, commit: CommittedBundle) -> None:
        observed = commit.observed
        for name, change in commit.changes.items():
            observed.changed[name] = commit.bundle
            if change is None:
                observed.keyed.pop(name, None)
            else:
                observed.keyed[name] = change
        for segment in commit.segments:
            sub = next(s for s in self.deployed.subscriptions if s.subscription_id == segment.subscription_id)
            self.unread.append(UnreadSegment(observed.interval_id, segment, sub))

    def is_read(self, unread: UnreadSegment) -> bool:
        """Tell whether all consumers are past a segment."""
        cursors = (self.by_interval[consumer].cursors[unread.producer][0] for consumer in unread.subscription.consumers)
        return all(seq >= unread.segment.seq for seq in cursors)


def hashable(key: Any) -> Any:
    """Return a key from its JSON form; a key of several fields as a tuple."""
    return tuple(key) if isinstance(key, list) else key


def read_document(document: bytes) -> dict[Name, tuple[Any, int] | None]:
    """Read a delta document, following the description in `model/delta.py`, with plain JSON."""
    found: dict[Name, tuple[Any, int] | None] = {}
    for part in json.loads(document):
        names = zip(part["key"], part["subkey"], part["value"], part["fire_at"], strict=True)
        for key, subkey, value, fire_at in names:
            name = (part["kind"], part["namespace"], hashable(key), subkey)
            found[name] = None if value is None else (value[0], fire_at)
    return found


class RecordingStore(MemoryStore):
    """A worker's connection that records the calls.

    It finds result tables by name, like PostgreSQL: by the graph's name when the worker looked it up.

    Attributes:
        worker: the worker of the connection.
        dies: called to kill the worker when the outcome of a commit is unknown.
        known_as: the graph's name when it was looked up.
        switches: the number of switches at that time.
    """

    history: RunHistory
    worker: UUID
    dies: Callable[[], None] | None = None
    known_as: str = ""
    switches: int = 0

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Record the deployment."""
        deployment = await super().deploy(spec, on_purpose=on_purpose)
        self.known_as, self.switches = deployment.name, self.history.names.switches
        return deployment

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Record the intervals that the worker receives."""
        grants = await super().claim(worker_id, interval_ids)
        self.history.note_granted(worker_id, grants)
        return grants

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Record the intervals that the worker receives."""
        fresh = await super().take_over_from_self(worker_id, grants)
        self.history.note_granted(worker_id, fresh)
        return fresh

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Record the segments."""
        answers = await super().poll(queries, bytes_max)
        self.history.note_given(self.worker, answers)
        return answers

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitFailpoint | None = None,
        trial: bool = False,
    ) -> None:
        """Record the commit."""
        if not trial:
            self.history.note_submitted(Attempt(self.worker, tuple(checkpoints), self.switches, graph_version))
        if len(self.database.graphs) > 1:
            checkpoints = [routed_by_name(self.database, self.known_as, checkpoint) for checkpoint in checkpoints]
        try:
            await super().commit(checkpoints, graph_version=graph_version, inside=inside, trial=trial)
        except CommitUnknownError:
            if self.dies is not None:
                self.dies()
            raise

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Record that a slot was freed."""
        freed = await super().turn_rings(epoch_s=epoch_s, epoch_bytes=epoch_bytes)
        self.history.freed |= freed > 0
        return freed


def pending(history: RunHistory, subscription: DeployedSubscription) -> int:
    """Count the records in stored segments above the cursors of their consumers (I8)."""
    return sum(
        part.records
        for unread in history.unread
        if unread.subscription.subscription_id == subscription.subscription_id
        for consumer, part in zip(subscription.consumers, unread.segment.slices, strict=True)
        if part is not None and history.by_interval[consumer].cursors[unread.producer][0] < unread.segment.seq
    )
