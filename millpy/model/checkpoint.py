"""Checkpoint: everything that one bundle of one interval commits, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import pyarrow as pa

from millpy.model.bundle import Bundle
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant


class Kind(StrEnum):
    """The kind of a keyed entry. Counters and positions, which have no key, are stored under the key `""`."""

    STATE = "state"  # namespace: cell name; subkey: a map cell's entry (JSON text), else ""
    TIMER = "timer"  # namespace: time domain ("event", "processing", "hold"); subkey: timer name; fire_at: when
    WINDOW = "window"  # namespace: ""; subkey: "<start µs>/<end µs>"; fire_at: when it expires
    POSITION = "position"  # a source partition's position and running maximum; how far sliding windows have fired
    COUNTER = "counter"  # namespace: the counter, e.g. "consumed"; subkey: stream; value: absolute count (I8)
    PARKED = "parked"  # a parked key, or a record that waits behind it: see operators/parking.py
    SAMPLE = "sample"  # namespace: a table of records; subkey: cause; value: counts of seen and kept records
    DISORDER = "disorder"  # namespace: "", or a site; subkey: "counted" or "learned"; value: see ingest/disorder.py
    LOOKUP = "lookup"  # subkey: a lookup table; value: the version that the last bundle saw, see model/lookup.py
    SITE = "site"  # namespace: "source", or the producer's interval; subkey: the site; value: see model/sites.py
    FLEET = "fleet"  # namespace: the fields that name a device; key: the device; value: see ingest/device_stats.py


@dataclass(slots=True)
class Entries:
    """Changes to keyed entries of one kind and namespace, as columns of equal length; one change per (key, subkey).

    Attributes:
        keys: keys as JSON text (`keys.key_text`), `b'""'` for entries without a key.
        key_hashes: hashes of the keys, 0 for entries without a key.
        subkeys: subkeys; "" where the kind has none.
        values: JSON text, or None for a tombstone. Must be storable: see `model.delta.encode_value`.
        fire_ats: µs, for timers and windows; INSTANT_MAX otherwise.
    """

    kind: Kind
    namespace: str
    keys: list[bytes] = field(default_factory=list)
    key_hashes: list[int] = field(default_factory=list)
    subkeys: list[str] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    fire_ats: list[int] = field(default_factory=list)

    def add(self, key: bytes, key_hash: int, subkey: str, value: bytes | None, fire_at: int = INSTANT_MAX) -> None:
        """Append one change."""
        self.keys.append(key)
        self.key_hashes.append(key_hash)
        self.subkeys.append(subkey)
        self.values.append(value)
        self.fire_ats.append(fire_at)

    def extend(self, more: Entries) -> None:
        """Append the changes of other entries of the same kind and namespace."""
        self.keys += more.keys
        self.key_hashes += more.key_hashes
        self.subkeys += more.subkeys
        self.values += more.values
        self.fire_ats += more.fire_ats

    def part(self, lo: int, hi: int) -> Entries:
        """Return the changes at the positions [lo, hi)."""
        columns = (self.keys, self.key_hashes, self.subkeys, self.values, self.fire_ats)
        return Entries(self.kind, self.namespace, *(column[lo:hi] for column in columns))  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Entries:
        """Return the changes at some positions."""
        columns = (self.keys, self.key_hashes, self.subkeys, self.values, self.fire_ats)
        return Entries(self.kind, self.namespace, *([column[row] for row in rows] for column in columns))  # type: ignore[arg-type]

    def clear(self) -> None:
        """Remove all changes."""
        for column in (self.keys, self.key_hashes, self.subkeys, self.values, self.fire_ats):
            column.clear()

    def __len__(self) -> int:
        return len(self.keys)


Delta = tuple[Entries, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to write one interval, while the worker's lease lasts (I1)."""

    interval_id: int
    sequencer: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """A consumed position: all segments of `producer` up to `seq`, in every subscription of this consumer (I3)."""

    producer: int
    seq: int
    watermark: Instant


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """One consumer interval's part of a segment: records as Arrow IPC, and a checksum that readers verify."""

    records: int
    payload: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The records that one bundle produced for one subscription, stored for consumers that do not get them in memory.

    Attributes:
        subscription_id: id of the subscription.
        seq: the producer's bundle number.
        previous_seq: seq of the previous segment of this subscription, 0 for none.
        watermark: the producer's low watermark at `seq`.
        slices: one per interval of the consuming computation, in the order of its intervals; None where that consumer
            takes its records in memory or has none.
        event_time_lo, event_time_hi: smallest and largest event time.
    """

    subscription_id: int
    seq: int
    previous_seq: int
    watermark: Instant
    slices: tuple[StoredSlice | None, ...]
    event_time_lo: Instant
    event_time_hi: Instant


@dataclass(frozen=True, slots=True)
class DedupeRun:
    """The dedupe ids that one bundle of a source saw, including duplicates, as a sorted run.

    Attributes:
        ids: sorted ids of 16 bytes, concatenated.
        times: when each id was last seen on the dedupe clock, in the order of `ids`, as int64 little-endian; a single
            time if it applies to all ids. `operators/kept_records.py` has more than the time of each.
        expires_at: when the last id leaves the horizon, on the dedupe clock.
        clock: the dedupe clock's running maximum at this commit; runs with expires_at < clock are dead.
        whole: whether the run has all live ids, so that runs of earlier bundles are dead, too.
    """

    ids: bytes
    times: bytes
    expires_at: Instant
    clock: Instant
    whole: bool = False


@dataclass(slots=True)
class ResultRows:
    """Rows for one result table.

    Attributes:
        table_id: id of the table, as deployed.
        columns: one Arrow array or Python list per column of the table spec, in its order (key columns, then
            `window_start`, `window_end` for windowed tables, then values, then `pane_index`, `pane_timing`,
            `late_count` for windowed tables). Event-time columns are int64 µs; the store converts them to timestamptz.
            `ordinal` for record tables is the row's place in the bundle.
        count: number of rows.
        first: whether every row is a first pane (absent from the table unless something is wrong), so that the rows may
            be copied.
    """

    table_id: int
    columns: list[pa.Array | list[Any]]
    count: int
    first: bool


@dataclass(slots=True)
class DeletedRows:
    """Rows to delete from a windowed result table, before others are written.

    Their sessions were merged into others, or every record of their windows was retracted. A row that no longer exists
    is ignored: an administrator may have deleted old rows.

    Attributes:
        table_id: id of the table, as deployed.
        columns: one column per key column, then `window_start` and `window_end`, as in `ResultRows`.
        count: number of rows.
    """

    table_id: int
    columns: list[pa.Array | list[Any]]
    count: int


@dataclass(slots=True)
class LateRows:
    """Records too late for their window, or to be deduplicated: columns of equal length, for `mill.late_records`.

    Attributes:
        input: index of the computation's input of the records.
        whole: rows that represent a record that missed all of its windows, one per record; empty if all rows do. Only
            these rows can be replayed: any other record is in a window already, or has another row that represents it.
        retracts: whether each record is a retraction; empty if none is.
    """

    stream: str
    computation: str
    input: int = field(default=0, kw_only=True)
    whole: list[bool] = field(default_factory=list, kw_only=True)
    retracts: list[bool] = field(default_factory=list, kw_only=True)
    keys: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    event_times: list[int] = field(default_factory=list)
    watermarks: list[int] = field(default_factory=list)
    window_starts: list[int | None] = field(default_factory=list)
    window_ends: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.payloads)

    def select(self, rows: Sequence[int]) -> LateRows:
        """Return the given rows, in the given order."""
        return replace(
            self,
            keys=[self.keys[row] for row in rows],
            payloads=[self.payloads[row] for row in rows],
            event_times=[self.event_times[row] for row in rows],
            watermarks=[self.watermarks[row] for row in rows],
            window_starts=[self.window_starts[row] for row in rows],
            window_ends=[self.window_ends[row] for row in rows],
            whole=[self.whole[row] for row in rows] if self.whole else [],
            retracts=[self.retracts[row] for row in rows] if self.retracts else [],
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that could not be processed, kept so that it is not lost.

    Attributes:
        reason: "undecodable", "oversize", "event_time", "future", "refused", "user_error", "key" or "windows".
        detail: the failure in one line.
        payload: the record's bytes as received, or as JSON if it was a millpy record.
        stream, computation: stream of the record, and computation that rejected it.
        position: position in the source (file and offset, topic), as text that JSON can hold.
        traceback: traceback of a user error.
        input: index of the computation's input of the record.
        wire: encoding of the payload, as the injector recorded it; "" for a record of the stream as JSON.
        dedupe_id: 16-byte id under which the record was accepted before it was dead-lettered; None if it has none.
        retracts: whether the record is a retraction.
    """

    reason: str
    detail: str
    payload: bytes
    stream: str
    computation: str
    position: str = ""
    traceback: str = ""
    event_time: int | None = None
    key: bytes | None = None
    input: int = 0
    wire: str = ""
    dedupe_id: bytes | None = None
    retracts: bool = False


