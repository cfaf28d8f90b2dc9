"""Sliding windows whose size is a whole number of periods, over whole bundles: kept as slices, emitted as columns.

Rows of a turn are grouped twice: by slice, for the state, and by window, for the windows that are due at its end. A due
pane is merged from the slices stored before the turn and the turn's own group, which leaves out rows that came too late
for that window though not for all of theirs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key
from millpy.model.record import Instants
from millpy.model.stage import Binding, Recovered, StepResult, Work
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.emission import Emission
from millpy.windowing.fold import Folds, Partial
from millpy.windowing.grouping import Groups, Integers, aligned_groups, stable_order
from millpy.windowing.interval import Mask, Rows, TooLate, WindowedInterval, Windowing
from millpy.windowing.open_slices import OpenSlices
from millpy.windowing.room import Openings, openings_of
from millpy.windowing.window import SlidingWindows

LATE_MAX = 1_000_000
"""Of so many (row, window) pairs of late rows it is looked whether they open a window; of more not."""
ENTRIES_MAX = 1_000_000
"""So many (slice, window) pairs are merged at once: when a stream goes on after a gap, all of its windows are due."""

FIRED = "fired"
"""Namespace of the position up to which windows have fired, while that stays behind the input watermark."""
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class Panes:
    """Panes of windows by number: start, key code, accumulators, late records.

    `known`: of how many accumulators, the first ones, the value is known; None for all of them.
    """

    starts: Instants
    codes: Integers
    late: Integers
    partials: list[Partial]
    size_us: int
    known: Integers | None = None

    @property
    def ends(self) -> Instants:
        """Their ends."""
        return self.starts + self.size_us

    def __len__(self) -> int:
        return len(self.starts)

    def with_more(self, more: Panes, folds: Folds) -> Panes:
        """These, then others."""
        pairs = zip(folds.folds, self.partials, more.partials, strict=True)
        return Panes(
            np.concatenate([self.starts, more.starts]),
            np.concatenate([self.codes, more.codes]),
            np.concatenate([self.late, more.late]),
            [fold.joined(one, other) for fold, one, other in pairs],
            self.size_us,
            None if self.known is None or more.known is None else np.concatenate([self.known, more.known]),
        )


@dataclass(slots=True)
class Parts:
    """What windows are merged from, by number: the first window that each is in, how many, key code, accumulators.

    A slice with records from before an aggregate was added has fewer accumulators: `known` as for panes.
    """

    starts: Instants = field(default_factory=lambda: _NONE)
    counts: Integers = field(default_factory=lambda: _NONE)
    codes: Integers = field(default_factory=lambda: _NONE)
    late: Integers = field(default_factory=lambda: _NONE)
    known: Integers | None = None
    partials: list[Partial] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)
    _runs: list[tuple[int, int, int]] = field(default_factory=list)
    _codes: list[int] = field(default_factory=list)

    def extend(self, start: int, windows: int, of_slice: Sequence[tuple[int, list[Any]]]) -> None:
        """A slice's accumulators, by key code."""
        self._runs.append((start, windows, len(of_slice)))
        self._codes += [code for code, _ in of_slice]
        self.values += [values for _, values in of_slice]

    def closed(self, folds: Folds) -> Parts:
        """As columns."""
        starts, counts, sizes = (np.array(column, np.int64) for column in zip(*self._runs, strict=True))
        self.starts, self.counts = np.repeat(starts, sizes), np.repeat(counts, sizes)
        self.codes, self.late = np.array(self._codes, np.int64), np.zeros(len(self._codes), np.int64)
        known = np.array(list(map(len, self.values)), np.int64)
        values = self.values
        if int(known.min()) < len(folds.folds):
            self.known = known
            values = [[*some, *(fold.empty() for fold in folds.folds[len(some) :])] for some in values]
        self.partials = [fold.gathered([v[place] for v in values]) for place, fold in enumerate(folds.folds)]
        return self

    def add(self, panes: Panes) -> None:
        """Panes of the turn; their accumulators are there already."""
        self.starts = np.concatenate([self.starts, panes.starts])
        self.counts = np.concatenate([self.counts, np.ones(len(panes), np.int64)])
        self.codes = np.concatenate([self.codes, panes.codes])
        self.late = np.concatenate([self.late, panes.late])
        if self.known is not None:
            self.known = np.concatenate([self.known, np.full(len(panes), len(self.partials), np.int64)])


