"""Intake: turns a source's batch into records with watermarks and the changes to commit.

An Intake serves one source partition under one grant, is stepped from one thread, and is pure apart from its soft
state. Its steps, in order:

    decode -> dedupe -> event time -> row watermarks

Every record is counted once, as accepted, duplicate or dead-lettered. The count of injected records is the source's
own, made before decoding; the accounting checks that the sums agree (I8).

The watermark of a row is the largest event time *before* it minus the disorder bound, and never below the published
watermark (I9: a bundle has the effect of one record at a time). The bound is `max_disorder`, or with a percentile what
the records before the row have taught (`disorder.py`). A record ahead of its arrival moves the watermark only as far as
its arrival, so that it makes no punctual record late; beyond the tolerance it is dead-lettered. A finished source
reports the greatest time.

Under `AdvanceWithClock(after)`, once the source has been quiet (connected, drained, nothing waiting) for `after`, the
watermark follows now - after - the disorder bound, as if a record with event time now - after had just arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.formats import Format
from millpy.ingest.dead_letters import DeadLetterCollector, outcomes_of, replay_rows_of
from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.dedupe import DedupeIds, DedupeIndex
from millpy.ingest.device_stats import DeviceStats
from millpy.ingest.disorder import Disorder
from millpy.ingest.error_rate import RecentErrorRate
from millpy.ingest.event_times import LocalTimeCounters, arrivals_of, field_times, rising_arrivals
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.rejections import time_problems
from millpy.ingest.settings import AdvanceWithClock, Dedupe, ErrorRate, EventTime, IdlePolicy, Wait
from millpy.ingest.site_watermarks import SiteColumn, SiteWatermarks, sites_of
from millpy.ingest.source_position import NOWHERE, SourcePosition
from millpy.limits import RING_SLOTS, Limits
from millpy.model.checkpoint import DeadLetter, DedupeRun, Delta, Entries, Kind, Pause, Request, RequestOutcome
from millpy.model.dead_letter import key_problem
from millpy.model.keys import KeyColumn, KeyHasher
from millpy.model.record import Instants, Records, RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, ClockReading, Instant, describe

NO_KEY = b'""'
KEPT_KINDS = (Kind.DISORDER, Kind.FLEET, Kind.SITE)
"""Of a step's delta, what does not change when one of its records is dead-lettered later."""
COUNTERS = ("injected", "accepted", "duplicate", "dead_lettered")
POSITION_NAMESPACE = "source"
NOTES_NAMESPACE = "notes"

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeSettings:
    """Settings of an injector; `computation` is its name, by default the stream's; `format` is the source's."""

    stream: str
    record_type: RecordType
    event_time: EventTime
    dedupe: Dedupe | None = None
    idle: IdlePolicy = field(default_factory=Wait)
    pause_above: ErrorRate | None = None
    devices: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    computation: str = ""
    lax: tuple[str, ...] = ()
    format: Format | None = None

    @property
    def sites(self) -> str:
        """The field with a watermark for each value; empty for one watermark."""
        return self.event_time.watermark_by or ""


@dataclass(slots=True)
class IntakeResult:
    """The result of one step of an intake, to be committed.

    Attributes:
        records: the accepted records, with event times and the watermark before each.
        delta: the position, notes, counters, disorder and device statistics to commit.
        dedupe_run: the ids to commit; None without records that have ids.
        watermark: the watermark after the step, which the injector publishes.
        changed: whether there is anything to commit.
        accepted, rows: number of accepted records, whatever later operators do; the row of each in the source batch.
        letter_of: (record, reason, detail) -> a dead letter for an accepted record that a later operator rejects.
        outcomes, places: of a replay, the outcome of each request, and the place of each row's among them, or -1.
        pause: set if too many records were dead-lettered.
    """

    records: Records
    watermark: Instant
    changed: bool
    accepted: int = 0
    delta: Delta = ()
    dead_letters: list[DeadLetter] = field(default_factory=list)
    dedupe_run: DedupeRun | None = None
    outcomes: list[RequestOutcome] = field(default_factory=list)
    places: Sequence[int] = ()
    pause: Pause | None = None
    rows: npt.NDArray[np.int64] | None = None
    letter_of: Callable[[int, str, str], DeadLetter] | None = None


