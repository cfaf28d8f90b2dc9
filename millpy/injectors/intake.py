"""Intake: from what a source handed over to records with watermarks, as data to commit.

Pure but for its own soft state: one Intake is one source partition under one grant, stepped from one thread. In order:

    decode -> dedupe -> event time -> row watermarks

Every record ends in one place, and is counted there: accepted, duplicate or dead-lettered. How many were injected is
the source's own count, made before anything was decoded; that the sum is the same is for the account to find out (I8).

Watermark of a row: the largest event time *before* it minus the disorder bound, never below the watermark published
before (I9: a bundle has the effect of one record at a time). A record that is ahead of its arrival counts here as one
that happens when it arrives, so it makes no punctual record late; beyond the tolerance it is set aside. A finished
source reports the greatest time.

Idle: under `AdvanceWithClock(after)`, once the source was quiet (connected, drained, nothing waiting) for the whole of
`after`, the watermark follows now - after - max_disorder, as if a record that happened `after` ago had just come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.injectors.decode import Decoded, Decoder
from millpy.injectors.dedupe import DedupeIds, DedupeIndex
from millpy.injectors.fleet import Fleet
from millpy.injectors.health import Health
from millpy.injectors.instants import DATETIME_HI, DATETIME_LO, instants_of_numbers
from millpy.injectors.letters import Letters, taken_again
from millpy.injectors.protocol import Taken
from millpy.injectors.settings import AdvanceWithClock, Dedupe, EventTime, IdlePolicy, Rate, Unit, Wait
from millpy.limits import RING_SLOTS, Limits
from millpy.model.checkpoint import DeadLetter, DedupeRun, Delta, Entries, Kind, Pause, Request, Settled
from millpy.model.keys import KeyColumn, KeyHasher
from millpy.model.quarantine import key_problem
from millpy.model.record import Instants, Records, RecordType, column_of, getter
from millpy.model.stage import Recovered
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, ClockReading, Instant, describe, instant

NO_KEY = b'""'
NOWHERE = msgspec.Raw(b"null")
COUNTERS = ("injected", "accepted", "duplicate", "dead_lettered")
POSITION_NAMESPACE = "source"
NOTES_NAMESPACE = "notes"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """What an injector of the graph says about its records; `computation` is its name (the stream's by default)."""

    stream: str
    record_type: RecordType
    event_time: EventTime
    dedupe: Dedupe | None = None
    idle: IdlePolicy = field(default_factory=Wait)
    pause_above: Rate | None = None
    devices: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    computation: str = ""


class SourcePosition(msgspec.Struct, kw_only=True):
    """What is stored of a source partition: where it goes on, and what made its watermark (for people).

    Attributes:
        position: the source's own, as it made it; null when the broker keeps it.
        max_event_time, max_event_record: the largest event time, at most that of arrival, and where it came from: this
            holds the watermark.
        last_event_time, last_record, arrived_at: the newest accepted record.
        unsure_us: by so much it may have been later, as far as was known: what decides who is from the future.
        dedupe_shift_us: the dedupe clock of a source that names none is its time of arrival plus this: a clock that is
            set right, or wrong, must neither forget ids nor keep them.
    """

    position: msgspec.Raw = NOWHERE
    watermark: int = INSTANT_MIN
    max_event_time: int = INSTANT_MIN
    max_event_record: str = ""
    last_event_time: int = INSTANT_MIN
    last_record: str = ""
    arrived_at: int = INSTANT_MIN
    unsure_us: int = 0
    dedupe_shift_us: int = 0
    finished: bool = False


@dataclass(slots=True)
class IntakeResult:
    """What one step of an intake commits.

    Attributes:
        records: accepted, with event times and the watermark before each.
        delta: position and counters.
        watermark: after the step; what the injector publishes.
        changed: there is something to commit.
        accepted: how many records were accepted, whatever becomes of `records` on their way.
        rows: of each accepted record, its row in what was taken.
        letter_of: (record, reason, detail) -> a dead letter for an accepted record that is refused after all.
        settled: what became of the requests, when it was a replay.
        pause: too much was set aside; the source stands still behind this step.
    """

    records: Records
    watermark: Instant
    changed: bool
    accepted: int = 0
    delta: Delta = ()
    dead_letters: list[DeadLetter] = field(default_factory=list)
    dedupe_run: DedupeRun | None = None
    finished: bool = False
    settled: list[Settled] = field(default_factory=list)
    pause: Pause | None = None
    rows: npt.NDArray[np.int64] | None = None
    letter_of: Callable[[int, str, str], DeadLetter] | None = None


class Intake:
    """Soft state of one source partition.

    Args:
        settings: what the graph says.
        recovered: position and counters as stored.
        runs: the dedupe runs of the horizon, oldest first.
    """

    def __init__(self, settings: IntakeSettings, recovered: Recovered, runs: Sequence[DedupeRun] = ()) -> None:
        self._settings = settings
        limits = settings.limits
        self._decoder = Decoder(
            settings.record_type, time_field=settings.event_time.field, record_bytes_max=limits.record_bytes_max
        )
        self._ids = DedupeIds(settings.dedupe, settings.record_type) if settings.dedupe else None
        self._seen = DedupeIndex(settings.dedupe.within_us if settings.dedupe else 0, runs)
        self._health = Health(settings.pause_above)
        device_types = settings.record_type.key_types(settings.devices) if settings.devices else ()
        self._fleet = Fleet(settings.devices, device_types, recovered.entries)
        self._hasher = KeyHasher()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._handed_over: int | None = None
        self._source = SourcePosition()
        self._noted: Mapping[str, bytes | None] = {}
        self.notes: dict[str, bytes] = {}  # as recovered, for the source that is about to be opened
        for entries in recovered.entries:
            self._absorb(entries)
        self._source.watermark = max(self._source.watermark, recovered.low_watermark)
        self._quiet_since: int | None = None
        self._arrived_us: int | None = None
        self._stepped_us: int | None = None
        self._unsure_us = 0
        self._renewed = 0

    def _absorb(self, entries: Entries) -> None:
        for subkey, value in zip(entries.subkeys, entries.values, strict=True):
            if value is None:
                continue
            if entries.kind is Kind.POSITION and entries.namespace == POSITION_NAMESPACE:
                self._source = msgspec.json.decode(value, type=SourcePosition)
            elif entries.kind is Kind.POSITION and entries.namespace == NOTES_NAMESPACE:
                self.notes[subkey] = value
            elif entries.kind is Kind.COUNTER and entries.namespace in self._counts and subkey == self._settings.stream:
                self._counts[entries.namespace] = int(value)

    @property
    def position(self) -> bytes | None:
        """Where the source goes on, for `Injector.open`."""
        return None if self._source.position == NOWHERE else bytes(self._source.position)

    @property
    def watermark(self) -> Instant:
        """What the injector publishes."""
        return Instant(self._source.watermark)

    @property
    def finished(self) -> bool:
        """Whether the source has ended."""
        return self._source.finished

    @property
    def counts(self) -> dict[str, int]:
        """The counters of I8, absolute."""
        return dict(self._counts)

    def observe(self, clock: ClockReading, quiet: bool) -> bool:
        """Note whether the source is quiet; cheap, for every turn.

        Returns:
            Whether a step without input would move the watermark.
        """
        if not quiet:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = clock.elapsed_us
        return self._idle_watermark(clock) is not None

    def _idle_watermark(self, clock: ClockReading) -> int | None:
        idle = self._settings.idle
        if not isinstance(idle, AdvanceWithClock) or self._quiet_since is None or self._source.finished:
            return None
        if clock.elapsed_us - self._quiet_since < idle.after_us:
            return None
        candidate = clock.earliest_us - idle.after_us - self._settings.event_time.max_disorder_us
        # Coalesced: a watermark that creeps with the clock must not cost a commit a turn.
        step = int(self._settings.limits.progress_every_s * 1_000_000)
        return candidate if candidate >= self._source.watermark + step else None

    def step(self, taken: Taken | None, *, bundle: int, clock: ClockReading, quiet: bool) -> IntakeResult:
        """Take one batch in, or with None let only the clock work.

        Args:
            taken: what the source handed over.
            bundle: the number that the commit will give the interval.
            clock: what time it was before the source was looked at.
            quiet: what the source's `quiet()` said.
        """
        before = self._place()
        arrived = taken is not None and taken.has_records
        self._noted = taken.notes if taken is not None else {}
        self.observe(clock, quiet and not arrived)
        self._follow(clock)
        result = IntakeResult(Records.none(self._settings.record_type), self.watermark, False)
        if taken is not None:
            injected = self._injected(taken)
            if arrived:
                self._take(taken, result, clock)
                result.pause = None if taken.finished else self._health.count(injected, len(result.dead_letters))
            if taken.position is not None:
                self._source.position = msgspec.Raw(taken.position)
            if taken.finished:
                self._source.finished, self._source.watermark = True, INSTANT_MAX
                if self._settings.dedupe is not None:
                    run = result.dedupe_run or DedupeRun(b"", b"", INSTANT_MIN, INSTANT_MAX)
                    result.dedupe_run = replace(run, clock=INSTANT_MAX)  # nobody will ask for these ids again
        else:
            candidate = self._idle_watermark(clock)
            self._source.watermark = self._source.watermark if candidate is None else candidate
        if arrived or self._arrived_us is None:
            self._arrived_us, self._renewed = clock.elapsed_us, 0
        elif taken is None:
            result.dedupe_run = self._quiet_ids(clock.elapsed_us - self._arrived_us)
        fleet_due = self._fleet.due(clock.now_us, at_last=self._source.finished)
        result.changed = arrived or fleet_due or bool(self._noted) or result.dedupe_run is not None
        result.changed |= self._place() != before
        result.watermark, result.finished = self.watermark, self.finished
        if result.changed:
            result.delta = self._delta_with_fleet(clock.now_us)
        return result

    def _follow(self, clock: ClockReading) -> None:
        """Take the time of this step in. The dedupe clock follows elapsed time only (see `dedupe_shift_us`)."""
        source, dedupe = self._source, self._settings.dedupe
        self._unsure_us = clock.latest_us - clock.now_us
        if dedupe is None or dedupe.time is not None or source.finished:
            return
        if self._stepped_us is None:
            # What has passed since the last owner's commit, by the earliest that it can be; none if clocks went back.
            earliest = clock.earliest_us + source.dedupe_shift_us
            source.dedupe_shift_us = max(earliest, self._seen.clock) - clock.now_us
        else:
            source.dedupe_shift_us -= clock.stepped_us - self._stepped_us
        self._stepped_us = clock.stepped_us

    def source_opened(self) -> None:
        """Note that its source has been opened, and so has handed over nothing yet."""
        self._handed_over = 0

    def _injected(self, taken: Taken) -> int:
        """Count what the source says that it has handed over since it was asked last."""
        injected = taken.records
        if taken.total is not None:
            before = self._handed_over
            injected = taken.records if before is None else taken.total - before
            self._handed_over = taken.total
        self._counts["injected"] += injected
        return injected

    def _quiet_ids(self, quiet_us: int) -> DedupeRun | None:
        """What the store is told of the ids of a source that has brought nothing for so long, so that slots are freed.

        By the clock of arrival they expire. Those of a named clock wait for it: they move to the current slot.
        """
        dedupe = self._settings.dedupe
        if dedupe is None or self._source.finished:
            return None
        if dedupe.time is None:
            return self._seen.expire(quiet_us)
        every_us = int(self._settings.limits.epoch_s * 1_000_000) * RING_SLOTS // 2
        if quiet_us // every_us <= self._renewed:
            return None
        self._renewed = quiet_us // every_us
        return self._seen.renew()

    def _place(self) -> tuple[object, ...]:
        """What has to be committed when it changes, also when nothing has come."""
        source = self._source
        return source.position, source.watermark, source.finished, self._stepped_us or 0

    def standing(self) -> IntakeResult:
        """A step that brings nothing and moves nothing."""
        self._noted = {}
        return IntakeResult(Records.none(self._settings.record_type), self.watermark, True, finished=self.finished)

    def replay(self, requests: Sequence[Request], arrived_at: Instant, clock: ClockReading) -> IntakeResult:
        """Take records again that were set aside, each under the dedupe id that it had.

        They are judged by where the source stands now, and say nothing of where it stands: they move no watermark, and
        the promise of a sorted source is not theirs. A record that was let in before it was set aside is the one that
        its id stands for, so it is no duplicate of itself; any other is dropped when its id was seen.
        """
        result = self.standing()
        self._counts["dead_lettered"] -= len(requests)
        self._follow(clock)
        letters = self._take(taken_again(requests, arrived_at), result, clock, requests)
        result.settled = [Settled(request, letters.of_row(row)) for row, request in enumerate(requests)]
        result.dead_letters = []
        result.delta = self._delta_with_fleet(clock.now_us)
        return result

    def _take(self, taken: Taken, result: IntakeResult, clock: ClockReading, again: Sequence[Request] = ()) -> Letters:
        settings = self._settings
        decoded = self._decoder.decode(taken)
        letters = Letters(settings.stream, settings.computation or settings.stream, taken, decoded, again)
        letters.devices = settings.devices
        letters.add_refused()
        rows = decoded.rows
        fresh, duplicates = np.ones(len(rows), bool), 0
        if self._ids is not None:
            fresh, duplicates, result.dedupe_run = self._without_duplicates(letters)
        self._refuse_long_keys(letters, fresh)
        if duplicates and settings.devices:
            self._fleet.take_duplicates(self._devices_of(letters, fresh), clock.now_us)
        times, accepted = self._event_times(letters, fresh)
        result.accepted = int(np.count_nonzero(accepted))
        self._counts["accepted"] += result.accepted
        self._counts["duplicate"] += duplicates
        self._counts["dead_lettered"] += len(letters)
        result.dead_letters = letters.in_order()
        kept = np.flatnonzero(accepted)
        result.rows = rows[kept]
        result.letter_of = lambda record, reason, detail: letters.of(
            int(kept[record]), reason, detail, int(times[kept[record]])
        )
        if not again:
            self._source.arrived_at, self._source.unsure_us = taken.arrived_at, self._unsure_us
        if not len(kept):
            return letters
        everything = len(kept) == len(rows)
        of_kept = times if everything else times[kept]
        result.records = Records(
            settings.record_type,
            of_kept,
            watermarks=self._standing_still(len(kept)) if again else self._row_watermarks(of_kept, rows[kept], taken),
            batch=decoded.batch if everything or decoded.batch is None else decoded.batch.take(pa.array(kept)),
            objects=decoded.objects if everything or decoded.objects is None else [decoded.objects[k] for k in kept],
        )
        if settings.devices:
            self._fleet.take(result.records.keys(settings.devices, self._hasher), of_kept, clock.now_us)
        return letters

    def _refuse_long_keys(self, letters: Letters, fresh: Mask) -> None:
        """Set fresh records aside whose key is too long for an index; they are not fresh then."""
        for index in letters.long_devices().tolist():
            if fresh[index] and (problem := key_problem(letters.device_of(index) or b"")):
                which = np.zeros(len(fresh), bool)
                which[index] = True
                letters.add(which, "key", problem)
                fresh[index] = False

    def _devices_of(self, letters: Letters, fresh: Mask) -> KeyColumn:
        """The devices of the records that are neither fresh nor set aside."""
        decoded = letters.decoded
        dropped = [k for k in np.flatnonzero(~fresh).tolist() if letters.of_row(int(decoded.rows[k])) is None]
        records = Records(
            self._settings.record_type,
            np.zeros(len(dropped), np.int64),
            batch=None if decoded.batch is None else decoded.batch.take(pa.array(dropped, pa.int64())),
            objects=None if decoded.objects is None else [decoded.objects[k] for k in dropped],
        )
        return records.keys(self._settings.devices, self._hasher)

    def _without_duplicates(self, letters: Letters) -> tuple[Mask, int, DedupeRun | None]:
        """Which records are neither duplicates nor without a place on the dedupe clock; how many are duplicates."""
        settings = self._settings.dedupe
        assert settings is not None
        taken, decoded = letters.taken, letters.decoded
        clocks = np.full(len(decoded.rows), taken.arrived_at + self._source.dedupe_shift_us, np.int64)
        timed = np.ones(len(decoded.rows), bool)
        if settings.time is not None:
            clocks, timed = field_times(decoded, settings.time, settings.unit)
            latest = self._latest(taken)
            future = timed & (clocks > latest)  # would carry the clock away, and every id with it
            letters.add(~timed, "refused", f"dedupe time {settings.time} names no time")
            letters.add(future, "future", f"dedupe time {settings.time} after {describe(latest)}")
            timed &= ~future
            clocks = np.minimum(clocks, taken.arrived_at)  # nor may one that is ahead by less
        letters.judged, letters.ids = self._identify(decoded, timed)
        held = letters.keep_original_ids(timed)
        duplicates, run = self._seen.check(letters.ids, clocks[letters.judged])
        fresh = timed.copy()
        fresh[letters.judged] = ~duplicates
        kept_all_the_same = int(np.count_nonzero(held[letters.judged] & duplicates))
        return fresh | held, self._seen.found - kept_all_the_same, run

    def _identify(self, decoded: Decoded, timed: Mask) -> tuple[Mask, bytes]:
        """Which of the timed rows have an id, and these ids."""
        assert self._ids is not None
        if decoded.objects is not None:
            judged = timed & self._ids.identified_objects(decoded.objects)
            return judged, self._ids.of_objects(
                [o for o, is_judged in zip(decoded.objects, judged, strict=True) if is_judged]
            )
        assert decoded.batch is not None
        judged = timed & self._ids.identified_batch(decoded.batch)
        return judged, self._ids.of_batch(decoded.batch if judged.all() else decoded.batch.filter(pa.array(judged)))

    def _latest(self, taken: Taken) -> Instant:
        """What is later than this was not there yet, by any clock."""
        return Instant(taken.arrived_at + self._unsure_us + self._settings.event_time.future_tolerance_us)

    def _event_times(self, letters: Letters, fresh: Mask) -> tuple[Instants, Mask]:
        """Event times of all rows, and which of the fresh ones are accepted."""
        settings = self._settings.event_time
        times, timed = field_times(letters.decoded, settings.field, settings.unit)
        latest = self._latest(letters.taken)
        future = times > latest
        letters.add(fresh & ~timed, "event_time", f"{settings.field} names no time")
        letters.add(fresh & timed & future, "future", f"{settings.field} is after {describe(latest)}", times)
        accepted = fresh & timed & ~future
        if settings.sorted and not letters.again:
            # A record that falls below the maximum would not have moved it: the maximum over all is that over the kept.
            highest = np.maximum.accumulate(
                np.where(accepted, np.minimum(times, letters.taken.arrived_at), INSTANT_MIN)
            )
            unordered = accepted & (times < np.maximum(highest, self._source.max_event_time))
            detail = f"{settings.field} is earlier than one before it in a sorted source"
            letters.add(unordered, "event_time", detail, times)
            accepted &= ~unordered
        return times, accepted

    def _row_watermarks(self, times: Instants, rows: npt.NDArray[np.int64], taken: Taken) -> Instants:
        """The watermark before each row; moves the maximum and the watermark past the last."""
        source = self._source
        happened = np.minimum(times, taken.arrived_at)
        before = np.empty(len(times) + 1, np.int64)
        before[0], before[1:] = source.max_event_time, happened
        np.maximum.accumulate(before, out=before)
        watermarks = np.maximum(before - self._settings.event_time.max_disorder_us, source.watermark)
        if before[-1] > source.max_event_time:
            source.max_event_record = taken.describe(int(rows[int(np.argmax(happened))]))
        source.max_event_time = int(before[-1])
        source.last_event_time, source.last_record = int(times[-1]), taken.describe(int(rows[-1]))
        source.watermark = int(watermarks[-1])
        return watermarks[:-1]

    def _standing_still(self, count: int) -> Instants:
        """Row watermarks of records that are taken again: where the source stands."""
        return np.full(count, self._source.watermark, np.int64)

    def set_aside(self, result: IntakeResult, count: int) -> Delta:
        """Count accepted records of the last step as dead-lettered after all; the delta to commit instead."""
        result.accepted -= count
        self._counts["accepted"] -= count
        self._counts["dead_lettered"] += count
        return (*self._delta(), *(entries for entries in result.delta if entries.kind is Kind.FLEET))

    def _delta_with_fleet(self, now_us: Instant) -> Delta:
        if not self._fleet.due(now_us, at_last=self._source.finished):
            return self._delta()
        return (*self._delta(), self._fleet.entries(now_us))

    def _delta(self) -> Delta:
        position = Entries(Kind.POSITION, POSITION_NAMESPACE)
        position.add(NO_KEY, 0, "", msgspec.json.encode(self._source))
        counters = []
        for name, count in self._counts.items():
            entries = Entries(Kind.COUNTER, name)
            entries.add(NO_KEY, 0, self._settings.stream, b"%d" % count)
            counters.append(entries)
        if not self._noted:
            return (position, *counters)
        notes = Entries(Kind.POSITION, NOTES_NAMESPACE)
        for name, note in self._noted.items():
            notes.add(NO_KEY, 0, name, note)
        return (position, notes, *counters)


def field_times(decoded: Decoded, name: str, unit: Unit | None) -> tuple[Instants, Mask]:
    """The times in a field of all accepted rows, and which of them are times; the others are 0."""
    if decoded.objects is not None:
        values: list[Any] = list(map(getter(name), decoded.objects))
        timed = np.array([v is not None for v in values], bool)
        if unit is None:
            moments = [0 if v is None else instant(v) for v in values]
            return np.array(moments, np.int64), timed
        kind = np.float64 if any(isinstance(v, float) for v in values) else np.int64
        numbers: Any = np.array([0 if v is None else v for v in values], kind)
    else:
        assert decoded.batch is not None
        column = column_of(decoded.batch, name)
        timed = column.is_valid().to_numpy(zero_copy_only=False)
        if unit is None:
            times = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            return times, timed & (times >= DATETIME_LO) & (times <= DATETIME_HI)
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
    times, possible = instants_of_numbers(numbers, unit)
    return times, timed & possible
