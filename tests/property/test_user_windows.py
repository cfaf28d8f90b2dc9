"""Windows of a user's function are what the engine's own windows are, turn by turn: panes, tables, watermarks, late.

The engine's windows are compared with batches elsewhere (`test_pane_triggers.py`, `test_windowed.py`). A function that
assigns the same windows therefore has to give the same effects in every turn, with every trigger, mode, crash and
restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Collect,
    Count,
    SessionWindows,
    SlidingWindows,
    Sum,
    TimestampCombiner,
    WindowFunction,
)
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType, retractions_of
from millpy.model.stage import StepResult
from millpy.model.time import EPOCH, INSTANT_MAX
from millpy.store.memory.tables import column_values
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.composite_triggers import AFTER_WATERMARK
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.property.test_pane_triggers import check_flags, rules_of_panes, triggers
from tests.property.test_session_triggers import check_sessions, totals
from tests.stage_driver import StageDriver, timedelta_us

SIZE, EVERY, GAP, MAX_DISORDER = 10, 4, 5, 5
Window = tuple[datetime, datetime]


def us(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def moment(at: int) -> datetime:
    return EPOCH + timedelta(microseconds=at)


@dataclass(frozen=True, slots=True)
class Sliding(WindowFunction):
    """The windows of `SlidingWindows`, latest first."""

    size: int
    every: int

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        last = us(at) // self.every * self.every
        for start in range(last, us(at) - self.size, -self.every):
            yield moment(start), moment(start + self.size)


class Visits(WindowFunction):
    """The windows of `SessionWindows`, with the gap of each record."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(at, at + timedelta(microseconds=record.gap))]


class Texts(Combiner[list[int]]):
    accumulator = list[int]
    result_type = str

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Any) -> list[int]:
        return self.merge(accumulator, [record.number])

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        return sorted(one + other)

    def result(self, accumulator: list[int]) -> str:
        return " ".join(map(str, accumulator))


class Row(msgspec.Struct):
    key: str
    number: int
    gap: int  # in µs, for the function
    gap_s: float


def subject(
    windows: Windows,
    trigger: Trigger,
    mode: Accumulation,
    allowed: int,
    few: int,
    *,
    combines: bool = False,
    retracts: bool = False,
    timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW,
    rules: PaneRules = DEFAULT_RULES,
) -> StageDriver:
    aggregates: dict[str, Aggregate] = {"n": Count(), "total": Sum("number")}
    if not retracts:
        aggregates["all"] = Collect("number", limit=5)
    if combines:
        aggregates["texts"] = Texts()
    logic = WindowedLogic(
        windows,
        timedelta_us(allowed),
        aggregates,
        few_records_max=few,
        trigger=trigger,
        accumulation=mode,
        takes_retractions=retracts,
        timestamps=timestamps,
        rules=rules,
    )
    outputs = {"panes": logic.output_type(RecordType(Row), ("key",))}
    return StageDriver(logic, Row, outputs=outputs, tables={"panes": 1}, max_disorder=MAX_DISORDER)


def effects(result: StepResult) -> dict[str, Any]:
    """Return what a turn has done, without the order of what has no order."""
    panes = result.productions.get("panes")
    rows: list[Any] = []
    if panes is not None:
        columns = (retractions_of(panes).tolist(), panes.event_times.tolist())
        rows = list(zip(map(msgspec.structs.asdict, panes.objects()), *columns, strict=True))
    return {
        "panes": [row for row in rows if row[1]] + [row for row in rows if not row[1]],
        "table": sorted(
            (part.first, *row) for part in result.results for row in zip(*map(column_values, part.columns), strict=True)
        ),
        "deleted": sorted(
            row for part in result.deleted for row in zip(*map(column_values, part.columns), strict=True)
        ),
        "late": Counter(
            row
            for late in result.late
            for row in zip(late.keys, late.payloads, late.window_starts, late.window_ends, late.watermarks, strict=True)
        ),
        "whole": sum(sum(late.whole or [True] * len(late.keys)) for late in result.late),
        "counts": [
            +Counter(counts) for counts in (result.consumed_by_input, result.late_by_input, result.emitted_by_table)
        ],
        "letters": len(result.dead_letters),
        "unfinished": result.unfinished,
    }