RecordTableName = Literal["dead_letters", "late_records"]


@dataclass(frozen=True, slots=True)
class PastWindow:
    """The finished window that a late record is replayed into.

    Attributes:
        key: the key as JSON text.
        start, end: the window, in µs.
        whole: whether the record is counted as late; one that missed several windows is counted once.
        row: the window's row in the result table as a JSON object; None without a row.
        table_id: id of the result table; None if the computation writes none.
        newest_pane: index of the newest pane in the table's history, where a repair adds panes, too; -1 without any.
        dropped_to: rows of windows that end before it were dropped, because the table has a retention.
        recomputed: the accumulators of the window by an archive, as JSON; None if nobody has recomputed it.
        recomputed_fits: whether the row is still the one that they give.
        overlapping: without a row, the first rows of the key whose windows intersect this one, at most two, each with
            the newest pane of its history: a session may contain it.
    """

    key: bytes
    start: int
    end: int
    whole: bool
    row: bytes | None = None
    table_id: int | None = None
    newest_pane: int = -1
    dropped_to: int = INSTANT_MIN
    recomputed: bytes | None = None
    recomputed_fits: bool = False
    overlapping: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request to replay a dead letter or a late record. Other attributes are those of `DeadLetter`.

    Attributes:
        table, id: table and row of the record.
        interval_id: interval that rejected the record; its owner replays it.
        payload: payload of the record, or its correction by an operator.
        into_window: whether the record is to be added to finished windows that it is too late for.
        window: the finished window that a late record is to be added to; None to replay it as a record.
    """

    table: RecordTableName
    id: int
    interval_id: int
    stream: str
    computation: str
    payload: bytes
    input: int = 0
    wire: str = ""
    position: str = ""
    event_time: int | None = None
    dedupe_id: bytes | None = None
    retracts: bool = False
    into_window: bool = False
    window: PastWindow | None = None


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of a request. The record was accepted if `dead_letter` and `watermark` are None.

    Attributes:
        dead_letter: the new dead letter, if the record was dead-lettered again.
        watermark: the watermark that judged the record, if it was late again.
        detail: why a late record could not be added to its finished window, in one line.
    """

    request: Request
    dead_letter: DeadLetter | None = None
    watermark: int | None = None
    detail: str = ""

    @property
    def corrects(self) -> bool:
        """Whether the commit changes the row of a finished window."""
        return self.request.window is not None and self.dead_letter is None and self.watermark is None


