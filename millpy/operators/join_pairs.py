"""The pairs of an interval join: which buffered rows match rows that are being joined, and how many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from millpy.model.dead_letter import payload_of
from millpy.operators.join_rows import BufferedSide, Integers, Rows, Tier, ranges_joined

PAIRS_AT_ONCE = 1_000_000
"""Possible matches that are looked at together."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Pairs of a row that is being joined and a buffered row of the other side, as columns.

    Attributes:
        triggers: per pair, the index of the row that is being joined.
        times, numbers: per pair, the event time and the number of the buffered row.
        parts: the buffered rows: (tier, positions in it), one tier after the other.
    """

    triggers: Integers
    times: Integers
    numbers: Integers
    parts: list[tuple[Tier, Integers]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where the rows of the other side are that may match rows: of each tier, a range of positions for each row."""

    rows: Rows
    ranges: list[tuple[Tier, Integers, Integers]]

    def counts(self) -> Integers:
        """Return the number of candidates of each row."""
        found = np.zeros(len(self.rows), np.int64)
        for _, starts, ends in self.ranges:
            found += ends - starts
        return found

    def matches(self, before: Integers) -> Matches:
        """Return the matches of the first rows: candidates that are live, with a number below `before` of the row."""
        triggers, times, numbers, parts = [], [], [], []
        for tier, starts, ends in self.ranges:
            queries, places = ranges_joined(starts[: len(before)], ends[: len(before)])
            keep = tier.live[places] & (tier.rows.numbers[places] < before[queries])
            if keep.any():
                queries, places = queries[keep], places[keep]
                triggers.append(queries)
                times.append(tier.rows.times[places])
                numbers.append(tier.rows.numbers[places])
                parts.append((tier, places))
        if not parts:
            empty = np.empty(0, np.int64)
            return Matches(empty, empty, empty, [])
        return Matches(np.concatenate(triggers), np.concatenate(times), np.concatenate(numbers), parts)


def candidates_of(rows: Rows, other: BufferedSide, los: Integers, his: Integers) -> Candidates:
    """Find the rows of the other side that may match rows.

    Args:
        rows: the rows that are being joined.
        other: the other side.
        los: the first event time that matches each row.
        his: the last one.
    """
    return Candidates(rows, [(tier, *tier.ranges(rows.codes, los, his)) for tier in other.tiers])


@dataclass(frozen=True, slots=True)
class LastMatches:
    """The last candidate of each row: the index of its tier (-1 for none), and its position there."""

    tiers: Integers
    positions: Integers


def last_matches(candidates: Candidates) -> LastMatches:
    """Return the live candidate of each row with the greatest (event time, number)."""
    count = len(candidates.rows)
    tiers, positions = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    times, numbers = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for index, (tier, starts, ends) in enumerate(candidates.ranges):
        # Within a tier candidates are in order, so the last live one before the end of the range is the last of all.
        last = np.maximum.accumulate(np.where(tier.live, np.arange(len(tier)), -1))
        places = np.where(ends > starts, last[np.maximum(ends - 1, 0)], -1)
        has = np.flatnonzero((places >= starts) & (ends > starts))
        at, number = tier.rows.times[places[has]], tier.rows.numbers[places[has]]
        newer = (tiers[has] < 0) | (at > times[has]) | ((at == times[has]) & (number > numbers[has]))
        has, at, number = has[newer], at[newer], number[newer]
        tiers[has], positions[has], times[has], numbers[has] = index, places[has], at, number
    return LastMatches(tiers, positions)


def joined_at_once(queues: Sequence[Candidates], end: int) -> int:
    """Return the number before which rows are joined at once: as many as have PAIRS_AT_ONCE candidates.

    Args:
        queues: the rows of each side that wait, by number; at least one.
        end: a number above all.
    """
    numbers = np.concatenate([queue.rows.numbers for queue in queues])
    counts = np.concatenate([queue.counts() for queue in queues])
    if int(counts.sum()) <= PAIRS_AT_ONCE:
        return end
    order = np.argsort(numbers, kind="stable")
    fit = max(1, int(np.searchsorted(np.cumsum(counts[order]), PAIRS_AT_ONCE, "right")))
    return int(numbers[order][fit]) if fit < len(order) else end


def cut_of(found: Sequence[tuple[Rows, Matches]], pairs_max: int, until: int) -> int:
    """Return the number before which rows make at most `pairs_max` pairs: `until`, or less; one row at least."""
    if sum(len(matches.triggers) for _, matches in found) <= pairs_max:
        return until
    numbers = np.concatenate([rows.numbers for rows, _ in found])
    counts = np.concatenate([np.bincount(matches.triggers, minlength=len(rows)) for rows, matches in found])
    order = np.argsort(numbers, kind="stable")
    fit = int(np.searchsorted(np.cumsum(counts[order]), pairs_max, "right"))
    return int(numbers[order][max(1, fit)]) if max(1, fit) < len(order) else until


def before_cut(rows: Rows, matches: Matches, cut: int) -> tuple[Rows, Matches]:
    """Return the rows with a number before `cut`, which come first, and their matches."""
    count = int(np.searchsorted(rows.numbers, cut))
    keep = matches.triggers < count
    parts, start = [], 0
    for tier, places in matches.parts:
        mine = keep[start : start + len(places)]
        start += len(places)
        if mine.any():
            parts.append((tier, places[mine]))
    kept = Matches(matches.triggers[keep], matches.times[keep], matches.numbers[keep], parts)
    return rows.take(np.arange(count)), kept


def rows_taken_back(buffered: BufferedSide, retractions: Rows, but: Sequence[Integers] = ()) -> Integers:
    """Return the numbers of the rows that are retracted: of equal ones the last. Unknown ones have none.

    The rows with the numbers `but` are retracted already.
    """
    codes, times = np.unique(np.stack([retractions.codes, retractions.times]), axis=1)
    numbers: dict[tuple[int, int, bytes], list[int]] = {}
    for tier in buffered.tiers:
        _, places = ranges_joined(*tier.ranges(codes, times, times))
        rows = tier.rows.take(places[tier.live[places]])
        if but:
            rows = rows.take(~np.isin(rows.numbers, np.concatenate(but)))
        for name, number in zip(_names(rows), rows.numbers.tolist(), strict=True):
            numbers.setdefault(name, []).append(number)
    for equal in numbers.values():
        equal.sort()
    taken = [of_name.pop() for name in _names(retractions) if (of_name := numbers.get(name))]
    return np.array(sorted(taken), np.int64)


def _names(rows: Rows) -> Iterator[tuple[int, int, bytes]]:
    """Yield key code, event time and content of each row. A row and its retraction have the same."""
    contents = map(payload_of, rows.batch.to_pylist())
    return zip(rows.codes.tolist(), rows.times.tolist(), contents, strict=True)
