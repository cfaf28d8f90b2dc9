"""Session windows of one key interval, processed by whole bundles.

`UnalignedInterval` is what they share with a user's windows (`user_windows.py`): open windows by key, of any length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import cast

import numpy as np

from millpy.model.keys import Key
from millpy.model.record import Instants, Mask
from millpy.model.stage import StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.combiner import try_merges
from millpy.windowing.closed_sessions import ClosedSessions
from millpy.windowing.group_by import Groups, Integers
from millpy.windowing.operator import DroppedLate, JoinedRows, WindowedInterval
from millpy.windowing.pane_codec import NO_TIME, OpenPane
from millpy.windowing.panes import Emission
from millpy.windowing.session_assign import Sessions, merge_sessions, replay
from millpy.windowing.session_gaps import Gaps
from millpy.windowing.session_size import SizeBound
from millpy.windowing.session_state import OpenSession, OpenSessions
from millpy.windowing.triggered_sessions import TriggeredSessions
from millpy.windowing.unfired_sessions import UnfiredSessions
from millpy.windowing.window import SessionWindows
from millpy.windowing.window_memory import Openings
from millpy.windowing.window_spec import WindowSpec


class UnalignedInterval(WindowedInterval[OpenSessions]):
    """Soft state of one key interval: its open windows by key, each of any length."""

    def __init__(self, windowing: WindowSpec, binding: StageBinding) -> None:
        super().__init__(windowing, binding)
        given = (self._accumulators, self._merger, self._allowed_us)
        self._triggered = None if self._triggers is None else TriggeredSessions(*given, self._triggers)
        self._open = self._triggered or OpenSessions(*given)
        if self._combines:
            self._open.hold_times(retracts=self._mode is Accumulation.RETRACTING)

    def _is_expected(self) -> bool:
        """Tell whether a percentile has reached a window that has to be asked."""
        return self._triggered is not None and self._triggered.is_expected()

    def _is_closed(self, key: Key, start: int, end: int) -> bool:
        return self._triggered is not None and (key, start, end) in self._triggered.closed

    def _are_closed(self, keys: Sequence[Key], codes: Integers, starts: Instants, ends: Instants) -> Mask:
        """Tell of windows whether their triggers have closed them."""
        if self._triggered is None or not self._triggered.closed:
            return np.zeros(len(starts), np.bool_)
        spans = zip(codes.tolist(), starts.tolist(), ends.tolist(), strict=True)
        return np.array([self._is_closed(keys[code], start, end) for code, start, end in spans], np.bool_)

    def _next_alarm(self) -> Instant:
        """Return the processing time at which a pane is due; INSTANT_MAX without one."""
        return INSTANT_MAX if self._triggered is None else self._triggered.alarms.next_time()

    def _add_groups(
        self,
        emission: Emission,
        rows: JoinedRows,
        groups: Groups,
        joined: Mapping[int, Sequence[OpenSession]],
        late: Integers,
        watermark: Instant,
    ) -> None:
        """Emit the windows that open and expire within the turn, and add the others to the state.

        Args:
            emission: the panes of the turn.
            rows: the rows.
            groups: the rows by window.
            joined: group -> the open windows that it continues, by start; without them it is new.
            late: per group, its number of late records.
            watermark: the watermark after the turn.
        """
        partials = [member.aggregate(groups) for member in self._accumulators.members]
        if self._accumulators.calls_user:
            try_merges(self._accumulators, groups, partials, lambda n: [old.pane.values for old in joined.get(n, ())])
        kept = (groups.ends + self._allowed_us > watermark) | self._accumulators.retracts
        kept[list(joined)] = True
        combined = self._timestamps.of_groups(groups, rows.watermarks)
        if combined is not None:
            emission.direct_times = combined
        emission.add_direct(groups, partials, late, np.flatnonzero(~kept), rows.keys)
        self._made += int(np.count_nonzero(~kept))
        self._tally.applied += int(groups.counts[~kept].sum())
        picks = np.flatnonzero(kept)
        columns = (picks.tolist(), groups.codes[picks].tolist(), groups.starts[picks].tolist())
        more = (groups.ends[picks].tolist(), late[picks].tolist(), groups.counts[picks].tolist())
        triggers = self._triggers
        accumulators = zip(*(partial.accumulators(picks) for partial in partials), strict=True)
        times = repeat(NO_TIME, len(picks)) if combined is None else combined[picks].tolist()
        rest = (accumulators, times)
        for number, code, start, end, late_count, count, values, at in zip(*columns, *more, *rest, strict=True):
            pane = OpenPane(list(values), late_count=late_count, at=at)
            if triggers is not None:
                triggers.add(pane, count, late_count)
            olds = joined.get(number)
            if olds is None:
                self._open.open(rows.keys[code], rows.hashes[code], start, end, pane)
            else:
                self._open.join(olds, start, end, pane)
            self._tally.applied += count


class SessionInterval(UnalignedInterval):
    """Soft state of one key interval: its open sessions by key."""

    _unfired_spill = False
    """Whether sessions that have not fired may leave memory, too."""

    def __init__(
        self, windowing: WindowSpec, windows: SessionWindows, binding: StageBinding, recovered: StoredInterval
    ) -> None:
        super().__init__(windowing, binding)
        self._gaps = Gaps(windows)
        # Row -> the closed session that it would have made again.
        self._missed_sessions: dict[int, tuple[int, int]] = {}
        self._bound = None if windows.max_records is None else SizeBound(windows.max_records)
        self._replay = replay if self._bound is None else self._bound.replay
        if windowing.sessions_spill and not self._input.site and not binding.is_taken:
            limits, intervals = binding.limits, binding.windowed_intervals
            closed = limits.closed_windows_bytes_max // intervals
            of_closed = self._open, self._input.key_types, closed, recovered
            self._unfired_spill = windowing.unfired_spill(self._accumulators)
            if self._unfired_spill:
                unfired = limits.unfired_bytes_max // intervals
                self._open.spilled = UnfiredSessions(*of_closed, unfired)
            else:
                self._open.spilled = ClosedSessions(*of_closed)
        self._recover(recovered)

    @property
    def immediate(self) -> bool:
        """Whether a step calls no user code, and all sessions are in memory."""
        spilled = self._open.spilled
        return super().immediate and (spilled is None or not spilled.are_stored)

    def on_folded(self, bundle: int) -> None:
        """Allow sessions last changed at or before `bundle` to leave memory: they are rows now."""
        if self._open.spilled is not None:
            self._open.spilled.spill(bundle)

    def needs_fold(self) -> bool:
        """Tell whether sessions that may leave memory exceed their bound."""
        return self._open.spilled is not None and self._open.spilled.needs_fold()

    def waits_for_fold(self) -> bool:
        """Tell whether they exceed it by half, and have changed since the last fold."""
        return self._open.spilled is not None and self._open.spilled.is_over()

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the open sessions and return the result to commit."""
        if self._open.spilled is not None:
            self._open.spilled.load = work.query_windows
        return super().step(work)

    def _held_bytes(self) -> int:
        """Return the memory of sessions that cannot leave it: 0 if those that have not fired may, too."""
        return 0 if self._unfired_spill else super()._held_bytes()

    def _counted_bytes(self) -> int:
        """Return the memory that counts against the bound: sessions that can wait in the store do not."""
        if self._unfired_spill:
            return 0
        spilled = self._open.spilled
        return super()._counted_bytes() - (0 if spilled is None else spilled.bytes_in_memory)

    def _with_room(self, result: StepResult, rows: JoinedRows, work: Work) -> JoinedRows:
        """Load the stored sessions that rows touch, and dead-letter the rows that would open one beyond the bound."""
        spilled = self._open.spilled
        if spilled is not None and spilled.are_stored and len(rows):
            times, gaps = rows.records.event_times, self._gaps.gaps_of(rows.keys)
            ends = times + self._gaps.of_rows(rows.records, gaps[rows.codes])
            over_by = Instant(max(work.watermark_before - self._allowed_us, self._over_floor))
            spilled.fetch(rows.codes, rows.keys, times, ends, over_by)
        return super()._with_room(result, rows, work)

    def _intersects_open(self, over_by: Instant, key: Key, start: int, end: int) -> bool:
        """Tell whether a session of a key would be one with a session that is not over, in memory or in the store."""
        if self._open.spilled is not None:
            self._open.spilled.fetch(np.zeros(1, np.int64), [key], np.array([start]), np.array([end]), over_by)
        return any(other.start < end and start < other.end for other in self._open.by_key.get(key, ()))

    def _storable(self, result: StepResult, rows: JoinedRows) -> JoinedRows:
        """Dead-letter the rows that cannot be stored, and those whose own gap is not one. Return the other rows."""
        rows = super()._storable(result, rows)
        if not self._gaps.by_field or not len(rows):
            return rows
        out = np.flatnonzero(self._gaps.refused(rows.records))
        if not len(out):
            return rows
        self._dead_letter(result, rows, out, dict.fromkeys(out.tolist(), self._gaps.refusal()))
        return rows.take(np.setdiff1d(np.arange(len(rows)), out))

    def _take_rows(self, emission: Emission, rows: JoinedRows, work: Work) -> DroppedLate | None:
        """Add each row to one session. Return the rows that are too late for any, or make a closed one again."""
        self._missed_sessions = {}
        if len(rows) <= self._few_records_max:
            late: Sequence[int] | Integers = self._take_few(rows)
        else:
            late = self._take_many(emission, rows, work.watermark)
        emission.absorb(self._open.take_absorbed())
        self._expect(rows, np.delete(np.arange(len(rows)), late) if len(late) else None, len(rows) - len(late))
        return self._too_late(rows, late) if len(late) else None

    def _openings(self, rows: JoinedRows, work: Work) -> Openings:
        """Return the sessions that the rows would have if none were late."""
        known = {code: found for code, key in enumerate(rows.keys) if (found := self._open.by_key.get(key)) is not None}
        times, gaps = rows.records.event_times, self._gaps.gaps_of(rows.keys)
        before = np.full(len(rows), INSTANT_MIN, np.int64)
        row_gaps = self._gaps.of_rows(rows.records, gaps[rows.codes]) if self._gaps.by_row else None
        sessions = merge_sessions(times, before, rows.codes, gaps, self._allowed_us, known, row_gaps, self._bound)
        opens = sessions.ends + self._allowed_us > work.watermark
        opens[list(sessions.joined)] = False
        opens &= ~self._are_closed(rows.keys, sessions.codes, sessions.starts, sessions.ends)
        if self._open.spilled is not None:
            # Sessions that have fired do not tell which keys continue, because those of a key may all be in the store.
            has_left = self._open.has_left
            known = {code: found for code, found in known.items() if not all(has_left(one.pane) for one in found)}
        if self._open.spilled is not None and self._triggered is None:  # else a late record may have to wait
            opens &= sessions.ends > self._trigger.latest_end(work.watermark)
        # A turn has room for all that it opens if sessions may leave before they fire.
        extends = opens if self._unfired_spill else np.isin(sessions.codes, list(known))
        large = np.zeros(len(opens), np.bool_)
        for number, olds in sessions.joined.items() if self._open.weights.large else ():
            large[number] = any(id(old.pane) in self._open.weights.large for old in cast("list[OpenSession]", olds))
        return Openings(np.arange(len(rows)), sessions.of_row, opens, extends, large)

    def _too_late(self, rows: JoinedRows, late: Sequence[int] | Integers) -> DroppedLate:
        """Return the late records, each with the session that it would have opened, or the closed one."""
        places = np.asarray(late, np.int64)
        missed = rows.take(places)
        starts: Instants = missed.records.event_times.copy()
        ends: Instants = starts + self._gaps.of_rows(missed.records, self._gaps.gaps_of(rows.keys)[missed.codes])
        for place, row in enumerate(places.tolist() if self._missed_sessions else ()):
            if row in self._missed_sessions:
                starts[place], ends[place] = self._missed_sessions[row]
        found = self._late_rows(missed, starts, ends)
        return DroppedLate(found, {place: len(mine) for place, mine in rows.by_input(places)})

    def _take_few(self, rows: JoinedRows) -> list[int]:
        """Add the records one by one. Return the rows that are too late."""
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        gaps = self._gaps.of_rows(rows.records, self._gaps.gaps_of(rows.keys)[rows.codes]).tolist()
        by_key: dict[int, list[int]] = {}
        for row, code in enumerate(rows.codes.tolist()):
            by_key.setdefault(code, []).append(row)
        missed: set[int] = set(range(len(rows)))
        for code, of_key in by_key.items():
            key = rows.keys[code]
            columns = ((row, times[row], watermarks[row], gaps[row]) for row in of_key)
            known = self._open.by_key.get(key, ())
            sessions, late = self._replay(columns, self._allowed_us, known, self._over_floor)
            for session in sessions:
                if self._is_closed(key, session.start, session.end):
                    self._missed_sessions.update(dict.fromkeys(session.rows, (session.start, session.end)))
                    continue
                pane = OpenPane(self._accumulators.empty())
                for row in sorted(session.rows):
                    self._accumulators.add(pane.values, objects[row], times[row])
                pane.late_count = sum(row in late for row in session.rows)
                if self._combines:
                    of_session = [times[row] for row in session.rows], [watermarks[row] for row in session.rows]
                    pane.at = self._timestamps.of_records(*of_session)
                missed.difference_update(session.rows)
                self._tally.applied += len(session.rows)
                if self._triggers is not None:
                    self._triggers.add(pane, len(session.rows), pane.late_count)
                if session.open:
                    self._open.join(cast("list[OpenSession]", session.open), session.start, session.end, pane)
                else:
                    self._open.open(key, rows.hashes[code], session.start, session.end, pane)
        return sorted(missed)

    def _without_closed(self, sessions: Sessions, keys: Sequence[Key]) -> Sessions:
        """Return the sessions that are not closed. The open ones that would have become part of a closed one stay."""
        closed = self._are_closed(keys, sessions.codes, sessions.starts, sessions.ends)
        if not closed.any():
            return sessions
        for row in np.flatnonzero((sessions.of_row >= 0) & closed[sessions.of_row]).tolist():
            number = sessions.of_row[row]
            self._missed_sessions[row] = int(sessions.starts[number]), int(sessions.ends[number])
        return sessions.drop(closed)

    def _take_many(self, emission: Emission, rows: JoinedRows, watermark: Instant) -> Integers:
        """Add the records as columns. Return the rows that are too late."""
        open_sessions = {
            code: found for code, key in enumerate(rows.keys) if (found := self._open.by_key.get(key)) is not None
        }
        gaps = self._gaps.gaps_of(rows.keys)
        sessions = merge_sessions(
            rows.records.event_times,
            rows.watermarks,
            rows.codes,
            gaps,
            self._allowed_us,
            open_sessions,
            self._gaps.of_rows(rows.records, gaps[rows.codes]) if self._gaps.by_row else None,
            self._bound,
            self._over_floor,
        )
        sessions = self._without_closed(sessions, rows.keys)
        too_late = np.flatnonzero(sessions.of_row < 0)
        if not len(sessions.codes):
            return too_late
        inside = np.flatnonzero(sessions.of_row >= 0) if len(too_late) else None
        of_row = sessions.of_row if inside is None else sessions.of_row[inside]
        counts = np.bincount(of_row, minlength=len(sessions.codes))
        groups = Groups(sessions.starts, sessions.ends, sessions.codes, of_row, counts, rows.records, inside)
        late = np.bincount(sessions.of_row[sessions.late], minlength=len(groups))
        joined = cast("dict[int, list[OpenSession]]", sessions.joined)
        self._add_groups(emission, rows, groups, joined, late, watermark)
        return too_late
