"""The database of the memory store, which several `MemoryStore`s share.

It holds tables, and locks on interval headers: a commit holds its headers from the fence to its end, and every other
change of a header waits. Tests inspect the contents by `rows`, `accounting`, `late_records`, `dead_letters` and
`events`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from millpy.clock import Clock, SystemClock
from millpy.errors import CommitUnknownError, GraphError
from millpy.model.checkpoint import Checkpoint, DeadLetter, Kind, LateRows, OutboxRows, OutboxState, RefusedMessage
from millpy.model.deployment import (
    ComputationSpec,
    DeployedInterval,
    Deployment,
    GraphSpec,
    SubscriptionSpec,
    generation_name,
)
from millpy.model.graph_changes import changes_between, new_partitions
from millpy.model.horizons import HORIZON, HorizonChange, horizon_changes
from millpy.model.keys import KeyInterval, tile_key_space
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, describe
from millpy.model.united_streams import behind_error, ended, ended_source
from millpy.model.versions import refuse_changes, refuse_older
from millpy.store.memory.commit import StagedRows, apply, check, check_fence, document_of
from millpy.store.memory.faults import Faults
from millpy.store.memory.requests import Requests
from millpy.store.memory.resetting import forget_computations
from millpy.store.memory.tables import (
    DeployedGraph,
    DeployedSubscription,
    Header,
    Holder,
    RegisteredWorker,
    Ring,
    Row,
    SourceAccount,
    StoredAccounting,
    StoredDelta,
    StoredRun,
    StoredSegment,
    StoredTable,
    SubscriptionAccount,
    TableAccount,
    overlaid,
)
from millpy.store.protocol import Backlog, Event, LookupReport, SinkReport, SourceReport

if TYPE_CHECKING:
    from millpy.store.memory.store import MemoryStore


class Transaction(Holder):
    """A commit in flight, which holds the headers of its checkpoints."""

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
        """Raise unless the commit is valid, and change nothing. Return the result rows to store."""
        self.check_fence()
        return check(self._database, self._checkpoints)

    def land(self) -> None:
        """Commit: apply every change, or raise and apply none."""
        apply(self._database, self._checkpoints, self._documents, self.check())


class MemoryDatabase:
    """The tables and locks of one server, and the faults to inject. `clock` is the server's clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.faults = Faults(self)
        self.graphs: dict[int, DeployedGraph] = {}
        self.headers: dict[int, Header] = {}
        self.tables: dict[int, StoredTable] = {}
        self.workers: dict[UUID, RegisteredWorker] = {}
        now = self.clock.now_us()
        self.segments: Ring[StoredSegment] = Ring(now)
        self.deltas: Ring[StoredDelta] = Ring(now)
        self.dedupe_runs: Ring[StoredRun] = Ring(now)
        self.late_records: list[tuple[int, int, LateRows]] = []
        self.quiet: dict[int, bool] = {}
        self.dead_letters: list[tuple[int, int, DeadLetter]] = []
        self.requests = Requests(self)
        self.events: list[tuple[int, Event]] = []
        self.noticed: dict[tuple[int, str], tuple[Event, Instant]] = {}
        self.lookup_tables: dict[str, bytes] = {}
        self.lookup_reports: dict[tuple[UUID, str], LookupReport] = {}
        self.source_reports: dict[int, tuple[UUID, SourceReport]] = {}
        self.statements: dict[tuple[int, str], list[tuple[str | None, ...]]] = {}
        self.outbox: dict[int, list[OutboxRows]] = {}
        self.sink_reports: dict[int, SinkReport] = {}
        self.refused_messages: dict[int, dict[int, RefusedMessage]] = {}
        self.listeners: dict[tuple[MemoryStore, int], asyncio.Event] = {}
        self.deploying: set[str] = set()
        self._locks: dict[int, Holder] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._subscription_count = 0

    # Inspection by tests.

    def rows(self, table: str, graph: str | None = None) -> list[Row]:
        """Return the rows of a result table as dicts, with `interval_id` and `bundle`. Instants are in µs."""
        return list(self.table(table, graph).rows.values())

    def constrain(self, table: str, name: str, accepts: Callable[[Row], bool], graph: str | None = None) -> None:
        """Add a user's CHECK constraint. A row for which `accepts` is false is poison."""
        self.table(table, graph).constraints[name] = accepts

    def delete_rows(self, table: str, matches: Callable[[Row], bool], graph: str | None = None) -> None:
        """Delete the result rows that match, as users do."""
        rows = self.table(table, graph).rows
        for key in [key for key, row in rows.items() if matches(row)]:
            del rows[key]

    def accounting(self, graph_id: int) -> StoredAccounting:
        """Return the accounting (I8), from counters and stored segments."""
        deployed = self.graphs[graph_id]
        sources = []
        for stream in deployed.spec.streams:
            for interval in deployed.deployment.intervals_of(stream.producer):
                if interval.keys is None:
                    kinds = ("injected", "accepted", "duplicate", "dead_lettered")
                    counts = [self._count([interval.interval_id], kind, stream.name) for kind in kinds]
                    sources.append(SourceAccount(stream.name, interval.partition, *counts))
        subscriptions = []
        for sub in deployed.subscriptions:
            name = str(sub.subscription_id)
            produced = self._count(sub.producers, "produced", name)
            both = [*sub.producers, *sub.consumers]  # operators dead-letter in the producer
            consumed, late, dead_lettered, duplicate, added, filtered = (
                self._count(both, kind, name)
                for kind in ("consumed", "late", "dead_lettered", "duplicate", "added", "filtered")
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
                    dead_lettered,
                    pending,
                    duplicate,
                    self._parked(sub.consumers, name),
                    added,
                    filtered,
                )
            )
        return StoredAccounting(tuple(sources), tuple(subscriptions), tuple(self._table_accounts(deployed)))

    def _table_accounts(self, deployed: DeployedGraph) -> Iterable[TableAccount]:
        writers = {s.name: s.producer for s in deployed.spec.streams}
        for table in (t for t in self.tables.values() if t.graph_id == deployed.deployment.graph_id):
            stream = table.spec.stream
            owners = [interval.interval_id for interval in deployed.deployment.intervals_of(writers[stream])]
            counts = (self._count(owners, kind, str(table.table_id)) for kind in ("emitted", "written"))
            yield TableAccount(stream, table.spec.name, *counts)

    # Locks.

    async def lock(self, transaction: Transaction) -> None:
        """Lock the transaction's headers in the order of their ids. Wait while another holder has one."""
        for interval_id in transaction.interval_ids:
            while self.holder(interval_id) not in (None, transaction):
                await self.wait_for_release()
            self.hold(transaction, interval_id)

    def hold(self, holder: Holder, interval_id: int) -> None:
        """Lock a header that has no holder."""
        self._locks[interval_id] = holder

    def try_lock(self, transaction: Transaction) -> bool:
        """Lock all headers, or return False when another holder has one of them."""
        if any(self.holder(interval_id) not in (None, transaction) for interval_id in transaction.interval_ids):
            return False
        self._locks.update(dict.fromkeys(transaction.interval_ids, transaction))
        return True

    def unlock(self, holder: Holder) -> None:
        """Release a holder's locks, and wake all waiters."""
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
        """Return the holder of a header's lock, or None."""
        return self._locks.get(interval_id)

    async def wait_for_release(self) -> None:
        """Wait until any lock is released."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    # Shared by the operations.

    def is_live(self, worker_id: UUID | None) -> bool:
        """Tell whether a worker's lease has not expired on the server's clock."""
        worker = None if worker_id is None else self.workers.get(worker_id)
        # A deadline further away than any lease was set before the clock was set back.
        return worker is not None and 0 < worker.expires_at - self.clock.now_us() <= 2 * worker.lease_us

    def unfolded(self, header: Header) -> list[StoredDelta]:
        """Return the unfolded deltas of an interval, in bundle order."""
        interval_id = header.interval.interval_id
        return [d for d in self.deltas if d.interval_id == interval_id and d.bundle > header.folded_bundle]

    def pending(self, subscriptions: Iterable[DeployedSubscription]) -> Backlog:
        """Count the stored records and bytes that the consumers of these subscriptions have not read yet."""
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
        """Tell whether the cursors of all consumers, owned or not, are past a segment."""
        deployed = self.graphs[self.headers[stored.interval_id].graph_id]
        segment = stored.segment
        sub = next(s for s in deployed.subscriptions if s.subscription_id == segment.subscription_id)
        return all(self.headers[consumer].cursors[stored.interval_id][0] >= segment.seq for consumer in sub.consumers)

    def outbox_state(self, interval_id: int) -> OutboxState:
        """Return how far the outbox of an interval is filled and delivered."""
        rows, report = self.outbox.get(interval_id, []), self.sink_reports.get(interval_id)
        delivered = 0 if report is None else report.delivered
        head = max([delivered, *(row.end for row in rows)])
        refused = [found for _, found in sorted(self.refused_messages.get(interval_id, {}).items())]
        return OutboxState(head, delivered, sum(len(row.payload) for row in rows), refused)

    def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Register a graph, or apply its additions to the deployed one; see `Store.deploy`."""
        deployed = self._find(spec)
        if deployed is not None:
            before, after = deployed.spec.description(), spec.description()
            changes = changes_between(before, after)
            version = deployed.deployment.version
            refuse_changes(spec.name, version, before, after, on_purpose=on_purpose, changes=changes)
            if not changes:
                return deployed.deployment
            self._check_joining(deployed, new_partitions(before, after))
            self._check_united(deployed, spec)
            self._change_horizons(deployed.deployment, horizon_changes(before, after))
            self._migrate(deployed, with_deployed_partitions(spec, deployed.spec))
            return replace(deployed.deployment, changes=tuple(map(str, changes)))
        known = [deployed.spec.generation for deployed in self.graphs.values() if deployed.spec.name == spec.name]
        refuse_older(spec, max(known, default=0))
        name = generation_name(spec.name, spec.generation) if known else spec.name
        empty = Deployment(len(self.graphs) + 1, 0, name, (), {}, {}, secret=f"of {name} in memory")
        deployed = DeployedGraph(replace(spec, computations=(), subscriptions=(), tables=()), empty, ())
        self.graphs[empty.graph_id] = deployed
        self._migrate(deployed, spec)
        return deployed.deployment

    def knows(self, worker_id: UUID, header: Header) -> bool:
        """Tell whether a worker knows the deployed version of the graph."""
        deployed = self.graphs[header.graph_id].deployment
        return self.workers[worker_id].info.graph_version == deployed.version

    def is_locked_against(self, spec: GraphSpec) -> bool:
        """Tell whether a deployment must wait, because it changes a graph with commits in flight or during a switch."""
        deployed = self._find(spec)
        return (
            deployed is not None
            and bool(changes_between(deployed.spec.description(), spec.description()))
            and self.is_locked(spec)
        )

    def is_locked(self, spec: GraphSpec) -> bool:
        """Tell whether a deployed graph has commits in flight, or is being switched."""
        deployed = self._find(spec)
        return deployed is not None and (
            spec.name in self.deploying
            or any(self.holder(interval.interval_id) for interval in deployed.deployment.intervals)
        )

    def reset(self, spec: GraphSpec, names: Collection[str]) -> Deployment:
        """Let some computations of a deployed graph begin anew: remove them with all their data, and add them again."""
        deployed = self._find(spec)
        if deployed is None or changes_between(deployed.spec.description(), spec.description()):
            raise GraphError(f"graph {spec.name!r} is not deployed as in this file", hint="deploy it first")
        forget_computations(self, deployed, spec, names)
        self._migrate(deployed, spec)
        return deployed.deployment

    def _find(self, spec: GraphSpec) -> DeployedGraph | None:
        """Return the deployed graph of the same name and generation, or None."""
        same = (d for d in self.graphs.values() if (d.spec.name, d.spec.generation) == (spec.name, spec.generation))
        return next(same, None)

    def _migrate(self, deployed: DeployedGraph, spec: GraphSpec) -> None:
        """Add new source partitions, computations with their subscriptions, tables and columns."""
        before = deployed.deployment
        for interval in before.intervals:
            self.headers[interval.interval_id].disown()
        known = {computation.name for computation in deployed.spec.computations}
        intervals = {c.name: list(before.intervals_of(c.name)) for c in spec.computations}
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
        subscriptions += self._united(deployed, spec, intervals, ids)
        deployed.deployment = replace(
            before,
            version=before.version + 1,
            intervals=tuple(interval for c in spec.computations for interval in intervals[c.name]),
            subscription_ids=ids,
            table_ids=self._add_tables(before, spec),
        )
        deployed.spec, deployed.subscriptions = spec, tuple(subscriptions)

    def _change_horizons(self, deployment: Deployment, changes: Sequence[HorizonChange]) -> None:
        """Set floors, and keep the ids that are not forgotten, where a horizon grows."""
        for change in filter(lambda change: change.grows, changes):
            for interval in deployment.intervals_of(change.computation):
                header = self.headers[interval.interval_id]
                reached = header.dedupe_clock if change.setting == HORIZON else header.input_watermark
                if reached < INSTANT_MAX:  # an end that is set back sets a floor itself
                    header.horizon_floor = max(header.horizon_floor, Instant(reached - change.floor_us))
                if change.longer_us > 0:
                    self.dedupe_runs.replace(partial(StoredRun.longer, header=header, by_us=change.longer_us))

    def _new_intervals(
        self, graph_id: int, computation: ComputationSpec, siblings: Sequence[DeployedInterval]
    ) -> list[DeployedInterval]:
        """Add the new intervals of a computation.

        A partition that joins a source begins at the lowest watermark of the source's other partitions.
        """
        parts: list[tuple[KeyInterval | None, str]] = [(None, partition) for partition in computation.partitions]
        if computation.kind != "injector":
            parts = [(keys, "") for keys in tile_key_space(computation.intervals)]
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
        """Add producers to a subscription. Each consumer reads them from the watermark that it has reached."""
        for interval_id in joining:
            self.headers[interval_id].last_segments[subscription.subscription_id] = 0
        for consumer in subscription.consumers if joining else ():
            header = self.headers[consumer]
            header.cursors.update({producer: (0, header.input_watermark) for producer in joining})
        return replace(subscription, producers=(*subscription.producers, *joining))

    def _subscribe(self, subscription_id: int, producers: Sequence[int], consumers: Sequence[int]) -> None:
        """Start new consumers at the last commit of each producer, with the watermark of that commit."""
        for producer in producers:
            header = self.headers[producer]
            header.last_segments[subscription_id] = 0
            for consumer in consumers:
                self.headers[consumer].cursors[producer] = (header.bundle, header.low_watermark)

    def _check_joining(self, deployed: DeployedGraph, added: Mapping[str, Sequence[str]]) -> None:
        """Raise GraphError if a source partition would join a source that has ended; nothing has changed yet."""
        for source, partitions in added.items():
            headers = [self.headers[interval.interval_id] for interval in deployed.deployment.intervals_of(source)]
            if all(header.low_watermark >= INSTANT_MAX for header in headers):
                raise ended_source(source, partitions[0])

    def _check_united(self, deployed: DeployedGraph, spec: GraphSpec) -> None:
        """Raise GraphError if a deployed step cannot read one more stream now; nothing has changed yet."""
        producer_of = {stream.name: stream.producer for stream in spec.streams}
        for one in _united(deployed, spec):
            consumers = deployed.deployment.intervals_of(one.consumer)
            reached = max(self.headers[interval.interval_id].input_watermark for interval in consumers)
            if reached >= INSTANT_MAX:
                raise ended(one.stream, one.consumer)
            for interval in deployed.deployment.intervals_of(producer_of[one.stream]):
                at = self.headers[interval.interval_id].low_watermark
                if at < reached:
                    raise behind_error(one.stream, one.consumer, describe(at), describe(reached))

    def _united(
        self,
        deployed: DeployedGraph,
        spec: GraphSpec,
        intervals: Mapping[str, Sequence[DeployedInterval]],
        ids: dict[tuple[str, str, int], int],
    ) -> list[DeployedSubscription]:
        """Let deployed steps read more streams, and return these subscriptions; see `united_streams.py`."""
        steps = {computation.name for computation in deployed.spec.computations}
        producer_of = {stream.name: stream.producer for stream in spec.streams}
        kinds = {computation.name: computation.kind for computation in spec.computations}
        made = []
        for one in _united(deployed, spec):
            producer = producer_of[one.stream]
            consumers = tuple(interval.interval_id for interval in intervals[one.consumer])
            producers = tuple(interval.interval_id for interval in intervals[producer])
            reached = [self.headers[interval_id].input_watermark for interval_id in consumers]
            for header in map(self.headers.__getitem__, producers):
                if producer not in steps and kinds[producer] == "injector":
                    header.input_watermark = header.low_watermark = max(header.low_watermark, *reached)
            self._subscription_count += 1
            number = ids[one.stream, one.consumer, one.input] = self._subscription_count
            for header in map(self.headers.__getitem__, producers):
                header.last_segments[number] = 0
                for interval_id in consumers:
                    at = (header.bundle, header.low_watermark)
                    self.headers[interval_id].cursors.setdefault(header.interval.interval_id, at)
            made.append(DeployedSubscription(number, one.stream, producer, one.consumer, producers, consumers))
        return made

    def _begin(self, consumers: Sequence[int]) -> None:
        """Set the watermarks of new consumers to the lowest of their cursors."""
        for consumer in consumers:
            header = self.headers[consumer]
            if header.cursors:
                header.input_watermark = header.low_watermark = min(mark for _, mark in header.cursors.values())

    def _add_tables(self, before: Deployment, spec: GraphSpec) -> dict[str, int]:
        table_ids = dict(before.table_ids)
        for table in spec.tables:
            table_id = table_ids.setdefault(table.name, max(self.tables, default=0) + 1)
            stored = self.tables.setdefault(table_id, StoredTable(table_id, before.graph_id, before.name, table))
            for row in stored.rows.values():
                row.update({c.name: None for c in table.columns() if c.name not in row})
            stored.spec = table
        return table_ids

    def table(self, name: str, graph: str | None = None) -> StoredTable:
        """Return the result table of this name, which must be unique unless `graph` names its graph."""
        found = [t for t in self.tables.values() if t.spec.name == name and graph in (None, t.graph)]
        assert len(found) == 1, (name, graph, [t.spec.name for t in self.tables.values()])
        return found[0]

    def _parked(self, interval_ids: Iterable[int], subscription: str) -> int:
        """Count the records of a subscription that are parked in these intervals."""
        headers = [self.headers[interval_id] for interval_id in interval_ids]
        stored = [overlaid(header.keyed, self.unfolded(header)) for header in headers]
        parked = [row for rows in stored for name, row in rows.items() if name[:2] == (Kind.PARKED, subscription)]
        return sum(1 for row in parked if row.value is not None)

    def _count(self, interval_ids: Iterable[int], namespace: str, subkey: str) -> int:
        """Return the sum of one counter over these intervals."""
        total = 0
        for interval_id in interval_ids:
            header = self.headers[interval_id]
            row = overlaid(header.keyed, self.unfolded(header)).get((Kind.COUNTER, namespace, b'""', subkey))
            total += 0 if row is None or row.value is None else int(row.value)
        return total


def _united(deployed: DeployedGraph, spec: GraphSpec) -> list[SubscriptionSpec]:
    """Return the subscriptions by which deployed steps are to read more streams."""
    known = {(found.stream, found.consumer, found.input) for found in deployed.spec.subscriptions}
    steps = {computation.name for computation in deployed.spec.computations}
    return [s for s in spec.subscriptions if s.consumer in steps and (s.stream, s.consumer, s.input) not in known]


def with_deployed_partitions(spec: GraphSpec, stored: GraphSpec) -> GraphSpec:
    """Return `spec` with all source partitions that `stored` has in addition, in the deployed order."""
    deployed = {computation.name: computation.partitions for computation in stored.computations}
    computations = tuple(
        replace(c, partitions=tuple(dict.fromkeys((*deployed.get(c.name, ()), *c.partitions))))
        for c in spec.computations
    )
    return replace(spec, computations=computations)
