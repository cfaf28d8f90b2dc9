"""Accumulation: what a pane has of the panes of its window before it, and what becomes of these.

    discarding     the records since the pane before; the result table shows all of the window's
    accumulating   all records of the window; consumers get each pane, and the newest counts
    retracting     the same, and each new pane comes behind a retraction of the pane before it

`PaneMerger` adds a turn's records to an open pane. It keeps what its mode needs beside the accumulators: the pane that
consumers have, from its first change on, or the records since then.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import reduce
from typing import Any

from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.pane_codec import NO_TIME, OpenPane, PaneContent
from millpy.windowing.timestamp_combiner import TimestampCombiner


class Accumulation(Enum):
    """What a pane has of the panes of its window before it: see `KeyedStream.window`.

    Attributes:
        DISCARDING: each pane has the records since the pane before. Sums of panes are right; the result table shows
            the whole window.
        ACCUMULATING: each pane has all records of its window so far, and takes the place of the pane before.
        RETRACTING: as ACCUMULATING, and consumers get a retraction of the pane before first, which they subtract.
    """

    DISCARDING = "discarding"
    ACCUMULATING = "accumulating"
    RETRACTING = "retracting"

    def __repr__(self) -> str:
        return f"Accumulation.{self.name}"


class PaneMerger:
    """Merges the panes of a turn into open ones, in one mode."""

    def __init__(
        self,
        accumulators: AccumulatorSet,
        mode: Accumulation,
        timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW,
    ) -> None:
        self._accumulators = accumulators
        self._mode = mode
        self._timestamps = timestamps

    def merge(self, pane: OpenPane, values: list[Any], late_count: int, at: int = NO_TIME) -> None:
        """Add records to an open pane.

        Args:
            pane: the pane.
            values: the accumulators of the records, which are not used afterwards.
            late_count: how many of the records are late.
            at: their combined event time.
        """
        if self._mode is Accumulation.RETRACTING:
            self.keep(pane)
        elif self._mode is Accumulation.DISCARDING and (pane.pane_index or pane.kept is not None):
            since = pane.kept or PaneContent(self._accumulators.empty())
            pane.kept = self._sum(since, PaneContent(values, late_count))
        pane.values = self._accumulators.merge(pane.values, values)
        pane.late_count += late_count
        if at != NO_TIME:
            pane.at = self._timestamps.combined(pane.at, at)

    def keep(self, pane: OpenPane) -> None:
        """Copy the newest pane that a retracting window has emitted, before the first change since then."""
        if pane.pane_index and pane.kept is None:
            pane.kept = PaneContent(self._accumulators.copied(pane.values), pane.late_count)

    def join(self, pane: OpenPane, olds: Sequence[OpenPane]) -> None:
        """Merge open sessions, by start, into a pane of the turn's records, which becomes the pane of all of them."""
        since = None
        if self._mode is Accumulation.DISCARDING and any(old.pane_index or old.kept is not None for old in olds):
            parts = [part for old in olds if (part := content_of(old, self._mode)) is not None]
            since = reduce(self._sum, [*parts, pane], PaneContent(self._accumulators.empty()))
        for old in olds if self._mode is Accumulation.RETRACTING else ():
            self.keep(old)
        values = reduce(self._accumulators.merge, [old.values for old in olds])
        pane.values = self._accumulators.merge(values, pane.values)
        pane.late_count += sum(old.late_count for old in olds)
        pane.at = reduce(self._timestamps.combined, [old.at for old in olds], pane.at)
        pane.kept = since

    def absorb(self, pane: OpenPane, other: OpenPane) -> None:
        """Add to an open pane one that `join` has made of other windows and the turn's records."""
        if self._mode is Accumulation.RETRACTING:
            self.keep(pane)
        elif self._mode is Accumulation.DISCARDING and (content_of(pane, self._mode) is not pane or other.kept):
            since = content_of(pane, self._mode) or PaneContent(self._accumulators.empty())
            pane.kept = self._sum(
                PaneContent(self._accumulators.copied(since.values), since.late_count), other.kept or other
            )
        pane.values = self._accumulators.merge(pane.values, other.values)
        pane.late_count += other.late_count
        pane.at = self._timestamps.combined(pane.at, other.at)

    def _sum(self, one: PaneContent, other: PaneContent | OpenPane) -> PaneContent:
        """Return the content of two parts of a window; `other` does not change."""
        values = self._accumulators.merge(one.values, self._accumulators.copied(other.values))
        return PaneContent(values, one.late_count + other.late_count)


def content_of(pane: OpenPane, mode: Accumulation) -> PaneContent | OpenPane | None:
    """Return what the next pane of a window has for consumers; None if it is empty.

    In discarding mode it has only what the panes before it had not.
    """
    if mode is not Accumulation.DISCARDING:
        return pane
    return pane.kept or (None if pane.pane_index else pane)


def newest_of(pane: OpenPane) -> PaneContent | OpenPane | None:
    """Return the content of the newest pane that consumers have of a window; None without one."""
    if not pane.pane_index:
        return None
    if pane.kept is None:
        return pane
    return pane.kept if pane.kept.values else None


def withdraw(pane: OpenPane) -> None:
    """Record that consumers and the result table have no pane of a window any more: its records are retracted."""
    pane.kept = PaneContent([]) if pane.pane_index else None
    pane.emitted = True
