"""Skew: no source reads further ahead in event time than `max_skew` of the slowest, so that windows stay few.

A backfill beside a live feed, or one file much denser than another, would otherwise open windows without bound: they
close only when the slowest source has passed them. A source that has ended, stands still until a person resumes it, or
is proven idle (`Injector.quiet`) slows nobody; one that is merely out of reach, or has not begun, does. The slowest is
never held back, so some source can always go on.

A source may overshoot by what it hands over in one turn. Sources of this worker are compared turn by turn in memory.
Of those elsewhere the last known watermark is used: it only rises, so an old one holds back for longer, never for less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from millpy.model.time import INSTANT_MAX, describe
from millpy.runtime.soft_state import Halt, Owned
from millpy.store.protocol import SourceState

log = logging.getLogger(__name__)


class Skew:
    """Compares the sources of one graph.

    Args:
        max_skew_us: how far one may be ahead; None for as far as it likes.
    """

    def __init__(self, max_skew_us: int | None) -> None:
        self.max_skew_us = max_skew_us
        self._known: dict[int, SourceState] | None = None
        self._held: frozenset[int] = frozenset()

    def learn(self, states: Sequence[SourceState]) -> None:
        """Take what the store knows of all sources of the graph."""
        self._known = {state.interval_id: state for state in states}

    def own(self, intervals: Mapping[int, Owned]) -> list[SourceState]:
        """How the sources of this worker stand."""
        return [
            SourceState(interval.interval_id, interval.low_watermark, interval.quiet or interval.halt is not Halt.NO)
            for interval in intervals.values()
            if interval.plan.stage is None
        ]

    def held_back(self, intervals: Mapping[int, Owned]) -> frozenset[int]:
        """The sources of this worker that are not read now."""
        if self.max_skew_us is None:
            return self._held
        own = self.own(intervals)
        if self._known is None:  # nobody is read before all are known
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
