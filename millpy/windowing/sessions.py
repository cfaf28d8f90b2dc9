"""Session windows of one key interval, over whole bundles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from millpy.model.record import Instants
from millpy.model.stage import Binding, Recovered, Work
from millpy.model.time import INSTANT_MIN, Instant
from millpy.windowing.combiner import try_merges
from millpy.windowing.emission import Emission
from millpy.windowing.grouping import Groups, Integers
from millpy.windowing.interval import Rows, TooLate, WindowedInterval, Windowing
from millpy.windowing.open_sessions import OpenSession, OpenSessions
from millpy.windowing.pane import OpenPane
from millpy.windowing.room import Openings
from millpy.windowing.session_merge import Sessions, merge_sessions, replay
from millpy.windowing.window import Gaps, SessionWindows


class SessionInterval(WindowedInterval[OpenSessions]):
    """Soft state of one key interval: its open sessions by key."""

    def __init__(self, windowing: Windowing, windows: SessionWindows, binding: Binding, recovered: Recovered) -> None:
        super().__init__(windowing, binding)
        self._gaps = Gaps(windows)
        self._open = OpenSessions(self._folds, self._allowed_us)
        self._recover(recovered)

    def _take_rows(self, emission: Emission, rows: Rows, work: Work) -> TooLate | None:
        """Each row in one session, or too late for any."""
        if len(rows) <= self._few_records_max:
            late: Sequence[int] | Integers = self._take_few(rows)
        else:
            late = self._take_many(emission, rows, work.watermark)
        retracted = self._open.take_retracted()
        failed = len(emission.failed)
        emission.retract(retracted)
        self._retracted += len(retracted) - (len(emission.failed) - failed)
        self._expect(rows, np.delete(np.arange(len(rows)), late) if len(late) else None, len(rows) - len(late))
        return self._too_late(rows, late) if len(late) else None

    def _openings(self, rows: Rows, work: Work) -> Openings:
        """Sessions by event time alone; the rows of those that are over fall out later."""
        known = {code: found for code, key in enumerate(rows.keys) if (found := self._open.by_key.get(key)) is not None}
        times, gaps = rows.records.event_times, self._gaps.of_all(rows.keys)
        before = np.full(len(rows), INSTANT_MIN, np.int64)
        sessions = merge_sessions(times, before, rows.codes, gaps, self._allowed_us, known)
        opens = sessions.ends + self._allowed_us > work.watermark
        opens[list(sessions.joined)] = False
        goes_on = np.isin(sessions.codes, list(known))
        large = np.zeros(len(opens), np.bool_)
        for number, olds in sessions.joined.items() if self._open.weights.large else ():
            large[number] = any(id(old.pane) in self._open.weights.large for old in cast("list[OpenSession]", olds))
        return Openings(np.arange(len(rows)), sessions.of_row, opens, goes_on, large)

    def _too_late(self, rows: Rows, late: Sequence[int] | Integers) -> TooLate:
        """Records that missed the session of their own, which is all there was for them."""
        places = np.asarray(late, np.int64)
        missed = rows.take(places)
        starts: Instants = missed.records.event_times
        found = self._late_rows(missed, starts, starts + self._gaps.of_all(rows.keys)[missed.codes])
        return TooLate(found, {place: len(mine) for place, mine in rows.by_input(places)})

    def _take_few(self, rows: Rows) -> list[int]:
        """One record after the other, in plain Python; returns rows that are too late."""
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        by_key: dict[int, list[int]] = {}
        for row, code in enumerate(rows.codes.tolist()):
            by_key.setdefault(code, []).append(row)
        missed: set[int] = set(range(len(rows)))
        for code, of_key in by_key.items():
            key = rows.keys[code]
            columns = ((row, times[row], watermarks[row]) for row in of_key)
            sessions, late = replay(columns, self._gaps.of(key), self._allowed_us, self._open.by_key.get(key, ()))
            for session in sessions:
                pane = OpenPane(self._folds.empty())
                for row in sorted(session.rows):
                    self._folds.add(pane.values, objects[row], times[row])
                pane.late_count = sum(row in late for row in session.rows)
                missed.difference_update(session.rows)
                self._tally.applied += len(session.rows)
                if session.open:
                    self._open.join(cast("list[OpenSession]", session.open), session.start, session.end, pane)
                else:
                    self._open.open(key, session.start, session.end, pane)
        return sorted(missed)

    def _take_many(self, emission: Emission, rows: Rows, watermark: Instant) -> Integers:
        """Sessions, one group-by, then the state; returns rows that are too late."""
        open_sessions = {
            code: found for code, key in enumerate(rows.keys) if (found := self._open.by_key.get(key)) is not None
        }
        sessions = merge_sessions(
            rows.records.event_times,
            rows.watermarks,
            rows.codes,
            self._gaps.of_all(rows.keys),
            self._allowed_us,
            open_sessions,
        )
        too_late = np.flatnonzero(sessions.of_row < 0)
        if not len(sessions.codes):
            return too_late
        inside = np.flatnonzero(sessions.of_row >= 0) if len(too_late) else None
        of_row = sessions.of_row if inside is None else sessions.of_row[inside]
        counts = np.bincount(of_row, minlength=len(sessions.codes))
        groups = Groups(sessions.starts, sessions.ends, sessions.codes, of_row, counts, rows.records, inside)
        late = np.bincount(sessions.of_row[sessions.late], minlength=len(groups))
        self._bring(emission, rows, groups, sessions, late, watermark)
        return too_late

    def _bring(
        self, emission: Emission, rows: Rows, groups: Groups, sessions: Sessions, late: Integers, watermark: Instant
    ) -> None:
        """Emit sessions that open and expire within the turn; the others go on in the state."""
        partials = [fold.partial(groups) for fold in self._folds.folds]
        joined = cast("dict[int, list[OpenSession]]", sessions.joined)
        if self._folds.calls_user:
            try_merges(self._folds, groups, partials, lambda n: [old.pane.values for old in joined.get(n, ())])
        kept = groups.ends + self._allowed_us > watermark
        kept[list(joined)] = True
        emission.add_direct(groups, partials, late, np.flatnonzero(~kept), rows.keys)
        self._made += int(np.count_nonzero(~kept))
        self._tally.applied += int(groups.counts[~kept].sum())
        picks = np.flatnonzero(kept)
        columns = (picks.tolist(), groups.codes[picks].tolist(), groups.starts[picks].tolist())
        more = (groups.ends[picks].tolist(), late[picks].tolist(), groups.counts[picks].tolist())
        accumulators = zip(*(partial.accumulators(picks) for partial in partials), strict=True)
        for number, code, start, end, late_count, count, values in zip(*columns, *more, accumulators, strict=True):
            pane = OpenPane(list(values), late_count=late_count)
            olds = joined.get(number)
            if olds is None:
                self._open.open(rows.keys[code], start, end, pane)
            else:
                self._open.join(olds, start, end, pane)
            self._tally.applied += count
