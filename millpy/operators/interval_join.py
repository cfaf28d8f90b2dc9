"""Interval join: each record of the left stream with the records of the right one that have its key and are near it.

    left.event_time - before <= right.event_time <= left.event_time + after

Both sides buffer their records until the watermark proves that no record can match them any more. The later of two
matching records, by arrival, makes the joined record, at the greater of both event times. So the result depends on
which records are late, and on nothing else of their order. A record is late once the watermark is more than
`allowed_lateness` past its event time: some of what it could match may then have left.

    step   judge late records -> dead-letter what cannot be buffered -> buffer the others, take back retracted ones
           -> retract what was made of these -> join what is not yet joined, in order of arrival
           -> let rows leave; those without a match pass alone

A turn makes and retracts a bounded number of joined records. What is left is done in the next turns, in the same order,
and holds the watermark meanwhile. A retraction takes back the joined records of its record; both are gone without a
trace if the record was not joined yet.

What is buffered is logged like dedupe ids (`store/join_log.py`): a bundle appends what it changes, and the log
expires with the watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from millpy.model.arrivals import judging_watermarks
from millpy.model.checkpoint import DedupeRun, Entries, Kind
from millpy.model.delta import encode_value
from millpy.model.identity import Identity
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType, concat, retractions_of
from millpy.model.stage import InputBundle, ResidentInterval, Stage, StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, microseconds
from millpy.operators.join_keys import JoinKeys, NoRoom
from millpy.operators.join_output import How, OutputType
from millpy.operators.join_pairs import (
    Candidates,
    Matches,
    before_cut,
    candidates_of,
    cut_of,
    joined_at_once,
    rows_taken_back,
)
from millpy.operators.join_reach import LEFT, RIGHT, Reach
from millpy.operators.join_refusals import JoinRefusals
from millpy.operators.join_rows import BufferedSide, Integers, Rows, joined_rows, row_bytes
from millpy.operators.outputs import outlets_of
from millpy.store.join_log import Piece, PieceKind, matches_piece, numbers_piece, pieces_of, records_piece

REASON = "join"
"""The reason of dead letters for which a join has no room."""


class IntervalJoinLogic:
    """An interval join in a graph.

    Args:
        joined: the type of its output.
        left_inputs: number of inputs of the left side; the others are of the right side.
        reach: which records match.
        how: which records without a match are in the result.
        allowed_lateness: how far the watermark may be past a record that is still joined.
        takes_retractions: whether some of the records may be retractions.
    """

    kind = "interval_join"

    def __init__(
        self,
        joined: OutputType,
        left_inputs: int,
        reach: Reach,
        *,
        how: How = "inner",
        allowed_lateness: timedelta = timedelta(0),
        takes_retractions: bool = False,
    ) -> None:
        self.joined = joined
        self.left_inputs = left_inputs
        self.reach = reach
        self.how = how
        self.allowed_lateness = allowed_lateness
        self.takes_retractions = takes_retractions

    @property
    def retracts(self) -> bool:
        """Whether its output may have retractions."""
        return self.takes_retractions

    def bind(self, binding: StageBinding) -> Stage:
        """Return the stage, which can open intervals."""
        return IntervalJoinStage(self, binding)

    def open(self, binding: StageBinding, recovered: StoredInterval) -> IntervalJoin:
        """Build the soft state of one interval from its log."""
        return IntervalJoin(self, binding, recovered)

    def identity(self) -> Identity:
        """Describe what must not change while records are buffered."""
        described: dict[str, Any] = {
            "kind": self.kind,
            "how": self.how,
            "left_inputs": self.left_inputs,
            **self.reach.identity(),
            "allowed_lateness_us": microseconds(self.allowed_lateness),
        }
        return described | ({"takes_retractions": True} if self.takes_retractions else {})


class IntervalJoinStage:
    """A join in a deployed graph."""

    def __init__(self, logic: IntervalJoinLogic, binding: StageBinding) -> None:
        self.logic = logic
        self.binding = binding

    def open(self, recovered: StoredInterval) -> IntervalJoin:
        """Build the soft state of one interval from its log."""
        return self.logic.open(self.binding, recovered)


class _Place(msgspec.Struct, frozen=True):
    """How far an interval has come, as it is stored.

    Attributes:
        left_until: the watermark up to which rows have left.
        pending: the number of the first row that is not joined yet; None if all are.
    """

    left_until: int
    pending: int | None


class IntervalJoin(ResidentInterval):
    """The soft state of one interval: the buffered rows of both sides."""

    immediate = True

    def __init__(self, logic: IntervalJoinLogic, binding: StageBinding, recovered: StoredInterval) -> None:
        self._logic, self._binding = logic, binding
        self._lateness_us = microseconds(logic.allowed_lateness)
        specs = (binding.inputs[0], binding.inputs[-1])  # the right inputs are last, if there are any
        self._types: tuple[RecordType, ...] = tuple(spec.record_type for spec in specs)
        self._key_fields = tuple(spec.key_fields for spec in specs)
        self._refusals = JoinRefusals(binding, self._types)
        self._keys = JoinKeys()
        outer = self._outer_sides()
        self._sides = [
            BufferedSide(side, logic.reach, self._lateness_us, outer=outer[side], holds_matched=logic.takes_retractions)
            for side in (LEFT, RIGHT)
        ]
        share = max(1, binding.joining_intervals)
        self._bytes_max = binding.limits.join_bytes_max // share
        self._key_bytes_max = min(self._bytes_max, binding.limits.join_key_bytes_max)
        self._outlet = outlets_of(binding)[None]
        self._pending: list[list[Rows]] = [[], []]
        self._retracted: list[tuple[int, Integers]] = []
        """(side, numbers) of joined rows that are still to be removed, in order. Until then nothing is joined."""
        self._next_number = 0
        self._clock, self._stored_until = INSTANT_MIN, INSTANT_MIN
        self._place: _Place | None = None
        self._log: list[bytes] = []
        self._log_until = INSTANT_MIN
        self._emitted: list[Records] = []
        self._made = 0
        self._oldest: list[Instant] | None = None
        self._recover(recovered)

    def _outer_sides(self) -> tuple[bool, bool]:
        """Return which sides' rows are wanted when they leave without a match."""
        return self._logic.how in ("left", "full"), self._logic.how == "full"

    # What the engine asks.

    def oldest_work(self) -> Instant:
        """Return the least event time of a row that may yet leave without a match; INSTANT_MAX without any."""
        return min(self._unmatched())

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (watermark at which a row leaves without a match, INSTANT_MAX); rows to be joined are due at once."""
        if self._is_pending:
            return INSTANT_MIN, INSTANT_MAX
        found = INSTANT_MAX
        for side, oldest in zip(self._sides, self._unmatched(), strict=True):
            if oldest < INSTANT_MAX:
                found = min(found, Instant(side.expires_at(oldest) + 1))
        return found, INSTANT_MAX

    def _unmatched(self) -> list[Instant]:
        """Return the oldest unmatched row of each side, found once a step: the engine asks more often."""
        if self._oldest is None:
            self._oldest = [side.oldest_unmatched() for side in self._sides]
        return self._oldest

    @property
    def _is_pending(self) -> bool:
        return bool(self._retracted) or any(self._pending)

    @property
    def buffered(self) -> tuple[int, int]:
        """Number of buffered rows of the left and the right side."""
        return len(self._sides[LEFT]), len(self._sides[RIGHT])

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the buffered rows, as `join_bytes_max` counts them."""
        return self._keys.total

    def step(self, work: Work) -> StepResult:
        """Buffer and join one turn's records, and let those leave that nothing can match any more."""
        result = StepResult()
        self._emitted, self._oldest = [], None
        for arrival in work.arrived:
            if len(arrival.bundle):
                self._take(result, arrival, work)
        made = self._retract(work.panes_max)
        made += self._join(work.panes_max - made)
        left = max(1, work.panes_max - made)
        result.unfinished = self._is_pending or self._let_leave(work.watermark, left)
        self._emit(result)
        result.dedupe_run = self._take_run()
        result.delta = self._take_place()
        return result

    # Arrival.

    def _take(self, result: StepResult, arrival: InputBundle, work: Work) -> None:
        """Buffer the records of a bundle, and take back those that it retracts."""
        bundle, place = arrival.bundle, arrival.bundle.input
        records, side = bundle.records, RIGHT if place >= self._logic.left_inputs else LEFT
        watermarks = judging_watermarks(arrival, work)
        late = self._logic.reach.in_time_until(records.event_times) + self._lateness_us < watermarks
        rows = np.flatnonzero(~late)
        if late.any():
            self._refusals.set_late(result, bundle, np.flatnonzero(late), watermarks)
        rows = self._refusals.storable(result, bundle, rows, side)
        if not len(rows):
            return
        batch = records.batch() if len(rows) == len(records) else records.batch().take(pa.array(rows))
        used, codes = np.unique(bundle.keys.codes[rows], return_inverse=True)
        known = self._keys.codes([bundle.keys.keys[code] for code in used.tolist()])
        codes = known[codes]
        retracts = retractions_of(records)[rows]
        weights = row_bytes(batch)
        full = self._keys.without_room(codes, np.where(retracts, 0, weights), self._key_bytes_max, self._bytes_max)
        full = [found for found in full if not retracts[found.row]]
        if full:
            for found in full:
                self._refusals.refuse(result, bundle, int(rows[found.row]), REASON, self._no_room(found))
            kept = np.setdiff1d(np.arange(len(rows)), [found.row for found in full])
            rows, codes, weights, retracts = rows[kept], codes[kept], weights[kept], retracts[kept]
            batch = batch.take(pa.array(kept))
        numbers = self._next_number + np.arange(len(rows))
        self._next_number += len(rows)
        result.consumed_by_input[place] = result.consumed_by_input.get(place, 0) + len(rows)
        taken = Rows(codes, records.event_times[rows], numbers, batch)
        if not retracts.any():
            self._buffer(side, taken, weights)
        else:
            ends = np.append(np.flatnonzero(np.diff(retracts)) + 1, len(rows))
            for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
                part = np.arange(start, end)
                if retracts[start]:
                    self._take_back(side, taken.take(part))
                else:
                    self._buffer(side, taken.take(part), weights[part])
        self._keys.sweep(known)

    def _no_room(self, found: NoRoom) -> str:
        return (
            f"no room for another record: {found.of_key:,} bytes of this key are buffered, of"
            f" {self._key_bytes_max:,} (MILLPY_JOIN_KEY_BYTES_MAX), and {found.total:,} of all keys, of"
            f" {self._bytes_max:,} (the key interval's share of MILLPY_JOIN_BYTES_MAX)"
        )

    def _buffer(self, side: int, rows: Rows, weights: Integers) -> None:
        """Buffer rows, which are still to be joined."""
        if not len(rows):
            return
        self._keys.add(rows.codes, weights)
        self._sides[side].add(rows)
        self._pending[side].append(rows)
        records = Records(self._types[side], rows.times, batch=rows.batch)
        self._append(records_piece(side, rows.numbers, records), side, rows.times)

    def _take_back(self, side: int, retractions: Rows) -> None:
        """Remove the rows that are retracted; those that are joined wait until what was made of them is retracted."""
        waiting = [numbers for of_side, numbers in self._retracted if of_side == side]
        numbers = rows_taken_back(self._sides[side], retractions, waiting)
        is_joined = numbers < self._first_pending
        joined, gone = numbers[is_joined], numbers[~is_joined]
        if len(joined):
            self._retracted.append((side, joined))
            self._append(numbers_piece(PieceKind.RETRACTED, side, joined), side, retractions.times)
        if len(gone):
            self._pending[side] = [
                kept for rows in self._pending[side] if len(kept := rows.take(~np.isin(rows.numbers, gone)))
            ]
            self._remove(side, gone)

    def _remove(self, side: int, numbers: Integers) -> None:
        """Remove buffered rows."""
        removed = self._sides[side].remove(numbers)
        assert removed is not None, numbers
        self._keys.drop(removed.codes, row_bytes(removed.batch))
        self._append(numbers_piece(PieceKind.REMOVED, side, removed.numbers), side, removed.times)

    def _retract(self, pairs_max: int) -> int:
        """Remove joined rows, and retract what was made of them, until `pairs_max` pairs are. Return their number."""
        made = 0
        while self._retracted and made < pairs_max:
            side, numbers = self._retracted[0]
            queue = self._candidates(side, self._sides[side].rows_of(numbers))
            until = joined_at_once([queue], self._next_number)
            rows = queue.rows.take(queue.rows.numbers < until)
            matches = queue.matches(np.full(len(rows), self._first_pending))
            cut = cut_of([(rows, matches)], pairs_max - made, until)
            if cut < until:
                rows, matches = before_cut(rows, matches, cut)
            made += len(matches.triggers)
            self._remove(side, rows.numbers)
            self._make([(side, rows, matches)], retracts=True)
            self._keys.sweep(np.unique(rows.codes))
            left = numbers[numbers >= cut]
            self._retracted[:1] = [(side, left)] if len(left) else []
        return made

    @property
    def _first_pending(self) -> int:
        """The number of the first row that is not joined yet."""
        numbers = [int(rows.numbers[0]) for pending in self._pending for rows in pending]
        return min(numbers, default=self._next_number)

    # Joining.

    def _join(self, pairs_max: int) -> int:
        """Join the rows that are not joined yet, by number, until `pairs_max` pairs are made. Return their number."""
        made = 0
        while self._is_pending and made < pairs_max:
            queues = {
                side: self._candidates(side, joined_rows(rows)) for side, rows in enumerate(self._pending) if rows
            }
            until = joined_at_once(list(queues.values()), self._next_number)
            found = []
            for side, queue in queues.items():
                mine = queue.rows if until == self._next_number else queue.rows.take(queue.rows.numbers < until)
                if len(mine):
                    found.append((side, mine, queue.matches(mine.numbers)))
            cut = cut_of([(rows, matches) for _, rows, matches in found], pairs_max - made, until)
            if cut < until:
                found = [(side, *before_cut(rows, matches, cut)) for side, rows, matches in found]
            made += sum(len(matches.triggers) for _, _, matches in found)
            self._make(found, retracts=False)
            self._pending = [[], []]
            if cut < self._next_number:
                for side, queue in queues.items():
                    if len(left := queue.rows.take(queue.rows.numbers >= cut)):
                        self._pending[side] = [left]
        return made

    def _candidates(self, side: int, rows: Rows) -> Candidates:
        return candidates_of(rows, self._sides[1 - side], *self._logic.reach.matching(side, rows.times))

    def _make(self, found: Sequence[tuple[int, Rows, Matches]], *, retracts: bool) -> None:
        """Make the joined records of pairs, or retract them: in the order of the rows that made them."""
        found = [(side, rows, matches) for side, rows, matches in found if len(matches.triggers)]
        if not found:
            return
        change = -1 if retracts else 1
        batches, columns = [], []
        for side, rows, matches in found:
            numbers, times = rows.numbers[matches.triggers], rows.times[matches.triggers]
            self._count_matches(side, numbers, times, change)
            self._count_matches(1 - side, matches.numbers, matches.times, change)
            if self._is_wanted:
                other = pa.concat_batches([tier.rows.batch.take(pa.array(places)) for tier, places in matches.parts])
                own = rows.batch.take(pa.array(matches.triggers))
                batches.append(self._logic.joined.batch({side: own, 1 - side: other}))
            at = self._logic.reach.stamps(np.maximum(times, matches.times))
            columns.append((numbers, matches.times, matches.numbers, at))
        triggers, times, numbers, at = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._made += len(at)
        if self._is_wanted:
            order = np.lexsort((numbers, times, triggers))
            self._add_emitted(pa.concat_batches(batches).take(pa.array(order)), at[order], retracts=retracts)

    def _count_matches(self, side: int, numbers: Integers, times: Integers, change: int) -> None:
        """Count the matches of rows on an outer side, and log the counts that another owner has to know."""
        if not self._sides[side].outer:
            return
        changed, counts = self._sides[side].add_matches(numbers, change)
        if len(changed):
            self._append(matches_piece(side, changed, counts), side, times)

    # Leaving.

    def _let_leave(self, watermark: Instant, unmatched_max: int) -> bool:
        """Let rows leave that nothing can match any more; return whether some have to wait for the next turn."""
        reached = min(side.bounded(watermark, unmatched_max) for side in self._sides)
        batches, columns = [], []
        for side, buffered in enumerate(self._sides):
            gone, unmatched = buffered.leave(reached)
            self._forget(gone)
            for rows in unmatched:
                batches.append(self._logic.joined.batch({side: rows.batch}))
                columns.append((rows.times, rows.numbers))
        self._clock = Instant(max(self._clock, reached))
        if batches:
            times, numbers = (np.concatenate(column) for column in zip(*columns, strict=True))
            self._made += len(times)
            order = np.lexsort((numbers, times))
            batch, at = pa.concat_batches(batches).take(pa.array(order)), self._logic.reach.stamps(times[order])
            self._add_emitted(batch, at, retracts=False)
        return reached < watermark

    def _forget(self, gone: Sequence[Rows]) -> None:
        """Count rows out that have left."""
        for rows in gone:
            self._keys.drop(rows.codes, row_bytes(rows.batch))
            self._keys.sweep(np.unique(rows.codes))

    # Effects.

    @property
    def _is_wanted(self) -> bool:
        return self._outlet.subscribed or self._outlet.table_id is not None

    def _add_emitted(self, batch: pa.RecordBatch, times: Integers, *, retracts: bool) -> None:
        marks = np.full(len(times), retracts) if self._logic.retracts else None
        self._emitted.append(Records(self._logic.joined.record_type, times, retracts=marks, batch=batch))

    def _emit(self, result: StepResult) -> None:
        """Add the joined records of the turn to its result."""
        outlet, made, self._made = self._outlet, self._made, 0
        result.emitted_by_stream[outlet.stream] = made
        if outlet.table_id is not None:
            result.emitted_by_table[outlet.table_id] = made
        if not self._emitted or not self._is_wanted:
            return
        outlet.emit(concat(self._emitted), result)

    def _append(self, piece: bytes, side: int, times: Integers) -> None:
        """Log a change of rows with these event times."""
        self._log.append(piece)
        until = int(self._sides[side].expires_at(int(times.max())))
        self._log_until = Instant(max(self._log_until, until))

    def _take_run(self) -> DedupeRun | None:
        """Return the log of the turn as a run; without one, once all runs have expired, what frees their slots."""
        if self._log:
            log, self._log = b"".join(self._log), []
            until, self._log_until = self._log_until, INSTANT_MIN
            latest = Instant(max(self._stored_until, until))
            self._stored_until = latest if latest >= self._clock else INSTANT_MIN  # as after a restart
            return DedupeRun(b"", log, until, self._clock)
        if not INSTANT_MIN < self._stored_until < self._clock:
            return None
        self._stored_until = INSTANT_MIN
        return DedupeRun(b"", b"", Instant(self._clock - 1), self._clock)

    def _take_place(self) -> tuple[Entries, ...]:
        """Return how far the interval has come, if that has changed and its log does not say it."""
        outer = any(side.outer for side in self._sides)
        pending = self._first_pending if self._is_pending else None
        place = _Place(self._clock if outer or self._logic.takes_retractions else INSTANT_MIN, pending)
        if place == (self._place or _Place(INSTANT_MIN, None)):
            return ()
        self._place = place
        entries = Entries(Kind.POSITION, "join")
        entries.add(b'""', 0, "", encode_value(place))
        return (entries,)

    def _recover(self, recovered: StoredInterval) -> None:
        """Load the rows of the log that have not left."""
        runs = recovered.dedupe_runs
        self._clock = max((run.clock for run in runs), default=INSTANT_MIN)
        self._stored_until = max((run.expires_at for run in runs if run.times), default=INSTANT_MIN)
        for entries in recovered.entries:
            if entries.kind is Kind.POSITION and entries.values and entries.values[-1] is not None:
                self._place = msgspec.json.decode(entries.values[-1], type=_Place)
                self._clock = Instant(max(self._clock, self._place.left_until))
        if self._clock >= INSTANT_MAX:  # the end was set back, or is still reached
            self._clock = recovered.input_watermark
        pieces = [piece for run in runs for piece in pieces_of(run.times, self._types)]
        if not pieces:
            return
        self._next_number = 1 + max(int(piece.numbers.max()) for piece in pieces)
        pending = self._next_number if self._place is None or self._place.pending is None else self._place.pending
        self._next_number = max(self._next_number, pending)
        hasher = KeyHasher()
        for side, buffered in enumerate(self._sides):
            mine = [piece for piece in pieces if piece.side == side]
            if not (rows := self._stored_rows(side, mine, hasher)):
                continue
            buffered.add(joined_rows(rows))
            removed = [piece.numbers for piece in mine if piece.kind is PieceKind.REMOVED]
            if removed and (gone := buffered.remove(np.concatenate(removed))) is not None:
                self._keys.drop(gone.codes, row_bytes(gone.batch))
                self._keys.sweep(np.unique(gone.codes))
            counted = [(piece.numbers, piece.counts) for piece in mine if piece.counts is not None]
            if counted:
                buffered.set_matches(*(np.concatenate(column) for column in zip(*counted, strict=True)))
            waiting = [tier.rows.take(tier.live & (tier.rows.numbers >= pending)) for tier in buffered.tiers]
            if any(map(len, waiting)):
                queue = joined_rows(waiting)
                self._pending[side] = [queue.take(np.argsort(queue.numbers, kind="stable"))]
        for piece in pieces:
            if piece.kind is PieceKind.RETRACTED and len(left := self._sides[piece.side].buffered(piece.numbers)):
                self._retracted.append((piece.side, left))

    def _stored_rows(self, side: int, pieces: Sequence[Piece], hasher: KeyHasher) -> list[Rows]:
        """Return the rows of a side that have not left, and count them."""
        found = []
        for piece in pieces:
            if piece.records is None:
                continue
            keys = piece.records.keys(self._key_fields[side], hasher)
            rows = Rows(keys.codes.astype(np.int64), piece.records.event_times, piece.numbers, piece.records.batch())
            rows = rows.take(self._sides[side].expires_at(rows.times) >= self._clock)
            if len(rows):
                used, codes = np.unique(rows.codes, return_inverse=True)
                rows.codes = self._keys.codes([keys.keys[code] for code in used.tolist()])[codes]
                self._keys.add(rows.codes, row_bytes(rows.batch))
                found.append(rows)
        return found
