"""The interface between the engine and a computation: steps from bundles and state to data.

A `Stage` is the immutable logic of one deployed computation (windowed or user code). `open` makes a `StageInterval`:
the soft state of one key interval under one sequencer. The engine calls, from one thread at a time:

    missing_keys, load_state    to load the state that a step needs and that is not in memory
    step                        to apply a turn's work; it changes nothing but the soft state
    oldest_work, next_due       to learn what holds the watermark back, and when to step without records
    on_folded                   to allow that values leave memory

After a failed or unknown commit the engine drops the StageInterval and opens a new one from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import (
    DeadLetter,
    DedupeRun,
    DeletedRows,
    Delta,
    Entries,
    LateRows,
    Notice,
    OutboxRows,
    OutboxState,
    PastWindow,
    ResultRows,
    StatementRows,
)
from millpy.model.identity import Identity
from millpy.model.keys import Key
from millpy.model.lookup import Tables
from millpy.model.record import Records, RecordType
from millpy.model.step_progress import StepProgress
from millpy.model.stored_windows import QueryWindows, SpanOfEnds, no_query
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant

UNBOUNDED = 2**62

LoadWindows = Callable[[int, Sequence[str], Sequence[bytes]], Entries]
"""(folded bundle, subkeys, keys) -> stored windows; see `Store.load_windows`."""


def no_windows(folded_bundle: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
    """Raise: a stage that is stepped without a store must have all of its windows in memory."""
    raise AssertionError(f"{len(subkeys)} windows are only in the store")


@dataclass(slots=True)
class InputBundle:
    """A bundle, and the bound on the watermarks that judge it.

    Attributes:
        cap: the smallest watermark of the *other* producers, at the positions consumed when this bundle is taken. A row
            with a watermark is judged by min(row watermark, cap), a row without one by `Work.watermark_before`.
    """

    bundle: Bundle
    cap: Instant


@dataclass(frozen=True, slots=True)
class Release:
    """An operator's request to release a parked key.

    Attributes:
        key: the key as JSON text.
        ticket: identifies the parking; a request for another parking has no effect.
        discard: whether to dead-letter the record or timer at which the key stopped.
    """

    release_id: int
    interval_id: int
    key: bytes
    ticket: int
    discard: bool


@dataclass(frozen=True, slots=True)
class WindowCorrection:
    """A late record that an operator adds to its finished window (or takes out of it, if it is a retraction).

    Attributes:
        request_id: number of the request.
        window: the window, with its stored row.
        record: the record.
        event_time: its event time.
        retracts: whether it is a retraction.
    """

    request_id: int
    window: PastWindow
    record: Any
    event_time: Instant
    retracts: bool


@dataclass(slots=True)
class Work:
    """The work of one interval in one turn. `arrived` may be empty: then only the watermark or the clock moved.

    Attributes:
        bundle: bundle number that the commit will give the interval.
        arrived: bundles of records, in order.
        watermark_before: input watermark before the turn.
        watermark: input watermark after all input; windows close and timers fire by it at the end.
        now_us: processing time, which never runs backwards.
        releases: parked keys to release.
        panes_max: maximum of panes to emit because the watermark makes them due. If more are due, the step sets
            `StepResult.unfinished` and the rest is due in the next turn. The worker halves it after too large a turn.
        timers_max: the same for timers that fire at the end of the turn.
        overdue: returns whether the step has used up its time; called between timers.
        fires: key -> number of timers to fire at the end, to repeat a step whose first run was cut by time. None: all
            due timers, within the bounds above.
        tables: the versions of the step's lookup tables.
        corrections: late records for finished windows; only windows take them.
        load_windows: loads windows that are only in the store, in the midst of the step.
        query_windows: the same for the windows that a query asks for.
    """

    bundle: int
    arrived: Sequence[InputBundle]
    watermark_before: Instant
    watermark: Instant
    now_us: Instant
    releases: Sequence[Release] = ()
    panes_max: int = UNBOUNDED
    timers_max: int = UNBOUNDED
    overdue: Callable[[], bool] = field(default=lambda: False)
    fires: Mapping[Key, int] | None = None
    tables: Tables = field(default_factory=dict)
    corrections: Sequence[WindowCorrection] = ()
    load_windows: LoadWindows = no_windows
    query_windows: QueryWindows = no_query


@dataclass(slots=True)
class StepResult:
    """All effects of a step, as data. The runtime adds cursors, segments and the header.

    The counts are those of I8. Each is counted where its event happens and never derived from other counts, so that
    they differ if a record is lost.
    """

    delta: Delta = ()
    productions: dict[str, Records] = field(default_factory=dict)
    """Output stream -> productions, in order."""
    results: list[ResultRows] = field(default_factory=list)
    deleted: list[DeletedRows] = field(default_factory=list)
    late: list[LateRows] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    consumed_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> number of records that were applied to the state or judged by it."""
    emitted_by_stream: dict[str, int] = field(default_factory=dict)
    """Output stream -> number of records made for its consumers."""
    emitted_by_table: dict[int, int] = field(default_factory=dict)
    """Result table -> number of rows made for it."""
    late_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> number of records that were too late for all of their windows."""
    dead_lettered_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> number of records that became dead letters."""
    duplicates_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> number of consumed records that were duplicates of others."""
    unmatched_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> number of records without a row in a lookup table, whatever became of them."""
    dedupe_run: DedupeRun | None = None
    archived: Sequence[Bundle] = ()
    """Bundles to archive."""
    fired: Mapping[Key, int] = field(default_factory=dict)
    """Key -> number of timers that fired at the end, for `Work.fires`; empty unless due timers were left."""
    notices: Sequence[Notice] = ()
    """Notices for operators, at most one of each kind."""
    gauges: Mapping[str, int] = field(default_factory=dict)
    """Name of a gauge, which is kept beside the counters -> by how much it has changed."""
    corrected: dict[int, str | None] = field(default_factory=dict)
    """Request of a correction -> "" if it was made, why it cannot be, or None if a later turn has to decide."""
    corrected_windows: dict[int, PastWindow] = field(default_factory=dict)
    """Request of a correction -> the session that contains the record, where this is not the record's own."""
    statements: Sequence[StatementRows] = ()
    """Records for which the commit runs statements of users."""
    outbox: OutboxRows | None = None
    """Messages for the other side of a sink."""
    unfinished: bool = False
    """Whether more was due than the turn may hold. The low watermark stays until later turns have done the rest."""


