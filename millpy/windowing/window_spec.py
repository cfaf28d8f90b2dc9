"""The definition of a windowed step, and what must not change of it while windows are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from millpy.model.deployment import PANE_INFO
from millpy.model.horizons import LATENESS
from millpy.model.identity import Identity
from millpy.model.record import SMALL_RECORDS_MAX, RecordType
from millpy.model.time import microseconds
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.aggregates.balance import CountBalance
from millpy.windowing.composite_triggers import AFTER_WATERMARK
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.panes import output_type
from millpy.windowing.session_gaps import check_gap_field
from millpy.windowing.session_size import SessionSize
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import SessionWindows, SlidingWindows, Windows
from millpy.windowing.window_function import WindowFunction


@dataclass(frozen=True, slots=True, eq=False)
class WindowSpec:
    """The definition of a windowed step: windows, lateness, aggregates.

    Attributes:
        windows: the windows by which records are grouped.
        allowed_lateness: how long past a window's end late records still amend it.
        aggregates: result column -> aggregate.
        few_records_max: the most records of a turn that are added one by one; columns have the same effect.
        trigger: the rule by which windows fire.
        accumulation: what a pane has of the panes of its window before it.
        takes_retractions: whether some of the records may be retractions.
        timestamps: the event time of a pane.
        rules: which empty panes are emitted, and whether panes have `PANE_INFO`.
    """

    windows: Windows
    allowed_lateness: timedelta
    aggregates: Mapping[str, Aggregate]
    few_records_max: int = SMALL_RECORDS_MAX
    trigger: Trigger = AFTER_WATERMARK
    accumulation: Accumulation = Accumulation.ACCUMULATING
    takes_retractions: bool = False
    timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW
    rules: PaneRules = DEFAULT_RULES

    def output_type(self, record_type: RecordType, key_fields: Sequence[str]) -> RecordType:
        """Return the record type of the stream of panes.

        Raises:
            SchemaError: an aggregate does not accept its field, or sessions take their gap from a field without one.
            GraphError: records may be retractions, and an aggregate cannot subtract.
        """
        check_gap_field(self.windows, record_type)
        return output_type(
            record_type,
            key_fields,
            dict(self.aggregates),
            retracts=self.takes_retractions,
            mode=self.accumulation,
            rules=self.rules,
        )

    def accumulators(self, record_type: RecordType) -> AccumulatorSet:
        """Return the operations of the aggregates on records of a type."""
        counter = CountBalance() if self.takes_retractions else None
        counts = isinstance(self.windows, SessionWindows) and self.windows.max_records is not None
        return AccumulatorSet(self.aggregates, record_type, counter, SessionSize() if counts else None)

    @property
    def panes_repeat(self) -> bool:
        """Whether a window may have a second pane, or a session that has one may be merged into another."""
        return self.allowed_lateness > timedelta(0) or self.trigger.per_pane

    @property
    def by_pane(self) -> bool:
        """Whether the trigger is asked pane by pane, and has a state in each."""
        return self.trigger.per_pane or self.rules.with_empty_panes

    @property
    def simple(self) -> bool:
        """Whether records only add to windows, and all that a pane needs of its window are the accumulators."""
        plain = self.accumulation is Accumulation.ACCUMULATING and not self.by_pane
        return plain and not self.takes_retractions and self.timestamps is TimestampCombiner.END_OF_WINDOW

    @property
    def spills(self) -> bool:
        """Whether windows that have fired may leave memory until a late record comes or they expire.

        They may if each stands for itself: fixed, calendar and sliding windows, which do not merge. A new owner takes
        windows that end before the low watermark for fired, and of a trigger with a state those panes that do not wait
        (`FiringState.waits`). A pane from which all records are retracted has not been emitted. Rules that give empty
        panes make all windows wait until they are over.
        """
        return not isinstance(self.windows, SessionWindows | WindowFunction) and self._can_spill

    def unfired_spill(self, accumulators: AccumulatorSet) -> bool:
        """Tell whether windows that have not fired may leave memory, too, until a record comes or they end.

        They may if nothing but records and the watermark makes their panes due, if a pane holds the low watermark only
        at its end, and if all panes of a turn's records fit into memory (`unfired_windows.py`, `unread_panes.py`,
        `unfired_sessions.py`). Slices make several panes each.
        """
        by_records = not self.by_pane or (self.spills and self._is_due_by_records)
        may_spill = (self.spills or self.sessions_spill) and by_records
        at_end = self.timestamps is TimestampCombiner.END_OF_WINDOW
        return may_spill and at_end and not self.sliced and accumulators.is_small

    @property
    def _is_due_by_records(self) -> bool:
        """Whether records and the watermark alone make panes due, and none holds the watermark after its end."""
        trigger = self.trigger
        return trigger.fires_at_end and not trigger.by_clock and not trigger.percentiles

    @property
    def sessions_spill(self) -> bool:
        """Whether sessions that have fired may leave memory until a late record touches them or they expire."""
        return isinstance(self.windows, SessionWindows) and self._can_spill

    @property
    def _can_spill(self) -> bool:
        return not (self.rules.with_empty_panes or self.takes_retractions)

    def columns(self) -> tuple[str, ...]:
        """Return the names of the aggregate columns."""
        return tuple(self.aggregates)

    def info_columns(self) -> tuple[str, ...]:
        """Return the names of the columns behind them that say what a pane is, if the rules ask for them."""
        return PANE_INFO if self.rules.pane_info else ()

    def stored_forms(self, record_type: RecordType) -> tuple[tuple[int, str], ...]:
        """Return the place of each column's accumulator in a stored window, and its form; empty if no row is a window.

        Slices are parts of windows, and windows over retractions count what is left of them in other forms.
        """
        if self.sliced or self.takes_retractions:
            return ()
        return tuple((place, member.stored_form) for place, member in self.accumulators(record_type).columns)

    @property
    def sliced(self) -> bool:
        """Whether the windows are stored as slices: sliding ones, with three exceptions.

        If the size is not a whole number of periods, there would be more slices than windows. If an aggregate merges in
        order of arrival only, slices cannot be merged, because they follow event time. If a window needs its newest
        pane again, or the times of its records, slices do not have them.
        """
        windows = self.windows
        if not isinstance(windows, SlidingWindows) or not self.simple:
            return False
        if any(aggregate.merge_order == "arrival" for aggregate in self.aggregates.values()):
            return False
        return windows.size_us % windows.every_us == 0 and windows.size_us > windows.every_us

    def identity(self) -> Identity:
        """Describe what must not change while windows are stored: windows, stored form, trigger, mode, aggregates."""
        described: dict[str, Any] = {
            "kind": "window",
            "window": self.windows.identity(),
            "stored_form": "slices" if self.sliced else "whole windows",
            "trigger": self.trigger.identity(),
            "aggregates": [(name, aggregate.identity()) for name, aggregate in self.aggregates.items()],
        }
        if self.accumulation is not Accumulation.ACCUMULATING:
            described["accumulation"] = self.accumulation.value
        if self.takes_retractions:
            described["takes_retractions"] = True
        if self.timestamps is not TimestampCombiner.END_OF_WINDOW:
            described["timestamp_combiner"] = self.timestamps.value
        return described | self.rules.described()

    def settings(self) -> Identity:
        """Describe what windows to come depend on: what is over at a change stays over (`model/horizons.py`)."""
        return {LATENESS: microseconds(self.allowed_lateness)}
