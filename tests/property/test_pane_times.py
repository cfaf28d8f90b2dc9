"""The event times of panes, and the watermark that waits for them, against plain loops over the records."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    CalendarWindows,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    SessionWindows,
    SlidingWindows,
    Sum,
    TimestampCombiner,
    WindowFunction,
    days,
    hours,
    seconds,
)
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant, instant, to_datetime
from millpy.testing import GraphDriver, ManualSource
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.timestamp_combiner import PaneHolds
from tests.stage_driver import StageDriver, timedelta_us

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
SPAN = 40
KINDS = {
    "fixed": FixedWindows(seconds(10)),
    "sliding": SlidingWindows(seconds(10), every=seconds(5)),
    "session": SessionWindows(seconds(4)),
    "full": SessionWindows(seconds(4), max_records=3),
    "calendar": CalendarWindows("hour", zone="Europe/Berlin"),
}
TRIGGERS = {"at the end": AfterWatermark(), "early": AfterWatermark(early=AfterCount(2))}
combiners = st.sampled_from([TimestampCombiner.EARLIEST, TimestampCombiner.LATEST])
modes = st.sampled_from(list(Accumulation))
steps = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, SPAN)), min_size=1, max_size=6),
        st.integers(0, SPAN),
        st.just("crash"),
    ),
    max_size=14,
)


how = st.tuples(st.sampled_from([0, 3600]), st.sampled_from([-1, 64]), st.sampled_from([1, 100_000]))
"""Seconds of lateness, the most records that are taken one by one, and the most panes of a turn."""


class Reading(msgspec.Struct):
    key: str
    at: datetime


@dataclass(eq=False)
class Entry:
    """A record: when it happened, whether it was on time, and the windows of which a pane has it."""

    key: str
    at: datetime
    on_time: bool
    in_panes: set[tuple[datetime, datetime]] = field(default_factory=set)


def at(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)


class Tens(WindowFunction):
    """Fixed windows of 10 µs."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        start = to_datetime(Instant(instant(at) // 10 * 10))
        return [(start, start + timedelta_us(10))]


def graph_of(
    windows: Any, combiner: TimestampCombiner, mode: Accumulation, trigger: Any, lateness: timedelta, few: int
) -> Graph:
    graph = Graph("factory")
    event_time = EventTime("at", max_disorder=days(100_000))
    source = graph.inject("readings", ManualSource(), schema=Reading, event_time=event_time)
    inner = source.key_by("key").window(
        windows,
        allowed_lateness=lateness,
        accumulation=mode,
        trigger=trigger,
        timestamp_combiner=combiner,
        name="inner",
        intervals=2,
    )
    panes = inner.aggregate(n=Count())
    node = panes.producer
    assert node is not None
    node.logic = replace(node.logic, few_records_max=few)  # type: ignore[union-attr, type-var]
    if mode is not Accumulation.ACCUMULATING:
        outer = panes.key_by("key").window(FixedWindows(seconds(3)), name="outer", intervals=2)
        outer.aggregate(n=Sum("n"))
    return graph


def time_of(entries: list[Entry], window: tuple[datetime, datetime], combiner: TimestampCombiner) -> datetime:
    """The time of a pane of these records, by the definition."""
    times = [entry.at for entry in entries if entry.on_time]
    if not times:
        return window[1] - timedelta(microseconds=1)
    return min(times) if combiner is TimestampCombiner.EARLIEST else max(times)


@dataclass
class Oracle:
    """The records that have come, and the panes that have left; a merged session has what its parts had."""

    combiner: TimestampCombiner
    mode: Accumulation
    merges: bool
    entries: list[Entry] = field(default_factory=list)
    newest: dict[tuple[str, tuple[datetime, datetime]], datetime] = field(default_factory=dict)

    def take(self, pane: Any) -> tuple[datetime, bool]:
        """Return the time that a pane must have, and whether the watermark has waited for it."""
        name = pane.key, pane.window
        if pane.retraction:
            return self.newest.pop(name), True
        start, end = pane.window
        inside = [entry for entry in self.entries if entry.key == pane.key and start <= entry.at < end]
        inside = [e for e in inside if not (e.in_panes if self.merges else pane.window in e.in_panes)]
        for entry in inside:
            entry.in_panes.add(pane.window)
        self.newest[name] = time_of(inside, pane.window, self.combiner)
        return self.newest[name], any(entry.on_time for entry in inside)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("kind", ["fixed", "sliding", "calendar"])
@settings(max_examples=25, deadline=None)
@given(steps=steps, combiner=combiners, mode=modes, how=how)
def test_panes_have_the_times_of_records_and_the_watermark_waits(
    kind: str,
    trigger: str,
    steps: list[Any],
    combiner: TimestampCombiner,
    mode: Accumulation,
    how: Any,
) -> None:
    check(kind, trigger, steps, combiner, mode, *how)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("kind", ["session", "full"])
