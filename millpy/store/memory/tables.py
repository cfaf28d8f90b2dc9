"""The tables of a `MemoryDatabase`: the rows that PostgreSQL would hold, as plain objects.

Every function here runs between two awaits, so it sees and leaves one consistent state: that is how the memory store
models snapshots and atomic commits. `MemoryDatabase` and `MemoryStore` model the waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import pyarrow as pa

from millpy.limits import RING_SLOTS
from millpy.model.checkpoint import DedupeRun, Entries, Kind, Segment
from millpy.model.delta import decode_document
from millpy.model.deployment import DeployedInterval, Deployment, GraphSpec, TableSpec
from millpy.model.stored_windows import WAITS, ClosedKind
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.protocol import WorkerInfo

EntryName = tuple[Kind, str, bytes, str]
Row = dict[str, Any]


@dataclass(slots=True)
class KeyedRow:
    """A folded row of `mill.keyed`. `bundle` is the bundle that last wrote it."""

    key_hash: int
    value: bytes | None
    fire_at: int
    bundle: int


@dataclass(slots=True)
class Header:
    """The checkpoint header of one interval (fence and progress), with the interval's cursors and folded rows.

    Attributes:
        gone: whether the interval is no longer one of the graph, because its computation was reset.
    """

    interval: DeployedInterval
    graph_id: int
    gone: bool = False
    owner: UUID | None = None
    sequencer: int = 0
    bundle: int = 0
    folded_bundle: int = 0
    input_watermark: Instant = INSTANT_MIN
    low_watermark: Instant = INSTANT_MIN
    oldest_work: Instant = INSTANT_MAX
    processing_floor: Instant = INSTANT_MIN
    horizon_floor: Instant = INSTANT_MIN
    dedupe_clock: Instant = INSTANT_MIN
    dedupe_whole: int = 0
    cursors: dict[int, tuple[int, Instant]] = field(default_factory=dict)
    last_segments: dict[int, int] = field(default_factory=dict)
    keyed: dict[EntryName, KeyedRow] = field(default_factory=dict)

    def disown(self) -> None:
        """Take the unlocked header from its owner, whose grant is stale from now on."""
        self.owner = None
        self.sequencer += 1

    def needs_run(self, bundle: int, run: DedupeRun) -> bool:
        """Tell whether a run that `bundle` wrote has not expired, and no later run has replaced it."""
        return run.expires_at >= self.dedupe_clock and bundle >= self.dedupe_whole


@dataclass(slots=True, eq=False)
class Holder:
    """A holder of row locks on headers.

    Attributes:
        committing: whether its backend can no longer be terminated.
    """

    interval_ids: list[int] = field(default_factory=list)
    committing: bool = False
    terminated: bool = False


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """One delta document, with the bundle of the interval that wrote it."""

    interval_id: int
    bundle: int
    document: bytes

    @property
    def size(self) -> int:
        """Bytes that the entry takes in the ring."""
        return len(self.document)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """One segment and the interval that produced it."""

    interval_id: int
    segment: Segment

    @property
    def size(self) -> int:
        """Bytes that the entry takes in the ring."""
        return sum(len(part.payload) for part in self.segment.slices if part is not None)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One dedupe run, with the source partition and the bundle that wrote it."""

    interval_id: int
    bundle: int
    run: DedupeRun

    @property
    def size(self) -> int:
        """Bytes that the entry takes in the ring."""
        return len(self.run.ids) + len(self.run.times)

    def longer(self, header: Header, by_us: int) -> StoredRun:
        """Return the run, kept longer if it is the interval's and has not expired."""
        if self.interval_id != header.interval.interval_id or self.run.expires_at < header.dedupe_clock:
            return self
        return replace(self, run=replace(self.run, expires_at=Instant(self.run.expires_at + by_us)))


class RingEntry(Protocol):
    """An entry of a ring."""

    @property
    def size(self) -> int:
        """Bytes that the entry takes in the ring."""
        ...


T = TypeVar("T", bound=RingEntry)


