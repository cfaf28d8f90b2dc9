"""Steps: local intervals in topological order, slices handed on in memory, one checkpoint an interval.

Pure but for soft state: it reads an inbox, moves soft state and returns checkpoints. Runs in the stepping thread.

What a step produces goes on its way by `routing`. A local consumer without records in a bundle still moves its cursor
there, so that it may use the watermark that belongs to that position. It does not commit for that alone: progress
without data is coalesced (`Inbox.progress_due`), unless a window, hold or timer is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millpy.clock import Clock
from millpy.errors import CursorGapError, StaleSequencerError
from millpy.graph import StageNode
from millpy.injectors.intake import IntakeResult
from millpy.injectors.protocol import Taken
from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint, DeadLetter, Delta, Entries, Grant, Settled
from millpy.model.keys import KeyHasher, key_text
from millpy.model.quarantine import payload_of
from millpy.model.record import Records
from millpy.model.stage import Arrived, Release, StageInterval, StepResult, Work
from millpy.model.time import INSTANT_MAX, ClockReading, Instant
from millpy.model.watermark import advance, input_watermark, low_watermark
from millpy.runtime.guarded_clock import believed_floor
from millpy.runtime.isolation import Blamed, Isolation
from millpy.runtime.plan import Plan
from millpy.runtime.probe import Point, Probe
from millpy.runtime.replays import Replay, Retaken, is_emission, retake, retake_emission, settle
from millpy.runtime.routing import Mail, Router, positions_of_local_producers
from millpy.runtime.soft_state import Halt, Owned
from millpy.runtime.turn_budget import TurnBudget
from millpy.store.codec import decode_slice
from millpy.store.protocol import Polled

LoadState = Callable[[Grant, Sequence[bytes]], Sequence[Entries]]
CURSOR_ONLY_EVERY_S = 1.0


@dataclass(slots=True)
class Inbox:
    """What a turn starts from. Immutable once gathered, so that a turn can be stepped again from it.

    Attributes:
        clock: what time it was before the sources were looked at.
        polled: consumer interval -> answers of the store.
        taken: injector interval -> what was waiting at its source.
        quiet: injector intervals whose source is proven idle.
        replays: interval -> what it takes again.
        progress_due: whether progress without data is to be committed in this turn.
        releases: interval -> parked keys that a person lets go on.
    """

    clock: ClockReading
    monotonic: float
    polled: Mapping[int, Sequence[Polled]] = field(default_factory=dict)
    taken: Mapping[int, Taken] = field(default_factory=dict)
    quiet: frozenset[int] = frozenset()
    replays: Mapping[int, Replay] = field(default_factory=dict)
    progress_due: bool = False
    releases: Mapping[int, Sequence[Release]] = field(default_factory=dict)

    @property
    def now_us(self) -> Instant:
        """Processing time."""
        return self.clock.now_us


class Steps:
    """Runs the intervals that a worker owns.

    Attributes:
        records: how many records the last run took in, from sources and in segments, whatever became of them.
    """

    def __init__(
        self, plan: Plan, limits: Limits, load: LoadState, probe: Probe, budget: TurnBudget, clock: Clock
    ) -> None:
        self._plan = plan
        self.progress = plan.progress
        self._limits = limits
        self._budget = budget
        self._clock = clock
        self._ends_at = 0.0
        self.records = 0
        self._clock_step_us = round(limits.clock_step_s * 1e6)
        self._load = load
        self._probe = probe
        self._hasher = KeyHasher()
        self._router = Router(limits, self._hasher, plan.progress)

    def run(self, inbox: Inbox, intervals: Mapping[int, Owned], isolation: Isolation) -> list[Checkpoint]:
        """Step everything once; returns the checkpoints that this turn has to commit, in topological order."""
        self._ends_at = self._clock.monotonic() + self._limits.step_s_max
        self.records = 0
        progress, run = self.progress, self.progress.run
        progress.in_hand = None
        # Received first of all: whether a consumer is current with a local producer depends on what it has read.
        mail = {
            interval_id: self._receive(interval, inbox.polled.get(interval_id, ()), intervals)
            for interval_id, interval in intervals.items()
        }
        for interval_id, inbound in mail.items():
            inbound.extend(positions_of_local_producers(intervals[interval_id], intervals, inbound))
        checkpoints: list[Checkpoint] = []
        for computation in self._plan:
            for deployed in computation.intervals:
                interval = intervals.get(deployed.interval_id)
                if interval is None:
                    continue
                if interval.stage is None:
                    checkpoint = self._inject(interval, inbox, intervals, mail, isolation)
                else:
                    checkpoint = self._step(interval, inbox, intervals, mail, isolation)
                progress.done(run)
                if checkpoint is not None and not isolation.again:
                    checkpoint = interval.kept_letters.keep(checkpoint, inbox.now_us)
                if checkpoint is not None:
                    checkpoints.append(checkpoint)
        return checkpoints

    def _inject(
        self,
        interval: Owned,
        inbox: Inbox,
        intervals: Mapping[int, Owned],
        mail: dict[int, list[Mail]],
        isolation: Isolation,
    ) -> Checkpoint | None:
        taken = inbox.taken.get(interval.interval_id)
        replay = inbox.replays.get(interval.interval_id)
        if taken is None and replay is None and (not inbox.progress_due or interval.finished):
            return None
        assert interval.intake is not None
        retaken = Retaken()
        if replay is None:
            quiet = interval.interval_id in inbox.quiet
            before = interval.intake.counts["injected"]
            result = interval.intake.step(taken, bundle=interval.bundle + 1, clock=inbox.clock, quiet=quiet)
            self.records += interval.intake.counts["injected"] - before
        elif is_emission(replay.requests[0], interval):
            result = interval.intake.standing()
            retaken = retake_emission(interval, replay, isolation)
        else:
            result = interval.intake.replay(replay.requests, replay.arrived_at, inbox.clock)
            self.records += len(replay.requests)
        if not result.changed:
            return None
        self._probe.reach_now(Point.AFTER_DECODE)
        if taken is not None and taken.finished:
            interval.finished = True
        if result.pause is not None:
            interval.halt = Halt.STEPPED
        records, delta, refused = self._admitted(interval, result, isolation)
        emitted = {interval.plan.name: result.accepted}
        interval.input_watermark = interval.low_watermark = advance(interval.low_watermark, result.watermark)
        interval.bundle += 1
        productions = {interval.plan.name: records}
        segments, failed = self._router.emit(interval, productions, emitted, intervals, mail, retaken.emitted)
        settled, failed, _ = settle(retaken, failed)
        return Checkpoint(
            grant=interval.grant,
            bundle=interval.bundle,
            input_watermark=interval.input_watermark,
            low_watermark=interval.low_watermark,
            delta=(*delta, *interval.take_counters()),
            segments=segments,
            dedupe_run=result.dedupe_run,
            dead_letters=[*result.dead_letters, *refused, *failed],
            settled=[*result.settled, *settled],
            pause=result.pause,
        )

    def _admitted(
        self, interval: Owned, result: IntakeResult, isolation: Isolation
    ) -> tuple[Records, Delta, list[DeadLetter]]:
        """Records of an intake without those that the database refuses, its delta then, and their letters."""
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
            if result.settled:
                place = int(result.rows[blame.row])
                result.settled[place] = Settled(result.settled[place].request, letter)
            else:
                letters.append(letter)
        return records, interval.intake.set_aside(result, len(blamed)), letters

    def _receive(self, interval: Owned, answers: Sequence[Polled], intervals: Mapping[int, Owned]) -> list[Mail]:
        """Turn polled segments into mail, before anything that local producers hand over in this turn."""
        received, records_max = 0, self._budget.records
        inbound: list[Mail] = []
        for answer in answers:
            producer = answer.want.producer
            _check_still_ours(intervals.get(producer), answer)
            at = interval.cursors[producer].seq
            if at != answer.want.after:
                continue  # polled before the cursor moved on in memory: old news
            whole = not answer.truncated
            segments = answer.segments
            for place, segment in enumerate(segments):
                if segment.seq > at:
                    if received >= records_max:
                        whole = False
                        break
                    at = segment.seq
                if segment.previous_seq > answer.want.after and not any(
                    s.seq == segment.previous_seq and s.subscription_id == segment.subscription_id for s in segments
                ):
                    raise CursorGapError(
                        f"segment {segment.seq} of interval {producer} follows {segment.previous_seq}, "
                        f"but interval {interval.interval_id} is at {answer.want.after}"
                    )
                bundle = None
                if segment.payload is not None:
                    inlet = interval.plan.inlets[segment.subscription_id]
                    records = decode_slice(inlet.record_type, segment.payload, segment.checksum)
                    keys = records.keys(inlet.key_fields, self._hasher)
                    bundle = Bundle(inlet.input, producer, segment.seq, segment.watermark, records, keys)
                    received += len(records)
                    self.progress.units += 1
                last_of_seq = place + 1 == len(segments) or segments[place + 1].seq != segment.seq
                inbound.append(Mail(producer, segment.seq, segment.watermark, bundle, last_of_seq, polled=True))
            if whole and answer.head_seq > at:
                inbound.append(Mail(producer, answer.head_seq, answer.head_watermark, None, True))
        self.records += received
        return inbound

    def _step(
        self,
        interval: Owned,
        inbox: Inbox,
        intervals: Mapping[int, Owned],
        mail: dict[int, list[Mail]],
        isolation: Isolation,
    ) -> Checkpoint | None:
        assert interval.stage is not None
        stage = interval.stage
        before = interval.input_watermark
        retaken = self._retaken(interval, inbox, isolation)
        arrived, refused = self._arrivals(interval, mail[interval.interval_id], isolation)
        arrived = [*retaken.arrived, *arrived]
        after = input_watermark(cursor.watermark for cursor in interval.cursors.values())
        assert after >= before, (interval.interval_id, before, after)
        floor = believed_floor(interval.processing_floor, inbox.clock, self._clock_step_us)
        now_us = advance(floor, inbox.now_us)
        releases = inbox.releases.get(interval.interval_id, ())
        asked = bool(retaken.settled or retaken.taken or releases)
        if not (arrived or refused or asked or self._is_due(interval, before, after, now_us, inbox)):
            interval.input_watermark = after
            return None
        if missing := stage.missing([arrival.bundle for arrival in arrived]):
            stage.absorb(missing, self._load(interval.grant, missing))
        self._probe.reach_now(Point.AFTER_LOAD)
        work = Work(interval.bundle + 1, arrived, before, after, now_us, releases, self._budget.panes)
        result = self._bounded_step(interval, stage, work, isolation)
        interval.bundle += 1
        interval.input_watermark = after
        interval.processing_floor = now_us
        oldest = stage.oldest_work()
        # A late record can hold nothing: the watermark has passed it (I5). What is due and still undone holds all.
        if not result.unfinished:
            interval.low_watermark = advance(interval.low_watermark, low_watermark(oldest, after))
        _count(interval, refused, result)
        _uncount(interval, retaken)
        made = (result.productions, result.emitted_by_stream)
        segments, failed = self._router.emit(interval, *made, intervals, mail, retaken.emitted)
        settled, letters, late = settle(retaken, [*result.dead_letters, *failed], result.late)
        interval.committed_at = inbox.monotonic
        return Checkpoint(
            grant=interval.grant,
            bundle=interval.bundle,
            input_watermark=after,
            low_watermark=interval.low_watermark,
            oldest_work=oldest,
            processing_floor=now_us,
            delta=(*result.delta, *interval.take_counters()),
            cursors=interval.take_moved(),
            segments=segments,
            results=result.results,
            absorbed=result.absorbed,
            late=late,
            dedupe_run=result.dedupe_run,
            dead_letters=[*letters, *(letter for _, letter in refused)],
            settled=settled,
            release_ids=[release.release_id for release in releases],
        )

    def _bounded_step(self, interval: Owned, stage: StageInterval, work: Work, isolation: Isolation) -> StepResult:
        """Fire what the turn has room and time for; one that is stepped again fires what it did before."""
        if isolation.again:
            work.fires = isolation.fired.get(interval.interval_id)
        else:
            work.timers_max, work.overdue = self._budget.timers, self._is_overdue
        result = stage.step(work)
        if result.fired and not isolation.again:
            isolation.fired[interval.interval_id] = result.fired
        interval.unfinished = result.unfinished
        return result

    def _is_overdue(self) -> bool:
        """Whether the step has taken its time."""
        return self._clock.monotonic() >= self._ends_at

    def _retaken(self, interval: Owned, inbox: Inbox, isolation: Isolation) -> Retaken:
        """Records of this interval that people want taken again."""
        replay = inbox.replays.get(interval.interval_id)
        if replay is None:
            return Retaken()
        if is_emission(replay.requests[0], interval):
            return retake_emission(interval, replay, isolation)
        return retake(interval, replay, self._hasher, isolation)

    def _arrivals(
        self, interval: Owned, inbound: Sequence[Mail], isolation: Isolation
    ) -> tuple[list[Arrived], list[tuple[int, DeadLetter]]]:
        """Consume the mail in order: each bundle capped by where the *other* producers stand at that moment."""
        arrived: list[Arrived] = []
        refused: list[tuple[int, DeadLetter]] = []
        if not inbound:
            return arrived, refused
        for letter in inbound:
            if letter.bundle is not None and len(letter.bundle):
                bundle = letter.bundle
                if letter.polled:
                    admitted, blamed = isolation.admit(bundle.records)
                    refused.extend((bundle.input, self._blamed(interval, bundle, blame)) for blame in blamed)
                    bundle = bundle if admitted is None else bundle.take(admitted)
                others = (cursor.watermark for p, cursor in interval.cursors.items() if p != letter.producer)
                cap = min(others, default=INSTANT_MAX)
                if len(bundle):
                    arrived.append(Arrived(bundle, cap))
            if letter.moves_cursor:
                interval.advance_cursor(letter.producer, letter.seq, letter.watermark)
        return arrived, refused

    def _blamed(self, interval: Owned, bundle: Bundle, blame: Blamed) -> DeadLetter:
        """A dead letter for a record that the database refuses, here or in a table behind this stage."""
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
        )

    def _is_due(self, interval: Owned, before: Instant, after: Instant, now_us: Instant, inbox: Inbox) -> bool:
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


def _count(interval: Owned, refused: Sequence[tuple[int, DeadLetter]], result: StepResult) -> None:
    """Keep I8: what the stage says of what it took and made, and the rows that go to its tables."""
    for inlet in interval.plan.inlets.values():
        of, place = str(inlet.subscription_id), inlet.input
        interval.count("consumed", of, result.consumed_by_input.get(place, 0))
        interval.count("late", of, result.late_by_input.get(place, 0))
        interval.count("duplicate", of, result.duplicates_by_input.get(place, 0))
        set_aside = result.quarantined_by_input.get(place, 0) + sum(1 for i, _ in refused if i == place)
        interval.count("quarantined", of, set_aside)
    for table_id, rows in result.emitted_by_table.items():
        interval.count("emitted", str(table_id), rows)
    for part in result.results:
        interval.count("written", str(part.table_id), len(part.columns[0]))


def _uncount(interval: Owned, retaken: Retaken) -> None:
    """What is taken again is no longer set aside; where it ends now is counted like everything else (I8)."""
    if not retaken.arrived:
        return
    of = {inlet.input: str(inlet.subscription_id) for inlet in interval.plan.inlets.values()}
    for request, (place, _, _) in retaken.taken:
        interval.count("late" if request.pile == "late_records" else "quarantined", of[place], -1)


def _check_still_ours(producer: Owned | None, answer: Polled) -> None:
    """A local producer that others have taken further is not ours any more: this worker was frozen past its lease.

    Raises:
        StaleSequencerError: naming it.
    """
    if producer is not None and answer.head_seq > producer.bundle:
        raise StaleSequencerError(
            f"interval {producer.interval_id} has come to bundle {answer.head_seq}, here to {producer.bundle}",
            stale=[producer.interval_id],
        )