@dataclass(slots=True)
class StoredInterval:
    """The stored state of one interval, as a new owner reads it.

    Attributes:
        bundle: number of the last committed bundle.
        folded_bundle: number of the last bundle whose delta is folded into rows.
        entries: newest values of every kind; of STATE only if `state_complete`.
        state_complete: whether `entries` has all state of the interval; if not, keys are loaded on demand.
        dedupe_runs: runs that have not expired, for a stage that keeps ids or joins.
        horizon_floor: what was over or forgotten when the lateness or the dedupe horizon last changed (`horizons.py`):
            of a stage, the windows that end by it; of a source, the ids that were last seen before it.
        closed_windows: subkeys of windows that have fired and whose folded entries are not in `entries`; see
            `Store.read`.
        unfired_windows: subkeys of other windows whose folded entries are not in `entries`, which then have the
            tombstones of windows, too.
        closed_ends: when the first and the last of the sessions end that have fired and are not in `entries`.
        unfired_from: when the first of the other sessions ends, if they are not in `entries`, which then have the
            tombstones of windows, too; INSTANT_MAX without any. It may be earlier.
        outbox: how far the outbox of a sink is filled and delivered.
    """

    interval_id: int
    sequencer: int
    bundle: int = 0
    folded_bundle: int = 0
    input_watermark: Instant = INSTANT_MIN
    low_watermark: Instant = INSTANT_MIN
    processing_floor: Instant = INSTANT_MIN
    entries: Sequence[Entries] = ()
    state_complete: bool = True
    dedupe_runs: Sequence[DedupeRun] = ()
    horizon_floor: Instant = INSTANT_MIN
    closed_windows: Sequence[str] = ()
    unfired_windows: Sequence[str] = ()
    closed_ends: SpanOfEnds | None = None
    unfired_from: Instant = INSTANT_MAX
    outbox: OutboxState = field(default_factory=OutboxState)


