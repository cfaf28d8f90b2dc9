"""What several `MemoryStore`s share: the database that the memory store models.

It holds tables and row locks. Locks are those of interval headers: a commit holds its headers from the fence to
its end, and whoever changes a header waits for them. A test's own view of the contents is here too: `rows`,
`accounting`, `late_records`, `dead_letters`, `events`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from millpy.clock import Clock, SystemClock
from millpy.errors import CommitUnknownError, GraphError
from millpy.model.checkpoint import Checkpoint, DeadLetter, Kind, LateRows
from millpy.model.deployment import DeployedInterval, Deployment, GraphSpec, grown
from millpy.model.keys import tile
from millpy.model.time import INSTANT_MIN
from millpy.store.memory_commit import StagedRows, apply, check, check_fence, document_of
from millpy.store.memory_faults import Faults
from millpy.store.memory_requests import Requests
from millpy.store.memory_tables import (
    Accounting,
    DeployedGraph,
    DeployedSubscription,
    Header,
    Ring,
    Row,
    SourceAccount,
    StoredDelta,
    StoredRun,
    StoredSegment,
    SubscriptionAccount,
    Table,
    Worker,
    overlaid,
)
from millpy.store.protocol import Backlog, Event

if TYPE_CHECKING:
    from millpy.store.memory import MemoryStore


class Transaction:
    """A commit on its way: what it will change, and whether its backend can still be terminated."""

    def __init__(self, database: MemoryDatabase, checkpoints: Sequence[Checkpoint], graph_version: int) -> None:
        self._database = database
        self._checkpoints = tuple(checkpoints)
        self._documents = [document_of(checkpoint) for checkpoint in checkpoints]
        self._graph_version = graph_version
        self.interval_ids = sorted(checkpoint.grant.interval_id for checkpoint in checkpoints)
        assert len(set(self.interval_ids)) == len(self.interval_ids), self.interval_ids
        self.committing = False
        self.terminated = False

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
        self._locks: dict[int, Transaction] = {}
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
            consumed, late, quarantined, duplicate = (
                self._count(both, kind, name) for kind in ("consumed", "late", "quarantined", "duplicate")
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
                )
            )
        return Accounting(tuple(sources), tuple(subscriptions))

    # Locks.

    async def lock(self, transaction: Transaction) -> None:
        """Lock the transaction's headers in id order, waiting for whoever holds them."""
        for interval_id in transaction.interval_ids:
            while self.holder(interval_id) not in (None, transaction):
                await self.released()
            self._locks[interval_id] = transaction

    def lock_now(self, transaction: Transaction) -> bool:
        """Lock all headers, or none when one is held by somebody else."""
        if any(self.holder(interval_id) not in (None, transaction) for interval_id in transaction.interval_ids):
            return False
        self._locks.update(dict.fromkeys(transaction.interval_ids, transaction))
        return True

    def unlock(self, transaction: Transaction) -> None:
        """Release what the transaction holds and wake those who wait."""
        for interval_id in transaction.interval_ids:
            if self._locks.get(interval_id) is transaction:
                del self._locks[interval_id]
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def terminate(self, transaction: Transaction) -> None:
        """End the backend of a transaction that has not reached COMMIT."""
        transaction.terminated = True
        self.unlock(transaction)

    def holder(self, interval_id: int) -> Transaction | None:
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
        return worker is not None and self.clock.now_us() < worker.expires_at

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

    def deploy(self, spec: GraphSpec) -> Deployment:
        """Register a graph, or find it deployed with the same fingerprint."""
        for deployed in self.graphs.values():
            if deployed.spec.name == spec.name:
                added = grown(deployed.spec.description(), spec.description())
                if added is None:
                    raise GraphError(
                        f"graph {spec.name} is deployed with another meaning: {differences(deployed.spec, spec)}",
                        hint="give the changed graph another name, or deploy it to another database",
                    )
                return self._grow(deployed, added) if added else deployed.deployment
        graph_id = len(self.graphs) + 1
        intervals = self._add_intervals(graph_id, spec)
        subscriptions = tuple(self._add_subscriptions(spec, intervals))
        table_ids = {}
        for table in spec.tables:
            table_id = len(self.tables) + 1
            self.tables[table_id] = Table(table_id, graph_id, spec.name, table)
            table_ids[table.name] = table_id
        ids = {
            (s.stream, s.consumer, s.input): deployed.subscription_id
            for s, deployed in zip(spec.subscriptions, subscriptions, strict=True)
        }
        deployment = Deployment(graph_id, 1, spec.name, tuple(intervals), ids, table_ids)
        self.graphs[graph_id] = DeployedGraph(spec, deployment, subscriptions)
        return deployment

    def _grow(self, deployed: DeployedGraph, added: Mapping[str, Sequence[str]]) -> Deployment:
        """Add source partitions: they join at the watermark that their stream has published."""
        spec, graph_id = deployed.spec, deployed.deployment.graph_id
        intervals = list(deployed.deployment.intervals)
        new: dict[str, list[int]] = {}
        for name, partitions in added.items():
            siblings = [self.headers[i.interval_id] for i in intervals if i.computation == name]
            published = min(header.low_watermark for header in siblings)
            for place, partition in enumerate(partitions, start=len(siblings)):
                interval = DeployedInterval(len(self.headers) + 1, name, place, None, partition)
                header = Header(interval, graph_id, input_watermark=published, low_watermark=published)
                self.headers[interval.interval_id] = header
                new.setdefault(name, []).append(interval.interval_id)
                intervals.append(interval)
        subscriptions = []
        for subscription in deployed.subscriptions:
            joining = new.get(subscription.producer, [])
            for interval_id in joining:
                self.headers[interval_id].last_segments[subscription.subscription_id] = 0
            for consumer in subscription.consumers:
                header = self.headers[consumer]
                header.cursors.update({producer: (0, header.input_watermark) for producer in joining})
            subscriptions.append(replace(subscription, producers=(*subscription.producers, *joining)))
        computations = tuple(replace(c, partitions=(*c.partitions, *added.get(c.name, ()))) for c in spec.computations)
        order = {c.name: place for place, c in enumerate(spec.computations)}
        intervals.sort(key=lambda interval: (order[interval.computation], interval.index))
        deployment = replace(deployed.deployment, version=deployed.deployment.version + 1, intervals=tuple(intervals))
        self.graphs[graph_id] = DeployedGraph(
            replace(spec, computations=computations), deployment, tuple(subscriptions)
        )
        return deployment

    def _add_intervals(self, graph_id: int, spec: GraphSpec) -> list[DeployedInterval]:
        intervals = []
        for computation in spec.computations:
            parts: list[tuple[object, str]] = [(None, partition) for partition in computation.partitions]
            if computation.kind == "stage":
                parts = [(keys, "") for keys in tile(computation.intervals)]
            for index, (keys, partition) in enumerate(parts):
                interval_id = len(self.headers) + 1
                interval = DeployedInterval(interval_id, computation.name, index, keys, partition)  # type: ignore[arg-type]
                self.headers[interval_id] = Header(interval, graph_id)
                intervals.append(interval)
        return intervals

    def _add_subscriptions(
        self, spec: GraphSpec, intervals: Sequence[DeployedInterval]
    ) -> Iterable[DeployedSubscription]:
        by_computation: dict[str, list[int]] = {}
        for interval in intervals:
            by_computation.setdefault(interval.computation, []).append(interval.interval_id)
        producer_of = {stream.name: stream.producer for stream in spec.streams}
        for sub in spec.subscriptions:
            self._subscription_count += 1
            producer = producer_of[sub.stream]
            producers, consumers = tuple(by_computation[producer]), tuple(by_computation[sub.consumer])
            for interval_id in producers:
                self.headers[interval_id].last_segments[self._subscription_count] = 0
            for interval_id in consumers:
                self.headers[interval_id].cursors.update(dict.fromkeys(producers, (0, INSTANT_MIN)))
            yield DeployedSubscription(
                self._subscription_count, sub.stream, producer, sub.consumer, producers, consumers
            )

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


def differences(stored: GraphSpec, given: GraphSpec) -> str:
    """Where two graphs of one name differ, in words."""
    found = []
    before, after = stored.description(), given.description()
    for part, old in before.items():
        new = after[part]
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{part} {name} is gone" for name in old if name not in new]
            found += [f"{part} {name} is new" for name in new if name not in old]
            found += [f"{part} {n}: {old[n]} became {new[n]}" for n in old if n in new and old[n] != new[n]]
        elif old != new:
            found.append(f"{part}: {old} became {new}")
    return "; ".join(found)
