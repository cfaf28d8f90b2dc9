"""Sliding windows that are stored as slices (`WindowSpec.sliced`), and emitted as columns.

The rows of a turn are grouped twice: by slice, for the state, and by window, for the windows that fire at the end of
the turn. A pane is merged from the slices stored before the turn and the turn's group for that window, which leaves out
rows that are too late for that window but not for all of theirs.
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
from millpy.model.record import Instants, Mask
from millpy.model.stage import StageBinding, StepResult, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, Instant
from millpy.windowing.accumulator import AccumulatorSet, PartialAggregate
from millpy.windowing.group_by import Groups, Integers, aligned_groups, stable_order
from millpy.windowing.operator import DroppedLate, JoinedRows
from millpy.windowing.panes import Emission
from millpy.windowing.sliding_state import OpenSlices
from millpy.windowing.spilling import SpillingInterval
from millpy.windowing.window import Assigner, SlidingWindows
from millpy.windowing.window_memory import Openings, WindowEntries, openings_of
from millpy.windowing.window_spec import WindowSpec

LATE_MAX = 1_000_000
"""How many (row, window) pairs of late rows a turn checks for opening a window. It does not check further pairs."""
ENTRIES_MAX = 1_000_000
"""How many (slice, window) pairs are merged at once. When a stream continues after a gap, all its windows are due."""

FIRED = "fired"
"""Namespace of the position, the end up to which windows have fired; stored while it is behind the watermark."""
_NONE = np.empty(0, np.int64)


@dataclass(slots=True)
class PaneColumns:
    """Panes of windows, as columns.

    Attributes:
        starts: start of the window of each pane.
        codes: key code of each pane.
        late: number of late records of each pane.
        partials: accumulators of the panes, by aggregate.
        size_us: size of the windows.
        known: how many leading accumulators each pane has; None if every pane has all.
    """

    starts: Instants
    codes: Integers
    late: Integers
    partials: list[PartialAggregate]
    size_us: int
    known: Integers | None = None

    @property
    def ends(self) -> Instants:
        """Ends of the windows."""
        return self.starts + self.size_us

    def __len__(self) -> int:
        return len(self.starts)

    def followed_by(self, more: PaneColumns, accumulators: AccumulatorSet) -> PaneColumns:
        """Return these panes, followed by others."""
        pairs = zip(accumulators.members, self.partials, more.partials, strict=True)
        return PaneColumns(
            np.concatenate([self.starts, more.starts]),
            np.concatenate([self.codes, more.codes]),
            np.concatenate([self.late, more.late]),
            [member.concatenate(one, other) for member, one, other in pairs],
            self.size_us,
            None if self.known is None or more.known is None else np.concatenate([self.known, more.known]),
        )


@dataclass(slots=True)
class Parts:
    """The parts from which panes are merged, as columns.

    A part is a slice of one key, or a pane of the turn's rows. A slice with records from before an aggregate was added
    has fewer accumulators than there are aggregates.

    Attributes:
        starts: start of the first firing window that contains each part.
        counts: number of firing windows that contain it.
        codes: its key code.
        late: its number of late records.
        known: how many leading accumulators it has; None if every part has all.
        values, partials: its accumulators, before and after `to_columns`.
    """

    starts: Instants = field(default_factory=lambda: _NONE)
    counts: Integers = field(default_factory=lambda: _NONE)
    codes: Integers = field(default_factory=lambda: _NONE)
    late: Integers = field(default_factory=lambda: _NONE)
    known: Integers | None = None
    partials: list[PartialAggregate] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)
    _runs: list[tuple[int, int, int]] = field(default_factory=list)
    _codes: list[int] = field(default_factory=list)

    def extend(self, start: int, windows: int, of_slice: Sequence[tuple[int, list[Any]]]) -> None:
        """Add a slice: (key code, accumulators) of each key, the first window that contains it, and their number."""
        self._runs.append((start, windows, len(of_slice)))
        self._codes += [code for code, _ in of_slice]
        self.values += [values for _, values in of_slice]

    def to_columns(self, accumulators: AccumulatorSet) -> Parts:
        """Fill the columns from the slices that were added. Return the parts themselves."""
        starts, counts, sizes = (np.array(column, np.int64) for column in zip(*self._runs, strict=True))
        self.starts, self.counts = np.repeat(starts, sizes), np.repeat(counts, sizes)
        self.codes, self.late = np.array(self._codes, np.int64), np.zeros(len(self._codes), np.int64)
        known = np.array(list(map(len, self.values)), np.int64)
        values = self.values
        if int(known.min()) < len(accumulators.members):
            self.known = known
            values = [[*some, *(member.empty() for member in accumulators.members[len(some) :])] for some in values]
        self.partials = [member.gather([v[place] for v in values]) for place, member in enumerate(accumulators.members)]
        return self

    def add(self, panes: PaneColumns) -> None:
        """Add panes of the turn. Their accumulators are in `partials` already."""
        self.starts = np.concatenate([self.starts, panes.starts])
        self.counts = np.concatenate([self.counts, np.ones(len(panes), np.int64)])
        self.codes = np.concatenate([self.codes, panes.codes])
        self.late = np.concatenate([self.late, panes.late])
        if self.known is not None:
            self.known = np.concatenate([self.known, np.full(len(panes), len(self.partials), np.int64)])


class SlicedInterval(SpillingInterval[OpenSlices]):
    """Soft state of one key interval: its slices by start, then key."""

    def __init__(
        self, windowing: WindowSpec, windows: SlidingWindows, binding: StageBinding, recovered: StoredInterval
    ) -> None:
        super().__init__(windowing, binding)
        assert not self._accumulators.calls_user, "a combiner merges in order of arrival"
        self._assigner = Assigner(windows)
        self._size_us, self._every_us = windows.size_us, windows.every_us
        self._windows_per_record = self._size_us // self._every_us
        fired = [int(e.values[0]) for e in recovered.entries if e.namespace == FIRED and e.values[0] is not None]
        # After an end that was set back, the windows up to the floor have fired beyond the watermark.
        passed = max(self._trigger.latest_end(recovered.input_watermark), recovered.horizon_floor)
        reached = Instant(min([passed, *fired]))
        self._open = OpenSlices(self._accumulators, windows, self._allowed_us, reached)
        self._arrived: PaneColumns | None = None
        self._firing_ahead: dict[Key, Instant] = {}
        self._slices: list[tuple[int, list[Key], list[list[Any]], list[int]]] = []  # start; by key: values, records
        self._keys: list[Key] = []
        self._open.ahead.recover(recovered.entries, self._input.key_types, reached)
        self._spill_beyond(windowing, recovered)
        self._recover(recovered)

    def _take_rows(self, emission: Emission, rows: JoinedRows, work: Work) -> DroppedLate | None:
        """Group rows by window and by slice. The state changes only after the turn's panes are emitted."""
        starts = self._assigner.newest_starts(rows.records.event_times)
        # The earliest windows of a row end first: `missed` is the number of windows for which it is too late.
        over = self._over_by(rows.watermarks) - self._size_us - (starts - (self._size_us - self._every_us))
        missed = np.clip(over // self._every_us + 1, 0, self._windows_per_record)
        self._keys = rows.keys
        self._fetch(rows, starts, missed)
        latest_end: Instant | Instants = self._latest_end
        if self._firing_ahead or self._open.ahead:
            latest_end = self._targets(rows.keys, self._latest_end)[rows.codes]
        waiting, leaving = self._due(starts, missed, latest_end)
        live = (missed < self._windows_per_record) & (starts + (self._size_us + self._allowed_us) > work.watermark)
        inside = np.flatnonzero(missed < self._windows_per_record) if missed.any() else None
        self._expect(rows, inside, int(np.count_nonzero(live) + leaving.sum()))
        if len(rows) <= self._few_records_max:
            self._take_few(rows, starts, live, waiting, leaving)
        else:
            self._take_many(rows, starts, live, waiting, leaving)
        return self._too_late(rows, starts, missed) if missed.any() else None

    def _fetch(self, rows: JoinedRows, starts: Instants, missed: Integers) -> None:
        """Load the slices in the store of all windows for which rows are late, but not too late."""
        spilled = self._open.spilled
        if spilled is None or not spilled.stored:
            return
        late = (starts + self._every_us <= self._open.position) & (missed < self._windows_per_record)
        pairs = np.unique(np.stack([starts[late], rows.codes[late]]), axis=1)
        around = np.arange(1 - self._windows_per_record, self._windows_per_record) * self._every_us
        at_once = max(1, ENTRIES_MAX // len(around))
        for lo in range(0, pairs.shape[1], at_once):
            some, codes = pairs[:, lo : lo + at_once]
            spilled.fetch((some[:, None] + around).ravel(), np.repeat(codes, len(around)), rows.keys)

    def _openings(self, rows: JoinedRows, work: Work) -> Openings:
        """Return the slice of each row, and the windows for which it is late: these keep their number of late rows."""
        starts = self._assigner.newest_starts(rows.records.event_times)
        oldest = starts - (self._size_us - self._every_us)
        fired = np.clip((rows.watermarks - self._size_us - oldest) // self._every_us + 1, 0, self._windows_per_record)
        over = self._over_by(rows.watermarks) - self._size_us - oldest
        missed = np.clip(over // self._every_us + 1, 0, self._windows_per_record)
        late = np.maximum(fired - missed, 0)
        late[np.cumsum(late) > LATE_MAX] = 0
        at, place = _repeated(late)
        windows = oldest[at] + (missed[at] + place) * self._every_us
        at, windows = np.concatenate([np.arange(len(rows)), at]), np.concatenate([starts, windows])
        stays = windows + (self._size_us + self._allowed_us) > work.watermark
        if self._open.spilled is not None:
            # As for other windows, in `AlignedInterval._openings`.
            in_open = windows + self._size_us > self._trigger.latest_end(work.watermark)
            windows, at, stays = windows[in_open], at[in_open], stays[in_open]
            self._open.spilled.fetch_beside(windows, rows.codes[at], rows.keys, self._assigner.neighbors)
        panes, weights = self._open.panes, self._open.weights
        entries = WindowEntries(windows, rows.codes[at], at, stays)
        return openings_of(panes, weights, rows.keys, entries, self._assigner.neighbors)

    def _too_late(self, rows: JoinedRows, starts: Instants, missed: Integers) -> DroppedLate:
        """Return the late records, given how many of its windows each row has missed."""
        at, place = _repeated(missed)
        window_starts = starts[at] - (self._windows_per_record - missed[at] + place) * self._every_us
        whole = (missed[at] == self._windows_per_record) & (place == 0)
        late = self._late_rows(rows.take(at), window_starts, window_starts + self._size_us, whole)
        lost = np.flatnonzero(missed == self._windows_per_record)
        return DroppedLate(late, {place: len(mine) for place, mine in rows.by_input(lost)})

    def _due(self, starts: Instants, missed: Integers, latest_end: Instant | Instants) -> tuple[Integers, Integers]:
        """Return (number of windows that do not fire yet, number of firing windows not missed), each per row."""
        waiting = np.maximum(-((latest_end - self._size_us - starts) // self._every_us), 0)
        return waiting, np.maximum(self._windows_per_record - missed - waiting, 0)

    def _take_many(self, rows: JoinedRows, starts: Instants, live: Mask, waiting: Integers, leaving: Integers) -> None:
        """Group the rows as columns: the `live` ones by slice, and all by the windows that fire."""
        kept = np.flatnonzero(live)
        if len(kept):
            groups = self._grouped(rows, starts[kept], kept)
            accumulators = [member.aggregate(groups).accumulators(slice(None)) for member in self._accumulators.members]
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
        partials = [member.aggregate(groups) for member in self._accumulators.members]
        self._arrived = PaneColumns(groups.starts, groups.codes, late, partials, self._size_us)
        self._tally.applied += int(groups.counts.sum())

    def _grouped(self, rows: JoinedRows, starts: Instants, at: Integers) -> Groups:
        """Group entries by window (or slice) and key, given the start and the row of each."""
        codes, keys = rows.codes[at], len(rows.keys)
        return aligned_groups(starts, self._size_us, self._every_us, codes, keys, rows.records, at)

    def _take_few(self, rows: JoinedRows, starts: Instants, live: Mask, waiting: Integers, leaving: Integers) -> None:
        """Do the same as `_take_many`, record by record."""
        accumulators, every_us, size_us = self._accumulators, self._every_us, self._size_us
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
                values = slices.setdefault(start, {}).setdefault(rows.keys[code], accumulators.empty())
                accumulators.add(values, objects[row], times[row])
                records_of[start, rows.keys[code]] += 1
            newest = start - waits[row] * every_us
            for window in range(newest, newest - counts[row] * every_us, -every_us):
                accumulators.add(windows.setdefault((window, code), accumulators.empty()), objects[row], times[row])
                late[window, code] = late.get((window, code), 0) + (watermarks[row] >= window + size_us)
                self._tally.applied += 1
        self._slices = [
            (start, list(found), list(found.values()), [records_of[start, key] for key in found])
            for start, found in slices.items()
        ]
        if windows:
            self._arrived = self._gathered(list(windows), list(windows.values()), list(late.values()))

    def _gathered(
        self, names: Sequence[tuple[int, int]], values: Sequence[list[Any]], late: Sequence[int]
    ) -> PaneColumns:
        """Return panes as columns, from the (window start, key code), accumulators and late count of each."""
        starts, codes = (np.array(column, np.int64) for column in zip(*names, strict=True))
        partials = [
            member.gather([one[place] for one in values]) for place, member in enumerate(self._accumulators.members)
        ]
        return PaneColumns(starts, codes, np.array(late, np.int64), partials, self._size_us)

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work. Also store the position while it is behind the watermark, and the keys ahead of it."""
        behind = self._open.position < self._trigger.latest_end(work.watermark_before)
        result = super().step(work)
        position, latest_end = self._open.position, self._trigger.latest_end(work.watermark)
        if behind or position < latest_end:
            fired = None if position >= latest_end else b"%d" % position
            entry = Entries(Kind.POSITION, FIRED, [b'""'], [0], [""], [fired], [INSTANT_MAX])
            result.delta = (*result.delta, entry)
        ahead = self._open.ahead.take_entries(work.panes_max)
        if ahead is not None:
            result.delta = (*result.delta, ahead)
        return result

    def _limit_panes(self, work: Work, rows: JoinedRows | None) -> Work:
        """Lower the watermark so that about `panes_max` panes fire; of a window with more, only some keys fire."""
        latest_end = self._trigger.latest_end(work.watermark)
        reached, self._firing_ahead = self._open.limit_firing(latest_end, work.panes_max)
        if reached >= latest_end:
            return work
        if rows is not None:
            self._fire_early_for_late_rows(rows, reached)
        return replace(work, watermark=self._trigger.due_at(reached))

    def _fire_early_for_late_rows(self, rows: JoinedRows, reached: Instant) -> None:
        """Let keys go ahead to the windows for which their rows are late; else these would count as on time."""
        starts = self._assigner.newest_starts(rows.records.event_times)
        latest_ends = self._trigger.latest_end(rows.watermarks)
        late = np.flatnonzero((latest_ends >= starts + self._every_us) & (latest_ends > reached))
        for code, end in zip(rows.codes[late].tolist(), latest_ends[late].tolist(), strict=True):
            key = rows.keys[code]
            if end > self._firing_ahead.get(key, self._open.ahead.position_of(key, reached)):
                self._firing_ahead[key] = Instant(end)

    def _targets(self, keys: Sequence[Key], latest_end: Instant) -> Instants:
        """Return, per key, the end up to which its windows have fired or fire in this turn."""
        targets = self._open.ahead.positions_of(keys, latest_end)
        if self._firing_ahead:
            for code, key in enumerate(keys):
                targets[code] = max(int(targets[code]), self._firing_ahead.get(key, latest_end))
        return targets

    def _add_due(self, emission: Emission, work: Work) -> None:
        """Emit the panes of windows that fire, then add the turn's rows to their slices."""
        arrived, self._arrived = self._arrived, None
        slices, self._slices = self._slices, []
        code_of = {key: code for code, key in enumerate(self._keys)}
        due = self._merged(arrived, code_of, self._latest_end)
        keys = list(code_of)
        indexes = _NONE if due is None else self._indexes(due, keys)
        if due is not None:
            self._made += len(due)
            emission.add_direct(due, due.partials, due.late, np.arange(len(due)), keys, indexes, due.known)
        for start, of_slice, values, counts in slices:
            self._tally.applied += self._open.add(start, of_slice, values, counts)
        if due is not None:
            self._remember(due, indexes, keys, work.watermark)
        self._open.advance(self._latest_end)
        firing_ahead, self._firing_ahead = self._firing_ahead, {}
        self._open.ahead.advance(firing_ahead)
        self._keys = []

    def _merged(self, arrived: PaneColumns | None, code_of: dict[Key, int], latest_end: Instant) -> PaneColumns | None:
        """Return the panes of windows that fire; None without any. Add keys without a row in this turn to `code_of`."""
        stored = self._stored(arrived, code_of, latest_end)
        if stored is None:
            return arrived
        if arrived is not None:
            pairs = zip(self._accumulators.members, stored.partials, arrived.partials, strict=True)
            stored.partials = [member.concatenate(one, other) for member, one, other in pairs]
            stored.add(arrived)
        total = int(stored.counts.sum())
        first, last = int(stored.starts.min()), int((stored.starts + (stored.counts - 1) * self._every_us).max())
        # Merge as many windows at once as have ENTRIES_MAX pairs on average, and as 64 bits can number by key.
        windows = (last - first + self._every_us) // self._every_us * ENTRIES_MAX // total
        step = min(max(1, windows), 2**62 // len(code_of)) * self._every_us
        parts = ((lo, min(lo + step, last + self._every_us)) for lo in range(first, last + 1, step))
        found = [self._reduced(stored, lo, hi, len(code_of)) for lo, hi in parts]
        filled = [part for part in found if len(part)]
        return reduce(lambda one, more: one.followed_by(more, self._accumulators), filled)

    def _stored(self, arrived: PaneColumns | None, code_of: dict[Key, int], latest_end: Instant) -> Parts | None:
        """Return the stored slices of windows that fire, or fire again for late rows; None without any."""
        firing, panes, ahead = self._open.firing(latest_end), self._open.panes, self._open.ahead
        found = Parts()
        for start in sorted(panes) if firing else ():
            lo, hi = max(start - self._size_us + self._every_us, firing.start), min(start, firing.stop - 1)
            if lo > hi:
                continue
            of_slice = [
                (code_of.setdefault(key, len(code_of)), p.values)
                for key, p in panes[start].items()
                if p.values and not (ahead and key in ahead) and key not in self._firing_ahead
            ]
            if of_slice:
                found.extend(lo, (hi - lo) // self._every_us + 1, of_slice)
        self._add_apart(found, code_of, latest_end)
        if arrived is not None:
            keys = list(code_of)
            fired = np.flatnonzero(arrived.ends <= ahead.positions_of(keys, self._open.position)[arrived.codes])
            for window, code in zip(arrived.starts[fired].tolist(), arrived.codes[fired].tolist(), strict=True):
                held = [panes.get(start, {}).get(keys[code]) for start in self._slices_of(window)]
                found.extend(window, 1, [(code, pane.values) for pane in held if pane is not None and pane.values])
        return found.to_columns(self._accumulators) if found.values else None

    def _add_apart(self, found: Parts, code_of: dict[Key, int], latest_end: Instant) -> None:
        """Add the stored slices of keys that are ahead of the interval, or go ahead in this turn."""
        open_slices = self._open
        parts: dict[tuple[Instant, Instant], list[Key]] = {}
        for key, target in self._firing_ahead.items():
            parts.setdefault((open_slices.ahead.position_of(key, open_slices.position), target), []).append(key)
        if open_slices.ahead and latest_end > open_slices.position:
            for key, reached in open_slices.ahead.positions_before(latest_end):
                if key not in self._firing_ahead:
                    parts.setdefault((reached, latest_end), []).append(key)
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
        """Return the starts of the slices of the window that starts at `window`."""
        return range(window, window + self._size_us, self._every_us)

    def _reduced(self, parts: Parts, lo: int, hi: int, keys: int) -> PaneColumns:
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
        pairs = zip(self._accumulators.members, parts.partials, strict=True)
        partials = [member.combine(part, chosen, offsets) for member, part in pairs] if len(at) else []
        late = np.add.reduceat(parts.late[chosen], offsets) if len(at) else parts.late[:0]
        known = None
        if parts.known is not None:
            known = np.minimum.reduceat(parts.known[chosen], offsets) if len(at) else parts.known[:0]
        return PaneColumns(starts[groups], parts.codes[at[groups]], late, partials, self._size_us, known)

    def _indexes(self, due: PaneColumns, keys: list[Key]) -> Integers:
        """Return the pane index of each due pane. If its window had a late pane before, add the late count of that."""
        indexes = np.zeros(len(due), np.int64)
        panes = self._open.panes
        fired = np.flatnonzero(due.ends <= self._open.ahead.positions_of(keys, self._open.position)[due.codes])
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

    def _remember(self, due: PaneColumns, indexes: Integers, keys: list[Key], watermark: Instant) -> None:
        """Keep the pane index and late count of windows with late records, for their next late pane."""
        open_still = due.ends + self._allowed_us > watermark
        kept = np.flatnonzero(open_still & ((due.late > 0) | (indexes > 0)))
        columns = (due.starts[kept].tolist(), due.codes[kept].tolist(), indexes[kept].tolist(), due.late[kept].tolist())
        for start, code, index, late in zip(*columns, strict=True):
            self._open.remember(start, keys[code], index + 1, late)


def _repeated(counts: Integers) -> tuple[npt.NDArray[np.int64], Integers]:
    """Repeat index n `counts[n]` times. Return (the indexes, the number of each among its repetitions)."""
    at = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return at, np.arange(len(at)) - begin[at]
