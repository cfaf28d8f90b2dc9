"""Steps: run local intervals in topological order, pass slices in memory, make one checkpoint per interval.

A step is pure except for soft state: it reads an inbox, moves soft state and returns checkpoints. It runs in the step
thread, or in the event loop if it takes a few quick records (`TurnCycle.step`).

`routing` takes a step's productions to their consumers. A local consumer without records in a bundle still moves its
cursor there, so that it may use the watermark that belongs to that position. It does not commit for that alone:
progress without data is coalesced (`TurnInput.progress_due`), unless a window, hold or timer is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np

from millpy.errors import CursorGapError, StaleSequencerError
from millpy.graph import StageNode
from millpy.hosting.failpoints import Failpoint, Failpoints
from millpy.hosting.interval_state import IntervalState, PauseState
from millpy.hosting.isolation import Isolation, PoisonRecord
from millpy.hosting.plan import Plan
from millpy.hosting.replay import (
    ExpectedRecords,
    Replay,
    ReplayBatch,
    is_emission,
    match_outcomes,
    retake,
    retake_corrections,
    retake_emission,
)
from millpy.hosting.routing import Delivery, Observe, Router, positions_of_local_producers
from millpy.hosting.step_counts import count_step, uncount_given_up, uncount_replayed
from millpy.hosting.takes import TakeWriter
from millpy.ingest.intake import IntakeResult
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint, DeadLetter, Delta, Entries, Grant, RequestOutcome, Settlement
from millpy.model.dead_letter import payload_of
from millpy.model.keys import KeyHasher, key_text
from millpy.model.lookup import Tables
from millpy.model.record import Records, retractions_of
from millpy.model.stage import InputBundle, Release, StageInterval, StepResult, WindowCorrection, Work
from millpy.model.stored_windows import WindowQuery
from millpy.model.time import INSTANT_MAX, ClockReading, Instant, plausible_floor
from millpy.model.watermark import advance, input_watermark, low_watermark
from millpy.store.codec import decode_slice
from millpy.store.protocol import PollResult

LoadState = Callable[[Grant, Sequence[bytes]], Sequence[Entries]]


@dataclass(frozen=True, slots=True)
class StoreLoader:
    """What a step reads from the store.

    Attributes:
        state: loads the state of keys; see `Store.load_state`.
        windows: loads closed windows; see `Store.load_windows`.
        query: loads the windows that a query asks for; see `Store.query_windows`.
    """

    state: LoadState
    windows: Callable[[Grant, int, Sequence[str], Sequence[bytes]], Entries]
    query: Callable[[Grant, int, WindowQuery], Entries]


CURSOR_ONLY_EVERY_S = 1.0
ARCHIVE_BUNDLES = 2
"""Bundles that an archive may take at once from segments, so that it catches up with a source of its worker."""


class StepBudget(Protocol):
    """Bounds of one step; they change from turn to turn."""

    @property
    def records(self) -> int:
        """Number of polled records that one interval may take, at least one; a segment is taken whole."""
        ...

    @property
    def panes(self) -> int:
        """Number of panes that one interval may emit."""
        ...

    @property
    def timers(self) -> int:
        """Number of timers of one interval that may fire at the end."""
        ...


@dataclass(slots=True)
class TurnInput:
    """The input of a turn. Immutable once gathered, so that a turn can be stepped again from it.

    Attributes:
        clock: reading of the clock before the sources were read.
        monotonic: when the input was gathered, in seconds on the monotonic clock.
        polled: consumer interval -> answers of the store.
        delivered: consumer interval -> records that are decoded already, and positions, after those polled.
        taken: injector interval -> batch that was waiting at its source.
        quiet: injector intervals whose source is proven idle.
        replays: interval -> records that it replays.
        progress_due: whether this turn commits progress without data.
        releases: interval -> parked keys that an operator released.
        tables: the versions of lookup tables, as they are in this turn.
        full: sinks' intervals that take no input, because too much waits in their outboxes.
        settlements: interval of a sink -> what becomes of messages that the other side refuses.
    """

    clock: ClockReading
    monotonic: float
    polled: Mapping[int, Sequence[PollResult]] = field(default_factory=dict)
    delivered: Mapping[int, Sequence[Delivery]] = field(default_factory=dict)
    taken: Mapping[int, SourceBatch] = field(default_factory=dict)
    quiet: frozenset[int] = frozenset()
    replays: Mapping[int, Replay] = field(default_factory=dict)
    progress_due: bool = False
    releases: Mapping[int, Sequence[Release]] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)
    full: frozenset[int] = frozenset()
    settlements: Mapping[int, Settlement] = field(default_factory=dict)

    @property
    def now_us(self) -> Instant:
        """The processing time of the turn."""
        return self.clock.now_us


class Steps:
    """Steps intervals, in topological order.

    Attributes:
        records: number of records that the last run took in, from sources and in segments, whatever their outcome.
    """

    def __init__(
        self,
        plan: Plan,
        limits: Limits,
        load: StoreLoader,
        failpoints: Failpoints,
        budget: StepBudget,
        monotonic: Callable[[], float],
        observe: Observe | None = None,
    ) -> None:
        self._plan = plan
        self.progress = plan.progress
        self._limits = limits
        self._budget = budget
        self._monotonic = monotonic
        self._ends_at = 0.0
        self.records = 0
        self._clock_step_us = round(limits.clock_step_s * 1e6)
        self._load = load
        self._failpoints = failpoints
        self._hasher = KeyHasher()
        self._router = Router(limits, self._hasher, plan.progress, observe)
        self._takes = TakeWriter(plan)

    def run(self, inbox: TurnInput, intervals: Mapping[int, IntervalState], isolation: Isolation) -> list[Checkpoint]:
        """Step every interval once; return the checkpoints that this turn has to commit, in topological order."""
        self._ends_at = self._monotonic() + self._limits.step_s_max
        self.records = 0
        progress, run = self.progress, self.progress.run
        progress.current_call = None
        for each in intervals.values():  # also those that a search for a refused value has opened anew
            each.use_tables(inbox.tables)
            each.wait_for_outbox(inbox.full)
        # Receive before stepping: whether a consumer is current with a local producer depends on what it has read.
        deliveries = {
            interval_id: self._receive(interval, inbox.polled.get(interval_id, ()), intervals)
            for interval_id, interval in intervals.items()
        }
        for interval_id, decoded in inbox.delivered.items():
            deliveries[interval_id].extend(decoded)
        for interval_id, inbound in deliveries.items():
            inbound.extend(positions_of_local_producers(intervals[interval_id], intervals, inbound))
        checkpoints: list[Checkpoint] = []
        for computation in self._plan:
            for deployed in computation.intervals:
                interval = intervals.get(deployed.interval_id)
                if interval is None:
                    continue
                if interval.held:
                    if not _settles(interval, inbox):
                        continue
                    deliveries[interval.interval_id] = []
                if interval.stage is None:
                    checkpoint = self._inject(interval, inbox, intervals, deliveries, isolation)
                else:
                    checkpoint = self._step(interval, inbox, intervals, deliveries, isolation)
                progress.count_unit(run)
                if checkpoint is not None and not isolation.again:
                    checkpoint = interval.sampler.keep(checkpoint, inbox.now_us)
                if checkpoint is not None:
                    checkpoints.append(checkpoint)
        return checkpoints

    def _inject(
        self,
        interval: IntervalState,
        inbox: TurnInput,
        intervals: Mapping[int, IntervalState],
        deliveries: dict[int, list[Delivery]],
        isolation: Isolation,
    ) -> Checkpoint | None:
        """Step a source's interval: its batch, or the records that it replays; return None if nothing changes."""
        taken = inbox.taken.get(interval.interval_id)
        replay = inbox.replays.get(interval.interval_id)
        if taken is None and replay is None and (not inbox.progress_due or interval.finished):
            return None
        assert interval.intake is not None
        retaken = ReplayBatch()
        if replay is None:
            quiet = interval.interval_id in inbox.quiet
            before = interval.intake.counts["injected"]
            result = interval.intake.step(taken, clock=inbox.clock, quiet=quiet)
            self.records += interval.intake.counts["injected"] - before
        elif is_emission(replay.requests[0], interval):
            result = interval.intake.empty_result()
            retaken = retake_emission(interval, replay, isolation)
        else:
            result = interval.intake.replay(replay.requests, replay.arrived_at, inbox.clock)
            self.records += len(replay.requests)
        if not result.changed:
            return None
        self._failpoints.reach_now(Failpoint.AFTER_DECODE)
        if taken is not None and taken.finished:
            interval.finished = True
        if result.pause is not None:
            interval.pause = PauseState.STEPPED
        records, delta, refused = self._admitted(interval, result, isolation)
        emitted = {interval.plan.name: result.accepted}
        interval.input_watermark = interval.low_watermark = advance(interval.low_watermark, result.watermark)
        interval.bundle += 1
        productions = {interval.plan.name: records}
        expected = ExpectedRecords(replay)
        made = (productions, emitted)
        segments, failed = self._router.emit(interval, *made, intervals, deliveries, retaken.emitted, expected)
        outcomes, failed, _ = match_outcomes(retaken, failed)
        return Checkpoint(
            grant=interval.grant,
            bundle=interval.bundle,
            input_watermark=interval.input_watermark,
            low_watermark=interval.low_watermark,
            delta=(*delta, *interval.take_counters()),
            counters=interval.all_counters(delta),
            segments=segments,
            dedupe_run=result.dedupe_run,
            dead_letters=[*result.dead_letters, *refused, *failed],
            outcomes=[*result.outcomes, *outcomes],
            expected=expected.found,
            pause=result.pause,
        )

    def _admitted(
        self, interval: IntervalState, result: IntakeResult, isolation: Isolation
    ) -> tuple[Records, Delta, list[DeadLetter]]:
        """Return an intake's records without those that the database refuses, the new delta, and the dead letters."""
        admitted, blamed = isolation.admit(result.records)
        records = result.records if admitted is None else result.records.take(admitted)
        if not blamed:
            return records, result.delta, []
        assert interval.intake is not None
        assert result.letter_of is not None
        assert result.rows is not None
        letters = []
        for blame in blamed:
            letter = result.letter_of(blame.row, "refused", blame.detail)
            letter = replace(letter, computation=self._plan.writer_of(blame.table) or letter.computation)
            place = result.places[int(result.rows[blame.row])] if result.outcomes else -1
            if place >= 0:
                result.outcomes[place] = RequestOutcome(result.outcomes[place].request, letter)
            else:
                letters.append(letter)
        return records, interval.intake.count_dead_lettered(result, len(blamed)), letters

    def _receive(
        self, interval: IntervalState, answers: Sequence[PollResult], intervals: Mapping[int, IntervalState]
    ) -> list[Delivery]:
        """Make deliveries of polled segments, ahead of anything that local producers pass on in this turn."""
        received, records_max = 0, self._budget.records * (ARCHIVE_BUNDLES if interval.plan.archives else 1)
        inbound: list[Delivery] = []
        for answer in answers:
            producer = answer.query.producer
            _check_still_ours(intervals.get(producer), answer)
            at = interval.cursors[producer].seq
            if at != answer.query.after:
                continue  # this poll is older than a bundle that came in memory and moved the cursor
            whole = not answer.truncated
            segments = answer.segments
            answered = {(segment.subscription_id, segment.seq) for segment in segments}
            for place, segment in enumerate(segments):
                if segment.seq > at:
                    if received >= records_max:
                        whole = False
                        break
                    at = segment.seq
                previous = segment.subscription_id, segment.previous_seq
                if segment.previous_seq > answer.query.after and previous not in answered:
                    raise CursorGapError(
                        f"segment {segment.seq} of interval {producer} follows {segment.previous_seq}, "
                        f"but interval {interval.interval_id} is at {answer.query.after}"
                    )
                bundle = None
                if segment.payload is not None:
                    subscription = interval.plan.incoming[segment.subscription_id]
                    records = decode_slice(subscription.record_type, segment.payload, segment.checksum)
                    keys = records.keys(subscription.key_fields, self._hasher)
                    bundle = Bundle(
                        subscription.input,
                        producer,
                        segment.seq,
                        segment.watermark,
                        records,
                        keys,
                        segment.previous_seq,
                    )
                    received += len(records)
                    self.progress.units += 1
                last_of_seq = place + 1 == len(segments) or segments[place + 1].seq != segment.seq
                inbound.append(Delivery(producer, segment.seq, segment.watermark, bundle, last_of_seq, polled=True))
            if whole and answer.head_seq > at:
                inbound.append(Delivery(producer, answer.head_seq, answer.head_watermark, None, True))
        self.records += received
        return inbound

    def _step(
        self,
        interval: IntervalState,
        inbox: TurnInput,
        intervals: Mapping[int, IntervalState],
        deliveries: dict[int, list[Delivery]],
        isolation: Isolation,
    ) -> Checkpoint | None:
        """Step one interval and deliver to consumers in memory; return its checkpoint, or None if nothing is due."""
        assert interval.stage is not None
        stage, before, retaken = interval.stage, interval.input_watermark, self._retaken(interval, inbox, isolation)
        consumed = self._takes.consumed(interval, deliveries[interval.interval_id])
        arrived, refused = self._arrivals(interval, deliveries[interval.interval_id], isolation)
        arrived, refused = [*retaken.arrived, *arrived], [*refused, *uncount_given_up(interval, inbox.settlements)]
        after = input_watermark(cursor.watermark for cursor in interval.cursors.values())
        assert after >= before, (interval.interval_id, before, after)
        now_us = advance(plausible_floor(interval.processing_floor, inbox.clock, self._clock_step_us), inbox.now_us)
        releases = inbox.releases.get(interval.interval_id, ())
        unarchived = _unarchived(retaken, releases, refused)
        if not (arrived or unarchived or self._is_due(interval, before, after, now_us, inbox)):
            interval.input_watermark = after
            return None
        self._load_missing(interval, stage, arrived)
        work = self._work(interval, arrived, before, after, now_us, releases, retaken.corrections)
        result = self._bounded_step(interval, stage, work, isolation)
        oldest = stage.oldest_work()
        _advance(interval, after, now_us, None if result.unfinished else oldest)
        count_step(interval, refused, result)
        corrected = uncount_replayed(interval, retaken, result, before)
        self._takes.add(interval, consumed, work, result, unarchived)
        expected = _expected(interval, inbox, retaken)
        made = (result.productions, result.emitted_by_stream)
        segments, failed = self._router.emit(interval, *made, intervals, deliveries, retaken.emitted, expected)
        outcomes, letters, late = match_outcomes(retaken, [*result.dead_letters, *failed], result.late)
        interval.committed_at = inbox.monotonic
        return Checkpoint(
            grant=interval.grant,
            bundle=interval.bundle,
            input_watermark=after,
            low_watermark=interval.low_watermark,
            oldest_work=oldest,
            processing_floor=now_us,
            delta=(*result.delta, *interval.take_counters(), *interval.take_versions()),
            counters=interval.all_counters(()),
            cursors=interval.take_moved(),
            segments=segments,
            results=result.results,
            deleted=result.deleted,
            late=late,
            dedupe_run=result.dedupe_run,
            dead_letters=[*letters, *(letter for _, letter in refused)],
            outcomes=[*outcomes, *corrected],
            expected=expected.found,
            release_ids=[release.release_id for release in releases],
            notices=result.notices,
            archived=result.archived,
            statements=result.statements,
            outbox=result.outbox,
            settlement=inbox.settlements.get(interval.interval_id),
        )

    def _work(
        self,
        interval: IntervalState,
        arrived: Sequence[InputBundle],
        before: Instant,
        after: Instant,
        now_us: Instant,
        releases: Sequence[Release],
        corrections: Sequence[WindowCorrection],
    ) -> Work:
        """Return the work of a step, which can read what of its interval is only in the store."""
        work = Work(interval.bundle + 1, arrived, before, after, now_us, releases, self._budget.panes)
        work.corrections = corrections
        work.load_windows = partial(self._load.windows, interval.grant)
        work.query_windows = partial(self._load.query, interval.grant)
        return work

    def _load_missing(self, interval: IntervalState, stage: StageInterval, arrived: Sequence[InputBundle]) -> None:
        """Load the state that a step needs and that is not in memory."""
        if missing := stage.missing_keys([arrival.bundle for arrival in arrived]):
            stage.load_state(missing, self._load.state(interval.grant, missing))
        self._failpoints.reach_now(Failpoint.AFTER_LOAD)

    def _bounded_step(
        self, interval: IntervalState, stage: StageInterval, work: Work, isolation: Isolation
    ) -> StepResult:
        """Step within the budget of panes, timers and time; fire the same timers again if the turn is stepped again."""
        if isolation.again:
            work.fires = isolation.fired.get(interval.interval_id)
        else:
            work.timers_max, work.overdue = self._budget.timers, self._is_overdue
        work.tables = interval.tables
        result = stage.step(work)
        if result.fired and not isolation.again:
            isolation.fired[interval.interval_id] = result.fired
        interval.unfinished = result.unfinished
        return result

    def _is_overdue(self) -> bool:
        """Tell whether the step has taken longer than its budget allows."""
        return self._monotonic() >= self._ends_at

    def _retaken(self, interval: IntervalState, inbox: TurnInput, isolation: Isolation) -> ReplayBatch:
        """Return the requests that this interval replays in this turn, as records; an empty batch without requests."""
        replay = inbox.replays.get(interval.interval_id)
        if replay is None:
            return ReplayBatch()
        if replay.requests[0].window is not None:
            return retake_corrections(interval, replay, isolation)
        if is_emission(replay.requests[0], interval):
            return retake_emission(interval, replay, isolation)
        return retake(interval, replay, self._hasher, isolation)

    def _arrivals(
        self, interval: IntervalState, inbound: Sequence[Delivery], isolation: Isolation
    ) -> tuple[list[InputBundle], list[tuple[int, DeadLetter]]]:
        """Consume deliveries in order; cap each bundle by the watermarks of the *other* producers at that moment."""
        arrived: list[InputBundle] = []
        refused: list[tuple[int, DeadLetter]] = []
        if not inbound:
            return arrived, refused
        for delivery in inbound:
            if delivery.bundle is not None and (len(delivery.bundle) or delivery.bundle.records.sites is not None):
                bundle = delivery.bundle
                if len(bundle) and (delivery.polled or interval.plan.runs_statements):
                    admitted, blamed = isolation.admit(bundle.records)
                    refused.extend((bundle.input, self._blamed(interval, bundle, blame)) for blame in blamed)
                    bundle = bundle if admitted is None else bundle.take(admitted)
                others = (cursor.watermark for p, cursor in interval.cursors.items() if p != delivery.producer)
                cap = min(others, default=INSTANT_MAX)
                if len(bundle) or bundle.records.sites is not None:
                    arrived.append(InputBundle(bundle, cap))
            if delivery.moves_cursor:
                interval.advance_cursor(delivery.producer, delivery.seq, delivery.watermark)
        return arrived, refused

    def _blamed(self, interval: IntervalState, bundle: Bundle, blame: PoisonRecord) -> DeadLetter:
        """Make a dead letter of a record that the database refuses, here or in a table behind this stage."""
        assert isinstance(interval.plan.node, StageNode)
        record = bundle.records.take(np.array([blame.row], np.int64))
        return DeadLetter(
            reason="refused",
            detail=blame.detail,
            payload=payload_of(record.objects()[0]),
            stream=interval.plan.node.inputs[bundle.input].stream.name,
            computation=self._plan.writer_of(blame.table) or interval.plan.name,
            event_time=int(record.event_times[0]),
            key=key_text(bundle.keys.keys[int(bundle.keys.codes[blame.row])]),
            input=bundle.input,
            retracts=bool(retractions_of(record)[0]),
        )

    def _is_due(
        self, interval: IntervalState, before: Instant, after: Instant, now_us: Instant, inbox: TurnInput
    ) -> bool:
        assert interval.stage is not None
        due_event, due_processing = interval.stage.next_due()
        if interval.unfinished or due_processing <= now_us or (due_event <= after and due_event < INSTANT_MAX):
            return True
        if not inbox.progress_due:
            return False
        moved = advance(interval.low_watermark, low_watermark(interval.stage.oldest_work(), after))
        if moved > interval.low_watermark or after > before:
            return True
        return bool(interval.moved) and inbox.monotonic - interval.committed_at >= CURSOR_ONLY_EVERY_S


