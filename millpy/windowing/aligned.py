"""Aligned windows of one key interval, each kept by itself, over whole bundles. Most sliding ones: see `sliced.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.stage import Binding, Recovered, Work
from millpy.model.time import Instant
from millpy.windowing.combiner import try_merges
from millpy.windowing.emission import Emission
from millpy.windowing.fold import Partial
from millpy.windowing.grouping import Groups, Integers, aligned_groups
from millpy.windowing.interval import Mask, Rows, TooLate, WindowedInterval, Windowing
from millpy.windowing.open_windows import OpenWindows
from millpy.windowing.pane import OpenPane
from millpy.windowing.room import Openings, openings_of
from millpy.windowing.window import AlignedWindows, Assigner


class AlignedInterval(WindowedInterval[OpenWindows]):
    """Soft state of one key interval: its open windows by start, then key."""

    def __init__(self, windowing: Windowing, windows: AlignedWindows, binding: Binding, recovered: Recovered) -> None:
        super().__init__(windowing, binding)
        self._assigner = Assigner(windows)
        self._size_us = windows.size_us
        self._most = self._assigner.most
        self._open = OpenWindows(self._folds, self._size_us, self._allowed_us)
        self._recover(recovered)

    def _take_rows(self, emission: Emission, rows: Rows, work: Work) -> TooLate | None:
        """One entry per row and window; those of windows that are over come back."""
        starts, at = self._assigner.assign(rows.records.event_times)
        watermarks = rows.watermarks if at is None else rows.watermarks[at]
        over: Mask = watermarks >= starts + (self._size_us + self._allowed_us)
        late = None
        if over.any():
            late = self._too_late(rows, starts, at, over)
            inside = np.flatnonzero(~over)
            starts, at = starts[inside], inside if at is None else at[inside]
        if not len(starts):
            return late
        inside_rows = None if late is None else inside
        if at is not None:
            inside_rows = np.flatnonzero(np.bincount(at, minlength=len(rows)))
        self._expect(rows, inside_rows, len(starts))
        if len(rows) <= self._few_records_max:
            self._take_few(rows, starts, at)
        else:
            self._take_many(emission, rows, starts, at, work.watermark)
        return late

    def _openings(self, rows: Rows, work: Work) -> Openings:
        """Windows that are not over, or that are open still."""
        starts, at = self._assigner.assign(rows.records.event_times)
        at = np.arange(len(rows)) if at is None else at
        stays: Mask = starts + (self._size_us + self._allowed_us) > work.watermark
        every_us, panes, weights = self._assigner.every_us, self._open.panes, self._open.weights
        return openings_of(panes, weights, rows.keys, starts, rows.codes[at], at, stays, every_us)

    def _too_late(self, rows: Rows, starts: Instants, at: Integers | None, over: Mask) -> TooLate:
        entries = np.flatnonzero(over)
        missed = np.asarray(entries if at is None else at[entries], np.int64)
        kept = np.flatnonzero(~over) if at is None else at[~over]
        whole = None
        if at is not None:
            whole = ~np.isin(missed, kept)
            whole[np.setdiff1d(np.arange(len(missed)), np.unique(missed, return_index=True)[1])] = False
        late = self._late_rows(rows.take(missed), starts[entries], starts[entries] + self._size_us, whole)
        return TooLate(late, {place: len(mine) for place, mine in rows.by_input(np.setdiff1d(missed, kept))})

    def _take_few(self, rows: Rows, starts: Instants, at: Integers | None) -> None:
        """One record after the other, in plain Python."""
        open_windows, folds, size_us = self._open, self._folds, self._size_us
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        codes = rows.codes.tolist()
        for start, row in zip(starts.tolist(), range(len(rows)) if at is None else at.tolist(), strict=True):
            key = rows.keys[codes[row]]
            panes = open_windows.of(start)
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(folds.empty())
                open_windows.weights.panes += 1
            folds.add(pane.values, objects[row], times[row])
            if watermarks[row] >= start + size_us:
                pane.late_count += 1
            open_windows.changed(start)[key] = pane
            self._tally.applied += 1

    def _take_many(
        self, emission: Emission, rows: Rows, starts: Instants, at: Integers | None, watermark: Instant
    ) -> None:
        """One group-by; then groups that open and close here are emitted, the others merged."""
        codes, watermarks = (rows.codes, rows.watermarks) if at is None else (rows.codes[at], rows.watermarks[at])
        groups = aligned_groups(starts, self._size_us, self._assigner.every_us, codes, len(rows.keys), rows.records, at)
        is_late: Mask = watermarks >= starts + self._size_us
        late = groups.counts_where(is_late) if is_late.any() else np.zeros(len(groups), np.int64)
        partials = [fold.partial(groups) for fold in self._folds.folds]
        kept = self._kept(groups, groups.ends + self._allowed_us <= watermark, rows.keys)
        if self._folds.calls_user:
            try_merges(self._folds, groups, partials, lambda group: self._values(groups, group, rows.keys))
        leaving = ~kept
        self._tally.applied += int(groups.counts[leaving].sum())
        if kept.any():
            self._bring(groups, partials, late, kept, leaving, rows.keys, watermark)
        self._made += int(np.count_nonzero(leaving))
        emission.add_direct(groups, partials, late, np.flatnonzero(leaving), rows.keys)

    def _bring(
        self,
        groups: Groups,
        partials: Sequence[Partial],
        late: Integers,
        kept: Mask,
        leaving: Mask,
        keys: list[Key],
        watermark: Instant,
    ) -> None:
        """Merge groups into their panes, window by window; marks as leaving those that can be emitted as they are."""
        picks = np.flatnonzero(kept)
        values = list(map(list, zip(*(partial.accumulators(picks) for partial in partials), strict=True)))
        of_group = [keys[code] for code in groups.codes[picks].tolist()]
        late_counts, counts = late[picks].tolist(), groups.counts[picks].tolist()
        starts = groups.starts[picks]
        bounds = np.append(np.flatnonzero(np.diff(starts, prepend=starts[0] - 1)), len(picks))
        for lo, hi in pairwise(bounds.tolist()):
            start = int(starts[lo])
            if start in self._open.panes:
                self._merge(start, of_group[lo:hi], values[lo:hi], late_counts[lo:hi], counts[lo:hi])
                continue
            due = start + self._size_us <= watermark
            panes = map(OpenPane, values[lo:hi], repeat(int(due)), late_counts[lo:hi], repeat(due))
            opened = self._open.open(start, dict(zip(of_group[lo:hi], panes, strict=True)), emitted=due)
            self._tally.applied += sum(counts[lo : lo + opened])
            leaving[picks[lo:hi]] = due

    def _merge(self, start: int, keys: list[Key], values: list[list[Any]], late: list[int], counts: list[int]) -> None:
        """Merge into a window that is open; `late` and `counts` are records."""
        panes, changed = self._open.of(start), self._open.changed(start)
        merge, before = self._folds.merge, len(panes)
        applied = 0
        for key, accumulators, late_count, count in zip(keys, values, late, counts, strict=True):
            pane = panes.get(key)
            if pane is None:
                pane = panes[key] = OpenPane(accumulators)
            else:
                pane.values = merge(pane.values, accumulators)
            pane.late_count += late_count
            changed[key] = pane
            applied += count
        self._open.weights.panes += len(panes) - before
        self._tally.applied += applied

    def _values(self, groups: Groups, group: int, keys: list[Key]) -> list[list[object]]:
        """Accumulators that a group will be merged into."""
        pane = self._open.panes.get(int(groups.starts[group]), {}).get(keys[int(groups.codes[group])])
        return [pane.values] if pane is not None else []

    def _kept(self, groups: Groups, expiring: Mask, keys: list[Key]) -> Mask:
        """Groups that go through the state: their window stays open, or has a pane there already."""
        kept = ~expiring
        places = np.flatnonzero(expiring)
        if not len(places) or not self._open.panes:
            return kept
        known = [start for start in np.unique(groups.starts[places]).tolist() if start in self._open.panes]
        for place in places[np.isin(groups.starts[places], known)].tolist():
            panes = self._open.panes[int(groups.starts[place])]
            kept[place] = keys[int(groups.codes[place])] in panes
        return kept
