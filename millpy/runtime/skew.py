"""Skew: keep every source within `max_skew` of the slowest in event time, so that few windows are open.

A backfill beside a live feed, or one file much denser than another, would otherwise open windows without bound: they
close only when the slowest source has passed them. A source that has ended, is paused until an operator resumes it, or
is proven idle (`Injector.quiet`) does not slow the others; one that is merely out of reach, or has not begun, does. The
slowest source is never held back, so some source can always continue.

A source may overshoot by the records of one turn. Sources of this worker are compared in memory, turn by turn. For
sources elsewhere the last known watermark is used: it only rises, so an old one holds back for longer, never for less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from millpy.hosting.interval_state import PauseState
from millpy.model.time import INSTANT_MAX, describe
from millpy.runtime.owned_interval import OwnedInterval
from millpy.store.protocol import SourceState

log = logging.getLogger(__name__)


class Skew:
    """Decide which sources must wait, so that none is more than `max_skew_us` ahead of the slowest.

    Args:
        max_skew_us: how far a source may be ahead of the slowest; None for no limit.
    """

    def __init__(self, max_skew_us: int | None) -> None:
        self.max_skew_us = max_skew_us
        self._known: dict[int, SourceState] | None = None
        self._held: frozenset[int] = frozenset()

    def learn(self, states: Sequence[SourceState]) -> None:
        """Remember the states of all sources of the graph, as the store knows them."""
        self._known = {state.interval_id: state for state in states}

    def own(self, intervals: Mapping[int, OwnedInterval]) -> list[SourceState]:
        """Return the states of the owned sources."""
        return [
            SourceState(
                interval.interval_id, interval.low_watermark, interval.quiet or interval.pause is not PauseState.NO
            )
            for interval in intervals.values()
            if interval.plan.stage is None
        ]

    def held_back(self, intervals: Mapping[int, OwnedInterval]) -> frozenset[int]:
        """Return the ids of the owned sources that must wait now: all of them before the first `learn`."""
        if self.max_skew_us is None:
            return self._held
        own = self.own(intervals)
        if self._known is None:  # read no source before the state of all is known
            return frozenset(state.interval_id for state in own)
        everywhere = self._known | {state.interval_id: state for state in own}
        slowest = min(filter(_counts, everywhere.values()), key=lambda state: state.low_watermark, default=None)
        if slowest is None:
            held: frozenset[int] = frozenset()
        else:
            furthest = slowest.low_watermark + self.max_skew_us
            held = frozenset(s.interval_id for s in own if furthest < s.low_watermark < INSTANT_MAX)
            for interval_id in held - self._held:
                at, behind = intervals[interval_id].low_watermark, slowest.low_watermark
                log.info(
                    "source %d at %s waits for source %d at %s",
                    *(interval_id, describe(at), slowest.interval_id, describe(behind)),
                )
        self._held = held
        return held


def _counts(state: SourceState) -> bool:
    return state.low_watermark < INSTANT_MAX and not state.quiet