class Ring(Generic[T]):
    """An append-only table in `RING_SLOTS` slots, each of which is freed as a whole."""

    def __init__(self, now: Instant) -> None:
        self._slots: list[list[T]] = [[] for _ in range(RING_SLOTS)]
        self._current = 0
        self._since = now

    def __iter__(self) -> Iterator[T]:
        """Iterate over all entries, oldest slot first."""
        for step in range(1, RING_SLOTS + 1):
            yield from self._slots[(self._current + step) % RING_SLOTS]

    def append(self, item: T) -> None:
        """Append an entry to the current slot."""
        self._slots[self._current].append(item)

    def replace(self, change: Callable[[T], T]) -> None:
        """Replace each entry, as an UPDATE does."""
        for items in self._slots:
            items[:] = map(change, items)

    def remove(self, matches: Callable[[T], bool]) -> None:
        """Remove the entries that match, as a DELETE does."""
        for items in self._slots:
            items[:] = [item for item in items if not matches(item)]

    def turn(self, now: Instant, *, epoch_s: float, epoch_bytes: int) -> bool:
        """Start a new epoch if one is due and the next slot is free. Return whether one was started."""
        filled = self._slots[self._current]
        due = not 0 <= now - self._since < epoch_s * 1_000_000 or sum(item.size for item in filled) >= epoch_bytes
        following = (self._current + 1) % RING_SLOTS
        if not (due and filled) or self._slots[following]:
            return False
        self._current = following
        self._since = now
        return True

    def free(self, done: Callable[[T], bool]) -> int:
        """Empty every slot but the current one whose entries are all done. Return the number of emptied slots."""
        freed = 0
        for slot, items in enumerate(self._slots):
            if slot != self._current and items and all(done(item) for item in items):
                items.clear()
                freed += 1
        return freed


@dataclass(slots=True)
class StoredTable:
    """A result table of the graph named `graph`.

    Attributes:
        constraints: the user's constraints by name; each tells whether it accepts a row.
        history: key and window -> its panes and retractions in the order of commits, if the table keeps them.
        dropped_to: the end of the newest partition that was dropped.
    """

    table_id: int
    graph_id: int
    graph: str
    spec: TableSpec
    rows: dict[tuple[Any, ...], Row] = field(default_factory=dict)
    constraints: dict[str, Callable[[Row], bool]] = field(default_factory=dict)
    history: dict[tuple[Any, ...], list[Row]] = field(default_factory=dict)
    dropped_to: Instant = INSTANT_MIN

    def drop_before(self, end: Instant) -> list[tuple[Any, ...]]:
        """Drop the windows that end before a time, as partitions are dropped; return the names of those with rows."""
        self.dropped_to = max(self.dropped_to, end)
        gone = [name for name in self.rows if name[-1] < end]
        for name in gone:
            del self.rows[name]
        for name in [name for name in self.history if name[-1] < end]:
            del self.history[name]
        return gone


@dataclass(slots=True)
class RegisteredWorker:
    """A registered worker. Its lease is `lease_us` long and ends at `expires_at`."""

    info: WorkerInfo
    expires_at: Instant
    lease_us: int
    drain_requested: bool = False


@dataclass(frozen=True, slots=True)
class DeployedSubscription:
    """A subscription with its id. `producers` and `consumers` are interval ids."""

    subscription_id: int
    stream: str
    producer: str
    consumer: str
    producers: tuple[int, ...]
    consumers: tuple[int, ...]


@dataclass(slots=True)
class DeployedGraph:
    """A graph as it was specified, with its ids and subscriptions."""

    spec: GraphSpec
    deployment: Deployment
    subscriptions: tuple[DeployedSubscription, ...]

    def written_by(self, computation: str) -> Iterable[DeployedSubscription]:
        """Return the subscriptions whose segments a computation writes."""
        return (s for s in self.subscriptions if s.producer == computation)


@dataclass(frozen=True, slots=True)
class SourceAccount:
    """The accounting (I8) of a source partition: injected = accepted + duplicate + dead_lettered."""

    stream: str
    partition: str
    injected: int
    accepted: int
    duplicate: int
    dead_lettered: int

    @property
    def balanced(self) -> bool:
        """Whether the counts add up, so that nothing is lost or doubled."""
        return self.injected == self.accepted + self.duplicate + self.dead_lettered