def _advance(interval: IntervalState, watermark: Instant, now_us: Instant, oldest: Instant | None) -> None:
    """Move an interval to its next bundle, and its low watermark as far as its oldest work lets it.

    A late record holds nothing back: the watermark has passed it (I5). Due work that is left undone (None) holds all.
    """
    interval.bundle += 1
    interval.input_watermark = watermark
    interval.processing_floor = now_us
    if oldest is not None:
        interval.low_watermark = advance(interval.low_watermark, low_watermark(oldest, watermark))


def _expected(interval: IntervalState, inbox: TurnInput, retaken: ReplayBatch) -> ExpectedRecords:
    """Return what replayed dead letters become, with the records that they are for this interval."""
    found = ExpectedRecords(inbox.replays.get(interval.interval_id))
    for arrival in retaken.arrived:
        found.add(interval.plan.name, arrival.bundle.input, arrival.bundle.records)
    return found


def _unarchived(retaken: ReplayBatch, releases: Sequence[Release], refused: Sequence[tuple[int, DeadLetter]]) -> str:
    """Return what else than its producers makes a step, in the words of `Take.unarchived`."""
    if retaken.outcomes or retaken.taken or retaken.corrections:
        return "replay"
    return "release" if releases else "refused" if refused else ""


def _settles(interval: IntervalState, inbox: TurnInput) -> bool:
    """Tell whether something becomes of an interval's refused messages, although it takes no input."""
    of = interval.interval_id
    return of in inbox.settlements or (of in inbox.releases and interval.plan.delivers)


def _check_still_ours(producer: IntervalState | None, answer: PollResult) -> None:
    """Check that no other worker has moved a local producer further, which happens after a freeze past the lease.

    Raises:
        StaleSequencerError: another worker owns the producer.
    """
    if producer is not None and answer.head_seq > producer.bundle:
        raise StaleSequencerError(
            f"interval {producer.interval_id} is at bundle {answer.head_seq} in the store and {producer.bundle} here",
            stale=[producer.interval_id],
        )