class StageInterval(Protocol):
    """The soft state of one key interval of one computation."""

    @property
    def immediate(self) -> bool:
        """Whether a step neither loads state nor waits, so that a small one may run on the event loop."""
        ...

    def missing_keys(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Return the keys (JSON text) whose state must be loaded before a step with these bundles."""
        ...

    def load_state(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Add the stored state of `keys`: entries of kind STATE. A key without entries has no state."""
        ...

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the soft state, and return its effects."""
        ...

    def oldest_work(self) -> Instant:
        """Return the smallest event time of open windows, timers and holds; INSTANT_MAX without any."""
        ...

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (watermark, processing time) at which work becomes due without records; INSTANT_MAX if never."""
        ...

    def on_folded(self, bundle: int) -> None:
        """Allow values that last changed at or before `bundle` to leave memory: they are rows now."""
        ...

    def expired_windows(self) -> Sequence[tuple[str, int]]:
        """Return (subkey, bundle) of windows that have expired in a bundle, and may have rows without a tombstone."""
        ...

    def on_windows_deleted(self, bundle: int) -> None:
        """Forget the windows that have expired at or before `bundle`: their rows are deleted."""
        ...

    def needs_fold(self) -> bool:
        """Tell whether a fold is due because it lets values leave memory; the interval still takes input."""
        ...

    def waits_for_fold(self) -> bool:
        """Tell whether memory is short until a fold lets values leave it, so that the interval takes no input now."""
        ...


class ResidentInterval:
    """The answers of a `StageInterval` whose soft state is all in memory, for others to start from.

    One that has no more to say holds nothing back and has no timers.
    """

    def missing_keys(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Return an empty sequence: nothing has to be loaded."""
        return ()

    def load_state(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Do nothing: `missing_keys` is always empty."""

    def oldest_work(self) -> Instant:
        """Return INSTANT_MAX: nothing is held back."""
        return INSTANT_MAX

    def next_due(self) -> tuple[Instant, Instant]:
        """Return INSTANT_MAX twice: there are no timers."""
        return INSTANT_MAX, INSTANT_MAX

    def on_folded(self, bundle: int) -> None:
        """Do nothing: nothing leaves memory because it was folded."""

    def expired_windows(self) -> Sequence[tuple[str, int]]:
        """Return an empty sequence: all that expires has a tombstone."""
        return ()

    def on_windows_deleted(self, bundle: int) -> None:
        """Do nothing: all that expires has a tombstone."""

    def needs_fold(self) -> bool:
        """Return False: nothing leaves memory because it was folded."""
        return False

    def waits_for_fold(self) -> bool:
        """Return False: nothing leaves memory because it was folded."""
        return False


class Stage(Protocol):
    """The logic of one computation in a deployed graph; immutable."""

    def open(self, recovered: StoredInterval) -> StageInterval:
        """Build the soft state of one interval from its stored state."""
        ...


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a stage: a stream and the fields of its key.

    `source_fed` tells whether the producer is an injector, so that rows have watermarks. `site` is the field of the key
    whose values have a watermark each; empty without.
    """

    stream: str
    record_type: RecordType
    key_fields: tuple[str, ...]
    key_types: tuple[type, ...]
    source_fed: bool
    subscription_id: int = 0
    site: str = ""


@dataclass(frozen=True, slots=True)
class StageBinding:
    """What one stage needs to know of the deployed graph.

    Attributes:
        tables: output stream -> id of its result table, for streams that have one.
        subscribed: output streams with consumers; the stage need not produce to others.
        progress: the progress to which calls of user code are reported.
        windowed_intervals: number of the graph's windowed intervals, which share `limits.open_windows_bytes_max`.
        joining_intervals: number of the graph's intervals of joins, which share `limits.join_bytes_max`.
        is_taken: whether what its steps consume is archived, to make each bundle again.
        is_current: whether the generation is the graph's current one, whose sinks deliver.
    """

    computation: str
    inputs: tuple[InputSpec, ...]
    outputs: Mapping[str, RecordType]
    tables: Mapping[str, int]
    subscribed: frozenset[str]
    limits: Limits
    progress: StepProgress = field(default_factory=StepProgress)
    windowed_intervals: int = 1
    joining_intervals: int = 1
    is_taken: bool = False
    is_current: bool = True


class StageLogic(Protocol):
    """The logic of a computation before deployment: a windowed aggregation or a user's Computation."""

    def bind(self, binding: StageBinding) -> Stage:
        """Return the stage of this logic in a deployed graph."""
        ...

    def identity(self) -> Identity:
        """Describe the parts that must not change under stored state (windows, aggregates, cells)."""
        ...