@dataclass(frozen=True, slots=True)
class ExpectedRecord:
    """A record that a dead letter became on its way to one consumer, for whose finished windows an operator wants it.

    Attributes:
        dead_letter_id: the dead letter.
        computation, input: the consumer, and the index of its input.
        event_time: its event time.
        payload: as a late record of it has it.
    """

    dead_letter_id: int
    computation: str
    input: int
    event_time: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """A source partition stops reading until an operator resumes it: too many of its records became dead letters."""

    reason: str


NOTICE_NAMES_MAX = 10
"""How many names a notice has."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a bundle tells operators, of devices for example. The commit stores it as an event, or adds it to one.

    Notices of one kind and interval are one event a minute, however many there are.

    Attributes:
        kind: kind of the event.
        count: number of devices, or of records.
        names: the devices, or causes; at most NOTICE_NAMES_MAX, each of them once.
    """

    kind: str
    count: int
    names: Sequence[str]


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """A file of an archive, as the manifest lists it.

    Attributes:
        path: path below the archive's directory.
        records: number of records.
        size: bytes.
        event_time_lo, event_time_hi: smallest and largest event time.
        partitions: source partition or key interval -> numbers of its first and last bundle.
    """

    path: str
    records: int
    size: int
    event_time_lo: Instant
    event_time_hi: Instant
    partitions: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StatementRows:
    """Records for which the commit runs a user's statement, once for each, in order.

    Attributes:
        sink: name of the sink, whose statement the store knows from the deployment.
        rows: the parameters of each run, as text that PostgreSQL reads; None for NULL.
    """

    sink: str
    rows: Sequence[tuple[str | None, ...]]