@dataclass(frozen=True, slots=True)
class SubscriptionAccount:
    """The accounting (I8) of a subscription.

    produced + added = filtered + consumed + late + dead_lettered + parked + pending
    """

    subscription_id: int
    stream: str
    consumer: str
    produced: int
    consumed: int
    late: int
    dead_lettered: int
    pending: int
    duplicate: int = 0
    parked: int = 0
    added: int = 0
    filtered: int = 0

    @property
    def balanced(self) -> bool:
        """Whether the counts add up, so that nothing is lost or doubled."""
        taken = self.filtered + self.consumed + self.late + self.dead_lettered
        return self.produced + self.added == taken + self.parked + self.pending


@dataclass(frozen=True, slots=True)
class TableAccount:
    """The accounting (I8) of a result table: rows that were created, and rows that were given to the table."""

    stream: str
    table: str
    produced: int
    consumed: int

    @property
    def balanced(self) -> bool:
        """Whether the counts add up, so that nothing is lost or doubled."""
        return self.produced == self.consumed


@dataclass(frozen=True, slots=True)
class StoredAccounting:
    """The accounting (I8) of a graph, as the view `millpy.accounting` shows it."""

    sources: tuple[SourceAccount, ...]
    subscriptions: tuple[SubscriptionAccount, ...]
    tables: tuple[TableAccount, ...]

    @property
    def balanced(self) -> bool:
        """Whether all counts of the graph add up."""
        parts: list[SourceAccount | SubscriptionAccount | TableAccount] = [*self.sources, *self.subscriptions]
        return all(part.balanced for part in [*parts, *self.tables])


def overlaid(
    keyed: dict[EntryName, KeyedRow], deltas: Iterable[StoredDelta], *, tombstones: bool = False
) -> dict[EntryName, KeyedRow]:
    """Return the folded rows overlaid by deltas in bundle order. A tombstone removes its row, or is returned as asked.

    Only a later bundle replaces a row, so that a late fold cannot restore an old value.
    """
    newest = dict(keyed)
    for delta in deltas:
        for entries in decode_document(delta.document):
            for row in range(len(entries)):
                name = (entries.kind, entries.namespace, entries.keys[row], entries.subkeys[row])
                stored = newest.get(name)
                if stored is not None and stored.bundle >= delta.bundle:
                    continue
                newest[name] = KeyedRow(
                    entries.key_hashes[row], entries.values[row], entries.fire_ats[row], delta.bundle
                )
    return {name: row for name, row in newest.items() if tombstones or row.value is not None}


_WAITS_ARE_LEFT = (ClosedKind.WINDOWS, ClosedKind.UNFIRED, ClosedKind.UNFIRED_PANES)


def without_closed(
    keyed: dict[EntryName, KeyedRow], low_watermark: Instant, kind: ClosedKind
) -> tuple[dict[EntryName, KeyedRow], frozenset[str]]:
    """Return the rows without those of windows that end by a low watermark, and the subkeys of these windows.

    Panes that wait stay, unless their kind says that they do not.
    """
    closed = frozenset(
        name[3] for name in keyed if name[0] is Kind.WINDOW and int(name[3].partition("/")[2]) <= low_watermark
    )
    kept = {
        name: row
        for name, row in keyed.items()
        if name[0] is not Kind.WINDOW
        or name[3] not in closed
        or (kind not in _WAITS_ARE_LEFT and WAITS in (row.value or b""))
    }
    return kept, closed


def entries_of(rows: Iterable[tuple[EntryName, KeyedRow]]) -> list[Entries]:
    """Convert rows to columns, one `Entries` per kind and namespace."""
    found: dict[tuple[Kind, str], Entries] = {}
    for (kind, namespace, key, subkey), row in rows:
        entries = found.get((kind, namespace))
        if entries is None:
            entries = found[kind, namespace] = Entries(kind, namespace)
        entries.add(key, row.key_hash, subkey, row.value, row.fire_at)
    return list(found.values())


def column_values(column: pa.Array | list[Any]) -> list[Any]:
    """Return a column of result rows as Python values. Event-time columns stay in µs."""
    return column if isinstance(column, list) else column.to_pylist()
