"""A small deployed graph, workers that own parts of it, and checkpoints, for the store suites.

readings (injector, partitions a and b)  --by device (input 0) and by room (input 1)-->  sums (two intervals)
readings --by device--> alarms (one interval)          sums --by device--> alarms
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from millpy.model.checkpoint import Checkpoint, Entries, Grant, Kind, ResultRows, Segment, StoredSlice
from millpy.model.delta import encode_value
from millpy.model.deployment import (
    ColumnSpec,
    ComputationSpec,
    DeployedInterval,
    Deployment,
    GraphSpec,
    StreamSpec,
    SubscriptionSpec,
    TableSpec,
)
from millpy.model.keys import key_hash, key_text
from millpy.model.record import Records, RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.codec import encode_slice
from millpy.store.protocol import OwnerSnapshot, SegmentQuery, Store, WorkerInfo

MINUTE = 60_000_000
LEASE_S = 60.0
Row = dict[str, Any]
NULL = msgspec.Raw(b"null")


class Reading(msgspec.Struct):
    """A record of the stream `readings`."""

    device: str
    room: str
    value: float


READINGS = RecordType(Reading)


class Subject(Protocol):
    """A store implementation under test, and what users do with its tables."""

    async def store(self) -> Store:
        """Another open connection to the same database."""
        ...

    async def close(self) -> None:
        """Close every store that was given out."""
        ...

    async def rows(self, deployment: Deployment, table: str) -> list[Row]:
        """Result rows, instants in µs, without `emitted_at`."""
        ...

    async def delete_rows(self, deployment: Deployment, table: str) -> None:
        """Delete all result rows, as users do."""
        ...

    async def forbid_negative(self, deployment: Deployment, table: str, column: str) -> None:
        """Add a user's CHECK constraint."""
        ...

    async def dead_and_late(self, deployment: Deployment) -> tuple[int, int]:
        """How many late records and dead letters are stored."""
        ...

    async def switch(self, family: str, generation: int) -> bool:
        """Make a generation of a graph the current one; False when it is that already."""
        ...

    async def balance(self, deployment: Deployment) -> dict[str, dict[str, int]]:
        """Accounting (I8): "stream" or "stream>consumer" -> counts, summed over partitions and subscriptions."""
        ...

    def lose_answer_of_next_commit(self, store: Store, lands: str) -> Callable[[], Any] | None:
        """The next commit's answer is lost; `lands` is "before", "later" or "never". What to give as `inside`."""
        ...

    async def land_lost_commits(self) -> None:
        """Let those that land later land now."""
        ...


def a_graph(name: str = "factory", *, intervals: int = 2, partitions: tuple[str, ...] = ("a", "b")) -> GraphSpec:
    """The graph of this module."""
    key = (ColumnSpec("device", "text", False),)
    values = (ColumnSpec("total", "double precision", True), ColumnSpec("label", "text", True))
    return GraphSpec(
        name=name,
        computations=(
            ComputationSpec("readings", "injector", partitions=partitions),
            ComputationSpec(
                "sums", "stage", intervals=intervals, identity={"cells": [("sum", {"kind": "value", "type": "float"})]}
            ),
            ComputationSpec(
                "alarms", "stage", intervals=1, identity={"cells": [("alarm", {"kind": "value", "type": "bool"})]}
            ),
        ),
        streams=(
            StreamSpec("readings", "readings", READINGS.schema),
            StreamSpec("sums", "sums", READINGS.schema),
            StreamSpec("alarms", "alarms", READINGS.schema),
        ),
        subscriptions=(
            SubscriptionSpec("readings", "sums", 0, ("device",)),
            SubscriptionSpec("readings", "sums", 1, ("room",)),
            SubscriptionSpec("readings", "alarms", 0, ("device",)),
            SubscriptionSpec("sums", "alarms", 1, ("device",)),
        ),
        tables=(
            TableSpec("sums_1m", "windowed", "sums", "sums", key, values),
            TableSpec("alarms", "records", "alarms", "alarms", (), values),
        ),
    )