@dataclass(frozen=True, slots=True)
class OutboxRows:
    """The messages that one bundle of a sink has for the other side, in order.

    Attributes:
        position: number of the first message; the messages of an interval are numbered from 0, without a gap.
        records: number of messages, at least one.
        payload: the messages as columns, encoded (`sinks/messages.py`).
        checksum: checksum of the payload.
    """

    position: int
    records: int
    payload: bytes
    checksum: int

    @property
    def end(self) -> int:
        """The position behind its last message."""
        return self.position + self.records


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message that the other side of a sink refuses, or that waits behind such a message of its key.

    Attributes:
        message: the message, as a row of an outbox.
        key: its key as JSON text.
        record: the record that it was made of, as JSON.
        attempts: how often it was sent; 0 while it waits behind another one.
        since_us: when it was refused first; while it waits behind another one, since when.
        why: why it was refused last; "" while it waits behind another one.
        parked: whether its key is given up until an operator releases it.
    """

    message: OutboxRows
    key: bytes
    record: bytes
    attempts: int
    since_us: Instant
    why: str
    parked: bool

    @property
    def position(self) -> int:
        """Its number in its interval."""
        return self.message.position


@dataclass(frozen=True, slots=True)
class Settlement:
    """What becomes of refused messages of an interval, beside its next step.

    Attributes:
        letters: position -> the dead letter that the message becomes.
        released: keys (JSON text) that are no longer parked.
    """

    letters: Mapping[int, DeadLetter]
    released: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class OutboxState:
    """How far the outbox of an interval is filled and delivered.

    Attributes:
        head: the position of the next message to store.
        delivered: the other side has all messages before this position, except those that it refuses.
        size: bytes of the stored rows.
        refused: messages that wait for another attempt, by position.
    """

    head: int = 0
    delivered: int = 0
    size: int = 0
    refused: Sequence[RefusedMessage] = ()


@dataclass(slots=True)
class Checkpoint:
    """All changes for one bundle of one interval; commits as a whole or not at all (I2)."""

    grant: Grant
    bundle: int
    """The number that this commit gives the interval: the stored one is bundle - 1."""
    input_watermark: Instant
    low_watermark: Instant
    oldest_work: Instant = INSTANT_MAX
    """Smallest event time of pending work; INSTANT_MAX if there is none."""
    processing_floor: Instant = INSTANT_MIN
    """Processing time of this bundle; later bundles of the interval have no earlier one."""
    delta: Delta = ()
    counters: Mapping[tuple[str, str], int] | None = None
    """All counters of the interval as of this bundle, (counter, subkey) -> count: those that the delta has, and those
    that have not changed. None if only the delta has counters; readers then look through the deltas before it, too."""
    cursors: Sequence[Cursor] = ()
    segments: Sequence[Segment] = ()
    dedupe_run: DedupeRun | None = None
    results: Sequence[ResultRows] = ()
    deleted: Sequence[DeletedRows] = ()
    late: Sequence[LateRows] = ()
    dead_letters: Sequence[DeadLetter] = ()
    outcomes: Sequence[RequestOutcome] = ()
    expected: Sequence[ExpectedRecord] = ()
    """Records of replayed dead letters that are to be added to windows that they are too late for."""
    pause: Pause | None = None
    unstored: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(computation, reason) -> number of dead letters that are counted but not stored."""
    unstored_late: int = 0
    """Number of late rows that are counted but not stored."""
    notices: Sequence[Notice] = ()
    """Notices for operators, at most one of each kind."""
    release_ids: Sequence[int] = ()
    """Finished requests to release parked keys, whether or not they had an effect."""
    archived: Sequence[Bundle] = ()
    """Bundles that an archive takes; the store of an archiver writes them to `files`."""
    files: Sequence[ArchivedFile] = ()
    """Files with all records of `archived`, which the commit adds to the manifest."""
    statements: Sequence[StatementRows] = ()
    """Records for which the commit runs statements of users."""
    outbox: OutboxRows | None = None
    """Messages that a sink delivers after the commit."""
    settlement: Settlement | None = None
    """What becomes of refused messages of a sink."""
