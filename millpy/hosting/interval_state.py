"""The soft state of an interval: held in memory, valid for one sequencer, dropped after a failed commit.

The store is the authority. Soft state runs ahead of it by the turns that are stepped and not yet committed. When one
of those turns fails, all soft state is dropped and read again. `runtime/owned_interval.py` adds what a worker needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import msgspec

from millpy.graph import InjectorNode
from millpy.hosting.dead_letter_sampling import DeadLetterSampler
from millpy.hosting.plan import ComputationPlan
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.limits import Limits
from millpy.model.checkpoint import Cursor, DedupeRun, Delta, Entries, Grant, Kind
from millpy.model.deployment import DeployedInterval
from millpy.model.lookup import Tables
from millpy.model.stage import StageInterval, StoredInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.protocol import OwnerSnapshot

NO_KEY = b'""'
COUNTED = ("produced", "filtered", "added", "consumed", "late", "dead_lettered", "duplicate", "emitted", "written",
           "unmatched", "silent")  # fmt: skip
"""Names of the counters, which are kept per subscription; `emitted` and `written` are kept per result table.

`silent` is a gauge of the interval: how many devices are silent.
"""


StateT = TypeVar("StateT", bound="IntervalState")


class PauseState(Enum):
    """Whether a source is paused until an operator resumes it."""

    NO = "no"
    STEPPED = "stepped"  # in a turn that is not known to be committed
    COMMITTED = "committed"


@dataclass(slots=True)
class IntervalState:
    """The soft state of one interval under one grant.

    Attributes:
        bundle: number of the last bundle stepped (committed or in flight).
        processing_floor: processing time of the last step; the next step is not earlier, even after a takeover.
        cursors: producer interval -> consumed position and the watermark there (I3, I5).
        moved: producers whose cursor has moved since the last checkpoint.
        last_segments: subscription -> seq of the last segment written for it, including those in flight.
        counters: (counter, subscription or table) -> absolute count (I8).
        sampler: chooses the dead letters and late records that are stored.
        counted: counters that have changed since the last checkpoint.
        finished: whether the source has ended.
        unfinished: whether the last step left due work undone.
        committed_at: time of the last checkpoint, in seconds on the monotonic clock.
        memory_bytes_min: bytes of a local producer's bundle below which it comes in a segment; 0 for any stage but an
            archive, for which a bundle becomes a file.
        waiting_bytes: bytes of bundles of local producers that wait in segments, since the last poll of an archive.
        held: whether it takes no step, because a lookup table was not read yet or its outbox is full; its input waits
            in segments.
        tables: the versions of its lookup tables for the next step.
        versions: lookup table -> the version, as JSON text, that the last checkpoint saw.
    """

    grant: Grant
    deployed: DeployedInterval
    plan: ComputationPlan
    bundle: int
    input_watermark: Instant
    low_watermark: Instant
    processing_floor: Instant
    cursors: dict[int, Cursor]
    last_segments: dict[int, int]
    counters: dict[tuple[str, str], int]
    sampler: DeadLetterSampler
    stage: StageInterval | None = None
    intake: Intake | None = None
    moved: set[int] = field(default_factory=set)
    counted: set[tuple[str, str]] = field(default_factory=set)
    finished: bool = False
    unfinished: bool = False
    pause: PauseState = PauseState.NO
    committed_at: float = 0.0
    memory_bytes_min: int = 0
    waiting_bytes: int = 0
    held: bool = False
    tables: Tables = field(default_factory=dict)
    versions: dict[str, bytes] = field(default_factory=dict)

    def use_tables(self, tables: Tables) -> None:
        """Take the versions of its lookup tables for the next step; hold the interval while one has none."""
        if not self.plan.tables:
            return
        self.tables = {table: tables[table] for table in self.plan.tables if table in tables}
        self.held = len(self.tables) < len(self.plan.tables)
        self.memory_bytes_min = sys.maxsize if self.held else 0

    def wait_for_outbox(self, full: frozenset[int]) -> None:
        """Hold the interval of a sink while it is among those with a full outbox."""
        if (full or self.held) and self.plan.delivers:
            self.held = self.interval_id in full
            self.memory_bytes_min = sys.maxsize if self.held else 0

    @property
    def interval_id(self) -> int:
        """The interval's id."""
        return self.deployed.interval_id

    def is_current_with(self, producer: IntervalState, *, at_least: int = 0) -> bool:
        """Tell whether it has consumed every segment of a local producer, so that bundles can be passed in memory.

        `at_least` is a position that it will have reached by the time of the next bundle.
        """
        reached = max(self.cursors[producer.interval_id].seq, at_least)
        if reached >= producer.bundle:  # which is the common case, and no segment is newer
            return True
        return all(
            reached >= producer.last_segments.get(subscription_id, 0)
            for subscription_id in self.plan.producers[producer.interval_id]
        )

    def advance_cursor(self, producer: int, seq: int, watermark: Instant) -> None:
        """Move the cursor to a producer's position; the watermark belongs to that position and never regresses (I5)."""
        before = self.cursors[producer]
        assert seq >= before.seq, (producer, seq, before)
        assert watermark >= before.watermark, (producer, watermark, before)
        if seq > before.seq:
            self.cursors[producer] = Cursor(producer, seq, watermark)
            self.moved.add(producer)

    def take_moved(self) -> list[Cursor]:
        """Return the cursors that have moved since the last checkpoint, for the next one."""
        moved, self.moved = sorted(self.moved), set()
        return [self.cursors[producer] for producer in moved]

    def count(self, what: str, of: str, records: int) -> None:
        """Add `records` to the counter `what` of a subscription or result table, whose id is `of` (I8)."""
        if records:
            self.counters[(what, of)] = self.counters.get((what, of), 0) + records
            self.counted.add((what, of))

    def take_versions(self) -> list[Entries]:
        """Return the versions of its lookup tables that have changed since the last checkpoint, for the next one."""
        found = Entries(Kind.LOOKUP, "")
        for table, version in self.tables.items():
            text = msgspec.json.encode(version.described())
            if self.versions.get(table.name) != text:
                self.versions[table.name] = text
                found.add(NO_KEY, 0, table.name, text)
        return [found] if len(found) else []

    def all_counters(self, delta: Delta) -> dict[tuple[str, str], int] | None:
        """Return all counters of the interval for the next checkpoint, with those of its intake, which `delta` has.

        None if the delta of an intake has none: its counters have not changed, but are not known here.
        """
        taken = {
            (entries.namespace, subkey): int(value)
            for entries in delta
            if entries.kind is Kind.COUNTER
            for subkey, value in zip(entries.subkeys, entries.values, strict=True)
            if value is not None
        }
        return None if self.intake is not None and not taken else {**self.counters, **taken}

    def take_counters(self) -> list[Entries]:
        """Return entries for the counters that have changed since the last checkpoint, for the next one."""
        changed: dict[str, Entries] = {}
        for what, of in sorted(self.counted):
            if what not in changed:
                changed[what] = Entries(Kind.COUNTER, what)
            changed[what].add(NO_KEY, 0, of, b"%d" % self.counters[(what, of)])
        self.counted.clear()
        return list(changed.values())


