"""What several `MemoryStore`s share: the database that the memory store models.

It holds tables and row locks. Locks are those of interval headers: a commit holds its headers from the fence to
its end, and whoever changes a header waits for them. A test's own view of the contents is here too: `rows`,
`accounting`, `late_records`, `dead_letters`, `events`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from millpy.clock import Clock, SystemClock
from millpy.errors import CommitUnknownError
from millpy.model.checkpoint import Checkpoint, DeadLetter, Kind, LateRows
from millpy.model.deployment import ComputationSpec, DeployedInterval, Deployment, GraphSpec, name_beside
from millpy.model.keys import KeyInterval, tile
from millpy.model.time import INSTANT_MIN
from millpy.model.versions import changes_between, refuse, refuse_older
from millpy.store.memory_commit import StagedRows, apply, check, check_fence, document_of
from millpy.store.memory_faults import Faults
from millpy.store.memory_requests import Requests
from millpy.store.memory_tables import (
    Accounting,
    DeployedGraph,
    DeployedSubscription,
    Header,
    Holder,
    Ring,
    Row,
    SourceAccount,
    StoredDelta,
    StoredRun,
    StoredSegment,
    SubscriptionAccount,
    Table,
    TableAccount,
    Worker,
    overlaid,
)
from millpy.store.protocol import Backlog, Event

if TYPE_CHECKING:
    from millpy.store.memory import MemoryStore


class Transaction(Holder):
    """A commit on its way: what it will change, and whether its backend can still be terminated."""

    def __init__(self, database: MemoryDatabase, checkpoints: Sequence[Checkpoint], graph_version: int) -> None:
        self._database = database
        self._checkpoints = tuple(checkpoints)
        self._documents = [document_of(checkpoint) for checkpoint in checkpoints]
        self._graph_version = graph_version
        super().__init__(sorted(checkpoint.grant.interval_id for checkpoint in checkpoints))
        assert len(set(self.interval_ids)) == len(self.interval_ids), self.interval_ids

    def check_fence(self) -> None:
        """Raise unless every grant is current."""
        if self.terminated:
            raise CommitUnknownError("the backend was terminated by a worker that took over")
        check_fence(self._database, self._checkpoints, self._graph_version)

    def check(self) -> StagedRows:
        """Check everything and change nothing; the result rows to store."""
        self.check_fence()
        return check(self._database, self._checkpoints)

    def land(self) -> None:
        """Check everything, then change everything."""
        apply(self._database, self._checkpoints, self._documents, self.check())


class MemoryDatabase:
    """Tables, locks and faults; `clock` is the server's."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.faults = Faults(self)
        self.graphs: dict[int, DeployedGraph] = {}
        self.headers: dict[int, Header] = {}
        self.tables: dict[int, Table] = {}
        self.workers: dict[UUID, Worker] = {}
        now = self.clock.now_us()
        self.segments: Ring[StoredSegment] = Ring(now)
        self.deltas: Ring[StoredDelta] = Ring(now)
        self.dedupe_runs: Ring[StoredRun] = Ring(now)
        self.late_records: list[tuple[int, int, LateRows]] = []
        self.quiet: dict[int, bool] = {}
        self.dead_letters: list[tuple[int, int, DeadLetter]] = []
        self.requests = Requests(self)
        self.events: list[tuple[int, Event]] = []
        self.listeners: dict[tuple[MemoryStore, int], asyncio.Event] = {}
        self.deploying: set[str] = set()
        self._locks: dict[int, Holder] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._subscription_count = 0

    # What tests look at.

    def rows(self, table: str, graph: str | None = None) -> list[Row]:
        """The rows of a result table as dicts; instants are µs; with `interval_id` and `bundle`."""
        return list(self.table(table, graph).rows.values())

    def constrain(self, table: str, name: str, accepts: Callable[[Row], bool], graph: str | None = None) -> None:
        """Add a user's CHECK constraint: a row for which `accepts` is false is poison."""
        self.table(table, graph).constraints[name] = accepts

    def delete_rows(self, table: str, matches: Callable[[Row], bool], graph: str | None = None) -> None:
        """Delete result rows, as people do."""
        rows = self.table(table, graph).rows
        for key in [key for key, row in rows.items() if matches(row)]:
            del rows[key]

    def accounting(self, graph_id: int) -> Accounting:
        """I8, counted from counters and stored segments."""
        deployed = self.graphs[graph_id]
        sources = []
        for stream in deployed.spec.streams:
            for interval in deployed.deployment.of(stream.producer):
                if interval.keys is None:
                    kinds = ("injected", "accepted", "duplicate", "dead_lettered")
                    counts = [self._count([interval.interval_id], kind, stream.name) for kind in kinds]
                    sources.append(SourceAccount(stream.name, interval.partition, *counts))
        subscriptions = []
        for sub in deployed.subscriptions:
            name = str(sub.subscription_id)
            produced = self._count(sub.producers, "produced", name)
            both = [*sub.producers, *sub.consumers]  # operators quarantine in the producer
            consumed, late, quarantined, duplicate, added, filtered = (
                self._count(both, kind, name)
                for kind in ("consumed", "late", "quarantined", "duplicate", "added", "filtered")
            )
            pending = self.pending([sub]).records
            subscriptions.append(
                SubscriptionAccount(
                    sub.subscription_id,
                    sub.stream,
                    sub.consumer,
                    produced,
                    consumed,
                    late,
                    quarantined,
                    pending,
                    duplicate,
                    self._parked(sub.consumers, name),
                    added,
                    filtered,
                )
            )
        return Accounting(tuple(sources), tuple(subscriptions), tuple(self._table_accounts(deployed)))

    def _table_accounts(self, deployed: DeployedGraph) -> Iterable[TableAccount]:
        writers = {s.name: s.producer for s in deployed.spec.streams}
        for table in (t for t in self.tables.values() if t.graph_id == deployed.deployment.graph_id):
            stream = table.spec.stream
            owners = [interval.interval_id for interval in deployed.deployment.of(writers[stream])]
            counts = (self._count(owners, kind, str(table.table_id)) for kind in ("emitted", "written"))
            yield TableAccount(stream, table.spec.name, *counts)

    # Locks.

    async def lock(self, transaction: Transaction) -> None:
        """Lock the transaction's headers in id order, waiting for whoever holds them."""
        for interval_id in transaction.interval_ids:
            while self.holder(interval_id) not in (None, transaction):
                await self.released()
            self.hold(transaction, interval_id)

    def hold(self, holder: Holder, interval_id: int) -> None:
        """Lock a header that nobody holds."""
        self._locks[interval_id] = holder

    def lock_now(self, transaction: Transaction) -> bool:
        """Lock all headers, or none when one is held by somebody else."""
        if any(self.holder(interval_id) not in (None, transaction) for interval_id in transaction.interval_ids):
            return False
        self._locks.update(dict.fromkeys(transaction.interval_ids, transaction))
        return True

    def unlock(self, holder: Holder) -> None:
        """Release what somebody holds and wake those who wait."""
        for interval_id in holder.interval_ids:
            if self._locks.get(interval_id) is holder:
                del self._locks[interval_id]
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def terminate(self, transaction: Holder) -> None:
        """End the backend of a transaction that has not reached COMMIT."""
        transaction.terminated = True
        self.unlock(transaction)

    def holder(self, interval_id: int) -> Holder | None:
        """Who holds the row lock of a header."""
        return self._locks.get(interval_id)

    async def released(self) -> None:
        """Wait until some lock is released."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # What operations share.

    def is_live(self, worker_id: UUID | None) -> bool:
        """Whether a worker's lease has not expired on the server's clock."""
        worker = None if worker_id is None else self.workers.get(worker_id)
        # One that ends later than a lease can was given before the clock was set back.
        return worker is not None and 0 < worker.expires_at - self.clock.now_us() <= 2 * worker.lease_us

    def unfolded(self, header: Header) -> list[StoredDelta]:
        """Deltas of an interval that are not rows yet, in bundle order."""
        interval_id = header.interval.interval_id
        return [d for d in self.deltas if d.interval_id == interval_id and d.bundle > header.folded_bundle]

    def pending(self, subscriptions: Iterable[DeployedSubscription]) -> Backlog:
        """Records and bytes in stored segments above the cursors of their consumers."""
        wanted = {sub.subscription_id: sub for sub in subscriptions}
        records = size = 0
        for stored in self.segments:
            sub = wanted.get(stored.segment.subscription_id)
            if sub is None:
                continue
            for consumer, part in zip(sub.consumers, stored.segment.slices, strict=True):
                if part is not None and self.headers[consumer].cursors[stored.interval_id][0] < stored.segment.seq:
                    records += part.records
                    size += len(part.payload)
        return Backlog(records, size)

    def is_consumed(self, stored: StoredSegment) -> bool:
        """Whether the cursors of all consumers, owned or not, are past a segment."""
        deployed = self.graphs[self.headers[stored.interval_id].graph_id]
        segment = stored.segment
        sub = next(s for s in deployed.subscriptions if s.subscription_id == segment.subscription_id)
        return all(self.headers[consumer].cursors[stored.interval_id][0] >= segment.seq for consumer in sub.consumers)

    def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Register a graph, find it deployed, or bring its additions in."""
        deployed = self._find(spec)
        if deployed is not None:
            before, after = deployed.spec.description(), spec.description()
            changes = changes_between(before, after)
            version = deployed.deployment.version
            refuse(spec.name, version, before, after, on_purpose=on_purpose, changes=changes)
            if not changes:
                return deployed.deployment
            self._migrate(deployed, with_deployed_partitions(spec, deployed.spec))
            return replace(deployed.deployment, changes=tuple(map(str, changes)))
        known = [deployed.spec.generation for deployed in self.graphs.values() if deployed.spec.name == spec.name]
        refuse_older(spec, max(known, default=0))
        name = name_beside(spec.name, spec.generation) if known else spec.name
        empty = Deployment(len(self.graphs) + 1, 0, name, (), {}, {}, secret=f"of {name} in memory")
        deployed = DeployedGraph(replace(spec, computations=(), subscriptions=(), tables=()), empty, ())
        self.graphs[empty.graph_id] = deployed
        self._migrate(deployed, spec)
        return deployed.deployment

    def knows(self, worker_id: UUID, header: Header) -> bool:
        """Whether a worker knows the version of the graph that is deployed."""
        deployed = self.graphs[header.graph_id].deployment
        return self.workers[worker_id].info.graph_version == deployed.version

    def is_locked_against(self, spec: GraphSpec) -> bool:
        """Whether deploying this graph would change one that has commits in flight or is switched, and so waits."""
        deployed = self._find(spec)
        if deployed is None or not changes_between(deployed.spec.description(), spec.description()):
            return False
        return spec.name in self.deploying or any(
            self.holder(interval.interval_id) for interval in deployed.deployment.intervals
        )

    def _find(self, spec: GraphSpec) -> DeployedGraph | None:
        """This generation of this graph, as it is deployed."""
        same = (d for d in self.graphs.values() if (d.spec.name, d.spec.generation) == (spec.name, spec.generation))
        return next(same, None)

    def _migrate(self, deployed: DeployedGraph, spec: GraphSpec) -> None:
        """Bring in what is new: source partitions, computations with their subscriptions, tables, columns."""
        before = deployed.deployment
        for interval in before.intervals:
            self.headers[interval.interval_id].disown()
        known = {computation.name for computation in deployed.spec.computations}
        intervals = {c.name: list(before.of(c.name)) for c in spec.computations}
        joining: dict[str, list[int]] = {}
        for computation in spec.computations:
            new = self._new_intervals(before.graph_id, computation, intervals[computation.name])
            intervals[computation.name] += new
            joining[computation.name] = [interval.interval_id for interval in new]
        subscriptions = [self._joined(sub, joining[sub.producer]) for sub in deployed.subscriptions]
        ids = dict(before.subscription_ids)
        producer_of = {stream.name: stream.producer for stream in spec.streams}
        for computation in spec.computations:
            if computation.name not in known:
                consumers = joining[computation.name]
                for sub in (s for s in spec.subscriptions if s.consumer == computation.name):
                    producer = producer_of[sub.stream]
                    producers = tuple(interval.interval_id for interval in intervals[producer])
                    self._subscription_count += 1
                    number = ids[sub.stream, sub.consumer, sub.input] = self._subscription_count
                    subscriptions.append(
                        DeployedSubscription(number, sub.stream, producer, sub.consumer, producers, tuple(consumers))
                    )
                    self._subscribe(number, producers, consumers)
                self._begin(consumers)
        deployed.deployment = replace(
            before,
            version=before.version + 1,
            intervals=tuple(interval for c in spec.computations for interval in intervals[c.name]),
            subscription_ids=ids,
            table_ids=self._add_tables(before, spec),
        )
        deployed.spec, deployed.subscriptions = spec, tuple(subscriptions)

    def _new_intervals(
        self, graph_id: int, computation: ComputationSpec, siblings: Sequence[DeployedInterval]
    ) -> list[DeployedInterval]:
        """Source partitions join at the watermark that their stream has published."""
        parts: list[tuple[KeyInterval | None, str]] = [(None, partition) for partition in computation.partitions]
        if computation.kind == "stage":
            parts = [(keys, "") for keys in tile(computation.intervals)]
        published = min((self.headers[i.interval_id].low_watermark for i in siblings), default=INSTANT_MIN)
        found = []
        for index, (keys, partition) in enumerate(parts[len(siblings) :], start=len(siblings)):
            interval = DeployedInterval(
                len(self.headers) + 1, computation.name, index, keys, partition, joined=bool(siblings)
            )
            header = Header(interval, graph_id, input_watermark=published, low_watermark=published)
            self.headers[interval.interval_id] = header
            found.append(interval)
        return found

    def _joined(self, subscription: DeployedSubscription, joining: Sequence[int]) -> DeployedSubscription:
        """A deployed subscription with more producers; its consumers begin at the watermark that they have reached."""
        for interval_id in joining:
            self.headers[interval_id].last_segments[subscription.subscription_id] = 0
        for consumer in subscription.consumers if joining else ():
            header = self.headers[consumer]
            header.cursors.update({producer: (0, header.input_watermark) for producer in joining})
        return replace(subscription, producers=(*subscription.producers, *joining))

    def _subscribe(self, subscription_id: int, producers: Sequence[int], consumers: Sequence[int]) -> None:
        """New consumers have consumed all that is committed, and know the watermark there."""
        for producer in producers:
            header = self.headers[producer]
            header.last_segments[subscription_id] = 0
            for consumer in consumers:
                self.headers[consumer].cursors[producer] = (header.bundle, header.low_watermark)

    def _begin(self, consumers: Sequence[int]) -> None:
        """New consumers publish what they have been told."""
        for consumer in consumers:
            header = self.headers[consumer]
            if header.cursors:
                header.input_watermark = header.low_watermark = min(mark for _, mark in header.cursors.values())

    def _add_tables(self, before: Deployment, spec: GraphSpec) -> dict[str, int]:
        table_ids = dict(before.table_ids)
        for table in spec.tables:
            table_id = table_ids.setdefault(table.name, len(self.tables) + 1)
            stored = self.tables.setdefault(table_id, Table(table_id, before.graph_id, before.name, table))
            for row in stored.rows.values():
                row.update({c.name: None for c in table.columns() if c.name not in row})
            stored.spec = table
        return table_ids

    def table(self, name: str, graph: str | None = None) -> Table:
        """A result table; tests may change its constraints."""
        found = [t for t in self.tables.values() if t.spec.name == name and graph in (None, t.graph)]
        assert len(found) == 1, (name, graph, [t.spec.name for t in self.tables.values()])
        return found[0]

    def _parked(self, interval_ids: Iterable[int], subscription: str) -> int:
        """Records of a subscription that wait behind one that failed."""
        headers = [self.headers[interval_id] for interval_id in interval_ids]
        stored = [overlaid(header.keyed, self.unfolded(header)) for header in headers]
        parked = [row for rows in stored for name, row in rows.items() if name[:2] == (Kind.PARKED, subscription)]
        return sum(1 for row in parked if row.value is not None)

    def _count(self, interval_ids: Iterable[int], namespace: str, subkey: str) -> int:
        """The sum of one counter over intervals."""
        total = 0
        for interval_id in interval_ids:
            header = self.headers[interval_id]
            row = overlaid(header.keyed, self.unfolded(header)).get((Kind.COUNTER, namespace, b'""', subkey))
            total += 0 if row is None or row.value is None else int(row.value)
        return total


def with_deployed_partitions(spec: GraphSpec, stored: GraphSpec) -> GraphSpec:
    """A graph with the source partitions that are deployed, those that it does not know included."""
    deployed = {computation.name: computation.partitions for computation in stored.computations}
    computations = tuple(
        replace(c, partitions=tuple(dict.fromkeys((*deployed.get(c.name, ()), *c.partitions))))
        for c in spec.computations
    )
    return replace(spec, computations=computations)
