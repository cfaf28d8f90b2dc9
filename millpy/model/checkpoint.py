"""Checkpoint: everything that one bundle of one interval commits, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

import pyarrow as pa

from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant


class Kind(StrEnum):
    """What a keyed entry is. The counters of I8 and a source's position are keyed things too (key `""`)."""

    STATE = "state"  # namespace: cell name; subkey: a map cell's entry (JSON text), else ""
    TIMER = "timer"  # namespace: time domain ("event", "processing", "hold"); subkey: timer name; fire_at: when
    WINDOW = "window"  # namespace: ""; subkey: "<start µs>/<end µs>"; fire_at: when it expires
    POSITION = "position"  # a source partition's position and running maximum
    COUNTER = "counter"  # namespace: what is counted, e.g. "consumed"; subkey: stream; value: absolute count
    PARKED = "parked"
    SET_ASIDE = "set_aside"  # namespace: the pile; subkey: cause; value: what was seen and kept of it
    FLEET = "fleet"  # namespace: what names a device; key: the device; value: see injectors.fleet


@dataclass(slots=True)
class Entries:
    """Changes to keyed things of one kind and namespace: columns of equal length, newest value per (key, subkey).

    Attributes:
        keys: the keys as JSON text (`keys.key_text`), `b'""'` for things without a key.
        key_hashes: their hashes, 0 for things without a key.
        subkeys: "" where the kind has none.
        values: JSON text, or None for a tombstone. Must be storable: see `model.delta.storable`.
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
        """Append one change; each (key, subkey) at most once in one delta."""
        self.keys.append(key)
        self.key_hashes.append(key_hash)
        self.subkeys.append(subkey)
        self.values.append(value)
        self.fire_ats.append(fire_at)

    def part(self, lo: int, hi: int) -> Entries:
        """Those of [lo, hi)."""
        columns = (self.keys, self.key_hashes, self.subkeys, self.values, self.fire_ats)
        return Entries(self.kind, self.namespace, *(column[lo:hi] for column in columns))  # type: ignore[arg-type]

    def clear(self) -> None:
        """Let all of them go."""
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
    """All segments of `producer` up to `seq`, in every subscription of this consumer, are consumed (I3)."""

    producer: int
    seq: int
    watermark: Instant


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """One consumer interval's part of a segment: encoded Arrow, checked on reading."""

    records: int
    payload: bytes
    checksum: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Records of one subscription by one producer's bundle, for consumers that did not take them in memory.

    Attributes:
        subscription_id: which subscription.
        seq: the producer's bundle number (the checkpoint's).
        previous_seq: the seq of the previous segment written for this subscription, 0 for none.
        watermark: the producer's low watermark at seq.
        slices: one per interval of the consuming computation, in the order of its intervals; None where
            that consumer takes its records in memory or has none.
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
    """The dedupe ids that one bundle of a source saw, duplicates too, as a sorted run.

    Attributes:
        ids: 16 bytes each, sorted, concatenated.
        times: int64 little-endian, when each id was last seen on the dedupe clock, in the order of `ids`; one alone
            when it is that of all.
        expires_at: when the last of them leaves the horizon, on the dedupe clock.
        clock: the dedupe clock's running maximum at this commit; runs with expires_at < clock are dead.
        whole: it holds all ids that matter; runs of earlier bundles are dead too.
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
        table_id: the table, as deployed.
        columns: one Arrow array or Python list per column of the table spec, in its order (key columns,
            then `window_start`, `window_end` for windowed tables, then values, then `pane_index`,
            `pane_timing`, `late_count` for windowed tables). Event-time columns are int64 µs; the store
            converts them to timestamptz. `ordinal` for record tables is the row's place in the bundle.
        count: rows.
        first: every row is a first pane (absent from the table unless something is wrong), so it may be copied.
    """

    table_id: int
    columns: list[pa.Array | list[Any]]
    count: int
    first: bool


