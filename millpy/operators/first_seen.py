"""First seen: the first record of each id within a horizon of event time. The pure soft state of `deduplicate`.

A record is a duplicate if an earlier accepted record of the same id has an event time at most `within` away, on either
side; so the first to arrive wins, whatever the event times. A record more than `within` behind the watermark is not
judged, because ids that old may be forgotten. An id is therefore needed until the watermark is 2 · `within` past its
time: a forgotten id cannot change an answer, and neither can the bundling of records (I9).

    id      16 bytes, as two uint64 (hi, lo)
    tier    (hi, lo, event time) in order (`model/ids.py`); expired ids are dropped when tiers merge
    run     the ids that one bundle accepted, committed with it; an owner rebuilds from the runs that have not expired
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millpy.model.checkpoint import DedupeRun
from millpy.model.ids import Halves, IdFilter, Mask, first_of_each, halves_of, ids_of, order_of, tiers_to_merge
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant

Times = npt.NDArray[np.int64]


@dataclass(slots=True)
class _SeenTier:
    hi: Halves
    lo: Halves
    at: Times

    def take(self, rows: Times | Mask) -> _SeenTier:
        return _SeenTier(self.hi[rows], self.lo[rows], self.at[rows])

    def in_order(self) -> _SeenTier:
        return self.take(order_of(self.hi, self.lo))


class FirstSeen:
    """The accepted ids of one interval.

    Args:
        within_us: the horizon.
        runs: the stored runs.
        floor: ids with an earlier event time are forgotten, although they are within the horizon.

    Attributes:
        let_in: number of records that the last `check` accepted.
    """

    def __init__(self, within_us: int, runs: Sequence[DedupeRun] = (), *, floor: Instant = INSTANT_MIN) -> None:
        self._within_us = within_us
        self._tiers: list[_SeenTier] = []
        self._filter = IdFilter()
        self._newest = INSTANT_MIN
        self._clock = max((run.clock for run in runs), default=INSTANT_MIN)
        self.let_in = 0
        ids = b"".join(run.ids for run in runs)
        if ids:
            times = np.concatenate([np.frombuffer(run.times, "<i8") for run in runs]).astype(np.int64)
            known = _SeenTier(*halves_of(ids), times).take(times >= floor)
            if len(known.at):
                self._push(known.in_order())

    def __len__(self) -> int:
        """Return the number of ids in memory, some of which may have expired."""
        return sum(len(tier.at) for tier in self._tiers)

    def check(self, ids: bytes, times: Times, clock: Instant) -> tuple[Mask, DedupeRun | None]:
        """Judge records in order of arrival, and remember the accepted ones.

        Args:
            ids: 16 bytes per record.
            times: event times.
            clock: the watermark after all of them.

        Returns:
            A mask of the accepted records; the run to commit, None when nothing has changed.
        """
        self._clock = Instant(max(self._clock, clock))
        hi, lo = halves_of(ids)
        accepted = self._accepted(hi, lo, times)
        rows = np.flatnonzero(accepted)
        self.let_in = len(rows)
        if not len(rows):
            return accepted, self._expire()
        tier = _SeenTier(hi[rows], lo[rows], times[rows]).in_order()
        self._push(tier)
        run = DedupeRun(
            ids_of(tier.hi, tier.lo),
            tier.at.astype("<i8").tobytes(),
            self._expires_at(int(tier.at.max())),
            self._clock,
        )
        return accepted, run

    def _expires_at(self, at: int) -> Instant:
        return Instant(min(at + 2 * self._within_us, INSTANT_MAX - 1))

    def _expire(self) -> DedupeRun | None:
        """Forget all ids once all have expired; return the run that lets the store free their slots."""
        if not self._tiers or self._expires_at(self._newest) >= self._clock:
            return None
        self._tiers.clear()
        return DedupeRun(b"", b"", Instant(self._clock - 1), self._clock)

    def _accepted(self, hi: Halves, lo: Halves, times: Times) -> Mask:
        """Tell which records are accepted; only ids with records both near and far take the loop."""
        accepted = np.zeros(len(times), np.bool_)
        if not len(times):
            return accepted
        order = order_of(hi, lo)
        hi, lo, times = hi[order], lo[order], times[order]
        first = first_of_each(hi, lo)
        starts = np.flatnonzero(first)
        known, known_at = self._known(hi[starts], lo[starts])
        by_time = np.lexsort((known_at, known))
        known, known_at = known[by_time], known_at[by_time]
        groups = np.cumsum(first) - 1
        near = self._near(groups, times, known, known_at)
        some, every = np.logical_or.reduceat(near, starts), np.logical_and.reduceat(near, starts)
        spread = np.maximum.reduceat(times, starts) - np.minimum.reduceat(times, starts)
        fresh = ~some & (spread <= self._within_us)  # the first is accepted, and all others are near it
        accepted[order[starts[fresh]]] = True
        ends = np.append(starts[1:], len(order))
        for group in np.flatnonzero(~fresh & ~every).tolist():
            mine = slice(int(starts[group]), int(ends[group]))
            taken = known_at[slice(*np.searchsorted(known, [group, group + 1]))].tolist()
            for row, at in zip(order[mine].tolist(), times[mine].tolist(), strict=True):
                place = bisect_left(taken, at)
                if all(abs(at - other) > self._within_us for other in taken[max(0, place - 1) : place + 1]):
                    taken.insert(place, at)
                    accepted[row] = True
        return accepted

    def _near(self, groups: Times, times: Times, known: Times, known_at: Times) -> Mask:
        """Tell which rows have an accepted record of their id within the horizon; `known` has the records' groups.

        The records are ordered by group and time, so only the neighbors of a row count: one id may have very many.
        """
        near = np.zeros(len(times), np.bool_)
        if not len(known):
            return near
        moments = np.unique(np.concatenate([known_at, times]))
        places = np.searchsorted(
            known * len(moments) + np.searchsorted(moments, known_at),
            groups * len(moments) + np.searchsorted(moments, times),
        )
        for neighbors in (places - 1, places):  # the last record before a row's time, and the first not before it
            found = np.clip(neighbors, 0, len(known) - 1)
            near |= (known[found] == groups) & (np.abs(known_at[found] - times) <= self._within_us)
        return near

    def _known(self, hi: Halves, lo: Halves) -> tuple[Times, Times]:
        """Return (place of the id, event time) of every accepted record of these ids."""
        places, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        possible = np.flatnonzero(self._filter.may_hold(hi))
        few = hi[possible]
        for tier in self._tiers:
            left, right = np.searchsorted(tier.hi, few, "left"), np.searchsorted(tier.hi, few, "right")
            asked = np.repeat(possible, right - left)
            found = _ranges(left, right)
            same = tier.lo[found] == lo[asked]
            places.append(asked[same])
            times.append(tier.at[found[same]])
        return np.concatenate(places), np.concatenate(times)

    def _push(self, tier: _SeenTier) -> None:
        """Add a tier, and merge tiers of similar size when there are enough."""
        self._newest = Instant(max(self._newest, int(tier.at.max())))
        horizon = self._clock - 2 * self._within_us
        tiers = [*(old for old in self._tiers if int(old.at.max()) >= horizon), tier]
        while count := tiers_to_merge([len(each.at) for each in tiers]):
            merged = _SeenTier(
                np.concatenate([old.hi for old in tiers[-count:]]),
                np.concatenate([old.lo for old in tiers[-count:]]),
                np.concatenate([old.at for old in tiers[-count:]]),
            )
            tiers[-count:] = [merged.take(merged.at >= horizon).in_order()]
        self._tiers = [each for each in tiers if len(each.at)]
        self._filter.add(tier.hi, (each.hi for each in self._tiers))


def _ranges(starts: Times, ends: Times) -> Times:
    """Join the numbers of [start, end) of all pairs."""
    counts = ends - starts
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
