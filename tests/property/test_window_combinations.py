"""Windows over windows with every combination of features: the outer ones have what panes of the inner ones add up to.

Consumers have the panes of the inner windows that are not taken back. At every quiet moment the outer windows have
these, each in the window of its event time, whatever the inner windows, trigger, times and empty panes are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterEach,
    AfterPercentile,
    AfterWatermark,
    Count,
    EventTime,
    Every,
    FixedWindows,
    Graph,
    Repeatedly,
    SessionWindows,
    SlidingWindows,
    Sum,
    TimestampCombiner,
    When,
    WindowFunction,
    days,
    seconds,
)
from millpy.limits import Limits
from millpy.testing import GraphDriver, ManualSource
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.triggers import Trigger
from tests.property.test_pane_triggers import rules_of_panes

EXAMPLES = int(os.environ.get("MILLPY_WINDOW_EXAMPLES", "30"))
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
Window = tuple[datetime, datetime]


class Reading(msgspec.Struct):
    key: str
    at: datetime
    value: int


class Trips(WindowFunction):
    """Windows that merge, with a longer gap behind large values."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> list[Window]:
        return [(at, at + seconds(6 if record.value > 4 else 3))]


class Around(WindowFunction):
    """Two windows for each record, which need not be those of others."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[Window]:
        return [(at - seconds(record.value), at + seconds(2)), (at, at + seconds(7))]


class Thirds(WindowFunction):
    """`FixedWindows(seconds(20))`, by the time of the pane."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[Window]:
        start = EPOCH + (at - EPOCH) // seconds(20) * seconds(20)
        return [(start, start + seconds(20))]


def large(pane: Any) -> bool:
    return bool(pane.total > 8)


def several(pane: Any) -> bool:
    return bool(pane.panes > 2)


MERGING = Trips()
INNER = (
    FixedWindows(seconds(10)),
    SlidingWindows(seconds(10), every=seconds(5)),
    SessionWindows(seconds(4)),
    SessionWindows(seconds(4), max_records=3, max_length=seconds(30)),
    MERGING,
    Around(),
)
OUTER = (FixedWindows(seconds(20)), Thirds())
TRIGGERS: tuple[Trigger, ...] = (
    AfterWatermark(),
    AfterWatermark(early=AfterCount(2)),
    AfterWatermark(early=Repeatedly(When(large)), late=Repeatedly(AfterCount(2))),
    AfterWatermark(early=Every(seconds(7))),
    AfterWatermark(early=AfterPercentile(0.5)),
    AfterEach(AfterCount(1), AfterCount(2)),
    When(large),
)
OUTER_TRIGGERS: tuple[Trigger, ...] = (
    AfterWatermark(),
    AfterWatermark(early=AfterCount(2)),
    AfterWatermark(early=Every(seconds(5))),
    AfterWatermark(early=Repeatedly(When(several))),
)


@dataclass(frozen=True)
class Case:
    inner: Any
    outer: Any
    mode: Accumulation
    trigger: Trigger
    outer_trigger: Trigger
    timestamps: TimestampCombiner
    rules: PaneRules
    outer_rules: PaneRules
    outer_mode: Accumulation
    outer_timestamps: TimestampCombiner

    def graph(self) -> Graph:
        graph = Graph("levels")
        event_time = EventTime("at", max_disorder=days(100_000))
        readings = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
        inner = readings.key_by("key").window(
            self.inner,
            allowed_lateness=seconds(10_000),
            accumulation=self.mode,
            trigger=self.trigger,
            timestamp_combiner=self.timestamps,
            on_time_pane=self.rules.on_time_pane,
            final_pane=self.rules.final_pane,
            pane_info=self.rules.pane_info,
            name="inner",
            intervals=2,
        )
        panes = inner.aggregate(n=Count(), total=Sum("value")).to_table("inner", history=True)
        outer = panes.key_by("key").window(
            self.outer,
            allowed_lateness=seconds(20_000),
            accumulation=self.outer_mode,
            trigger=self.outer_trigger,
            timestamp_combiner=self.outer_timestamps,
            on_time_pane=self.outer_rules.on_time_pane,
            final_pane=self.outer_rules.final_pane,
            pane_info=self.outer_rules.pane_info,
            name="outer",
            intervals=2,
        )
        outer.aggregate(panes=Count(), n=Sum("n"), total=Sum("total")).to_table("outer", history=True)
        return graph


