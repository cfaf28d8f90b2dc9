"""Laws of windows: bundles, restarts and the way of execution do not show; the result is that of a plain loop."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MIN, instant
from millpy.operators.keyed import ComputationLogic
from millpy.store.memory.tables import column_values
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Median, Quantile
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.property.plain_calendar import walked_window
from tests.property.windows_by_computation import ABSORBED, SessionComputation, WindowedComputation
from tests.stage_driver import StageDriver

SIZE, MAX_DISORDER = 10, 7
us = timedelta(microseconds=1)
FIXED = FixedWindows(SIZE * us)
WINDOWS: dict[str, Windows] = {
    "fixed": FIXED,
    "sliding": SlidingWindows(SIZE * us, every=4 * us),
    "slices": SlidingWindows(SIZE * us, every=2 * us),
    "fixed with offset": FixedWindows(SIZE * us, offset=3 * us),
    "sliding with offset": SlidingWindows(SIZE * us, every=4 * us, offset=us),
    "slices with offset": SlidingWindows(SIZE * us, every=5 * us, offset=2 * us),
    "global": GlobalWindow(),
    "sessions": SessionWindows(3 * us, by_key={("b", 1): 6 * us}),
    "sessions by field": SessionWindows(3 * us, by_key={("b", 1): 6 * us}, by_field="gap"),
}
kinds = pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
closing = pytest.mark.parametrize("windows", [windows for kind, windows in WINDOWS.items() if kind != "global"])
"""The windows that close before the input ends."""


class Reading(msgspec.Struct):
    key: str
    site: int
    value: float | None
    number: int | None
    text: str | None
    gap: float | None = None


class Sites(Combiner[dict[str, int]]):
    """Texts and how often they came."""

    accumulator = dict[str, int]
    result_type = dict[str, int]

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], record: Reading) -> dict[str, int]:
        accumulator[str(record.text)] = accumulator.get(str(record.text), 0) + 1
        return accumulator

    def merge(self, one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        for text, count in other.items():
            one[text] = one.get(text, 0) + count
        return one

    def result(self, accumulator: dict[str, int]) -> dict[str, int]:
        return accumulator


AGGREGATES: dict[str, Aggregate] = {
    "n": Count(),
    "numbers": Count("number"),
    "total": Sum("value"),
    "whole": Sum("number"),
    "mean": Mean("value"),
    "whole_mean": Mean("number"),
    "low": Min("value"),
    "high": Max("number"),
    "first": Min("text"),
    "variance": Variance("value"),
    "deviation": StandardDeviation("number", population=True),
    "earliest": First("value"),
    "latest": Last("text"),
    "best": Top("number", n=3),
    "texts": Top("text", n=2, smallest=True),
    "all": Collect("number", limit=4),
    "distinct": ApproxDistinct("text") if find_spec("datasketches") else Count("text"),
    "p75": Quantile("value", 0.75),
    "median": Median("value"),
}
readings = st.builds(
    Reading,
    key=st.sampled_from("ab"),
    site=st.integers(1, 2),
    value=st.none() | st.sampled_from([0.0, -0.0]) | st.floats(-1e6, 1e6, width=32),
    number=st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5),
    text=st.none() | st.sampled_from(["x", "é", "😀", ""]),
    gap=st.none() | st.sampled_from([0.000_001, 0.000_004, 0.000_012]),
)
rows = st.lists(st.tuples(readings, st.integers(-20, 60)), max_size=40)
breaks = st.lists(
    st.sampled_from(["none", "none", "cut", "cut", "restart", "lost", "fold", "fold behind"]), max_size=40
)
lateness = st.sampled_from([0, 5, 10, 1000])


Name = tuple[str, int, int, int]


@dataclass
class Outcome:
    """Return the newest pane by (key, site, window start, window end), and the records that were too late."""

    windows: dict[Name, tuple[Any, ...]] = field(default_factory=dict)
    late: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """A window as a plain loop has it."""

    start: int
    end: int
    records: list[tuple[Reading, int]] = field(default_factory=list)
    late: int = 0


def payload(record: Reading) -> bytes:
    """As a late record is kept: zero has no sign."""
    value = None if record.value is None else record.value + 0.0
    return msgspec.json.encode(msgspec.structs.replace(record, value=value))


Summarize = Callable[[Group], tuple[Any, ...]]


class PlainLoop:
    """One record at a time, over lists."""

    def __init__(self, windows: Windows, allowed: int) -> None:
        self.windows = windows
        self.allowed = allowed
        self.floor = INSTANT_MIN
        self.groups: dict[tuple[str, int], list[Group]] = {}

    def is_over(self, end: int, watermark: int) -> bool:
        return watermark >= end + self.allowed or end <= self.floor

    def change(self, allowed: int, watermark: int) -> None:
        """Take another lateness from now on: what is over stays over."""
        self.floor, self.allowed = max(self.floor, watermark - self.allowed), allowed

    def take(self, record: Reading, at: int, watermark: int) -> int:
        """Add a record; how many windows it has missed."""
        found = self.groups.setdefault((record.key, record.site), [])
        if isinstance(self.windows, SessionWindows):
            return self._into_session(found, record, at, watermark)
        missed = 0
        for start, end in self._spans(at):
            if self.is_over(end, watermark):
                missed += 1
                continue
            known = [group for group in found if group.start == start]
            group = known[0] if known else Group(start, end)
            if not known:
                found.append(group)
            group.records.append((record, at))
            group.late += watermark >= group.end
        return missed

    def _spans(self, at: int) -> list[tuple[int, int]]:
        if isinstance(self.windows, CalendarWindows):
            return [walked_window(self.windows, at)]
        if isinstance(self.windows, GlobalWindow):
            return [(instant(datetime(2, 1, 1, tzinfo=UTC)), instant(datetime(9999, 1, 1, tzinfo=UTC)))]
        assert isinstance(self.windows, FixedWindows | SlidingWindows)
        every, offset = self.windows.every_us, self.windows.offset_us
        starts = range((at - SIZE - offset) // every * every + every + offset, at + 1, every)
        return [(start, start + SIZE) for start in starts]

    def _into_session(self, found: list[Group], record: Reading, at: int, watermark: int) -> int:
        gap = 6 if (record.key, record.site) == ("b", 1) else 3
        assert isinstance(self.windows, SessionWindows)
        if self.windows.by_field and record.gap is not None:
            gap = round(record.gap * 1_000_000)
        merged = Group(at, at + gap)
        met = [
            group
            for group in found
            if group.start < merged.end and at < group.end and not self.is_over(group.end, watermark)
        ]
        for group in met:
            merged.start, merged.end = min(merged.start, group.start), max(merged.end, group.end)
            merged.records += group.records
            merged.late += group.late
        if self.is_over(merged.end, watermark):
            return 1
        merged.records.append((record, at))
        merged.late += watermark >= merged.end
        found[:] = [group for group in found if group not in met] + [merged]
        return 0

    def outcome(self, summarize: Summarize) -> dict[Name, tuple[Any, ...]]:
        return {
            (*name, g.start, g.end): (*summarize(g), "late" if g.late else "on_time", g.late)
            for name, found in self.groups.items()
            for g in found
        }


def summary(group: Group) -> tuple[Any, ...]:
    """All aggregates over the records of a window, by what Python has."""
    records = [record for record, _ in group.records]
    in_order = sorted(group.records, key=lambda row: row[1])
    values = [r.value for r in records if r.value is not None]
    numbers = [r.number for r in records if r.number is not None]
    texts = [r.text for r in records if r.text is not None]
    return (
        len(records),
        len(numbers),
        math.fsum(values) if values else None,
        sum(numbers) if numbers else None,
        math.fsum(values) / len(values) if values else None,
        sum(numbers) / len(numbers) if numbers else None,
        min(values, default=None),
        max(numbers, default=None),
        min(texts, default=None),
        statistics.variance(values) if len(values) > 1 else None,
        statistics.pstdev(numbers) if numbers else None,
        next((r.value for r, _ in in_order if r.value is not None), None),
        next((r.text for r, _ in reversed(in_order) if r.text is not None), None),
        sorted(numbers, reverse=True)[:3],
        sorted(texts)[:2],
        [r.number for r, _ in in_order if r.number is not None][:4],
        len(set(texts)) if find_spec("datasketches") else len(texts),
        at_quantile(values, 0.75),
        at_quantile(values, 0.5),
    )


def at_quantile(values: list[float], q: float) -> float | None:
    return sorted(values)[math.floor(q * (len(values) - 1))] if values else None


def oracle(windows: Windows, feed: list[tuple[Reading, int]], allowed: int, summarize: Summarize = summary) -> Outcome:
    """The same by a loop over all records."""
    loop, late = PlainLoop(windows, allowed), []
    largest: int | None = None
    for record, at in feed:
        watermark = INSTANT_MIN if largest is None else largest - MAX_DISORDER
        largest = at if largest is None else max(largest, at)
        late += [(at, payload(record))] * loop.take(record, at, watermark)
    return Outcome(loop.outcome(summarize), sorted(late))


def run(subject: StageDriver, feed: list[Any], where: list[str], columns: bool) -> None:
    bundle: list[Any] = []
    for row, after in zip(feed, [*where, *["none"] * len(feed)], strict=False):
        bundle.append(row)
        if after == "none":
            continue
        if after == "lost":
            subject.lose(bundle, columns=columns)
        subject.feed(bundle, columns=columns)
        bundle = []
        if after == "restart":
            subject.restart()
        elif after.startswith("fold"):
            subject.fold(behind=after == "fold behind")
    subject.feed(bundle, columns=columns)
    subject.finish()
    subject.check_ended()


def newest_panes(subject: StageDriver, aggregates: dict[str, Aggregate]) -> dict[Name, tuple[Any, ...]]:
    """Newest pane of each window that no other has absorbed; indexes must rise by one (I7)."""
    found: dict[Name, tuple[Any, ...]] = {}
    indexes: dict[Name, int] = {}
    for result in subject.results:
        for name in subject.deleted(result):
            del found[name]
        for records in (result.productions["windows"],) if "windows" in result.productions else ():
            assert records.retracts is None
            for record, at in zip(records.objects(), records.event_times.tolist(), strict=True):
                name = (record.key, record.site, instant(record.window_start), instant(record.window_end))
                assert record.pane_index == indexes.get(name, -1) + 1
                assert at == instant(record.window_end) - 1
                indexes[name] = record.pane_index
                values = tuple(getattr(record, column) for column in [*aggregates, "pane_timing", "late_count"])
                if record.pane_timing == ABSORBED:
                    assert_close(found.pop(name)[:-2], values[:-2])
                else:
                    found[name] = values
    return found


def columnar(
    windows: Windows,
    feed: list[Any],
    where: list[str],
    allowed: int,
    *,
    few: int,
    aggregates: dict[str, Aggregate] = AGGREGATES,
    panes_max: int | None = None,
) -> Outcome:
    logic = WindowedLogic(windows, allowed * us, aggregates, few_records_max=few)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(
        logic, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    subject.panes_max = panes_max or subject.panes_max
    run(subject, feed, where, columns=few == 0)
    panes = newest_panes(subject, aggregates)
    assert table_of(subject) == panes.keys()
    late = [
        row for r in subject.results for part in r.late for row in zip(part.event_times, part.payloads, strict=True)
    ]
    return Outcome(panes, sorted(late))


def table_of(subject: StageDriver) -> set[Name]:
    """Return the final rows of the result table."""
    stored: set[Name] = set()
    for result in subject.results:
        gone = set(subject.deleted(result))
        assert gone <= stored
        stored -= gone
        for part in result.results:
            names = list(zip(*map(column_values, part.columns[:4]), strict=True))
            assert stored.isdisjoint(names) == part.first or not part.first
            stored.update(names)
    return stored


def keyed(
    windows: Windows,
    feed: list[Any],
    where: list[str],
    allowed: int,
    aggregates: dict[str, Aggregate] = AGGREGATES,
) -> Outcome:
    settings = {"to": "windows", "late_to": "late"}
    given = (windows, allowed * us, aggregates, Reading, ("key", "site"))
    by = SessionComputation if isinstance(windows, SessionWindows) else WindowedComputation
    computation = by(*given, **settings)
    outputs = {"windows": RecordType(computation.output), "late": RecordType(Reading)}
    subject = StageDriver(
        ComputationLogic(computation), Reading, key=("key", "site"), outputs=outputs, max_disorder=MAX_DISORDER
    )
    run(subject, feed, where, columns=False)
    assert not [dead_letter for result in subject.results for dead_letter in result.dead_letters]
    late = [(at, payload(record)) for record, at in subject.produced("late")]
    return Outcome(newest_panes(subject, aggregates), sorted(late))


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.late == other.late
    assert one.windows.keys() == other.windows.keys()
    for name, values in one.windows.items():
        assert_close(values, other.windows[name])


def last_place(values: tuple[Any, ...]) -> float:
    """Return the last place of the numbers of a group as doubles, which the deviation is computed of."""
    named = dict(zip(AGGREGATES, values, strict=False))
    return math.ulp(
        max((abs(float(named[n])) for n in ("whole_mean", "high") if named.get(n) is not None), default=2**63)
    )


def assert_close(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Equal, floats to 1e-9; what cancels to what 40 values of up to 1e6, or integers of 64 bits, lose as doubles."""
    for column, mine, theirs in zip([*AGGREGATES, "pane_timing", "late_count"], one, other, strict=False):
        if column in ("p75", "median") and mine is not None and theirs is not None:
            assert math.isclose(mine, theirs, rel_tol=0.0101), (column, one, other)
        elif isinstance(mine, float) and isinstance(theirs, float):
            lost = 1e-3 if mine > 1e6 else 1e-7
            if column == "deviation":
                lost = max(lost, 2 * last_place(one))
            assert math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=lost), (one, other)
        else:
            assert mine == theirs, (one, other)
            assert type(mine) is type(theirs)


