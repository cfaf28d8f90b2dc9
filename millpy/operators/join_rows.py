"""The buffered records of one side of a join, as sorted columns: what records of the other side may still match.

    row     a record that was neither late nor dead-lettered: the code of its key, its event time, and its number in
            order of arrival, over both sides
    tier    rows sorted by (code, event time, number); tiers of similar size are merged (`model/ids.py`)

A row leaves when the watermark proves that no record of the other side can match it. Rows that leave, or are retracted,
only lose their mark `live`; a tier is copied without them when they are the greater part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.ids import tiers_to_merge
from millpy.model.record import Instants, Mask
from millpy.model.time import INSTANT_MAX, Instant
from millpy.operators.join_reach import Reach

Integers = npt.NDArray[np.int64]
ROW_BYTES = 100
"""Bytes of a row beside its values: the columns of its tier, and its part of a tier that is being merged."""


@dataclass(slots=True)
class Rows:
    """Rows as columns of equal length.

    Attributes:
        codes: codes of the keys.
        times: event times.
        numbers: numbers in order of arrival, each once.
        batch: the records.
    """

    codes: Integers
    times: Instants
    numbers: Integers
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: Integers | Mask) -> Rows:
        """Return some of the rows."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Rows(self.codes[places], self.times[places], self.numbers[places], self.batch.take(pa.array(places)))


