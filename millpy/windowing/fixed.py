"""Aligned windows of one key interval, stored window by window: fixed and calendar ones, and sliding without slices.

Sliding windows that are stored as slices are in `sliding.py`; `WindowSpec.sliced` tells which are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from millpy.model.keys import Key
from millpy.model.record import Instants, Mask, retractions_of
from millpy.model.stage import StageBinding, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import PartialAggregate
from millpy.windowing.aggregates.combiner import try_merges
from millpy.windowing.fixed_state import OpenWindows
from millpy.windowing.group_by import Groups, Integers
from millpy.windowing.operator import DroppedLate, JoinedRows
from millpy.windowing.pane_codec import NO_TIME, OpenPane
from millpy.windowing.panes import Emission
from millpy.windowing.spilling import SpillingInterval
from millpy.windowing.triggered_state import TriggeredWindows
from millpy.windowing.window import WindowAssigner
from millpy.windowing.window_memory import Openings, WindowEntries, openings_of
from millpy.windowing.window_spec import WindowSpec


class AlignedInterval(SpillingInterval[OpenWindows]):
    """Soft state of one key interval: its open windows by start, then key."""

    def __init__(
        self, windowing: WindowSpec, assigner: WindowAssigner, binding: StageBinding, recovered: StoredInterval
    ) -> None:
        super().__init__(windowing, binding)
        self._assigner = assigner
        self._windows_per_record = assigner.windows_per_record
        given = (self._accumulators, assigner, self._allowed_us)
        self._triggered = None if self._triggers is None else TriggeredWindows(*given, self._triggers)
        self._open = self._triggered or OpenWindows(*given)
        self._through_state = self._accumulators.retracts or self._triggers is not None or self._combines
        if self._combines:
            self._open.hold_times(retracts=self._mode is Accumulation.RETRACTING)
        self._spill_beyond(windowing, recovered)
        self._recover(recovered)

    def _take_rows(self, emission: Emission, rows: JoinedRows, work: Work) -> DroppedLate | None:
        """Add each row to all of its windows, except those that have expired: these make late records."""
        starts, at = self._assigner.assign(rows.records.event_times)
        over_by = self._over_by(rows.watermarks)
        over: Mask = self._assigner.ends_of(starts) <= (over_by if at is None else over_by[at])
        spilled = self._open.spilled
        if spilled is not None:  # it may bring back panes that their trigger has closed
            spilled.fetch(starts[~over], (rows.codes if at is None else rows.codes[at])[~over], rows.keys)
        if self._triggered is not None and self._triggered.closed:
            over |= self._closed(starts, rows.codes if at is None else rows.codes[at], rows.keys)
        late = None
        if over.any():
            late = self._missed(rows, starts, self._assigner.ends_of(starts), at, over)
            inside = np.flatnonzero(~over)
            starts, at = starts[inside], inside if at is None else at[inside]
        if not len(starts):
            return late
        inside_rows = None if late is None else inside
        if at is not None:
            inside_rows = np.flatnonzero(np.bincount(at, minlength=len(rows)))
        self._expect(rows, inside_rows, len(starts))
        if len(rows) <= self._few_records_max and self._simple:
            self._take_few(rows, starts, at)
        elif len(rows) <= self._few_records_max:
            self._merge_few(rows, starts, at)
        else:
            self._take_many(emission, rows, starts, at, work.watermark)
        return late

    def _is_expected(self) -> bool:
        """Tell whether a percentile has reached a window that has to be asked."""
        return self._triggered is not None and self._triggered.is_expected()

    def _next_alarm(self) -> Instant:
        """Return the processing time at which a pane is due; INSTANT_MAX without one."""
        return INSTANT_MAX if self._triggered is None else self._triggered.alarms.next_time()

    def _closed(self, starts: Instants, codes: Integers, keys: list[Key]) -> Mask:
        """Return which (row, window) pairs have a window that its trigger has closed."""
        assert self._triggered is not None
        found = np.zeros(len(starts), np.bool_)
        for start in np.unique(starts).tolist():
            closed = self._triggered.closed.get(start)
            if closed:
                found |= (starts == start) & np.isin(codes, [code for code, key in enumerate(keys) if key in closed])
        return found

    def _openings(self, rows: JoinedRows, work: Work) -> Openings:
        """Return the windows of the rows."""
        starts, at = self._assigner.assign(rows.records.event_times)
        at = np.arange(len(rows)) if at is None else at
        stays: Mask = self._assigner.ends_of(starts) + self._allowed_us > work.watermark
        if self._triggered is not None and self._open.spilled is not None and not self._unfired_spill:
            # A late record may have to wait in a window that has fired: it needs room unless its window is there.
            self._open.spilled.fetch(starts, rows.codes[at], rows.keys)
            self._open.spilled.fetch_beside(starts, rows.codes[at], rows.keys, self._assigner.neighbors)
        elif self._open.spilled is not None:
            if self._triggered is None:
                # Windows that have fired, or fire in this turn, need no room, but tell which keys continue.
                in_open = self._assigner.ends_of(starts) > self._trigger.latest_end(work.watermark)
                starts, at, stays = starts[in_open], at[in_open], stays[in_open]
            if self._unfired_spill:
                self._open.spilled.fetch(starts, rows.codes[at], rows.keys)
                entries = WindowEntries(starts, rows.codes[at], at, stays)
                found = openings_of(self._open.panes, self._open.weights, rows.keys, entries, _itself)
                return replace(found, extends=found.opens)  # a turn has room for all that it opens
            self._open.spilled.fetch_beside(starts, rows.codes[at], rows.keys, self._assigner.neighbors)
        entries = WindowEntries(starts, rows.codes[at], at, stays)
        return openings_of(self._open.panes, self._open.weights, rows.keys, entries, self._assigner.neighbors)

    def _take_few(self, rows: JoinedRows, starts: Instants, at: Integers | None) -> None:
        """Add the records one by one."""
        open_windows, accumulators = self._open, self._accumulators
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        codes, entries = rows.codes.tolist(), self._entries(rows, starts, at)
        for start, end, row in entries:
            key = rows.keys[codes[row]]
            panes = open_windows.get_or_open(start)
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(accumulators.empty())
                open_windows.weights.panes += 1
            accumulators.add(pane.values, objects[row], times[row])
            if watermarks[row] >= end:
                pane.late_count += 1
            open_windows.changed(start)[key] = pane
            self._tally.applied += 1

    def _merge_few(self, rows: JoinedRows, starts: Instants, at: Integers | None) -> None:
        """Add the records to panes of this turn one by one, and merge these into the open panes, as columns do."""
        accumulators, entries = self._accumulators, self._entries(rows, starts, at)
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        retracts, codes = retractions_of(rows.records).tolist(), rows.codes.tolist()
        found: dict[int, dict[Key, OpenPane]] = {}
        counts: Counter[tuple[int, Key]] = Counter()
        for start, end, row in entries:
            key, of_window = rows.keys[codes[row]], found.setdefault(start, {})
            pane = of_window.get(key)
            if pane is None:
                pane = of_window[key] = OpenPane(accumulators.empty())
            change = accumulators.subtract if retracts[row] else accumulators.add
            change(pane.values, objects[row], times[row])
            if self._combines and times[row] >= watermarks[row]:
                pane.at = self._timestamps.combined(pane.at, times[row])
            pane.late_count += watermarks[row] >= end
            counts[start, key] += 1
        for start, panes in found.items():
            late = [pane.late_count for pane in panes.values()]
            values = [pane.values for pane in panes.values()]
            ats = [pane.at for pane in panes.values()] if self._combines else None
            self._merge(start, list(panes), values, late, [counts[start, key] for key in panes], ats)

    def _entries(self, rows: JoinedRows, starts: Instants, at: Integers | None) -> Iterator[tuple[int, int, int]]:
        """Return (start, end, row) of each window that a record is in."""
        ends = self._assigner.ends_of(starts).tolist()
        return zip(starts.tolist(), ends, range(len(rows)) if at is None else at.tolist(), strict=True)

    def _take_many(
        self, emission: Emission, rows: JoinedRows, starts: Instants, at: Integers | None, watermark: Instant
    ) -> None:
        """Group the rows. Emit groups whose window opens and expires in this turn; merge the others into the state."""
        codes, watermarks = (rows.codes, rows.watermarks) if at is None else (rows.codes[at], rows.watermarks[at])
        groups = self._assigner.groups(starts, codes, len(rows.keys), rows.records, at)
        is_late: Mask = watermarks >= self._assigner.ends_of(starts)
        late = groups.counts_where(is_late) if is_late.any() else np.zeros(len(groups), np.int64)
        partials = [member.aggregate(groups) for member in self._accumulators.members]
        kept = self._kept(groups, groups.ends + self._allowed_us <= watermark, rows.keys)
        if self._accumulators.calls_user:
            try_merges(self._accumulators, groups, partials, lambda group: self._values(groups, group, rows.keys))
        leaving = ~kept
        times = self._timestamps.of_groups(groups, rows.watermarks)
        self._tally.applied += int(groups.counts[leaving].sum())
        if kept.any():
            self._add_groups(groups, partials, late, kept, leaving, rows.keys, times)
        self._made += int(np.count_nonzero(leaving))
        if times is not None:
            emission.direct_times = times
        emission.add_direct(groups, partials, late, np.flatnonzero(leaving), rows.keys)

    def _add_groups(
        self,
        groups: Groups,
        partials: Sequence[PartialAggregate],
        late: Integers,
        kept: Mask,
        leaving: Mask,
        keys: list[Key],
        times: Instants | None,
    ) -> None:
        """Merge the `kept` groups into the state, window by window.

        A window that opens and fires in this turn emits its groups unchanged: mark them as `leaving`, too. If records
        may be retractions, or the trigger has a state, a group may have no pane to emit, and all leave from the state.
        """
        picks = np.flatnonzero(kept)
        values = list(map(list, zip(*(partial.accumulators(picks) for partial in partials), strict=True)))
        of_group = [keys[code] for code in groups.codes[picks].tolist()]
        late_counts, counts = late[picks].tolist(), groups.counts[picks].tolist()
        ats = None if times is None else times[picks].tolist()
        starts = groups.starts[picks]
        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[0] - 1)), len(picks))
        for lo, hi in pairwise(bounds.tolist()):
            start = int(starts[lo])
            if start in self._open.panes or self._through_state:
                some_ats = None if ats is None else ats[lo:hi]
                self._merge(start, of_group[lo:hi], values[lo:hi], late_counts[lo:hi], counts[lo:hi], some_ats)
                continue
            due = self._assigner.end_of(start) <= self._latest_end
            panes = map(OpenPane, values[lo:hi], repeat(int(due)), late_counts[lo:hi], repeat(due))
            opened = self._open.open(start, dict(zip(of_group[lo:hi], panes, strict=True)), emitted=due)
            self._tally.applied += sum(counts[lo : lo + opened])
            leaving[picks[lo:hi]] = due

    def _merge(
        self,
        start: int,
        keys: list[Key],
        values: list[list[Any]],
        late: list[int],
        counts: list[int],
        ats: list[int] | None,
    ) -> None:
        """Merge groups into an open window.

        Args:
            start: the start of the window.
            keys: the key of each group.
            values: its accumulators.
            late: its number of late records.
            counts: its number of records.
            ats: its combined event time; None if times are not combined.
        """
        panes, changed = self._open.get_or_open(start), self._open.changed(start)
        merge, simple, triggers, before = self._accumulators.merge, self._simple, self._triggers, len(panes)
        applied = 0
        holds, times = self._open.holds, repeat(NO_TIME, len(keys)) if ats is None else ats
        for key, accumulators, late_count, count, at in zip(keys, values, late, counts, times, strict=True):
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(accumulators, late_count=late_count, at=at)
            elif simple:
                pane.values = merge(pane.values, accumulators)
                pane.late_count += late_count
            else:
                self._merger.merge(pane, accumulators, late_count, at)
            if triggers is not None:
                triggers.add(pane, count, late_count)
            if holds is not None:
                holds.add((start, key))
            changed[key] = pane
            applied += count
        self._open.weights.panes += len(panes) - before
        self._tally.applied += applied

    def _values(self, groups: Groups, group: int, keys: list[Key]) -> list[list[object]]:
        """Return the lists of accumulators into which a group will be merged: one or none."""
        pane = self._open.panes.get(int(groups.starts[group]), {}).get(keys[int(groups.codes[group])])
        return [pane.values] if pane is not None else []

    def _kept(self, groups: Groups, expiring: Mask, keys: list[Key]) -> Mask:
        """Return which groups go through the state: their window stays open, or their key has a pane in it already.

        The others are the only pane of a window that is over, whatever its trigger. If records may be retractions, all
        groups go through the state.
        """
        kept = ~expiring | self._accumulators.retracts
        places = np.flatnonzero(~kept)
        if not len(places) or not self._open.panes:
            return kept
        known = [start for start in np.unique(groups.starts[places]).tolist() if start in self._open.panes]
        for place in places[np.isin(groups.starts[places], known)].tolist():
            panes = self._open.panes[int(groups.starts[place])]
            kept[place] = keys[int(groups.codes[place])] in panes
        return kept


def _itself(start: int) -> tuple[int, int]:
    """Return a window as its own neighbors."""
    return start, start