class Intake:
    """Turns the batches of one source partition into records; holds the soft state for that.

    Args:
        settings: the injector's settings.
        recovered: the stored position and counters.
        runs: the dedupe runs of the horizon, oldest first.
    """

    def __init__(self, settings: IntakeSettings, recovered: StoredInterval, runs: Sequence[DedupeRun] = ()) -> None:
        self._settings = settings
        limits = settings.limits
        reader = settings.event_time.reader()
        self._local_times = None if reader is None else LocalTimeCounters(reader)
        self._decoder = Decoder(
            settings.record_type,
            time_field=settings.event_time.field,
            times=reader,
            lax=settings.lax,
            record_bytes_max=limits.record_bytes_max,
        )
        self._expander = Expander(settings.format, settings.record_type, limits) if settings.format else None
        self._ids = DedupeIds(settings.dedupe, settings.record_type) if settings.dedupe else None
        within_us = settings.dedupe.within_us if settings.dedupe else 0
        self._seen = DedupeIndex(within_us, runs, floor=recovered.horizon_floor)
        self._error_rate = RecentErrorRate(settings.pause_above)
        device_types = settings.record_type.key_types(settings.devices) if settings.devices else ()
        self._fleet = DeviceStats(settings.devices, device_types, recovered.entries)
        self._disorder = Disorder(settings.event_time, recovered.entries)
        self._sites: SiteWatermarks | None = None
        if settings.sites:
            bound_us = settings.event_time.max_disorder_us
            self._sites = SiteWatermarks(bound_us, limits.sites_max, recovered.entries)
        self._hasher = KeyHasher()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._handed_over: int | None = None
        self._source = SourcePosition()
        self._noted: Mapping[str, bytes | None] = {}
        self.notes: dict[str, bytes] = {}  # the stored notes, for the source when it is opened
        for entries in recovered.entries:
            self._absorb(entries)
        if self._source.finished and recovered.low_watermark < INSTANT_MAX:  # its end was set back
            self._source.finished = False
            self._source.watermark = self._source.promised = recovered.low_watermark
        if recovered.low_watermark > self._source.watermark:  # a new partition joins at the published watermark
            self._advance(recovered.low_watermark)
        self._quiet_since: int | None = None
        self._sites_stepped_us: int | None = None
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
            elif entries.kind is Kind.COUNTER and self._local_times is not None:
                self._local_times.absorb(entries.namespace, int(value))

    @property
    def position(self) -> bytes | None:
        """The position at which `Injector.open` resumes; None if the source has stored none."""
        return None if self._source.position == NOWHERE else bytes(self._source.position)

    @property
    def watermark(self) -> Instant:
        """The watermark that the injector publishes."""
        return Instant(self._source.watermark)

    def site_watermarks(self) -> dict[str, Instant]:
        """Return the watermark of each site, those beyond the bound as one; empty for a source without sites."""
        return {} if self._sites is None else self._sites.watermarks()

    @property
    def finished(self) -> bool:
        """Whether the source has ended."""
        return self._source.finished

    @property
    def ended_at(self) -> Instant:
        """The watermark that a source which has ended had before its end."""
        return Instant(self._source.ended_at)

    @property
    def counts(self) -> dict[str, int]:
        """The counters of the accounting (I8), since the beginning of the partition."""
        return dict(self._counts)

    def _idle_watermark(self, clock: ClockReading) -> int | None:
        idle = self._settings.idle
        if not isinstance(idle, AdvanceWithClock) or self._quiet_since is None or self._source.finished:
            return None
        if clock.elapsed_us - self._quiet_since < idle.after_us:
            return None
        candidate = clock.earliest_us - idle.after_us - self._disorder.bound_us
        # Advance in steps: a watermark that follows the clock must not cost a commit in every turn.
        step = int(self._settings.limits.progress_every_s * 1_000_000)
        return candidate if candidate >= self._source.watermark + step else None

    def _advance_sites(self, result: IntakeResult, clock: ClockReading, quiet: bool) -> None:
        """Advance the sites that have been silent, and the source to the least of all; add their progress."""
        if self._sites is None:
            return
        if isinstance(self._settings.idle, AdvanceWithClock):
            self._follow_clock(self._sites, self._settings.idle, clock, quiet)
        if len(self._sites):
            self._advance(self._sites.watermark)
        result.records.sites = self._sites.take_progress()

    def _follow_clock(self, sites: SiteWatermarks, idle: AdvanceWithClock, clock: ClockReading, quiet: bool) -> None:
        """Let sites that have been silent follow the clock, while the source is read up to its end."""
        step_us = int(self._settings.limits.progress_every_s * 1_000_000)
        if self._sites_stepped_us is None or not quiet:
            sites.begin_silence(clock.elapsed_us)
            self._sites_stepped_us = clock.elapsed_us
        elif not self._source.finished and clock.elapsed_us >= self._sites_stepped_us + step_us:
            self._sites_stepped_us = clock.elapsed_us
            to = clock.earliest_us - idle.after_us - self._disorder.bound_us
            sites.advance_silent(to, silent_before_us=clock.elapsed_us - idle.after_us, step_us=step_us)

    def _advance(self, watermark: int, of_promise: int = 0) -> None:
        """Advance the watermark, and the promised one to `of_promise` µs after it."""
        source = self._source
        source.watermark = max(source.watermark, watermark)
        source.promised = max(source.promised, watermark + of_promise)

    def step(self, taken: SourceBatch | None, *, clock: ClockReading, quiet: bool) -> IntakeResult:
        """Process one batch; without a batch, only let the clock advance.

        Args:
            taken: the source's batch.
            clock: the time before the source was polled.
            quiet: the result of the source's `quiet()`.
        """
        before = self._place()
        arrived = taken is not None and taken.has_records
        self._note(taken.notes if taken is not None else {})
        if arrived or not quiet:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = clock.elapsed_us
        self._follow(clock)
        result = IntakeResult(Records.empty(self._settings.record_type), self.watermark, False)
        if taken is not None:
            injected = self._injected(taken)
            if arrived:
                self._take(taken, result, clock)
                result.pause = None if taken.finished else self._error_rate.count(injected, len(result.dead_letters))
            if taken.position is not None:
                self._source.position = msgspec.Raw(taken.position)
            self._state(taken.watermark)
            if taken.finished:
                self._end(result)
        elif not (self._sites and len(self._sites)) and (candidate := self._idle_watermark(clock)) is not None:
            self._advance(candidate, self._disorder.bound_us - self._settings.event_time.max_disorder_us)
        self._advance_sites(result, clock, quiet)
        if arrived or self._arrived_us is None:
            self._arrived_us, self._renewed = clock.elapsed_us, 0
        elif taken is None:
            result.dedupe_run = self._quiet_ids(clock.elapsed_us - self._arrived_us)
        fleet_due = self._fleet.due(clock.now_us, at_last=self._source.finished)
        result.changed = arrived or fleet_due or bool(self._noted) or result.dedupe_run is not None
        result.changed |= self._place() != before or result.records.sites is not None
        result.watermark = self.watermark
        if result.changed:
            result.delta = self._whole_delta(clock.now_us)
        return result

    def _note(self, noted: Mapping[str, bytes | None]) -> None:
        """Keep what a source notes, to be committed and for its next opening."""
        self._noted = noted
        for name, note in noted.items():
            if note is None:
                self.notes.pop(name, None)
            else:
                self.notes[name] = note

    def _end(self, result: IntakeResult) -> None:
        """Let the source end with this batch: it reports the greatest time, and needs no ids."""
        if not self._source.finished:
            self._source.ended_at = self._source.watermark
        self._source.finished = True
        self._state(INSTANT_MAX)
        if self._settings.dedupe is not None:
            run = result.dedupe_run or DedupeRun(b"", b"", INSTANT_MIN, INSTANT_MAX)
            result.dedupe_run = replace(run, clock=INSTANT_MAX)

    def _follow(self, clock: ClockReading) -> None:
        """Account for the time of this step. The dedupe clock follows elapsed time only (see `dedupe_shift_us`)."""
        source, dedupe = self._source, self._settings.dedupe
        self._unsure_us = clock.latest_us - clock.now_us
        if dedupe is None or dedupe.time is not None or source.finished:
            return
        if self._stepped_us is None:
            # The least time that can have passed since the last owner's commit: it may have been later than that owner
            # thought. None if clocks went back.
            earliest = clock.earliest_us + source.dedupe_shift_us - source.unsure_us
            source.dedupe_shift_us = max(earliest, self._seen.clock) - clock.now_us
        else:
            source.dedupe_shift_us -= clock.stepped_us - self._stepped_us
        self._stepped_us = clock.stepped_us

    def _state(self, watermark: Instant) -> None:
        """Advance to a watermark that the source itself states, for all sites."""
        self._advance(watermark)
        if self._sites is not None:
            self._sites.advance_all(watermark)

    def source_opened(self) -> None:
        """Reset the count of handed-over records, and the silence: the source has just been opened."""
        self._handed_over = 0
        self._quiet_since = self._sites_stepped_us = None

    def _injected(self, taken: SourceBatch) -> int:
        """Return how many records the source has handed over since the last batch, by its own count."""
        injected = taken.records
        if taken.total is not None:
            before = self._handed_over
            injected = taken.records if before is None else taken.total - before
            self._handed_over = taken.total
        self._counts["injected"] += injected
        return injected

    def _quiet_ids(self, quiet_us: int) -> DedupeRun | None:
        """Return the dedupe run of a source that has been quiet for this long, so that the store can free slots.

        On the clock of arrival, ids expire. On a named clock they stay valid, and move to the current slot.
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
        """Return the values whose change needs a commit, even without records."""
        source = self._source
        return source.position, source.watermark, source.finished, self._stepped_us or 0

    def empty_result(self) -> IntakeResult:
        """Return the result of a step without records that leaves the source in place."""
        self._noted = {}
        return IntakeResult(Records.empty(self._settings.record_type), self.watermark, True)

    def replay(self, requests: Sequence[Request], arrived_at: Instant, clock: ClockReading) -> IntakeResult:
        """Replay dead letters, each under its original dedupe id.

        They are judged by the source's current watermark but do not move it, and the order of a sorted source does not
        bind them. A record that passed deduplication before is not a duplicate of itself; any other may be one.
        """
        result = self.empty_result()
        self._counts["dead_lettered"] -= len(requests)
        self._follow(clock)
        rows = replay_rows_of(requests, arrived_at, self._expander)
        self._counts["injected"] += len(rows.requests) - len(requests)
        letters = self._take(rows.taken, result, clock, rows.requests)
        if self._sites is not None:
            result.records.sites = self._sites.take_progress()  # of sites that a replayed record is the first of
        result.places = rows.places
        result.outcomes, result.dead_letters = outcomes_of(requests, rows.places, letters)
        result.delta = self._whole_delta(clock.now_us)
        return result

    def _take(
        self, taken: SourceBatch, result: IntakeResult, clock: ClockReading, requests: Sequence[Request] = ()
    ) -> DeadLetterCollector:
        """Judge each row of a batch. Fill in `result`; move the counts, the ids, the source and the devices on."""
        settings = self._settings
        decoded = self._decoder.decode(taken)
        if self._local_times is not None:
            self._local_times.take(replayed=bool(requests))
        letters = DeadLetterCollector(
            settings.stream, settings.computation or settings.stream, taken, decoded, requests
        )
        letters.devices = settings.devices
        if settings.event_time.arrives:
            letters.arrivals = arrivals_of(taken, requests)
        letters.add_refused()
        rows = decoded.rows
        fresh, duplicates = np.ones(len(rows), bool), 0
        if self._ids is not None:
            fresh, duplicates, result.dedupe_run = self._without_duplicates(letters)
        self._refuse_long_keys(letters, fresh)
        by_site = sites_of(letters, fresh, settings.record_type, settings.sites) if settings.sites else None
        if duplicates and settings.devices:
            self._fleet.take_duplicates(self._devices_of(letters, fresh), clock.now_us)
        times, accepted = self._event_times(letters, fresh, by_site)
        result.accepted = int(np.count_nonzero(accepted))
        if result.accepted:
            newest = int(times[accepted].max())
            self._source.newest_event_time = max(self._source.newest_event_time, newest)
        self._counts["accepted"] += result.accepted
        self._counts["duplicate"] += duplicates
        self._counts["dead_lettered"] += len(letters)
        result.dead_letters = letters.in_order()
        kept = np.flatnonzero(accepted)
        result.rows = rows[kept]
        result.letter_of = lambda record, reason, detail: letters.letter_of(
            int(kept[record]), reason, detail, int(times[kept[record]])
        )
        if not requests:
            self._source.arrived_at, self._source.unsure_us = taken.arrived_at, self._unsure_us
        if not len(kept):
            return letters
        everything = len(kept) == len(rows)
        of_kept = times if everything else times[kept]
        if by_site is not None and not everything:
            by_site = by_site.take(kept)
        result.records = Records(
            settings.record_type,
            of_kept,
            watermarks=self._watermarks_by_site(by_site, of_kept, taken.arrived_at, clock, replayed=bool(requests))
            if by_site is not None
            else self._current_watermarks(len(kept))
            if requests
            else self._row_watermarks(of_kept, taken.arrived_at),
            batch=decoded.batch if everything or decoded.batch is None else decoded.batch.take(pa.array(kept)),
            objects=decoded.objects if everything or decoded.objects is None else [decoded.objects[k] for k in kept],
        )
        if settings.devices:
            self._fleet.take(result.records.keys(settings.devices, self._hasher), of_kept, clock.now_us)
        return letters

    def _refuse_long_keys(self, letters: DeadLetterCollector, fresh: Mask) -> None:
        """Dead-letter fresh records whose key is too long for an index, and mark them as not fresh."""
        for index in letters.long_devices().tolist():
            if fresh[index] and (problem := key_problem(letters.device_of(index) or b"")):
                which = np.zeros(len(fresh), bool)
                which[index] = True
                letters.add(which, "key", problem)
                fresh[index] = False

    def _devices_of(self, letters: DeadLetterCollector, fresh: Mask) -> KeyColumn:
        """Return the devices of the duplicates: the records that are neither fresh nor dead-lettered."""
        decoded = letters.decoded
        dropped = [k for k in np.flatnonzero(~fresh).tolist() if letters.of_row(int(decoded.rows[k])) is None]
        records = Records(
            self._settings.record_type,
            np.zeros(len(dropped), np.int64),
            batch=None if decoded.batch is None else decoded.batch.take(pa.array(dropped, pa.int64())),
            objects=None if decoded.objects is None else [decoded.objects[k] for k in dropped],
        )
        return records.keys(self._settings.devices, self._hasher)

    def _without_duplicates(self, letters: DeadLetterCollector) -> tuple[Mask, int, DedupeRun | None]:
        """Return which records are fresh, how many are duplicates, and the dedupe run to commit.

        A record without a valid time on the dedupe clock is dead-lettered, and is not fresh.
        """
        settings = self._settings.dedupe
        assert settings is not None
        taken, decoded = letters.taken, letters.decoded
        clocks = np.full(len(decoded.rows), taken.arrived_at + self._source.dedupe_shift_us, np.int64)
        timed = np.ones(len(decoded.rows), bool)
        if settings.time is not None:
            clocks, timed = field_times(decoded, settings.time, settings.unit)
            latest = self._latest(taken)
            future = timed & (clocks > latest)  # these would advance the clock and expire every id
            letters.add(~timed, "refused", f"dedupe time {settings.time} is missing or outside the years 1 to 9999")
            letters.add(future, "future", f"dedupe time {settings.time} is after {describe(latest)}")
            timed &= ~future
            clocks = np.minimum(clocks, taken.arrived_at)  # a tolerated record must not advance it past the arrival
        letters.judged, letters.ids = self._identify(decoded, timed)
        held = letters.keep_original_ids(timed)
        duplicates, run = self._seen.check(letters.ids, clocks[letters.judged])
        fresh = timed.copy()
        fresh[letters.judged] = ~duplicates
        kept_all_the_same = int(np.count_nonzero(held[letters.judged] & duplicates))
        return fresh | held, self._seen.found - kept_all_the_same, run

    def _identify(self, decoded: DecodeResult, timed: Mask) -> tuple[Mask, bytes]:
        """Return which of the timed rows have an id, and those ids."""
        assert self._ids is not None
        if decoded.objects is not None:
            judged = timed & self._ids.identified_objects(decoded.objects)
            return judged, self._ids.of_objects(
                [o for o, is_judged in zip(decoded.objects, judged, strict=True) if is_judged]
            )
        assert decoded.batch is not None
        judged = timed & self._ids.identified_batch(decoded.batch)
        return judged, self._ids.of_batch(decoded.batch if judged.all() else decoded.batch.filter(pa.array(judged)))

    def _latest(self, taken: SourceBatch) -> Instant:
        """Return the latest event time that is not from the future, allowing for the clock's error."""
        return Instant(taken.arrived_at + self._unsure_us + self._settings.event_time.future_tolerance_us)

    def _event_times(
        self, letters: DeadLetterCollector, fresh: Mask, by_site: SiteColumn | None
    ) -> tuple[Instants, Mask]:
        """Return the event times of all rows, and which of the fresh rows are accepted."""
        settings = self._settings.event_time
        if settings.arrives:
            floor = max(self._source.max_event_time, 0 if self.finished else self._source.watermark)
            return rising_arrivals(letters, fresh, floor), fresh
        times, timed = field_times(letters.decoded, settings.field, settings.unit)
        latest = self._latest(letters.taken)
        future = times > latest
        letters.add(fresh & ~timed, "event_time", time_problems(letters.decoded, settings.field, settings.unit))
        letters.add(fresh & timed & future, "future", f"{settings.field} is after {describe(latest)}", times)
        accepted = fresh & timed & ~future
        if settings.sorted and not letters.requests:
            # A record below the maximum would not have moved it: the maximum of all rows is that of the kept ones.
            happened = np.where(accepted, np.minimum(times, letters.taken.arrived_at), INSTANT_MIN)
            if self._sites is not None and by_site is not None:
                highest = self._sites.highest(by_site, happened)
            else:
                highest = np.maximum(np.maximum.accumulate(happened), self._source.max_event_time)
            unordered = accepted & (times < highest)
            detail = f"{settings.field} is earlier than that of a record before it in a sorted source"
            letters.add(unordered, "event_time", detail, times)
            accepted &= ~unordered
        return times, accepted

    def _row_watermarks(self, times: Instants, arrived_at: Instant) -> Instants:
        """Return the watermark before each row. Advance the maximum and the watermark past the last row."""
        source = self._source
        happened = np.minimum(times, arrived_at)
        before = np.empty(len(times) + 1, np.int64)
        before[0], before[1:] = source.max_event_time, happened
        np.maximum.accumulate(before, out=before)
        watermarks, source.promised = self._disorder.take(
            before, times, Instant(source.watermark), Instant(source.promised)
        )
        source.max_event_time = int(before[-1])
        source.watermark = int(watermarks[-1])
        return watermarks[:-1]

    def _watermarks_by_site(
        self, by_site: SiteColumn, times: Instants, arrived_at: Instant, clock: ClockReading, *, replayed: bool
    ) -> Instants:
        """Return the watermark of its site before each row, and advance the sites; replayed records move none."""
        assert self._sites is not None
        happened = np.minimum(times, arrived_at)
        if replayed:
            return self._sites.current(by_site, happened, arrived_at=arrived_at, elapsed_us=clock.elapsed_us)
        watermarks, before = self._sites.take(by_site, happened, arrived_at=arrived_at, elapsed_us=clock.elapsed_us)
        self._disorder.count(before, times, watermarks)
        self._source.max_event_time = max(self._source.max_event_time, int(happened.max()))
        return watermarks

    def _current_watermarks(self, count: int) -> Instants:
        """Return the row watermarks of replayed records: the current watermark."""
        return np.full(count, self._source.watermark, np.int64)

    def count_dead_lettered(self, result: IntakeResult, count: int) -> Delta:
        """Count accepted records of the last step as dead-lettered. Return the delta to commit instead."""
        result.accepted -= count
        self._counts["accepted"] -= count
        self._counts["dead_lettered"] += count
        return (*self._delta(), *(entries for entries in result.delta if entries.kind in KEPT_KINDS))

    def _whole_delta(self, now_us: Instant) -> Delta:
        """Return the changes to commit, with the statistics that are written only once."""
        delta = (*self._delta(), *self._disorder.entries())
        if self._sites is not None:
            delta = (*delta, *self._sites.take_entries())
        if not self._fleet.due(now_us, at_last=self._source.finished):
            return delta
        return (*delta, self._fleet.entries(now_us))

    def _delta(self) -> Delta:
        position = Entries(Kind.POSITION, POSITION_NAMESPACE)
        position.add(NO_KEY, 0, "", msgspec.json.encode(self._source))
        counters = []
        for name, count in {**self._counts, **(self._local_times.counts if self._local_times else {})}.items():
            entries = Entries(Kind.COUNTER, name)
            entries.add(NO_KEY, 0, self._settings.stream, b"%d" % count)
            counters.append(entries)
        if not self._noted:
            return (position, *counters)
        notes = Entries(Kind.POSITION, NOTES_NAMESPACE)
        for name, note in self._noted.items():
            notes.add(NO_KEY, 0, name, note)
        return (position, notes, *counters)