class Owner:
    """A worker with a lease, its store, its grants and the bundle numbers that it knows."""

    def __init__(self, store: Store, deployment: Deployment) -> None:
        self.store = store
        self.deployment = deployment
        self.worker_id = uuid.uuid4()
        self.grants: dict[int, Grant] = {}
        self.bundles: dict[int, int] = {}

    async def register(self, ttl_s: float = LEASE_S) -> None:
        """Begin a lease."""
        await self.store.register(WorkerInfo(self.worker_id, self.deployment.graph_id, self.deployment.version), ttl_s)

    async def claim(self, *intervals: DeployedInterval) -> Sequence[Grant]:
        """Claim intervals, by default all of the graph, and read their positions."""
        wanted = intervals or self.deployment.intervals
        grants = await self.store.claim(self.worker_id, [i.interval_id for i in wanted])
        await self._learn(grants)
        return grants

    async def take_over_from_self(self) -> Sequence[Grant]:
        """Take over all grants and read where they stand."""
        grants = await self.store.take_over_from_self(self.worker_id, list(self.grants.values()))
        self.grants.clear()
        await self._learn(grants)
        return grants

    async def expire(self) -> None:
        """End the lease now."""
        assert await self.store.heartbeat(self.worker_id, 0.0)

    def checkpoint(self, interval: DeployedInterval, **changes: Any) -> Checkpoint:
        """Build the interval's next checkpoint, with only the given changes."""
        changes = {"input_watermark": INSTANT_MIN, "low_watermark": INSTANT_MIN, **changes}
        grant = changes.pop("grant", None) or self.grants[interval.interval_id]
        bundle = changes.pop("bundle", None) or self.bundles[interval.interval_id] + 1
        return Checkpoint(grant, bundle, **changes)

    async def commit(self, *checkpoints: Checkpoint, inside: Any = None) -> None:
        """Commit a turn and count the bundles."""
        await self.store.commit(checkpoints, graph_version=self.deployment.version, inside=inside)
        for checkpoint in checkpoints:
            self.bundles[checkpoint.grant.interval_id] = checkpoint.bundle

    async def opened(self, interval: DeployedInterval, *, state_rows_max: int = 1_000) -> OwnerSnapshot:
        """An interval as the store describes it."""
        grant = self.grants[interval.interval_id]
        (opened,) = await self.store.read([grant], state_rows_max=state_rows_max)
        return opened

    async def fold(self, interval: DeployedInterval, *, bytes_max: int = 1_000_000) -> None:
        """Fold until every committed bundle is rows."""
        for _ in range(100):
            folded = await self.store.fold(self.grants[interval.interval_id], bytes_max=bytes_max)
            if folded >= self.bundles[interval.interval_id]:
                return
        raise AssertionError("folding does not come to an end")

    async def _learn(self, grants: Sequence[Grant]) -> None:
        for grant, opened in zip(grants, await self.store.read(grants, state_rows_max=0), strict=True):
            self.grants[grant.interval_id] = grant
            self.bundles[grant.interval_id] = opened.recovered.bundle


class World:
    """The graph, deployed in a fresh database."""

    def __init__(self, subject: Subject, store: Store, deployment: Deployment) -> None:
        self.subject = subject
        self.store = store
        self.deployment = deployment
        self.a, self.b = deployment.intervals_of("readings")
        self.sums = deployment.intervals_of("sums")
        (self.alarms,) = deployment.intervals_of("alarms")
        self.by_device = deployment.subscription_ids["readings", "sums", 0]
        self.by_room = deployment.subscription_ids["readings", "sums", 1]
        self.to_alarms = deployment.subscription_ids["readings", "alarms", 0]

    async def worker(self) -> Owner:
        """Another live worker that owns nothing; like every process it begins by deploying its graph."""
        store = await self.subject.store()
        owner = Owner(store, await store.deploy(a_graph()))
        await owner.register()
        return owner

    async def owner(self, *intervals: DeployedInterval) -> Owner:
        """A worker that owns the intervals, or all."""
        owner = await self.worker()
        await owner.claim(*intervals)
        return owner

    async def rows(self, table: str) -> list[Row]:
        """Result rows."""
        return await self.subject.rows(self.deployment, table)

    def query(self, consumer: DeployedInterval, producer: DeployedInterval, after: int = 0) -> SegmentQuery:
        """Return the query of a consumer for a producer, over all its subscriptions."""
        if consumer.computation == "sums":
            subscriptions: tuple[int, ...] = (self.by_device, self.by_room)
        elif producer.computation == "readings":
            subscriptions = (self.to_alarms,)
        else:
            subscriptions = (self.deployment.subscription_ids["sums", "alarms", 1],)
        return SegmentQuery(consumer.interval_id, consumer.index, producer.interval_id, subscriptions, after)

    def table_id(self, name: str) -> int:
        """Id of a result table."""
        return self.deployment.table_ids[name]