@dataclass(slots=True)
class AbsorbedRows:
    """Rows to delete from a windowed result table: their windows have become part of others (sessions).

    A row that is absent is passed over, because people delete old ones.

    Attributes:
        table_id: the table, as deployed.
        columns: one column per key column, then `window_start` and `window_end`, as in `ResultRows`.
        count: rows.
    """

    table_id: int
    columns: list[pa.Array | list[Any]]
    count: int


@dataclass(slots=True)
class LateRows:
    """Records too late for their window: columns of equal length, for `mill.late_records`.

    Attributes:
        input: index of the computation's input that they came on.
        whole: which rows stand for a record that missed all of its windows, one a record; empty for all. Only they
            can be replayed: any other record is in a window already, or has a row that stands for it.
    """

    stream: str
    computation: str
    input: int = field(default=0, kw_only=True)
    whole: list[bool] = field(default_factory=list, kw_only=True)
    keys: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    event_times: list[int] = field(default_factory=list)
    watermarks: list[int] = field(default_factory=list)
    window_starts: list[int | None] = field(default_factory=list)
    window_ends: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.payloads)

    def select(self, rows: Sequence[int]) -> LateRows:
        """Some of the rows."""
        return replace(
            self,
            keys=[self.keys[row] for row in rows],
            payloads=[self.payloads[row] for row in rows],
            event_times=[self.event_times[row] for row in rows],
            watermarks=[self.watermarks[row] for row in rows],
            window_starts=[self.window_starts[row] for row in rows],
            window_ends=[self.window_ends[row] for row in rows],
            whole=[self.whole[row] for row in rows] if self.whole else [],
        )


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record set aside: nothing is lost.

    Attributes:
        reason: a word for the class of failure: "undecodable", "oversize", "event_time", "future",
            "refused", "user_error", "key", "windows".
        detail: what exactly, one line; with the traceback for user errors.
        payload: the record's bytes as received, or as JSON when it was a millpy record.
        stream, computation: where it was on its way.
        position: where in the source (file and offset, topic), as JSON-able text.
        input: index of the computation's input that it came on.
        wire: how the payload is read again, as the injector wrote it down; "" for a record of the stream as JSON.
        dedupe_id: the 16-byte id under which it was let in before it was set aside; None when it never had one.
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


Pile = Literal["dead_letters", "late_records"]


@dataclass(frozen=True, slots=True)
class Request:
    """A record set aside that a person wants taken again; the rest as in `DeadLetter` and `LateRows`.

    Attributes:
        pile, id: where it lies.
        interval_id: the interval that set it aside, and whose owner takes it again.
        payload: as a person has corrected it, else as it was set aside.
    """

    pile: Pile
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


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a request: it was taken, or set aside again.

    Attributes:
        letter: why a dead letter is one again.
        watermark: by which a late record is late again.
    """

    request: Request
    letter: DeadLetter | None = None
    watermark: int | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """A source partition stops until a person resumes it, because too much of it is set aside."""

    reason: str


@dataclass(slots=True)
class Checkpoint:
    """All that must change for one bundle of one interval; commits whole or not at all (I2)."""

    grant: Grant
    bundle: int
    """The number that this commit gives the interval: the stored one is bundle - 1."""
    input_watermark: Instant
    low_watermark: Instant
    oldest_work: Instant = INSTANT_MAX
    processing_floor: Instant = INSTANT_MIN
    delta: Delta = ()
    cursors: Sequence[Cursor] = ()
    segments: Sequence[Segment] = ()
    dedupe_run: DedupeRun | None = None
    results: Sequence[ResultRows] = ()
    absorbed: Sequence[AbsorbedRows] = ()
    late: Sequence[LateRows] = ()
    dead_letters: Sequence[DeadLetter] = ()
    settled: Sequence[Settled] = ()
    pause: Pause | None = None
    unkept: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(computation, reason) -> dead letters that are counted and not kept."""
    late_unkept: int = 0
    """Late rows that are counted and not kept."""
    release_ids: Sequence[int] = ()
    """Requests to release parked keys that are done with, whether or not they did anything."""
