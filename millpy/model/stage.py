"""What the runtime asks of a computation: pure steps from bundles and state to data.

A `Stage` is the immutable logic of one computation (windowed or user code). `open` makes a `StageInterval`:
the soft state of one key interval under one sequencer. The runtime calls, always from one thread at a time:

    missing(bundles) -> keys whose state is not in memory;  absorb(entries) <- the store
    step(work) -> StepResult                                 (pure but for the soft state)
    oldest_work(), next_due()                                (what holds the watermark, when to wake)
    folded(bundle)                                           (values up to that bundle are rows now: may be evicted)

After a failed or unknown commit the runtime drops the StageInterval and opens a new one from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import AbsorbedRows, DeadLetter, DedupeRun, Delta, Entries, LateRows, ResultRows
from millpy.model.deployment import Meaning
from millpy.model.keys import Key
from millpy.model.record import Records, RecordType
from millpy.model.step_progress import StepProgress
from millpy.model.time import INSTANT_MIN, Instant

UNBOUNDED = 2**62


@dataclass(slots=True)
class Arrived:
    """A bundle and the watermarks that judge it.

    Attributes:
        bundle: the records.
        cap: min over the *other* producers of their watermark at the position consumed when this bundle is
            taken. A row that carries a watermark is judged by min(row watermark, cap); one that carries
            none by `Work.watermark_before`.
    """

    bundle: Bundle
    cap: Instant


@dataclass(frozen=True, slots=True)
class Release:
    """A person's request to let a parked key go on.

    Attributes:
        key: JSON text.
        ticket: which parking is meant; any other is none.
        discard: whether what it stopped at is set aside first.
    """

    release_id: int
    interval_id: int
    key: bytes
    ticket: int
    discard: bool


@dataclass(slots=True)
class Work:
    """What one interval does in one turn. `arrived` may be empty: then only the watermark or the clock moved.

    Attributes:
        bundle: the bundle number that the commit will give the interval.
        watermark_before: input watermark before the turn.
        watermark: input watermark after all that arrived; windows close and timers fire by it at the end.
        now_us: processing time, never running backwards.
        releases: parked keys to let go on.
        panes_max: emit at most so many panes that the watermark makes due, and say `StepResult.unfinished` when more
            are; what is left is due in the next turn. The worker halves it when a turn was too large.
        timers_max: the same for timers that fire at the end of the turn.
        overdue: whether the step has taken its time; asked between timers.
        fires: fire at the end so many timers of each key, and no others: as the step that is taken again did, which
            was cut by time. None: all that are due, within the bounds above.
    """

    bundle: int
    arrived: Sequence[Arrived]
    watermark_before: Instant
    watermark: Instant
    now_us: Instant
    releases: Sequence[Release] = ()
    panes_max: int = UNBOUNDED
    timers_max: int = UNBOUNDED
    overdue: Callable[[], bool] = field(default=lambda: False)
    fires: Mapping[Key, int] | None = None


@dataclass(slots=True)
class StepResult:
    """All effects of a step, as data. The runtime adds cursors, segments and the header.

    The counts are those of I8. Each is taken where the thing counted happens, never as what is left of others: a record
    that gets lost is in none of them, and the account says so.
    """

    delta: Delta = ()
    productions: dict[str, Records] = field(default_factory=dict)
    """Output stream -> records produced, in order."""
    results: list[ResultRows] = field(default_factory=list)
    absorbed: list[AbsorbedRows] = field(default_factory=list)
    late: list[LateRows] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    consumed_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> records that have been applied to the state, or judged by it."""
    emitted_by_stream: dict[str, int] = field(default_factory=dict)
    """Output stream -> records that came into being for its consumers."""
    emitted_by_table: dict[int, int] = field(default_factory=dict)
    """Result table -> rows that came into being for it."""
    late_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> records that went to `late_records` for every one of their windows (I8)."""
    quarantined_by_input: dict[int, int] = field(default_factory=dict)
    duplicates_by_input: dict[int, int] = field(default_factory=dict)
    """Input index -> consumed records that were duplicates of others."""
    dedupe_run: DedupeRun | None = None
    fired: Mapping[Key, int] = field(default_factory=dict)
    """Key -> timers that fired at the end, for `Work.fires`; only when timers are among what is unfinished."""
    unfinished: bool = False
    """More was due than the turn may hold. Until the next turns have done the rest, the low watermark stays."""


@dataclass(slots=True)
class Recovered:
    """What the store holds of one interval, read after the claim (entries: folded rows overlaid by deltas).

    Attributes:
        entries: newest values of every kind but STATE, and STATE too when `state_complete`.
        state_complete: all state of the interval is in `entries`; if not, keys are loaded on demand.
        dedupe_runs: of a stage that keeps ids, those that have not expired.
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


class StageInterval(Protocol):
    """Soft state of one key interval of one computation."""

    @property
    def immediate(self) -> bool:
        """Whether a step neither loads state nor calls user code, so that a small one may run on the event loop."""
        ...

    def missing(self, bundles: Sequence[Bundle]) -> Sequence[bytes]:
        """Keys (JSON text) whose state has to be loaded before these bundles can be stepped."""
        ...

    def absorb(self, keys: Sequence[bytes], entries: Sequence[Entries]) -> None:
        """Take what the store holds of `keys`: entries of kind STATE; a key without entries has none."""
        ...

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the soft state and say what has to be committed for it."""
        ...

    def oldest_work(self) -> Instant:
        """Smallest event time that this interval still holds back: open windows, timers, holds."""
        ...

    def next_due(self) -> tuple[Instant, Instant]:
        """(event time, processing time) at which something becomes due without data; INSTANT_MAX for nothing."""
        ...

    def folded(self, bundle: int) -> None:
        """Values last changed at or before `bundle` are rows now."""
        ...


class Stage(Protocol):
    """The logic of one computation."""

    def open(self, recovered: Recovered) -> StageInterval:
        """Build the soft state of one interval from what is stored."""
        ...


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a stage: a stream by its key.

    `source_fed`: its producer is an injector, so its rows carry watermarks. `subscription_id`: as deployed.
    """

    stream: str
    record_type: RecordType
    key_fields: tuple[str, ...]
    key_types: tuple[type, ...]
    source_fed: bool
    subscription_id: int = 0


@dataclass(frozen=True, slots=True)
class Binding:
    """What a stage's logic learns when its graph is deployed.

    `tables`: output stream -> id of its result table, for streams that have one.
    `subscribed`: output streams that somebody consumes; productions to others need not be kept.
    `progress`: what calls of user code are told to. `windowed_intervals`: how many the graph has, which share what a
    worker has room for.
    """

    computation: str
    inputs: tuple[InputSpec, ...]
    outputs: Mapping[str, RecordType]
    tables: Mapping[str, int]
    subscribed: frozenset[str]
    limits: Limits
    progress: StepProgress = field(default_factory=StepProgress)
    windowed_intervals: int = 1


class StageLogic(Protocol):
    """What a graph node holds: a windowed aggregation or a user's Computation, before deployment."""

    def bind(self, binding: Binding) -> Stage:
        """The stage, ready to open intervals."""
        ...

    def meaning(self) -> Meaning:
        """What must not change under stored state (windows, aggregators, cells)."""
        ...
