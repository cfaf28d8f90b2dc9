"""What a worker holds of an interval in memory: valid for one sequencer, dropped after any failed commit.

The store is the authority. Soft state runs ahead of it by the turns that are stepped and not yet committed; when
one of those fails, all of it is dropped and read again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from millpy.injectors.intake import Intake
from millpy.injectors.protocol import Injector
from millpy.limits import Limits
from millpy.model.checkpoint import Cursor, Entries, Grant, Kind, Request
from millpy.model.deployment import DeployedInterval
from millpy.model.stage import Release, StageInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.runtime.kept_letters import KeptLetters
from millpy.runtime.plan import ComputationPlan
from millpy.store.protocol import Opened

NO_KEY = b'""'
COUNTED = ("produced", "filtered", "added", "consumed", "late", "quarantined", "duplicate", "emitted", "written")
"""Counters by subscription; the last two by result table."""


class Halt(Enum):
    """Whether a source stands still until a person resumes it."""

    NO = "no"
    STEPPED = "stepped"  # in a turn that is not known to be committed
    COMMITTED = "committed"


@dataclass(slots=True)
class Owned:
    """One interval under one grant.

    Attributes:
        bundle: number of the last bundle stepped (committed or in flight).
        cursors: producer interval -> position consumed and the watermark there (I3, I5).
        moved: producers whose cursor has moved since the last checkpoint.
        last_segments: subscription -> seq of the last segment written for it, those in flight included.
        counters: (what, of what) -> absolute count (I8).
        kept_letters: what is kept of what is set aside.
        counted: those that have changed since the last checkpoint.
        unfolded_since: when the last fold was.
        quiet: whether its source, when it was asked last, had nothing and was proven idle.
        requested: records set aside that are to be taken again and wait for a turn.
        releases: parked keys to let go on, waiting for a turn.
        unfinished: whether its last step has left undone what was due.
        replaying: whether some are in a turn that is not known to be committed.
        unfolded, unfolded_bytes: (bundle, bytes of its deltas) above the folded bundle, those in flight included,
            oldest first; and their sum.
    """

    grant: Grant
    deployed: DeployedInterval
    plan: ComputationPlan
    bundle: int
    input_watermark: Instant
    low_watermark: Instant
    processing_floor: Instant
    folded_bundle: int
    cursors: dict[int, Cursor]
    last_segments: dict[int, int]
    counters: dict[tuple[str, str], int]
    unfolded_since: float
    kept_letters: KeptLetters
    stage: StageInterval | None = None
    intake: Intake | None = None
    injector: Injector | None = None
    moved: set[int] = field(default_factory=set)
    counted: set[tuple[str, str]] = field(default_factory=set)
    finished: bool = False
    unfinished: bool = False
    paused: bool = False
    quiet: bool = False
    halt: Halt = Halt.NO
    committed_at: float = 0.0
    requested: list[Request] = field(default_factory=list)
    replaying: bool = False
    releases: list[Release] = field(default_factory=list)
    unfolded: deque[tuple[int, int]] = field(default_factory=deque)
    unfolded_bytes: int = 0

    @property
    def interval_id(self) -> int:
        """Its interval."""
        return self.deployed.interval_id

    def is_current_with(self, producer: Owned, *, at_least: int = 0) -> bool:
        """Whether it has consumed every segment of a local producer, so that bundles can come in memory.

        `at_least` is a position that it will have reached by then.
        """
        last = max((producer.last_segments.get(s, 0) for s in self.plan.producers[producer.interval_id]), default=0)
        return max(self.cursors[producer.interval_id].seq, at_least) >= last

    def advance_cursor(self, producer: int, seq: int, watermark: Instant) -> None:
        """Move to a producer's position; the watermark belongs to it and never regresses (I5)."""
        before = self.cursors[producer]
        assert seq >= before.seq, (producer, seq, before)
        assert watermark >= before.watermark, (producer, watermark, before)
        if seq > before.seq:
            self.cursors[producer] = Cursor(producer, seq, watermark)
            self.moved.add(producer)

    def take_moved(self) -> list[Cursor]:
        """The cursors that have moved since the last checkpoint."""
        moved, self.moved = sorted(self.moved), set()
        return [self.cursors[producer] for producer in moved]

    def log(self, bundle: int, size: int) -> None:
        """A bundle has deltas of so many bytes."""
        self.unfolded.append((bundle, size))
        self.unfolded_bytes += size

    def fold_to(self, bundle: int) -> None:
        """Forget the deltas up to a bundle: they are rows now. What was in flight during the fold stays."""
        self.folded_bundle = bundle
        while self.unfolded and self.unfolded[0][0] <= bundle:
            self.unfolded_bytes -= self.unfolded.popleft()[1]

    def count(self, what: str, of: str, records: int) -> None:
        """Add to a counter of I8."""
        if records:
            self.counters[(what, of)] = self.counters.get((what, of), 0) + records
            self.counted.add((what, of))

    def take_counters(self) -> list[Entries]:
        """Entries of the counters that were added to since the last checkpoint."""
        changed: dict[str, Entries] = {}
        for what, of in sorted(self.counted):
            if what not in changed:
                changed[what] = Entries(Kind.COUNTER, what)
            changed[what].add(NO_KEY, 0, of, b"%d" % self.counters[(what, of)])
        self.counted.clear()
        return list(changed.values())


def owned(
    grant: Grant, deployed: DeployedInterval, plan: ComputationPlan, opened: Opened, now: float, limits: Limits
) -> Owned:
    """Soft state as it was read from the store, without its stage or injector."""
    recovered = opened.recovered
    counters = {
        (entries.namespace, subkey): int(value)
        for entries in recovered.entries
        if entries.kind is Kind.COUNTER and entries.namespace in COUNTED
        for subkey, value in zip(entries.subkeys, entries.values, strict=True)
        if value is not None
    }
    cursors = {
        producer: Cursor(producer, *opened.cursors.get(producer, (0, INSTANT_MIN))) for producer in plan.producers
    }
    interval = Owned(
        grant=grant,
        deployed=deployed,
        plan=plan,
        bundle=recovered.bundle,
        input_watermark=recovered.input_watermark,
        low_watermark=recovered.low_watermark,
        processing_floor=recovered.processing_floor,
        folded_bundle=recovered.folded_bundle,
        cursors=cursors,
        last_segments=dict(opened.last_segments),
        counters=counters,
        unfolded_since=now,
        kept_letters=KeptLetters.recovered(limits, recovered.entries),
        finished=plan.stage is None and recovered.low_watermark >= INSTANT_MAX,
    )
    if opened.unfolded_bytes:
        # Which bundles they are in is not known; a fold takes all of them.
        interval.log(recovered.folded_bundle + 1, opened.unfolded_bytes)
    return interval