@kinds
@settings(max_examples=60, deadline=None)
@given(feed=rows, where=breaks, allowed=lateness)
def test_columns_agree_with_a_plain_loop(windows: Windows, feed: list[Any], where: list[str], allowed: int) -> None:
    assert_same(columnar(windows, feed, where, allowed, few=0), oracle(windows, feed, allowed))


@kinds
@settings(max_examples=60, deadline=None)
@given(feed=rows, where=breaks, allowed=lateness)
def test_few_records_agree_with_a_plain_loop(windows: Windows, feed: list[Any], where: list[str], allowed: int) -> None:
    assert_same(columnar(windows, feed, where, allowed, few=10_000), oracle(windows, feed, allowed))


@kinds
@settings(max_examples=25, deadline=None)
@given(feed=rows, where=breaks, elsewhere=breaks, allowed=lateness)
def test_custom_combiner_agrees_with_a_plain_loop_in_both_executions(
    windows: Windows, feed: list[Any], where: list[str], elsewhere: list[str], allowed: int
) -> None:
    columns = columnar(windows, feed, where, allowed, few=0, aggregates={"sites": Sites()})
    by_key = keyed(windows, feed, elsewhere, allowed, aggregates={"sites": Sites()})
    loop = oracle(windows, feed, allowed, lambda group: (Counter(str(record.text) for record, _ in group.records),))

    assert columns == by_key == loop


