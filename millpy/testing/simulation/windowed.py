"""The windows behind the source, by branch: how the graph declares each, its table, trigger and mode.

`recount.py` has the same windows as plain loops; it shares the constants, and no code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from millpy.windowing.accumulation import Accumulation
from millpy.windowing.composite_triggers import AFTER_WATERMARK, AfterAny, AfterWatermark
from millpy.windowing.pane_rules import FiringBehavior
from millpy.windowing.predicate_trigger import When
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import AfterCount, Every, Trigger
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from millpy.windowing.window_function import Window, WindowFunction

WINDOW_US = 1_000_000
SLIDING_US, EVERY_US = 1_200_000, 400_000
GAP_US = 200_000
TOTAL_US, SHORT_TOTAL_US = 4_000_000, 1_000_000
OFFSET_US = 200_000
"""Windows with this offset lie across the bounds of the larger windows over their panes."""
LENGTH_US, FULL_RECORDS = 1_000_000, 4
"""Sessions are cut at the multiples of this length, and full with this number of records."""
PHASE_US, LARGE = 100_000, 50
TICK_US, EARLY_RECORDS = 250_000, 3
"""Early panes come at each tick of the clock, and with this number of records since the pane before."""
CLOSING_RECORDS, CLOSING_TOTAL = 2, 120
EARLY = AfterWatermark(early=AfterAny(AfterCount(EARLY_RECORDS), Every(timedelta(microseconds=TICK_US))))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _floor(at: datetime, size: timedelta, phase: timedelta) -> datetime:
    return at - (at - _EPOCH - phase) % size


class Phases(WindowFunction):
    """Windows that begin at another phase for each device; small values are in one more, odd multiples of 7 in none."""

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        """Return up to two windows."""
        if record.value % 14 == 7:
            return []
        size, phase = timedelta(microseconds=WINDOW_US), int(record.device[1:]) * timedelta(microseconds=PHASE_US)
        start = _floor(at, size, phase)
        found = [(start, start + size)]
        if record.value < LARGE:
            found.append((start, start + size / 2 if at < start + size / 2 else start + 2 * size))
        return found


class Visits(WindowFunction):
    """Sessions with a longer gap behind large values, which are cut at the multiples of a length."""

    merges = True
    length_max = timedelta(microseconds=LENGTH_US)

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        """Return one window."""
        gap = timedelta(microseconds=GAP_US) * (1 if record.value < LARGE else 2)
        return [(at, min(at + gap, _floor(at, self.length_max, timedelta(0)) + self.length_max))]


def is_enough(pane: Any) -> bool:
    """Tell whether a pane's total is large."""
    return bool(pane.total >= CLOSING_TOTAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedBranch:
    """A windowed branch.

    Attributes:
        kind: the name of the windows in `recount.py`.
        table: the name of its table.
        totals: the table of the windows over its panes; "" without such windows.
        total_us: the length of these windows.
    """

    kind: str
    windows: Windows
    table: str
    totals: str = ""
    total_us: int = TOTAL_US
    trigger: Trigger = AFTER_WATERMARK
    mode: Accumulation = Accumulation.ACCUMULATING
    combiner: TimestampCombiner = TimestampCombiner.END_OF_WINDOW

    @property
    def is_early(self) -> bool:
        """Whether panes come before the end, and again when they are empty."""
        return self.trigger is EARLY

    @property
    def later_us(self) -> int:
        """How much longer the windows over its panes wait: a pane may have the time of its first record."""
        return 0 if self.combiner is TimestampCombiner.END_OF_WINDOW else WINDOW_US

    @property
    def empty(self) -> FiringBehavior:
        """When empty panes are emitted."""
        always = self.is_early and self.mode is not Accumulation.DISCARDING
        return FiringBehavior.ALWAYS if always else FiringBehavior.IF_NOT_EMPTY


_FIXED = FixedWindows(timedelta(microseconds=WINDOW_US))
_SESSIONS = SessionWindows(timedelta(microseconds=GAP_US))
_OFFSET = FixedWindows(timedelta(microseconds=WINDOW_US), offset=timedelta(microseconds=OFFSET_US))
_SLIDING = SlidingWindows(timedelta(microseconds=SLIDING_US), every=timedelta(microseconds=EVERY_US))
_FULL = SessionWindows(
    timedelta(microseconds=GAP_US), max_length=timedelta(microseconds=LENGTH_US), max_records=FULL_RECORDS
)
_RETRACTING = Accumulation.RETRACTING

WINDOWED: dict[str, WindowedBranch] = {
    "fixed": WindowedBranch(kind="fixed", windows=_FIXED, table="per_window"),
    "sliding": WindowedBranch(kind="sliding", windows=_SLIDING, table="per_slide"),
    "session": WindowedBranch(kind="session", windows=_SESSIONS, table="per_session"),
    "levels": WindowedBranch(kind="fixed", windows=_FIXED, table="per_level", totals="level_totals", mode=_RETRACTING),
    "visits": WindowedBranch(
        kind="session", windows=_SESSIONS, table="per_visit", totals="visit_totals", mode=_RETRACTING
    ),
    "early": WindowedBranch(
        kind="fixed", windows=_FIXED, table="per_early", totals="early_totals", mode=_RETRACTING, trigger=EARLY
    ),
    "early_visits": WindowedBranch(
        kind="session",
        windows=_SESSIONS,
        table="per_early_visit",
        totals="early_visit_totals",
        mode=_RETRACTING,
        trigger=EARLY,
    ),
    "phased": WindowedBranch(kind="phased", windows=Phases(), table="per_phase"),
    "user_visits": WindowedBranch(kind="user_visits", windows=Visits(), table="per_user_visit"),
    "full": WindowedBranch(kind="full", windows=_FULL, table="per_full"),
    "earliest": WindowedBranch(
        kind="offset",
        windows=_OFFSET,
        table="per_earliest",
        totals="earliest_totals",
        total_us=SHORT_TOTAL_US,
        mode=_RETRACTING,
        combiner=TimestampCombiner.EARLIEST,
    ),
    "latest": WindowedBranch(
        kind="offset",
        windows=_OFFSET,
        table="per_latest",
        totals="latest_totals",
        total_us=SHORT_TOTAL_US,
        mode=_RETRACTING,
        combiner=TimestampCombiner.LATEST,
    ),
    "discarded": WindowedBranch(
        kind="fixed",
        windows=_FIXED,
        table="per_discard",
        totals="discarded_totals",
        mode=Accumulation.DISCARDING,
        trigger=EARLY,
    ),
    "punctual": WindowedBranch(kind="fixed", windows=_FIXED, table="per_punctual", trigger=AfterWatermark(late=None)),
    "topped": WindowedBranch(kind="fixed", windows=_FIXED, table="per_top", mode=_RETRACTING),
    "counted": WindowedBranch(kind="fixed", windows=_FIXED, table="per_count", trigger=AfterCount(CLOSING_RECORDS)),
    "enough": WindowedBranch(kind="fixed", windows=_FIXED, table="per_enough", trigger=When(is_enough)),
}
BY_TABLE = {branch.table: branch for branch in WINDOWED.values()}
TOTALS = {branch.totals: branch for branch in WINDOWED.values() if branch.totals}
"""The tables of windows over panes, and the branches of the panes."""