def stored(driver: StageDriver) -> dict[Any, Any]:
    """Return the names of the stored windows."""
    return {name[2:]: value[2] for name, value in driver.stored.items() if name[0] is Kind.WINDOW}


readings = st.builds(
    lambda key, number, gap: Row(key, number, gap, gap / 1_000_000),
    st.sampled_from("ab"),
    st.integers(-5, 5),
    st.sampled_from([1, 3, GAP, 20]),
)
bundles = st.lists(st.tuples(readings, st.integers(0, 40)), min_size=1, max_size=5)
moves = st.one_of(
    st.tuples(st.sampled_from(["records", "lost"]), bundles),
    st.tuples(st.just("clock"), st.integers(1, 60)),
    st.tuples(st.just("watermark"), st.integers(1, 20)),
    st.tuples(st.just("restart"), st.none()),
)


def applied(driver: StageDriver, what: str, how: Any) -> StepResult | None:
    """Drive a subject by one step of a schedule. Return the result of its turn, None if it has none."""
    if what == "records":
        return driver.feed(how)
    if what == "retract":
        return driver.feed(how, retracts=[True] * len(how))
    if what == "clock":
        return driver.feed([], now_us=driver.now_us + how)
    if what == "watermark":
        to = max(driver.watermark, 0) + how
        driver.largest = max(driver.largest or 0, to + MAX_DISORDER)
        return driver.feed([], watermark=to)
    if what == "end":
        return driver.finish()
    if what == "lost":
        driver.lose(how)
    else:
        driver.restart()
    return None


def play(drivers: Sequence[StageDriver], schedule: list[Any]) -> None:
    """Drive several subjects by one schedule, to the end, and compare all effects of each turn."""
    fed: list[Any] = []
    for what, given_how in [*schedule, ("end", None)]:
        how = given_how
        if what == "records":
            fed += how
        elif what == "retract":
            how = [fed.pop(number % len(fed)) for number in how if fed]
        results = [effects(result) for driver in drivers if (result := applied(driver, what, how)) is not None]
        assert all(result == results[0] for result in results[1:])
        for driver in drivers[1:]:
            assert stored(driver) == stored(drivers[0])
            assert driver.interval.oldest_work() == drivers[0].interval.oldest_work()
            assert driver.interval.next_due() == drivers[0].interval.next_due()


