"""The Store protocol: the persistence operations that the runtime needs. Internal, not an extension point for users.

tests/conformance/store_suite.py holds two implementations equal: `store.memory.MemoryStore`, which models snapshots,
lock waits and commits that land after the client lost its connection, and `store.postgres.PostgresStore`.

Errors: OwnershipError, TransientError (CommitUnknownError from `commit` only), PoisonError (from `commit` only),
GraphVersionError, CorruptionError. A method that raises a TransientError other than CommitUnknownError has changed
nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol
from uuid import UUID

from millpy.errors import TransientError
from millpy.model.checkpoint import Checkpoint, DedupeRun, Entries, Grant, OutboxRows, RefusedMessage, Request
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.lease import Renewal
from millpy.model.lookup import LookupTable, TableVersion
from millpy.model.stage import UNBOUNDED, Release, StoredInterval
from millpy.model.stored_windows import ClosedKind, WindowQuery
from millpy.model.time import Instant


@dataclass(frozen=True, slots=True)
class SegmentQuery:
    """A request of one consumer interval to read one producer interval.

    Attributes:
        consumer, producer: interval ids.
        subscription_ids: every subscription of this consumer to streams of this producer.
        consumer_index: position of the consumer's slice in each segment.
        after: the cursor; the consumer reads segments with seq > after.
    """

    consumer: int
    consumer_index: int
    producer: int
    subscription_ids: tuple[int, ...]
    after: int


@dataclass(frozen=True, slots=True)
class PolledSegment:
    """A segment as one consumer reads it. `payload` is the consumer's slice; None if that slice is empty."""

    subscription_id: int
    seq: int
    previous_seq: int
    watermark: Instant
    records: int
    payload: bytes | None
    checksum: int


@dataclass(frozen=True, slots=True)
class PollResult:
    """The answer to one SegmentQuery, read in one statement and so in one snapshot.

    Attributes:
        segments: ordered by (seq, subscription); each seq is complete.
        head_seq, head_watermark: the producer's header in the same snapshot. Use them only when `truncated` is false:
            then `segments` holds everything up to head_seq.
    """

    query: SegmentQuery
    segments: tuple[PolledSegment, ...]
    head_seq: int
    head_watermark: Instant
    truncated: bool


@dataclass(frozen=True, slots=True)
class OwnerSnapshot:
    """The stored data of one interval. The owner reads it after its claim, in a new statement."""

    recovered: StoredInterval
    cursors: dict[int, tuple[int, Instant]]
    """Producer interval -> (seq, watermark)."""
    last_segments: dict[int, int]
    """Subscription id -> seq of the last segment that this interval wrote for it; 0 before the first."""
    unfolded_bytes: int


Engine = Literal["workers", "spark"]
"""What computes a generation."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The description with which a worker registers. `engine` is "spark" for the driver of a streaming query."""

    worker_id: UUID
    graph_id: int
    graph_version: int
    only: tuple[str, ...] = ()
    """Names of the computations that the worker runs; empty for all."""
    host: str = ""
    pid: int = 0
    engine: Engine = "workers"


@dataclass(frozen=True, slots=True)
class LiveWorker:
    """A worker whose lease has not expired. `only` names the computations that it runs; empty for all."""

    worker_id: UUID
    only: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class IntervalOwner:
    """The owner of an interval.

    Attributes:
        worker_id: None when the interval has no owner.
        live: whether the owner's lease has not expired.
    """

    interval_id: int
    worker_id: UUID | None
    live: bool