@settings(max_examples=25, deadline=None)
@given(steps=steps, combiner=combiners, mode=modes, how=how)
def test_so_it_is_with_sessions_that_merge(
    kind: str, trigger: str, steps: list[Any], combiner: TimestampCombiner, mode: Accumulation, how: Any
) -> None:
    check(kind, trigger, steps, combiner, mode, *how)


def check(
    kind: str,
    trigger: str,
    steps: list[Any],
    combiner: TimestampCombiner,
    mode: Accumulation,
    lateness: int,
    few: int,
    panes_max: int,
) -> None:
    graph = graph_of(KINDS[kind], combiner, mode, TRIGGERS[trigger], seconds(lateness), few)
    driver = GraphDriver(graph, limits=Limits(turn_panes_max=panes_max))
    merges = isinstance(KINDS[kind], SessionWindows)
    oracle = Oracle(combiner, mode, merges)
    watermark, seen, behind = at(-100_000), 0, 0
    for step in [*steps, SPAN // 2, SPAN + 7200]:
        low = driver.watermarks("inner").low
        if step == "crash":
            driver.crash()
        elif isinstance(step, int):
            watermark = max(watermark, at(step))
            driver.advance_watermark("readings", watermark)
        else:
            for key, second in step:
                oracle.entries.append(Entry(key, at(second), at(second) >= watermark))
            driver.feed("readings", [Reading(key, at(second)) for key, second in step])
        panes = driver.panes("inner")
        for pane in panes[seen:]:
            expected, waited = oracle.take(pane)
            assert pane.event_time == expected, pane
            ended = pane.window[1] <= watermark and pane.retraction
            assert pane.event_time >= low or not waited or ended, (pane, low)
            behind += pane.event_time < low
        seen = len(panes)
        now = driver.watermarks("inner")
        assert now.low <= now.input
        if not merges:
            assert now.low == held(oracle, watermark, KINDS[kind], now.input)
    if mode is not Accumulation.ACCUMULATING:
        assert sum(late.computation == "outer" for late in driver.late_records()) <= behind


def held(oracle: Oracle, watermark: datetime, windows: Any, reached: datetime) -> datetime:
    """The low watermark: what the windows that have not ended wait for, and at most the input watermark."""
    found = [reached]
    waiting: dict[tuple[str, tuple[datetime, datetime]], list[Entry]] = {}
    for entry in oracle.entries:
        for window in windows_of(entry.at, windows):
            if window[1] > watermark:
                own = waiting.setdefault((entry.key, window), [])
                if window not in entry.in_panes:
                    own.append(entry)
    for (key, window), entries in waiting.items():
        found.append(time_of(entries, window, oracle.combiner))
        if oracle.mode is Accumulation.RETRACTING and (key, window) in oracle.newest:
            found.append(oracle.newest[key, window])
    return min(found)


def windows_of(when: datetime, windows: Any) -> list[tuple[datetime, datetime]]:
    if isinstance(windows, CalendarWindows):
        return [(EPOCH, EPOCH + hours(1))]
    every = windows.every if isinstance(windows, SlidingWindows) else windows.size
    last = EPOCH + (when - EPOCH) // every * every
    starts = (last - number * every for number in range(windows.size // every))
    return [(start, start + windows.size) for start in starts]


def test_holds_keep_one_entry_for_each_pane() -> None:
    times: dict[int, int] = {}
    holds = PaneHolds(times.__getitem__)
    for turn in range(5_000):
        for pane in range(3):
            times[pane] = 100_000 - turn * 3 - pane
            holds.add(pane)
        if turn % 7 == 0:
            assert holds.oldest() == min(times.values())
    times[2] = 200_000

    assert holds.oldest() == times[1]
    assert len(holds._heap) <= 1_006


@pytest.mark.parametrize("windows", [FixedWindows(timedelta_us(10)), Tens()], ids=["fixed", "function"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
def test_a_pane_that_is_taken_back_for_good_holds_nothing(windows: Any, restarts: bool) -> None:
    logic = WindowedLogic(
        windows,
        timedelta(0),
        {"n": Count()},
        trigger=AfterWatermark(early=AfterCount(1)),
        accumulation=Accumulation.RETRACTING,
        takes_retractions=True,
        timestamps=TimestampCombiner.EARLIEST,
    )
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    driver = StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=1_000)
    record = Reading("a", EPOCH), 3
    held = []
    for retracts in (False, True, False):
        driver.feed([record], retracts=[retracts])
        if restarts:
            driver.restart()
        held.append(driver.interval.oldest_work())

    assert held == [3, 9, 3]