given_schedule = given(
    trigger=triggers | st.just(AFTER_WATERMARK),
    schedule=st.lists(moves, max_size=20),
    allowed=st.sampled_from([0, 7, 100]),
    few=st.sampled_from([0, 10_000]),
    panes_max=st.sampled_from([1, 10_000]),
    combines=st.booleans(),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@settings(max_examples=20, deadline=None)
@given_schedule
def test_a_function_that_assigns_sliding_windows_does_what_these_do(
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    allowed: int,
    few: int,
    panes_max: int,
    combines: bool,
    timestamps: TimestampCombiner,
    rules: PaneRules,
) -> None:
    """Windows of 10 every 4 are stored whole, as those of a function are."""
    own = SlidingWindows(timedelta_us(SIZE), every=timedelta_us(EVERY))
    how: dict[str, Any] = {"combines": combines, "timestamps": timestamps, "rules": rules}
    drivers = [subject(windows, trigger, mode, allowed, few, **how) for windows in (own, Sliding(SIZE, EVERY))]
    play(drivers, schedule)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@settings(max_examples=20, deadline=None)
@given_schedule
def test_a_function_whose_windows_merge_does_what_sessions_do(
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    allowed: int,
    few: int,
    panes_max: int,
    combines: bool,
    timestamps: TimestampCombiner,
    rules: PaneRules,
) -> None:
    if trigger.may_finish:
        trigger = AFTER_WATERMARK
    if panes_max == 1:
        few = 0  # records that are added one by one leave through the state, where panes have to wait
    own = SessionWindows(timedelta_us(GAP), by_field="gap_s")
    how: dict[str, Any] = {"combines": combines, "timestamps": timestamps, "rules": rules}
    drivers = [subject(windows, trigger, mode, allowed, few, **how) for windows in (own, Visits())]
    for driver in drivers:
        driver.panes_max = panes_max
    play(drivers, schedule)


@pytest.mark.parametrize("mode", [Accumulation.ACCUMULATING, Accumulation.RETRACTING], ids=lambda mode: mode.value)
@settings(max_examples=20, deadline=None)
@given(
    trigger=triggers | st.just(AFTER_WATERMARK),
    schedule=st.lists(moves | st.tuples(st.just("retract"), st.lists(st.integers(0, 50), max_size=3)), max_size=20),
    allowed=st.sampled_from([0, 7, 100]),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
)
def test_retracted_records_leave_the_windows_of_a_function_as_they_leave_sliding_ones(
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    allowed: int,
    timestamps: TimestampCombiner,
    rules: PaneRules,
) -> None:
    own = SlidingWindows(timedelta_us(SIZE), every=timedelta_us(EVERY))
    how: dict[str, Any] = {"retracts": True, "timestamps": timestamps, "rules": rules}
    drivers = [subject(windows, trigger, mode, allowed, 0, **how) for windows in (own, Sliding(SIZE, EVERY))]
    play(drivers, schedule)


class Named(WindowFunction):
    """The windows that a record names, unaligned: (time before its event time, time after it)."""

    windows_max = 3

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(moment(us(at) - before), moment(us(at) + after)) for before, after in record.windows]


class Naming(msgspec.Struct):
    key: str
    number: int
    leads: list[int]
    lags: list[int]

    @property
    def windows(self) -> list[tuple[int, int]]:
        return list(zip(self.leads, self.lags, strict=True))


namings = st.builds(
    lambda key, number, windows: Naming(key, number, [one for one, _ in windows], [other for _, other in windows]),
    st.sampled_from("ab"),
    st.integers(-5, 5),
    st.lists(st.tuples(st.sampled_from([0, 1, 5]), st.sampled_from([1, 2, 9])), max_size=3, unique=True),
)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@settings(max_examples=20, deadline=None)
@given(
    trigger=triggers | st.just(AFTER_WATERMARK),
    schedule=st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(["records", "lost"]),
                st.lists(st.tuples(namings, st.sampled_from([3, 4, 5, 9, 20])), min_size=1, max_size=5),
            ),
            st.tuples(st.just("clock"), st.integers(1, 60)),
            st.tuples(st.just("restart"), st.none()),
        ),
        max_size=15,
    ),
    panes_max=st.sampled_from([1, 10_000]),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=rules_of_panes,
)
def test_panes_of_any_windows_add_up_to_the_batch_in_every_mode(
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    panes_max: int,
    timestamps: TimestampCombiner,
    rules: PaneRules,
) -> None:
    """The batch: each record in all of its windows, without the (record, window) pairs that came too late."""
    aggregates = {"n": Count(), "total": Sum("number")}
    options: dict[str, Any] = {"trigger": trigger, "accumulation": mode, "timestamps": timestamps, "rules": rules}
    logic = WindowedLogic(Named(), timedelta_us(7), aggregates, **options)
    outputs = {"panes": logic.output_type(RecordType(Naming), ("key",))}
    driver = StageDriver(logic, Naming, outputs=outputs, tables={"panes": 1}, max_disorder=MAX_DISORDER)
    driver.panes_max = panes_max
    wanted: Counter[Any] = Counter()
    for what, how in [*schedule, ("end", None)]:
        for record, at in how if what == "records" else ():
            for before, after in record.windows:
                wanted[record.key, at - before, at + after, "n"] += 1
                wanted[record.key, at - before, at + after, "total"] += record.number
        applied(driver, what, how)
    assert not stored(driver)
    assert driver.interval.oldest_work() == INSTANT_MAX

    sums: Counter[Any] = Counter()
    table: dict[Any, tuple[int, int]] = {}
    for result in driver.results:
        for late in result.late:
            columns = (late.keys, late.window_starts, late.window_ends, late.payloads)
            for key, start, end, payload in zip(*columns, strict=True):
                name = msgspec.json.decode(key), start, end
                wanted[(*name, "n")] -= 1
                wanted[(*name, "total")] -= msgspec.json.decode(payload)["number"]
        for pane, retracts, _ in effects(result)["panes"]:
            window = pane["key"], us(pane["window_start"]), us(pane["window_end"])
            keeps = mode is not Accumulation.ACCUMULATING
            for column in ("n", "total"):
                sums[(*window, column)] = keeps * sums[(*window, column)] + (-1 if retracts else 1) * (
                    pane[column] or 0
                )
        for first, *row in effects(result)["table"]:
            window, (n, total) = tuple(row[:3]), row[3:5]
            assert (window in table) != first
            table[window] = n, total
    assert {name: (sums[(*name, "n")], sums[(*name, "total")]) for name in table} == table
    assert {name: number for name, number in sums.items() if number} == {n: x for n, x in wanted.items() if x}
    check_flags(driver, rules)