def state_of(
    kind: type[StateT], grant: Grant, plan: ComputationPlan, snapshot: OwnerSnapshot, limits: Limits
) -> StateT:
    """Build soft state from what is stored, without its stage or intake."""
    recovered = snapshot.recovered
    counters = {
        (entries.namespace, subkey): int(value)
        for entries in recovered.entries
        if entries.kind is Kind.COUNTER and entries.namespace in COUNTED
        for subkey, value in zip(entries.subkeys, entries.values, strict=True)
        if value is not None
    }
    cursors = {
        producer: Cursor(producer, *snapshot.cursors.get(producer, (0, INSTANT_MIN))) for producer in plan.producers
    }
    return kind(
        grant=grant,
        deployed=next(i for i in plan.intervals if i.interval_id == grant.interval_id),
        plan=plan,
        bundle=recovered.bundle,
        input_watermark=recovered.input_watermark,
        low_watermark=recovered.low_watermark,
        processing_floor=recovered.processing_floor,
        cursors=cursors,
        last_segments=dict(snapshot.last_segments),
        counters=counters,
        versions={
            subkey: value
            for entries in recovered.entries
            if entries.kind is Kind.LOOKUP
            for subkey, value in zip(entries.subkeys, entries.values, strict=True)
            if value is not None
        },
        sampler=DeadLetterSampler.recovered(limits, recovered.entries),
        finished=plan.stage is None and recovered.low_watermark >= INSTANT_MAX,
    )


def intake_of(plan: ComputationPlan, recovered: StoredInterval, runs: Sequence[DedupeRun], limits: Limits) -> Intake:
    """Build the soft state of a source partition from what is stored."""
    return Intake(intake_settings(plan, limits), recovered, runs)


def intake_settings(plan: ComputationPlan, limits: Limits) -> IntakeSettings:
    """Return the settings of a source."""
    node = plan.node
    assert isinstance(node, InjectorNode)
    return IntakeSettings(
        stream=node.name,
        record_type=node.record_type,
        event_time=node.event_time,
        dedupe=node.dedupe,
        idle=node.idle,
        pause_above=node.pause_above,
        devices=plan.devices(),
        lax=node.lax,
        limits=limits,
        format=node.source.payload_format(),
    )