@kinds
@settings(max_examples=60, deadline=None)
@given(feed=rows, where=breaks, elsewhere=breaks, allowed=lateness)
def test_windows_by_a_computation_agree_with_columnar_ones(
    windows: Windows, feed: list[Any], where: list[str], elsewhere: list[str], allowed: int
) -> None:
    assert_same(keyed(windows, feed, where, allowed), columnar(windows, feed, elsewhere, allowed, few=3))


@kinds
@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
@settings(max_examples=25, deadline=None)
@given(feed=rows, where=breaks, allowed=lateness, panes_max=st.integers(1, 4))
def test_panes_emitted_in_several_turns_are_the_same(
    windows: Windows, feed: list[Any], where: list[str], allowed: int, panes_max: int, few: int
) -> None:
    outcome = columnar(windows, feed, where, allowed, few=few, panes_max=panes_max)

    assert_same(outcome, oracle(windows, feed, allowed))


@closing
@pytest.mark.parametrize("late", [False, True], ids=["on time", "late records meanwhile"])
@pytest.mark.parametrize("another", [False, True], ids=["same worker", "another after each turn"])
def test_no_turn_exceeds_its_limit_of_panes(windows: Windows, late: bool, another: bool) -> None:
    # All keys of a window are due at once.
    count: dict[str, Aggregate] = {"n": Count()}
    feed = [(Reading(f"k{n}", 1, None, None, None), 1 + n % 2) for n in range(60)]
    last = (Reading("last", 1, None, None, None), 1000)
    behind = [(Reading("k0", 1, None, None, None), 2)] if late else []
    logic = WindowedLogic(windows, 1000 * us, count)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(
        logic, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    subject.panes_max = 7
    subject.feed(feed)
    subject.feed([last])
    turns = 0
    while subject.results[-1].unfinished:
        if another:
            subject.restart()
        subject.feed(behind)
        turns += 1
        assert turns < 200, "it does not end"
    subject.finish()

    wanted = oracle(windows, [*feed, last, *behind * turns], 1000, lambda group: (len(group.records),))
    assert newest_panes(subject, count) == wanted.windows
    counts = [sum(part.count for part in result.results) for result in subject.results]
    assert max(counts) <= 7 + len(behind) * len({name[2:] for name in wanted.windows})
    assert turns >= 60 // 7