cases = st.builds(
    Case,
    inner=st.sampled_from(INNER),
    outer=st.sampled_from(OUTER),
    mode=st.sampled_from([Accumulation.RETRACTING, Accumulation.RETRACTING, Accumulation.DISCARDING]),
    trigger=st.sampled_from(TRIGGERS),
    outer_trigger=st.sampled_from(OUTER_TRIGGERS),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
    outer_rules=st.just(DEFAULT_RULES) | rules_of_panes,
    outer_mode=st.sampled_from([Accumulation.ACCUMULATING, Accumulation.RETRACTING]),
    outer_timestamps=st.sampled_from(TimestampCombiner),
).filter(lambda case: not (case.inner is MERGING and case.trigger.may_finish))
readings = st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(1, 6))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.lists(readings, min_size=1, max_size=6)),
        st.tuples(st.just("feed"), st.lists(readings, min_size=1, max_size=6)),
        st.tuples(st.just("feed"), st.lists(readings, min_size=70, max_size=70)),
        st.tuples(st.just("watermark"), st.integers(0, 80)),
        st.tuples(st.just("clock"), st.integers(1, 10)),
        st.tuples(st.just("crash"), st.none()),
    ),
    max_size=12,
)


def standing_of(panes: list[Any]) -> dict[Any, Any]:
    """Return the panes that consumers have: window -> the newest, if it is not taken back."""
    found: dict[Any, Any] = {}
    for pane in panes:
        name = pane.key, pane.window
        if pane.retraction:
            before = found.pop(name)
            assert (before.values, before.index, before.timing, before.event_time, before.on_time_index) == (
                pane.values,
                pane.index,
                pane.timing,
                pane.event_time,
                pane.on_time_index,
            )
        else:
            assert name not in found
            found[name] = pane
    return found


def batch(panes: Any) -> dict[Any, tuple[int, int, int]]:
    """Return the outer windows that panes make: number of panes, records and sum."""
    sums: dict[Any, tuple[int, int, int]] = {}
    for pane in panes:
        start = EPOCH + (pane.event_time - EPOCH) // seconds(20) * seconds(20)
        name = pane.key, (start, start + seconds(20))
        count, n, total = sums.get(name, (0, 0, 0))
        sums[name] = count + 1, n + pane.values["n"], total + (pane.values["total"] or 0)
    return sums


def table_of(driver: GraphDriver) -> dict[Any, tuple[int, int, int]]:
    return {
        (row["key"], (row["window_start"], row["window_end"])): (row["panes"], row["n"], row["total"] or 0)
        for row in driver.rows("outer")
    }


def check_history(driver: GraphDriver, table: str) -> None:
    """Check that a history adds up to its table."""
    found: dict[Any, Any] = {}
    own = ("is_retraction", "emitted_at", "interval_id", "bundle")
    for row in driver.history(table):
        name = row["key"], row["window_start"], row["window_end"]
        content = {column: value for column, value in row.items() if column not in own}
        if row["is_retraction"]:
            assert found.pop(name) == content
        else:
            found[name] = content
    rows = driver.rows(table)
    assert found == {
        (row["key"], row["window_start"], row["window_end"]): {k: v for k, v in row.items() if k not in own}
        for row in rows
    }


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=EXAMPLES, deadline=None)
@given(case=cases, given_steps=steps, panes_max=st.sampled_from([1, 100_000]), loses=st.booleans())
def test_outer_windows_have_the_panes_that_the_inner_ones_add_up_to(
    case: Case, given_steps: list[Any], panes_max: int, loses: bool
) -> None:
    driver = GraphDriver(case.graph(), now=EPOCH + days(1), limits=Limits(turn_panes_max=panes_max))
    driver.loses_turns = loses
    for what, how in [*given_steps, ("watermark", 120), ("watermark", 50_000)]:
        if what == "feed":
            driver.feed("readings", [Reading(key, EPOCH + seconds(at), value) for key, at, value in how])
        elif what == "watermark":
            driver.advance_watermark("readings", EPOCH + seconds(how))
        elif what == "clock":
            driver.advance_clock(seconds(how))
        else:
            driver.crash()
        panes = driver.panes("inner")
        late = [late for late in driver.late_records() if late.computation == "outer"]
        assert not late
        wanted = batch(standing_of(panes).values() if case.mode is Accumulation.RETRACTING else panes)
        reached = driver.watermarks("outer").input
        assert {name: row for name, row in table_of(driver).items() if name[1][1] <= reached} == {
            name: row for name, row in wanted.items() if name[1][1] <= reached
        }
        if case.outer_mode is Accumulation.RETRACTING:
            sums = {
                name: (pane.values["panes"], pane.values["n"], pane.values["total"] or 0)
                for name, pane in standing_of(driver.panes("outer")).items()
            }
            assert sums == table_of(driver)
    check_history(driver, "inner")
    check_history(driver, "outer")
    assert not driver.open_windows("inner")
    driver.check_accounting()