@dataclass(frozen=True, slots=True)
class Ownership:
    """The ownership table of one graph in one snapshot: the input of balancing.

    Attributes:
        intervals: every interval of the graph, with or without an owner.
        graph_version: the deployed version.
    """

    workers: tuple[LiveWorker, ...]
    intervals: tuple[IntervalOwner, ...]
    graph_version: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The records and bytes that one computation has written and that consumers have not read yet."""

    records: int
    bytes: int


ClosedEnds = Callable[[Mapping[str, Instant]], Mapping[str, Instant]]
"""Newest event time of each source -> the end up to which the windows of each windowed step are closed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A note for operators, such as a takeover or a refused commit. Workers write events and never read them."""

    kind: str
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceState:
    """The low watermark of a source partition. `quiet` tells whether the partition is proven idle, or paused."""

    interval_id: int
    low_watermark: Instant
    quiet: bool


@dataclass(frozen=True, slots=True)
class TableText:
    """All rows of a lookup table, as one statement found them.

    Attributes:
        rows: their number.
        size: their bytes as JSON text.
        read_at: when they were read, by the clock of the database.
        text: each row as a JSON object, one a line, by key; empty if there are too many rows or bytes.
    """

    rows: int
    size: int
    read_at: Instant
    text: bytes


@dataclass(frozen=True, slots=True)
class LookupReport:
    """What a worker knows of a lookup table, for operators.

    Attributes:
        computations: those that need the table, among the ones that the worker runs.
        version: the version in use; None until the first read has succeeded.
        error: why the last read failed; "" if it succeeded.
    """

    worker_id: UUID
    table: LookupTable
    computations: tuple[str, ...]
    version: TableVersion | None
    error: str


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Whether a source partition is connected, for operators; `attempts` to connect have failed since `since_us`.

    Other workers reach its owner at `address`, if the source has one.
    """

    interval_id: int
    connected: bool
    since_us: Instant
    why: str
    attempts: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class SinkReport:
    """How far the messages of one interval of a sink are delivered, and whether it is connected.

    Attributes:
        delivered: the other side has all messages before this position, except those that it refuses.
        connected, since_us, why, attempts: as in `SourceReport`.
        refused: the messages that have been refused since the last report, or wait behind one, or have changed.
        accepted: positions of messages that had been refused and are delivered now.
    """

    grant: Grant
    delivered: int
    connected: bool
    since_us: Instant
    why: str
    attempts: int
    refused: tuple[RefusedMessage, ...] = ()
    accepted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingRequests:
    """Operators' requests for some intervals.

    Attributes:
        requests: dead letters and late records to replay, oldest first.
        paused: source partitions that are paused until an operator resumes them.
        releases: parked keys to release.
    """

    requests: tuple[Request, ...] = ()
    paused: frozenset[int] = frozenset()
    releases: tuple[Release, ...] = ()


CommitFailpoint = Callable[[], Awaitable[None]]
"""Called inside a transaction, between the fence and the rest; tests pause or fail there."""


def check_fold(grant: Grant, stored: int, known: int) -> None:
    """Check that the store's folded bundle is not behind the one that an owner knows of.

    A server that crashes may lose the last folds, which are repeated. An owner learns of the crash by its connections,
    but may ask by a new one before it does.

    Raises:
        TransientError: it is behind.
    """
    if stored < known:
        raise TransientError(
            f"interval {grant.interval_id} is folded up to bundle {stored}, not {known}: the database lost a fold"
        )