class Tier:
    """Sorted rows.

    Attributes:
        rows: the rows, sorted by (code, event time, number).
        live: which of them are still buffered.
        matches: of each row, the number of rows of the other side with which it was joined.
        lo, hi: least and greatest event time of its live rows.
    """

    __slots__ = ("_by_number", "_sorted_numbers", "hi", "live", "lo", "matches", "rows")

    def __init__(self, rows: Rows, live: Mask, matches: npt.NDArray[np.int32]) -> None:
        self.rows, self.live, self.matches = rows, live, matches
        self._by_number: Integers | None = None
        self._sorted_numbers: Integers | None = None
        self.lo, self.hi = INSTANT_MAX, Instant(-INSTANT_MAX)
        self.measure()

    def __len__(self) -> int:
        return len(self.rows)

    def measure(self) -> None:
        """Update the bounds of the event times, after rows have left."""
        times = self.rows.times if self.live.all() else self.rows.times[self.live]
        if len(times):
            self.lo, self.hi = Instant(int(times.min())), Instant(int(times.max()))
        else:
            self.lo, self.hi = INSTANT_MAX, Instant(-INSTANT_MAX)

    def ranges(self, codes: Integers, los: Instants, his: Instants) -> tuple[Integers, Integers]:
        """Return, for each query, the positions [start, end) of the rows with its code and a time in [lo, hi]."""
        mine, times = self.rows.codes, self.rows.times
        starts, ends = np.searchsorted(mine, codes, "left"), np.searchsorted(mine, codes, "right")
        outside = (his < self.lo) | (los > self.hi)
        ends = np.where(outside, starts, ends)
        return _first_not_before(times, starts, ends, los), _first_not_before(times, starts, ends, his + 1)

    def find(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return (index into `numbers`, position) of the rows with these numbers that the tier has."""
        if self._by_number is None or self._sorted_numbers is None:
            self._by_number = np.argsort(self.rows.numbers, kind="stable")
            self._sorted_numbers = self.rows.numbers[self._by_number]
        places = np.searchsorted(self._sorted_numbers, numbers)
        hits = np.flatnonzero(self._sorted_numbers[np.minimum(places, len(self) - 1)] == numbers)
        return hits, self._by_number[places[hits]]


def _first_not_before(times: Instants, starts: Integers, ends: Integers, bounds: Instants) -> Integers:
    """Return the first position in each [start, end) with a time not before the bound: all binary searches at once."""
    lo, hi = starts.copy(), ends.copy()
    active = np.flatnonzero(lo < hi)
    while len(active):
        middle = (lo[active] + hi[active]) >> 1
        below = times[middle] < bounds[active]
        lo[active] = np.where(below, middle + 1, lo[active])
        hi[active] = np.where(below, hi[active], middle)
        active = active[lo[active] < hi[active]]
    return lo


def ranges_joined(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Return (index of the range, number in it) for the numbers of all ranges [start, end), in order."""
    counts = ends - starts
    indexes = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return indexes, np.arange(len(indexes)) - np.repeat(before - starts, counts)


def row_bytes(batch: pa.RecordBatch) -> Integers:
    """Return the weight of each record: ROW_BYTES, and its values; nested values count with their average."""
    weights = np.full(len(batch), ROW_BYTES, np.int64)
    for column in batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            weights += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        elif len(column):
            weights += -(-int(column.nbytes) // len(column))
    return weights


class BufferedSide:
    """The buffered rows of one side of a join.

    Args:
        side: 0 for the left side, 1 for the right.
        reach: what its rows match.
        lateness_us: how far the watermark may be past a record that is still joined.
        outer: whether rows that leave without a match are wanted.
        holds_matched: whether a row with matches may lose them again, because the other side has retractions.
    """

    def __init__(self, side: int, reach: Reach, lateness_us: int, *, outer: bool, holds_matched: bool) -> None:
        self._side, self._reach, self._lateness_us = side, reach, lateness_us
        self.outer = outer
        self._holds_matched = holds_matched
        self.tiers: list[Tier] = []

    def __len__(self) -> int:
        """Return the number of buffered rows."""
        return sum(int(np.count_nonzero(tier.live)) for tier in self.tiers)

    def expires_at(self, times: Any) -> Any:
        """Return the watermark that rows with these event times survive, and no later one."""
        return self._reach.joined_until(self._side, times) + self._lateness_us

    def add(self, rows: Rows) -> None:
        """Buffer rows."""
        if not len(rows):
            return
        order = np.lexsort((rows.numbers, rows.times, rows.codes))
        self.tiers.append(Tier(rows.take(order), np.ones(len(rows), np.bool_), np.zeros(len(rows), np.int32)))
        while count := tiers_to_merge([len(tier) for tier in self.tiers]):
            self.tiers[-count:] = _merged(self.tiers[-count:])

    def add_matches(self, numbers: Integers, change: int) -> tuple[Integers, Integers]:
        """Change the match counts of rows by `change` for each time that their number occurs.

        Returns:
            The numbers of the rows whose count has become zero or has been zero, and their counts: all that another
            owner has to know, as long as matches are never taken back.
        """
        distinct, times = np.unique(numbers, return_counts=True)
        changed, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for tier in self.tiers:
            found, places = tier.find(distinct)
            before = tier.matches[places]
            after = before + change * times[found].astype(np.int32)
            tier.matches[places] = after
            known = self._holds_matched | (before == 0) | (after == 0)
            changed.append(distinct[found[known]])
            counts.append(after[known].astype(np.int64))
        return np.concatenate(changed), np.concatenate(counts)

    def set_matches(self, numbers: Integers, counts: Integers) -> None:
        """Restore stored match counts; of a number that occurs several times the last one holds."""
        _, last = np.unique(numbers[::-1], return_index=True)
        newest = len(numbers) - 1 - last
        for tier in self.tiers:
            found, places = tier.find(numbers[newest])
            tier.matches[places] = counts[newest[found]]

    def buffered(self, numbers: Integers) -> Integers:
        """Return those of the numbers whose rows are buffered, in their order."""
        live = [tier.rows.numbers[tier.live] for tier in self.tiers]
        return numbers[np.isin(numbers, np.concatenate(live))] if live else numbers[:0]

    def rows_of(self, numbers: Integers) -> Rows:
        """Return the rows with these numbers, by number; they must be buffered."""
        rows = joined_rows([tier.rows.take(tier.find(numbers)[1]) for tier in self.tiers])
        return rows.take(np.argsort(rows.numbers, kind="stable"))

    def remove(self, numbers: Integers) -> Rows | None:
        """Remove rows by number; return them, None without any."""
        removed = []
        for tier in self.tiers:
            _, places = tier.find(numbers)
            places = places[tier.live[places]]
            if len(places):
                tier.live[places] = False
                tier.measure()
                removed.append(tier.rows.take(places))
        self._drop_dead()
        return joined_rows(removed) if removed else None

    def bounded(self, watermark: Instant, unmatched_max: int) -> Instant:
        """Return the watermark, or an earlier one at which no more than `unmatched_max` rows leave without a match.

        Rows of one event time or window leave together, so that no order among them has to be stored: they may be more.
        """
        if not self.outer:
            return watermark
        latest = self._reach.left_before(self._side, watermark - self._lateness_us)
        times = [tier.rows.times[tier.live & (tier.rows.times < latest) & (tier.matches == 0)] for tier in self.tiers]
        leaving = np.concatenate(times) if times else np.empty(0, np.int64)
        if len(leaving) <= unmatched_max:
            return watermark
        leaving = np.sort(leaving)
        latest = max(int(leaving[unmatched_max]), int(leaving[0]) + 1)
        return Instant(min(watermark, int(self.expires_at(latest - 1)) + 1))

    def leave(self, watermark: Instant) -> tuple[list[Rows], list[Rows]]:
        """Let the rows leave that nothing can match once the input watermark has reached `watermark`.

        Returns:
            The rows that leave, and those among them without a match, if these are wanted.
        """
        latest = self._reach.left_before(self._side, watermark - self._lateness_us)
        gone, unmatched = [], []
        for tier in self.tiers:
            if tier.lo >= latest:
                continue
            leaving = tier.live & (tier.rows.times < latest)
            gone.append(tier.rows.take(leaving))
            if self.outer and (alone := leaving & (tier.matches == 0)).any():
                unmatched.append(tier.rows.take(alone))
            tier.live &= ~leaving
            tier.measure()
        self._drop_dead()
        return gone, unmatched

    def oldest_unmatched(self) -> Instant:
        """Return the least event time of what rows may yet become without a match; INSTANT_MAX without any."""
        if not self.outer:
            return INSTANT_MAX
        found = INSTANT_MAX
        for tier in self.tiers:
            if self._holds_matched:
                found = min(found, tier.lo)
            else:
                alone = tier.rows.times[tier.live & (tier.matches == 0)]
                found = min(found, Instant(int(alone.min()))) if len(alone) else found
        return found if found == INSTANT_MAX else Instant(int(self._reach.stamps(found)))

    def _drop_dead(self) -> None:
        """Copy tiers that consist mostly of rows that have left, and drop empty ones."""
        self.tiers = [
            _merged([tier])[0] if np.count_nonzero(tier.live) * 2 < len(tier) else tier
            for tier in self.tiers
            if tier.lo < INSTANT_MAX
        ]


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """Concatenate rows; there must be at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Rows(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.numbers for part in parts]),
        pa.concat_batches([part.batch for part in parts]),
    )


def _merged(tiers: Sequence[Tier]) -> list[Tier]:
    """Merge tiers without the rows that have left; return one tier, or none if it would be empty."""
    live = [np.flatnonzero(tier.live) for tier in tiers]
    rows = joined_rows([tier.rows.take(kept) for tier, kept in zip(tiers, live, strict=True)])
    if not len(rows):
        return []
    matches = np.concatenate([tier.matches[kept] for tier, kept in zip(tiers, live, strict=True)])
    if len(tiers) > 1:
        order = np.lexsort((rows.numbers, rows.times, rows.codes))
        rows, matches = rows.take(order), matches[order]
    return [Tier(rows, np.ones(len(rows), np.bool_), matches)]