class SlicedInterval(WindowedInterval[OpenSlices]):
    """Soft state of one key interval: its slices by start, then key."""

    def __init__(self, windowing: Windowing, windows: SlidingWindows, binding: Binding, recovered: Recovered) -> None:
        super().__init__(windowing, binding)
        assert not self._folds.calls_user, "a combiner merges in order of arrival"
        self._size_us, self._every_us = windows.size_us, windows.every_us
        self._most = self._size_us // self._every_us
        fired = [int(e.values[0]) for e in recovered.entries if e.namespace == FIRED and e.values[0] is not None]
        reached = Instant(min([recovered.input_watermark, *fired]))
        self._open = OpenSlices(self._folds, self._size_us, self._every_us, self._allowed_us, reached)
        self._arrived: Panes | None = None
        self._going: dict[Key, Instant] = {}
        self._slices: list[tuple[int, list[Key], list[list[Any]], list[int]]] = []  # start; by key: values, records
        self._keys: list[Key] = []
        self._open.ahead.recover(recovered.entries, self._input.key_types, reached)
        self._recover(recovered)

    def _take_rows(self, emission: Emission, rows: Rows, work: Work) -> TooLate | None:
        """Groups by window and by slice; nothing changes before the turn's panes are emitted."""
        starts = rows.records.event_times // self._every_us * self._every_us
        # Of a row's windows the first end first: it is too late for so many of them.
        over = rows.watermarks - (self._size_us + self._allowed_us) - (starts - (self._size_us - self._every_us))
        missed = np.clip(over // self._every_us + 1, 0, self._most)
        self._keys = rows.keys
        watermark: Instant | Instants = work.watermark
        if self._going or self._open.ahead:
            watermark = self._targets(rows.keys, work.watermark)[rows.codes]
        waiting, leaving = self._due(starts, missed, watermark)
        live = (missed < self._most) & (starts + (self._size_us + self._allowed_us) > work.watermark)
        inside = np.flatnonzero(missed < self._most) if missed.any() else None
        self._expect(rows, inside, int(np.count_nonzero(live) + leaving.sum()))
        if len(rows) <= self._few_records_max:
            self._take_few(rows, starts, live, waiting, leaving)
        else:
            self._take_many(rows, starts, live, waiting, leaving)
        return self._too_late(rows, starts, missed) if missed.any() else None

    def _openings(self, rows: Rows, work: Work) -> Openings:
        """The slice of each row, and the windows for which it is late: these remember that they have had late rows."""
        starts = rows.records.event_times // self._every_us * self._every_us
        oldest = starts - (self._size_us - self._every_us)
        fired = np.clip((rows.watermarks - self._size_us - oldest) // self._every_us + 1, 0, self._most)
        over = rows.watermarks - (self._size_us + self._allowed_us) - oldest
        missed = np.clip(over // self._every_us + 1, 0, self._most)
        late = np.maximum(fired - missed, 0)
        late[np.cumsum(late) > LATE_MAX] = 0
        at, place = _repeated(late)
        windows = oldest[at] + (missed[at] + place) * self._every_us
        at, windows = np.concatenate([np.arange(len(rows)), at]), np.concatenate([starts, windows])
        stays = windows + (self._size_us + self._allowed_us) > work.watermark
        panes, weights = self._open.panes, self._open.weights
        return openings_of(panes, weights, rows.keys, windows, rows.codes[at], at, stays, self._every_us)

    def _too_late(self, rows: Rows, starts: Instants, missed: Integers) -> TooLate:
        at, place = _repeated(missed)
        window_starts = starts[at] - (self._most - missed[at] + place) * self._every_us
        whole = (missed[at] == self._most) & (place == 0)
        late = self._late_rows(rows.take(at), window_starts, window_starts + self._size_us, whole)
        lost = np.flatnonzero(missed == self._most)
        return TooLate(late, {place: len(mine) for place, mine in rows.by_input(lost)})

    def _due(self, starts: Instants, missed: Integers, watermark: Instant | Instants) -> tuple[Integers, Integers]:
        """Per row: (how many of its windows are not due yet, how many of the others it is not too late for)."""
        waiting = np.maximum(-((watermark - self._size_us - starts) // self._every_us), 0)
        return waiting, np.maximum(self._most - missed - waiting, 0)

    def _take_many(self, rows: Rows, starts: Instants, live: Mask, waiting: Integers, leaving: Integers) -> None:
        kept = np.flatnonzero(live)
        if len(kept):
            groups = self._grouped(rows, starts[kept], kept)
            accumulators = [fold.partial(groups).accumulators(slice(None)) for fold in self._folds.folds]
            values = list(map(list, zip(*accumulators, strict=True)))
            keys = [rows.keys[code] for code in groups.codes.tolist()]
            bounds = [*np.flatnonzero(np.diff(groups.starts, prepend=groups.starts[0] - 1)).tolist(), len(groups)]
            counts = groups.counts.tolist()
            self._slices = [
                (int(groups.starts[lo]), keys[lo:hi], values[lo:hi], counts[lo:hi]) for lo, hi in pairwise(bounds)
            ]
        at, place = _repeated(leaving)
        if not len(at):
            return
        window_starts = starts[at] - (waiting[at] + place) * self._every_us
        groups = self._grouped(rows, window_starts, at)
        late = groups.counts_where(rows.watermarks[at] >= window_starts + self._size_us)
        partials = [fold.partial(groups) for fold in self._folds.folds]
        self._arrived = Panes(groups.starts, groups.codes, late, partials, self._size_us)
        self._tally.applied += int(groups.counts.sum())

    def _grouped(self, rows: Rows, starts: Instants, at: Integers) -> Groups:
        codes, keys = rows.codes[at], len(rows.keys)
        return aligned_groups(starts, self._size_us, self._every_us, codes, keys, rows.records, at)

    def _take_few(self, rows: Rows, starts: Instants, live: Mask, waiting: Integers, leaving: Integers) -> None:
        """One record after the other, in plain Python."""
        folds, every_us, size_us = self._folds, self._every_us, self._size_us
        objects, times, watermarks = rows.records.objects(), rows.records.event_times.tolist(), rows.watermarks.tolist()
        waits, counts = waiting.tolist(), leaving.tolist()
        slices: dict[int, dict[Key, list[Any]]] = {}
        windows: dict[tuple[int, int], list[Any]] = {}
        late: dict[tuple[int, int], int] = {}
        records_of: Counter[tuple[int, Key]] = Counter()
        codes, is_live = rows.codes.tolist(), live.tolist()
        for row, start in enumerate(starts.tolist()):
            code = codes[row]
            if is_live[row]:
                values = slices.setdefault(start, {}).setdefault(rows.keys[code], folds.empty())
                folds.add(values, objects[row], times[row])
                records_of[start, rows.keys[code]] += 1
            newest = start - waits[row] * every_us
            for window in range(newest, newest - counts[row] * every_us, -every_us):
                folds.add(windows.setdefault((window, code), folds.empty()), objects[row], times[row])
                late[window, code] = late.get((window, code), 0) + (watermarks[row] >= window + size_us)
                self._tally.applied += 1
        self._slices = [
            (start, list(found), list(found.values()), [records_of[start, key] for key in found])
            for start, found in slices.items()
        ]
        if windows:
            self._arrived = self._gathered(list(windows), list(windows.values()), list(late.values()))

    def _gathered(self, names: Sequence[tuple[int, int]], values: Sequence[list[Any]], late: Sequence[int]) -> Panes:
        """Panes from (window start, key code), accumulators and late counts."""
        starts, codes = (np.array(column, np.int64) for column in zip(*names, strict=True))
        partials = [fold.gathered([one[place] for one in values]) for place, fold in enumerate(self._folds.folds)]
        return Panes(starts, codes, np.array(late, np.int64), partials, self._size_us)

    def step(self, work: Work) -> StepResult:
        """As any; and where the firing of windows stays behind the watermark, that is stored."""
        behind = self._open.watermark < work.watermark_before
        result = super().step(work)
        if behind or self._open.watermark < work.watermark:
            fired = None if self._open.watermark >= work.watermark else b"%d" % self._open.watermark
            stays = Entries(Kind.POSITION, FIRED, [b'""'], [0], [""], [fired], [INSTANT_MAX])
            result.delta = (*result.delta, stays)
        ahead = self._open.ahead.take_entries(work.panes_max)
        if ahead is not None:
            result.delta = (*result.delta, ahead)
        return result

    def _bounded(self, work: Work, rows: Rows | None) -> Work:
        """Fire only the first windows, of about as many panes as a turn may emit; of a single one only some keys."""
        reached, self._going = self._open.bounded(work.watermark, work.panes_max)
        if reached >= work.watermark:
            return work
        if rows is not None:
            self._let_late_ones_go(rows, reached)
        return replace(work, watermark=reached)

    def _let_late_ones_go(self, rows: Rows, reached: Instant) -> None:
        """A record that is late for a window finds it fired for its key: else it would count among those on time."""
        starts = rows.records.event_times // self._every_us * self._every_us
        late = np.flatnonzero((rows.watermarks >= starts + self._every_us) & (rows.watermarks > reached))
        for code, watermark in zip(rows.codes[late].tolist(), rows.watermarks[late].tolist(), strict=True):
            key = rows.keys[code]
            if watermark > self._going.get(key, self._open.ahead.of(key, reached)):
                self._going[key] = Instant(watermark)

    def _targets(self, keys: Sequence[Key], watermark: Instant) -> Instants:
        """By key, how far its windows fire in this turn or have fired."""
        targets = self._open.ahead.of_all(keys, watermark)
        if self._going:
            for code, key in enumerate(keys):
                targets[code] = max(int(targets[code]), self._going.get(key, watermark))
        return targets

    def _add_due(self, emission: Emission, watermark: Instant, panes_max: int) -> None:
        """Emit the panes that are due, then bring the turn's rows into their slices."""
        arrived, self._arrived = self._arrived, None
        slices, self._slices = self._slices, []
        code_of = {key: code for code, key in enumerate(self._keys)}
        due = self._merged(arrived, code_of, watermark)
        keys = list(code_of)
        indexes = _NONE if due is None else self._indexes(due, keys)
        if due is not None:
            self._made += len(due)
            emission.add_direct(due, due.partials, due.late, np.arange(len(due)), keys, indexes, due.known)
        for start, of_slice, values, counts in slices:
            self._tally.applied += self._open.add(start, of_slice, values, counts)
        if due is not None:
            self._remember(due, indexes, keys, watermark)
        self._open.advance(watermark)
        going, self._going = self._going, {}
        self._open.ahead.go(going)
        self._keys = []

    def _merged(self, arrived: Panes | None, code_of: dict[Key, int], watermark: Instant) -> Panes | None:
        """Panes that are due, by window, then key; keys that have none in this turn get codes."""
        stored = self._stored(arrived, code_of, watermark)
        if stored is None:
            return arrived
        if arrived is not None:
            pairs = zip(self._folds.folds, stored.partials, arrived.partials, strict=True)
            stored.partials = [fold.joined(one, other) for fold, one, other in pairs]
            stored.add(arrived)
        total = int(stored.counts.sum())
        first, last = int(stored.starts.min()), int((stored.starts + (stored.counts - 1) * self._every_us).max())
        # As many windows at once as have ENTRIES_MAX pairs on average, and as can be numbered by key in 64 bits.
        windows = (last - first + self._every_us) // self._every_us * ENTRIES_MAX // total
        step = min(max(1, windows), 2**62 // len(code_of)) * self._every_us
        parts = ((lo, min(lo + step, last + self._every_us)) for lo in range(first, last + 1, step))
        found = [self._reduced(stored, lo, hi, len(code_of)) for lo, hi in parts]
        return reduce(lambda one, more: one.with_more(more, self._folds), [part for part in found if len(part)])

    def _stored(self, arrived: Panes | None, code_of: dict[Key, int], watermark: Instant) -> Parts | None:
        """Stored slices of windows that fire now, and of those that had and have late rows; None for none."""
        firing, panes, ahead = self._open.firing(watermark), self._open.panes, self._open.ahead
        found = Parts()
        for start in sorted(panes) if firing else ():
            lo, hi = max(start - self._size_us + self._every_us, firing.start), min(start, firing.stop - 1)
            if lo > hi:
                continue
            of_slice = [
                (code_of.setdefault(key, len(code_of)), p.values)
                for key, p in panes[start].items()
                if p.values and not (ahead and key in ahead) and key not in self._going
            ]
            if of_slice:
                found.extend(lo, (hi - lo) // self._every_us + 1, of_slice)
        self._add_apart(found, code_of, watermark)
        if arrived is not None:
            keys = list(code_of)
            fired = np.flatnonzero(arrived.ends <= ahead.of_all(keys, self._open.watermark)[arrived.codes])
            for window, code in zip(arrived.starts[fired].tolist(), arrived.codes[fired].tolist(), strict=True):
                held = [panes.get(start, {}).get(keys[code]) for start in self._slices_of(window)]
                found.extend(window, 1, [(code, pane.values) for pane in held if pane is not None and pane.values])
        return found.closed(self._folds) if found.values else None

    def _add_apart(self, found: Parts, code_of: dict[Key, int], watermark: Instant) -> None:
        """Stored slices of keys that are ahead of the others, or go ahead now."""
        open_slices = self._open
        parts: dict[tuple[Instant, Instant], list[Key]] = {}
        for key, target in self._going.items():
            parts.setdefault((open_slices.ahead.of(key, open_slices.watermark), target), []).append(key)
        if open_slices.ahead and watermark > open_slices.watermark:
            for key, reached in open_slices.ahead.before(watermark):
                if key not in self._going:
                    parts.setdefault((reached, watermark), []).append(key)
        starts = sorted(open_slices.panes) if parts else []
        for (reached, target), keys in parts.items():
            firing = open_slices.firing(target, reached)
            if not firing:
                continue
            begin, end = bisect_left(starts, firing.start), bisect_left(starts, firing[-1] + self._size_us)
            for start in starts[begin:end]:
                panes = open_slices.panes[start]
                lo, hi = max(start - self._size_us + self._every_us, firing.start), min(start, firing[-1])
                mine = [(key, pane.values) for key in keys if (pane := panes.get(key)) is not None and pane.values]
                if mine:
                    of_slice = [(code_of.setdefault(key, len(code_of)), values) for key, values in mine]
                    found.extend(lo, (hi - lo) // self._every_us + 1, of_slice)

    def _slices_of(self, window: int) -> range:
        return range(window, window + self._size_us, self._every_us)

    def _reduced(self, parts: Parts, lo: int, hi: int, keys: int) -> Panes:
        """Merge parts by window and key, for windows that start in [lo, hi)."""
        every_us = self._every_us
        before = np.clip(-((parts.starts - lo) // every_us), 0, parts.counts)
        after = np.clip(-((parts.starts - hi) // every_us), 0, parts.counts)
        at, place = _repeated(np.maximum(after - before, 0))
        starts = parts.starts[at] + (before[at] + place) * every_us
        number = (starts - lo) // every_us * keys + parts.codes[at]
        order = stable_order(number)
        offsets = np.flatnonzero(np.diff(number[order], prepend=-1))
        chosen, groups = at[order], order[offsets]
        pairs = zip(self._folds.folds, parts.partials, strict=True)
        partials = [fold.combined(part, chosen, offsets) for fold, part in pairs] if len(at) else []
        late = np.add.reduceat(parts.late[chosen], offsets) if len(at) else parts.late[:0]
        known = None
        if parts.known is not None:
            known = np.minimum.reduceat(parts.known[chosen], offsets) if len(at) else parts.known[:0]
        return Panes(starts[groups], parts.codes[at[groups]], late, partials, self._size_us, known)

    def _indexes(self, due: Panes, keys: list[Key]) -> Integers:
        """The pane index of each; those that had late panes before take over what these counted."""
        indexes = np.zeros(len(due), np.int64)
        panes = self._open.panes
        fired = np.flatnonzero(due.ends <= self._open.ahead.of_all(keys, self._open.watermark)[due.codes])
        for place, window, code in zip(
            fired.tolist(), due.starts[fired].tolist(), due.codes[fired].tolist(), strict=True
        ):
            held = [panes.get(start, {}).get(keys[code]) for start in self._slices_of(window)]
            if held[0] is not None and held[0].pane_index:
                indexes[place] = held[0].pane_index
                due.late[place] += held[0].late_count
            else:
                indexes[place] = any(pane is not None and pane.values for pane in held)
        return indexes

    def _remember(self, due: Panes, indexes: Integers, keys: list[Key], watermark: Instant) -> None:
        """What the next late pane of a window has to know, where that is not what every window has."""
        open_still = due.ends + self._allowed_us > watermark
        told = np.flatnonzero(open_still & ((due.late > 0) | (indexes > 0)))
        columns = (due.starts[told].tolist(), due.codes[told].tolist(), indexes[told].tolist(), due.late[told].tolist())
        for start, code, index, late in zip(*columns, strict=True):
            self._open.remember(start, keys[code], index + 1, late)


def _repeated(counts: Integers) -> tuple[npt.NDArray[np.int64], Integers]:
    """Each place so many times, and the how-manieth it is of those."""
    at = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return at, np.arange(len(at)) - begin[at]