async def a_world(subject: Subject) -> World:
    """Deploy the graph."""
    store = await subject.store()
    return World(subject, store, await store.deploy(a_graph()))


@contextlib.asynccontextmanager
async def closing(subject: Subject) -> AsyncIterator[Subject]:
    """A subject whose stores are closed at the end."""
    try:
        yield subject
    finally:
        await subject.close()


def a_slice(*values: float) -> StoredSlice:
    """A slice with one reading per value."""
    objects = [Reading(f"dev-{value}", "hall", value) for value in values]
    return encode_slice(Records(READINGS, np.arange(len(values), dtype=np.int64), objects=objects))


def a_segment(
    subscription: int,
    seq: int,
    slices: Sequence[StoredSlice | None],
    *,
    previous: int = 0,
    watermark: int = INSTANT_MIN,
) -> Segment:
    """A segment of one subscription."""
    return Segment(subscription, seq, previous, Instant(watermark), tuple(slices), Instant(0), Instant(0))


def entries(kind: Kind, namespace: str, *rows: tuple[Any, ...]) -> Entries:
    """Build entries from (key, value, subkey, fire time), the last two optional; None is a tombstone, NULL a null."""
    found = Entries(kind, namespace)
    for row in rows:
        key, value, subkey, fire_at = (*row, "", INSTANT_MAX)[:4] if len(row) != 3 else (*row, INSTANT_MAX)
        encoded = None if value is None else encode_value(value)
        found.add(key_text(key), key_hash(key), subkey, encoded, fire_at)
    return found


def counters(**counts: tuple[str, int]) -> tuple[Entries, ...]:
    """Build counters from name=(stream or subscription id, count)."""
    found = []
    for namespace, (subkey, count) in counts.items():
        entry = Entries(Kind.COUNTER, namespace)
        entry.add(b'""', 0, subkey, b"%d" % count)
        found.append(entry)
    return tuple(found)


def panes(table_id: int, *rows: tuple[str, float | None, int], first: bool = False, label: str = "x") -> ResultRows:
    """Panes of one-minute windows that start at the epoch: (device, total, pane index)."""
    count = len(rows)
    columns: list[Any] = [
        [row[0] for row in rows],
        [0] * count,
        [MINUTE] * count,
        [row[1] for row in rows],
        [label] * count,
        [row[2] for row in rows],
        ["on_time"] * count,
        [0] * count,
    ]
    return ResultRows(table_id, columns, count, first)


def alarm_rows(table_id: int, *totals: float, label: str = "x") -> ResultRows:
    """Rows of the record table."""
    count = len(totals)
    columns: list[Any] = [list(totals), [label] * count, [MINUTE] * count, list(range(count))]
    return ResultRows(table_id, columns, count, first=True)


def contents(found: Sequence[Entries] | StoredInterval) -> dict[tuple[str, str, str, str], tuple[Any, int]]:
    """Entries as a dict: (kind, namespace, key, subkey) -> (value, fire time); tombstones and order left out."""
    parts = found.entries if isinstance(found, StoredInterval) else found
    table = {}
    for part in parts:
        for row in range(len(part)):
            value = part.values[row]
            if value is not None:
                name = (part.kind.value, part.namespace, bytes(part.keys[row]).decode(), part.subkeys[row])
                assert name not in table, f"{name} is read twice"
                table[name] = (msgspec.json.decode(value), part.fire_ats[row])
    return table
