"""Store: what the runtime needs of persistence. Ours alone, not a user's extension point.

Two implementations, held equal by tests/conformance/store_suite.py: `store.memory.MemoryStore` (models snapshots,
lock waits and commits that land after the client lost its connection) and `store.postgres.PostgresStore`.

Errors: OwnershipError, TransientError (CommitUnknownError for `commit` only), PoisonError (`commit` only),
GraphVersionError, CorruptionError. A method that raised a TransientError other than CommitUnknownError changed nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant, Request
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.stage import Recovered, Release
from millpy.model.time import Instant


@dataclass(frozen=True, slots=True)
class Want:
    """What one consumer interval wants to read of one producer interval.

    Attributes:
        subscription_ids: every subscription of this consumer to streams of this producer.
        consumer_index: which slice of a segment is the consumer's.
        after: the cursor: segments with seq > after.
    """

    consumer: int
    consumer_index: int
    producer: int
    subscription_ids: tuple[int, ...]
    after: int


@dataclass(frozen=True, slots=True)
class PolledSegment:
    """A segment as one consumer reads it; `payload` is its slice, None when that slice is empty."""

    subscription_id: int
    seq: int
    previous_seq: int
    watermark: Instant
    records: int
    payload: bytes | None
    checksum: int


@dataclass(frozen=True, slots=True)
class Polled:
    """Answer to one Want, read in one statement (one snapshot).

    Attributes:
        segments: ordered by (seq, subscription); never part of a seq.
        head_seq, head_watermark: the producer's header in the same snapshot. Use them only when not
            `truncated`: then everything up to head_seq is in `segments`.
    """

    want: Want
    segments: tuple[PolledSegment, ...]
    head_seq: int
    head_watermark: Instant
    truncated: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """What an owner reads after its claim, in a new statement."""

    recovered: Recovered
    cursors: dict[int, tuple[int, Instant]]
    """producer interval -> (seq, watermark)."""
    last_segments: dict[int, int]
    """subscription id -> seq of the last segment that this interval wrote for it; 0 for none."""
    unfolded_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it registers itself."""

    worker_id: UUID
    graph_id: int
    graph_version: int
    only: tuple[str, ...] = ()
    """Computations that it takes; empty for all."""
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker whose lease has not expired."""

    worker_id: UUID
    only: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Owned:
    """Who owns an interval; `live` when that worker's lease has not expired. worker_id None: nobody."""

    interval_id: int
    worker_id: UUID | None
    live: bool


@dataclass(frozen=True, slots=True)
class Ownership:
    """The ownership table of one graph in one snapshot: what balancing decides on.

    Attributes:
        graph_version: the one that is deployed.
    """

    workers: tuple[LiveWorker, ...]
    intervals: tuple[Owned, ...]
    graph_version: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """Stored segments above the cursors, for one producing computation's subscriptions."""

    records: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """For people: a takeover, a fence refused, a quarantine. Never needed for correctness."""

    kind: str
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceState:
    """How a source partition stands: what it has published, and whether it is proven idle or stands still."""

    interval_id: int
    low_watermark: Instant
    quiet: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """What people ask of some intervals.

    Attributes:
        requests: records set aside that are to be taken again, oldest first.
        paused: source partitions that stand still until they are resumed.
        releases: parked keys that are to go on.
    """

    requests: tuple[Request, ...] = ()
    paused: frozenset[int] = frozenset()
    releases: tuple[Release, ...] = ()


CommitProbe = Callable[[], Awaitable[None]]