class Store(Protocol):
    """The persistence of one worker. Every method may raise TransientError."""

    async def open(self) -> None:
        """Connect. Raises NotMigratedError, ConfigError (wrong settings) or StoreUnavailableError."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...

    async def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Register a graph, or change the deployed one to match `spec`. Return its deployment.

        A change raises the version, and fences off every worker that knows the earlier one. `on_purpose` says that
        an operator requested the change, so that settings may change too (see `model.versions`).

        Raises:
            GraphError: `spec` does not fit the stored data, or changes settings without `on_purpose` (the message
                lists the differences); or another relation has the name of a result table.
            GraphVersionError: the deployed version of this graph is newer.
        """
        ...

    async def register(self, worker: WorkerInfo, ttl_s: float) -> None:
        """Register a worker, which owns nothing yet, with a lease of ttl_s seconds by the server's clock.

        Raises:
            GraphVersionError: the worker does not know the deployed version of the graph.
            OtherEngineError: Spark computes the graph.
        """
        ...

    async def heartbeat(self, worker_id: UUID, ttl_s: float) -> Renewal | None:
        """Renew the lease. Return None if it has expired or the worker is not registered: it then owns nothing."""
        ...

    async def unregister(self, worker_id: UUID) -> None:
        """Delete the registration of a worker that has released everything."""
        ...

    async def ownership(self, graph_id: int) -> Ownership:
        """Read the live workers and the owner of each interval."""
        ...

    async def claim(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Claim the intervals that no live worker owns, and raise their sequencers. Return the grants.

        A claim waits for a commit in flight of the old owner. When an expired owner's frozen transaction locks the
        row, the claim terminates its backend. An interval that the table already assigns to this worker is claimed
        again, because the answer to the earlier claim was lost. The answer leaves out intervals of a graph version
        that the worker does not know, and intervals that another worker holds; it is empty when the worker's own
        lease has expired.
        """
        ...

    async def seize(self, worker_id: UUID, interval_ids: Sequence[int]) -> Sequence[Grant]:
        """Take intervals over from their owners, live or not, whose grants are stale from then on.

        Waits for commits in flight. The answer is empty when the worker's own lease has expired.
        """
        ...

    async def release(self, worker_id: UUID, grants: Sequence[Grant]) -> None:
        """Release intervals, so that other workers can claim them at once. Stale grants are ignored."""
        ...

    async def take_over_from_self(self, worker_id: UUID, grants: Sequence[Grant]) -> Sequence[Grant]:
        """Wait for commits in flight, then raise the sequencers of grants that are still current.

        Return the new grants, without those that were stale.
        """
        ...

    async def read(
        self,
        grants: Sequence[Grant],
        *,
        state_rows_max: int,
        closed_rows_max: int = UNBOUNDED,
        closed: ClosedKind = ClosedKind.WINDOWS,
    ) -> Sequence[OwnerSnapshot]:
        """Read the stored data of owned intervals, in the order of `grants`.

        An interval with more than `state_rows_max` rows of state comes without its state. One with more than
        `closed_rows_max` rows of windows comes without the rows of those that end by its low watermark, which have
        fired; their subkeys are in `StoredInterval.closed_windows`, and their unfolded deltas in the entries. Panes
        that wait come in any case. Of sessions, only the bounds of their ends are known (`StoredInterval.closed_ends`).
        The entries also have the tombstones of windows if windows that have not fired stay, too
        (`StoredInterval.unfired_windows`, and `unfired_from` of sessions); and those of sessions whenever
        `closed_rows_max` is given, because sessions that are read may leave memory before the tombstones are folded.

        Raises:
            StaleSequencerError: one of the grants is stale.
        """
        ...

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        """Read the STATE entries of these keys (JSON text): folded rows overlaid by unfolded deltas, no tombstones.

        Raises:
            StaleSequencerError: the grant is stale.
        """
        ...

    async def load_windows(
        self, grant: Grant, folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]
    ) -> Entries:
        """Read the folded rows of windows, without deltas: changes above the folded bundle are not in them.

        Args:
            grant: the caller's grant.
            folded_bundle: the folded bundle that the caller knows of.
            subkeys: the windows.
            keys: the key (JSON text) of each.

        Raises:
            StaleSequencerError: the grant is stale.
            TransientError: the store has lost that fold; the caller's state is not that of the store.
        """
        ...

    async def query_windows(self, grant: Grant, folded_bundle: int, query: WindowQuery) -> Entries:
        """Read the folded rows that a query asks for, without deltas; raise the errors of `load_windows`.

        Sessions that have ended come without values.
        """
        ...

    async def load_dedupe_runs(self, grant: Grant) -> Sequence[DedupeRun]:
        """Read the dedupe runs of this source partition that have not expired by its dedupe clock, oldest first."""
        ...

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        """Read the producers' headers, and about `bytes_max` of the segments above the cursors, in one statement.

        Return one result per query, in the order of `queries`, but none for a producer that does not exist.
        """
        ...

    async def read_requests(self, interval_ids: Sequence[int], *, records_max: int, bytes_max: int) -> PendingRequests:
        """Read the requests for these intervals: at most records_max of each table, about bytes_max in all."""
        ...

    async def commit(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        graph_version: int,
        inside: CommitFailpoint | None = None,
        trial: bool = False,
    ) -> None:
        """Commit a turn: all checkpoints of one graph, in one transaction, fenced by all their grants (I2).

        `inside` (tests) is awaited between the fence and the rest of the transaction. A `trial` executes everything,
        including deferred constraints (`SET CONSTRAINTS ALL IMMEDIATE`), and then rolls back. It finds out whether the
        database refuses a value.

        Raises:
            StaleSequencerError: another worker owns some of the intervals, or a bundle number is not the expected one.
            RequestWithdrawnError: an operator has withdrawn a request that the turn settles.
            CommitUnknownError: the connection was lost around COMMIT.
            PoisonError: the database refused a value. Nothing was committed.
            GraphVersionError, CorruptionError, TransientError.
        """
        ...

    async def fold(self, grant: Grant, *, bytes_max: int, progressed: Callable[[], None] | None = None) -> int:
        """Fold about `bytes_max` of this interval's oldest deltas into rows. Return the last folded bundle.

        `progressed` is called after each piece.

        Raises:
            StaleSequencerError: the grant is stale.
        """
        ...

    async def delete_windows(
        self, grant: Grant, subkeys: Sequence[str], *, progressed: Callable[[], None] | None = None
    ) -> None:
        """Delete the folded rows of windows, of all keys: windows that have expired in bundles that are committed.

        `progressed` is called after each piece.

        Raises:
            StaleSequencerError: the grant is stale.
        """
        ...

    async def backlog(self, graph_id: int, *, without: Sequence[str] = ()) -> dict[str, Backlog]:
        """Return the records and bytes of stored segments above the cursors, by producing computation.

        `without` names consumers whose cursors do not count.
        """
        ...

    async def compare_sources(self, graph_id: int, own: Sequence[SourceState]) -> Sequence[SourceState]:
        """Record which of the worker's sources are quiet. Return the states of all sources of the graph.

        The record is advisory: the fence does not protect it.
        """
        ...

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        """Start a new epoch in each ring where one is due and a slot is free, and free the slots that nothing needs.

        An epoch is due after `epoch_s` seconds or `epoch_bytes` bytes. Return the number of freed slots.
        """
        ...

    async def forget_old(
        self, *, now_us: Instant, dead_letter_kept_s: float, settled_kept_s: float, events_kept_s: float
    ) -> int:
        """Delete dead letters, late records and events beyond their age, and records settled long ago; in pieces.

        Requested records are kept. Deletions by age are counted. Return the number of deleted rows: when it is not 0,
        more rows may be due.

        Args:
            now_us: the earliest possible present, by the worker's guarded clock, because a deletion is final.
            dead_letter_kept_s: maximum age of dead letters and late records.
            settled_kept_s: how long they are kept after they were replayed or discarded.
            events_kept_s: maximum age of events.
        """
        ...

    async def drop_expired(self) -> None:
        """Drop the expired rows of result tables, which `forget_old` does at intervals, at once."""
        ...

    async def archives_are_available(self) -> bool:
        """Tell whether the files of archives can be written, where `commit` has raised ArchiveUnavailableError."""
        ...

    async def reopen_source(
        self, graph_id: int, grant: Grant, watermark: Instant, closed_ends: ClosedEnds, told: Event
    ) -> Instant | None:
        """Let a source partition that has ended be read on: set the end of its watermark back.

        The watermarks of the partition, and of the intervals behind it that have reached the end, become finite again
        in one transaction. Their owners lose them. What the end has closed stays closed: each windowed step gets its
        closed end as a floor (`StoredInterval.horizon_floor`), and the ids of dedupe steps and the rows of joins, which
        the end has expired, are deleted.

        Args:
            graph_id: the graph.
            grant: the grant on the partition.
            watermark: the watermark that it had before its end.
            closed_ends: newest event time of each source -> the end up to which the windows of each step are closed.
            told: the event to record with it.

        Returns:
            The watermark from which the partition continues: `watermark`, or that of a step behind it which has other
            inputs and is further. None, without a change, if the end is not stored yet, or not processed by all steps.

        Raises:
            StaleSequencerError: the grant is not current.
            TransientError: a commit in flight does not end.
        """
        ...

    async def finished(self, graph_id: int, *, without: Sequence[str] = ()) -> bool:
        """Tell whether the graph has no work left, apart from that of the computations in `without`.

        Every low watermark is INSTANT_MAX, no record waits for a consumer, no message in an outbox or because it is
        refused, and no replay or release is requested.
        A replay after the end of the input does not move a watermark.
        """
        ...

    async def now_us(self) -> Instant:
        """Read the server's clock."""
        ...

    async def notify(self, graph_id: int) -> None:
        """Hint to other workers that there are new segments or free intervals. A lost hint only delays them."""
        ...

    async def wait_hint(self, graph_id: int, timeout_s: float) -> bool:
        """Wait for a hint from another worker. Return False on timeout. Correctness does not depend on hints."""
        ...

    async def record_events(self, graph_id: int, events: Sequence[Event]) -> None:
        """Store events for operators."""
        ...

    async def read_lookup_table(self, table: LookupTable, *, rows_max: int, bytes_max: int) -> TableText:
        """Read an ordinary table in one statement, beside all turns; without the rows if there are too many.

        Raises:
            TableLoadError: the table is missing or altered, the read takes too long, or rights are missing.
            TransientError: the database cannot be reached.
        """
        ...

    async def report_lookup_table(self, report: LookupReport) -> None:
        """Store what a worker knows of a lookup table, in the place of its last report."""
        ...

    async def report_sources(self, worker_id: UUID, reports: Sequence[SourceReport]) -> None:
        """Store whether source partitions are connected; those that the worker does not own are left out."""
        ...

    async def source_addresses(self, interval_ids: Sequence[int]) -> Mapping[int, str]:
        """Return the address that the live owner of each source partition has reported; only those that have one."""
        ...

    async def read_outbox(self, grant: Grant, position: int, bytes_max: int) -> Sequence[OutboxRows]:
        """Read rows of a sink's outbox: the one that holds a position, and those after it, of about `bytes_max`.

        At least one row is read, if there is any.
        """
        ...

    async def record_delivered(self, reports: Sequence[SinkReport]) -> None:
        """Store how far outboxes are delivered and what is refused, and delete the rows whose messages all are settled.

        A position that is behind the stored one changes nothing. A report under an earlier grant than that of an owner
        who has read the outbox since is stale, too, even if it was sent before.

        Raises:
            StaleSequencerError: a grant is stale; those that are current are recorded.
        """
        ...