class Choosy(WindowFunction):
    """Windows that merge with some of those that they intersect, so that a merged window may equal one that is open."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(moment(us(at) - record.gap % 4), moment(us(at) + record.gap))]

    def merge(self, window: Window, others: Sequence[Window]) -> Iterable[Window]:
        own = us(window[0])
        return [other for other in WindowFunction.merge(self, window, others) if (us(other[0]) + own) % 3]


FOUR = Row("b", 1, 3, 0.0)
BACK_AT_ONCE: list[Any] = [("records", [(FOUR, 0)]), ("records", [(FOUR, 1), (FOUR, 0)]), ("restart", None)]
"""The window [-3, 3) becomes part of [-3, 4), and is opened again in the same turn."""


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
@settings(max_examples=40, deadline=None)
@example(AfterWatermark(early=AfterCount(1)), BACK_AT_ONCE, 1, TimestampCombiner.LATEST, PaneRules(pane_info=True))
@given(
    trigger=(triggers | st.just(AFTER_WATERMARK)).filter(lambda trigger: not trigger.may_finish),
    schedule=st.lists(moves, max_size=20),
    panes_max=st.sampled_from([1, 10_000]),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=rules_of_panes,
)
def test_windows_that_merge_with_some_others_lose_no_record_in_any_mode(
    mode: Accumulation,
    trigger: Trigger,
    schedule: list[Any],
    panes_max: int,
    timestamps: TimestampCombiner,
    rules: PaneRules,
) -> None:
    driver = subject(Choosy(), trigger, mode, 1_000, 0, timestamps=timestamps, rules=rules)
    driver.panes_max = panes_max
    for what, how in [*schedule, ("end", None)]:
        applied(driver, what, how)
    fed = [record for what, how in schedule if what == "records" for record in how]

    table, by_key = check_sessions(driver, mode)
    assert not any(result.late for result in driver.results)
    shown: Counter[Any] = Counter()
    for (key, _, _), (n, total) in table.items():
        shown[key, "n"] += n
        shown[key, "total"] += total
    assert {name: number for name, number in shown.items() if number} == totals(fed)
    if mode is Accumulation.DISCARDING:
        assert by_key == totals(fed)
    check_flags(driver, rules)