class Store(Protocol):
    """The dozen operations; all coroutines may raise TransientError."""

    async def open(self) -> None:
        """Connect. Raises NotMigratedError, or ConfigError when it is not reachable with these settings."""
        ...

    async def close(self) -> None:
        """Give all connections back."""
        ...

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Register the graph, its intervals and result tables, find it deployed, or bring its additions in.

        What changes raises the version, and fences off every worker that knows the graph as it was. `on_purpose`: a
        person has asked for it, so that settings may change too (see `model.versions`).

        Raises:
            GraphError: a change of meaning, or of settings without being asked for (the differences in words, a
                hint); or a result table of this name exists that is not ours.
            GraphVersionError: this graph is an older version of the one that is deployed.
        """
        ...

    async def register(self, worker: WorkerInfo, ttl_s: float) -> None:
        """Announce a worker with a lease of ttl_s from now on the server's clock.

        Raises:
            GraphVersionError: another version of the graph is deployed than it knows.
        """
        ...

    async def heartbeat(self, worker_id: UUID, ttl_s: float) -> bool:
        """Renew the lease; False when it had expired or the worker is unknown (it owns nothing then)."""
        ...

    async def unregister(self, worker_id: UUID) -> None:
        """Forget a worker that has released everything."""
        ...

    async def ownership(self, graph_id: int) -> Ownership:
        """Who lives, who owns what."""
        ...

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take those of the intervals that no live worker owns, raising their sequencers. None of another version.

        Waits for a commit in flight of the old owner. A row locked by an expired owner's frozen transaction
        is freed by terminating its backend. Intervals that somebody else holds are left out of the answer; those that
        the table says are this worker's own are claimed again (the answer to an earlier claim was lost),
        and so is everything when the worker's own lease has expired.
        """
        ...

    async def release(self, worker_id: UUID, grants: Sequence[Grant]) -> None:
        """Give intervals up, at once claimable by others; stale grants are ignored."""
        ...

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Raise the sequencers of the grants that are still ours (waits for a commit in flight). New grants."""
        ...

    async def read(self, grants: Sequence[Grant], *, state_rows_max: int) -> Sequence[Opened]:
        """Everything an owner needs, per grant, in the order of `grants`. Raises StaleSequencerError."""
        ...

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """STATE entries of these keys (JSON text), folded rows overlaid by unfolded deltas; tombstones left out."""
        ...

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Runs of this source partition that are not expired by its latest dedupe clock, oldest first."""
        ...

    async def poll(self, wants: Sequence[Want], bytes_max: int) -> Sequence[Polled]:
        """Headers and segments above the cursors, in one statement; at most about bytes_max of payload."""
        ...

    async def asked(self, interval_ids: Sequence[int], *, records_max: int, bytes_max: int) -> Asked:
        """What people ask of these intervals: at most records_max of each pile, about bytes_max in all."""
        ...

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitProbe | None = None,
        trial: bool = False,
    ) -> None:
        """Commit a turn: all checkpoints of one graph, in one transaction, fenced by all their grants (I2).

        `inside` (tests) is awaited between the fence and the rest of the transaction. A `trial` does everything,
        deferred constraints included (`SET CONSTRAINTS ALL IMMEDIATE`), and then rolls back: it only says whether
        the database would refuse a value.

        Raises:
            StaleSequencerError: somebody else owns some of them, or a bundle number is not the expected one.
            RequestWithdrawnError: a settled request is one no more.
            CommitUnknownError: the connection was lost around COMMIT.
            PoisonError: the database refused a value. Nothing was committed.
            GraphVersionError, CorruptionError, TransientError.
        """
        ...

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Bring this interval's deltas into rows; returns the new folded bundle. On its own connection.

        `progressed` is called after each piece, for a worker that waits for this and has nothing else to do.
        """
        ...

    async def backlog(self, graph_id: int) -> dict[str, Backlog]:
        """Pending records and bytes per producing computation, counted from stored segments above the cursors."""
        ...

    async def compare_sources(self, graph_id: int, own: Sequence[SourceState]) -> Sequence[SourceState]:
        """Say which of one's own sources are quiet; all sources of the graph as they stand. Advisory, not fenced."""
        ...

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Start a new epoch where one is due and a slot is free; free what can be freed. Returns slots freed."""
        ...

    async def forget_old(
        self, *, now_us: Instant, set_aside_kept_s: float, settled_kept_s: float, events_kept_s: float
    ) -> int:
        """Remove dead letters, late records and events beyond their time, and what was settled long ago; in pieces.

        What people have asked for is not removed. What goes by age is counted. Returns how many rows went: when it is
        not 0, there may be more.

        Args:
            now_us: the earliest that it can be, by the worker's guarded clock: what is removed cannot be had again.
            set_aside_kept_s: how old dead letters and late records may become.
            settled_kept_s: how long they are kept after they were replayed or discarded.
            events_kept_s: how old events may become.
        """
        ...

    async def finished(self, graph_id: int) -> bool:
        """Whether every interval of the graph has reached INSTANT_MAX, and nothing is pending or asked.

        What is taken again behind the end moves no watermark any more.
        """
        ...

    async def now_us(self) -> Instant:
        """The server's clock."""
        ...

    async def notify(self, graph_id: int) -> None:
        """Hint to others that there is something to read; coalesced by the caller."""
        ...

    async def wait_hint(self, graph_id: int, timeout_s: float) -> bool:
        """Wait for a hint from others; False on time-out. Nothing correct depends on it."""
        ...

    async def record_events(self, graph_id: int, events: Sequence[Event]) -> None:
        """Write events for people."""
        ...
