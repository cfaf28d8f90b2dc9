"""Windows over windows with retractions equal a batch at every quiet moment, in any order, bundles and crashes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    Combiner,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    Mean,
    SessionWindows,
    SlidingWindows,
    Stream,
    Sum,
    Variance,
)
from millpy.hosting.host import HostedGraph
from millpy.limits import Limits
from millpy.model.time import Instant, instant, to_datetime
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.state import MemoryState
from millpy.testing.clock import ManualClock
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.group_by import Groups
from millpy.windowing.panes import Emission
from millpy.windowing.window import Windows
from millpy.windowing.window_function import WindowFunction
from tests.feed import Feed

DISORDER, LATE, SIZE, GAP = 5, 90, 10, 4
START_US = 1_700_000_000_000_000
LIMITS = Limits(lease_ttl_s=1_000_000, progress_every_s=0.001)


def us(microseconds: int) -> timedelta:
    return timedelta(microseconds=microseconds)


INNER: dict[str, Windows] = {
    "fixed": FixedWindows(us(SIZE)),
    "slices": SlidingWindows(us(SIZE), every=us(SIZE // 2)),
    "sliding": SlidingWindows(us(SIZE), every=us(4)),
    "sessions": SessionWindows(us(GAP)),
}
OVERLAPPING = SlidingWindows(us(40), every=us(15))


class Overlapping(WindowFunction):
    """The same windows, by a user's function."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        starts = range(instant(at) // 15 * 15, instant(at) - 40, -15)
        return [(to_datetime(Instant(start)), to_datetime(Instant(start + 40))) for start in starts]


OUTER: dict[str, tuple[Windows, FixedWindows | SlidingWindows]] = {
    "fixed": (FixedWindows(us(40)), FixedWindows(us(40))),
    "sliding": (SlidingWindows(us(40), every=us(20)), SlidingWindows(us(40), every=us(20))),
    "overlapping": (OVERLAPPING, OVERLAPPING),
    "function": (Overlapping(), OVERLAPPING),
}
"""Windows, and those by which a batch counts again."""


class Reading(msgspec.Struct):
    device: str
    group: str
    at: int
    value: float


class Part(msgspec.Struct):
    """A pane behind operators. It lacks the window and the index, by which a pane could be told."""

    device: str
    group: str
    n: int
    total: float | None


def to_part(pane: Any) -> Part:
    return Part(pane.device, pane.group, pane.n, pane.total)


def is_kept(pane: Any) -> bool:
    """Reject some panes by what changes with the pane, so that a pane and its successor part ways."""
    return bool(pane.n % 3 and pane.pane_index % 4 != 2)


def several(part: Part) -> list[Part]:
    return [msgspec.structs.replace(part, n=part.n + place) for place in range(part.n % 3)]


def branch(part: Part) -> str | None:
    return [None, "left", "right"][part.n % 3]


def operated(panes: Stream) -> Stream:
    parts = panes.filter(is_kept).map(to_part, Part).flat_map(several)
    branches = parts.split(branch, into=["left", "right"])
    return branches["left"].union(branches["right"], branches["left"])


def operated_rows(pane: Any) -> Iterator[Part]:
    """Do the same with one pane. A map refuses infinities, in a pane and in its retraction."""
    for part in several(to_part(pane)) if is_kept(pane) and math.isfinite(pane.total) else ():
        yield from {"left": [part, part], "right": [part], None: []}[branch(part)]


def in_columns(panes: Stream) -> Stream:
    kept = panes.filter(lambda batch: np.asarray(batch["n"]) % 2 == 1, columns=True)
    return kept.map(lambda batch: {name: batch[name] for name in ("device", "group", "n", "total")}, Part, columns=True)


class Named(Part):
    """A part with the name of its window."""

    name: str = ""


def to_named(pane: Any) -> Named:
    name = f"{pane.group} {pane.device} {pane.window_start} {pane.window_end}"
    return Named(pane.device, pane.group, pane.n, pane.total, name)


def once(panes: Stream) -> Stream:
    """Let equal records through once: each pane comes twice."""
    named = panes.map(to_named, Named)
    return named.union(named).deduplicate("name", us(1_000), name="once", intervals=2)


def finite(pane: Any) -> Iterator[Part]:
    return iter([to_part(pane)] if math.isfinite(pane.total) else [])


BETWEEN: dict[str, tuple[Callable[[Stream], Stream], Callable[[Any], Iterator[Any]]]] = {
    "nothing": (lambda panes: panes, lambda pane: iter([pane])),
    "operators": (operated, operated_rows),
    "columns": (in_columns, lambda pane: iter([to_part(pane)] if pane.n % 2 and math.isfinite(pane.total) else [])),
    "deduplicate": (once, finite),
}


class Sizes(Combiner[dict[str, int]]):
    """How many panes had each number of records; without any it has no result."""

    accumulator = dict[str, int]
    result_type = dict[str, int]

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], record: Any) -> dict[str, int]:
        return self.merge(accumulator, {str(record.n): 1})

    def subtract(self, accumulator: dict[str, int], record: Any) -> dict[str, int]:
        return self.merge(accumulator, {str(record.n): -1})

    def merge(self, one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        found = {size: one.get(size, 0) + other.get(size, 0) for size in one | other}
        return {size: count for size, count in found.items() if count}

    def result(self, accumulator: dict[str, int]) -> dict[str, int]:
        if not accumulator:
            raise ValueError("an empty window has no sizes")
        return dict(sorted(accumulator.items()))


def graph_of(inner: str, between: str, outer: str, intervals: int, late: int = LATE) -> Graph:
    graph = Graph("levels")
    event_time = EventTime("at", unit="us", max_disorder=us(DISORDER))
    readings = graph.inject("readings", Feed(), schema=Reading, event_time=event_time)
    windows = readings.key_by("group", "device").window(
        INNER[inner],
        allowed_lateness=us(LATE),
        accumulation=Accumulation.RETRACTING,
        name="inner",
        intervals=intervals,
    )
    panes = windows.aggregate(n=Count(), total=Sum("value")).to_table("inner")
    middle = BETWEEN[between][0](panes).key_by("group")
    totals = middle.window(
        OUTER[outer][0],
        allowed_lateness=us(late),
        accumulation=Accumulation.RETRACTING,
        name="outer",
        intervals=intervals,
    ).aggregate(
        parts=Count(),
        n=Sum("n"),
        total=Sum("total"),
        mean=Mean("n"),
        spread=Variance("total"),
        **({"sizes": Sizes()} if intervals == 3 else {}),  # user code takes another path
    )
    totals.to_table("outer")
    days = totals.filter(lambda pane: pane.parts != 1).key_by("group")
    days.window(FixedWindows(us(80)), allowed_lateness=us(LATE)).aggregate(
        windows=Count(), parts=Sum("parts"), total=Sum("total")
    ).to_table("days")
    return graph


@dataclass(eq=False)
class Window:
    start: int
    end: int
    values: list[float] = field(default_factory=list)


class PlainLoop:
    """The inner windows by a plain loop, one record at a time."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self.found: dict[tuple[str, str], list[Window]] = {}
        self.newest: int | None = None

    @property
    def watermark(self) -> int:
        return -(10**9) if self.newest is None else self.newest - DISORDER

    def take(self, reading: Reading) -> None:
        mine = self.found.setdefault((reading.group, reading.device), [])
        if isinstance(self.windows, SessionWindows):
            self._into_session(mine, reading)
        else:
            every, size = self.windows.every_us, self.windows.size_us
            start = reading.at // every * every
            while start > reading.at - size:
                self._into(mine, start, start + size, reading)
                start -= every
        self.newest = reading.at if self.newest is None else max(self.newest, reading.at)

    def _into(self, mine: list[Window], start: int, end: int, reading: Reading) -> None:
        if self.watermark >= end + LATE:
            return
        known = [window for window in mine if window.start == start]
        if not known:
            mine.append(Window(start, end))
        (known or mine[-1:])[0].values.append(reading.value)

    def _into_session(self, mine: list[Window], reading: Reading) -> None:
        grown = Window(reading.at, reading.at + GAP)
        for window in list(mine):
            if window.start < grown.end and reading.at < window.end and self.watermark < window.end + LATE:
                mine.remove(window)
                grown = Window(
                    min(grown.start, window.start), max(grown.end, window.end), [*window.values, *grown.values]
                )
        if self.watermark < grown.end + LATE:
            mine.append(Window(grown.start, grown.end, [*grown.values, reading.value]))

    def fired(self) -> dict[tuple[str, str, int, int], list[float]]:
        return {
            (*key, window.start, window.end): window.values
            for key, windows in self.found.items()
            for window in windows
            if window.end <= self.watermark
        }


Row = Mapping[str, Any]
PARTS = ("parts", "n", "total", "mean", "spread", "sizes")


def starts_of(windows: FixedWindows | SlidingWindows, at: int) -> Iterator[int]:
    start = at // windows.every_us * windows.every_us
    while start > at - windows.size_us:
        yield start
        start -= windows.every_us


def rounded(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def total_of(values: Sequence[float]) -> float | None:
    unusual = {value for value in values if math.isinf(value)}
    if any(map(math.isnan, values)) or len(unusual) > 1:
        return math.nan
    return unusual.pop() if unusual else rounded(sum(map(Fraction, values), Fraction(0))) if values else None


def spread_of(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    if not all(map(math.isfinite, values)):
        return math.nan
    exact = list(map(Fraction, values))
    mean = sum(exact, Fraction(0)) / len(exact)
    found = rounded(sum(((value - mean) ** 2 for value in exact), Fraction(0)) / (len(exact) - 1))
    return found if math.isfinite(found) else math.nan


def batch(panes: Sequence[Row], between: str, outer: str, watermark: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    """The outer windows, computed at once from the panes that the table has now."""
    windows, groups = OUTER[outer][1], dict[tuple[str, int], list[Any]]()
    for row in panes:
        pane = msgspec.convert(dict(row), type=msgspec.defstruct("Pane", [(name, Any) for name in row]))
        for start in starts_of(windows, row["window_end"] - 1):
            for part in BETWEEN[between][1](pane):
                groups.setdefault((row["group"], start), []).append(part)
    return {
        name: (
            len(parts),
            sum(part.n for part in parts),
            total_of([part.total for part in parts]),
            rounded(Fraction(sum(part.n for part in parts), len(parts))),
            spread_of([part.total for part in parts]),
            dict(sorted(Counter(str(part.n) for part in parts).items())),
        )
        for name, parts in groups.items()
        if name[1] + windows.size_us <= watermark
    }


def days(rows: Sequence[Row], watermark: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    """The third level, from the table of the second."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row["parts"] != 1 and (row["window_end"] - 1) // 80 * 80 + 80 <= watermark:
            found.setdefault((row["group"], (row["window_end"] - 1) // 80 * 80), []).append(row)
    return {
        name: (len(mine), sum(row["parts"] for row in mine), total_of([row["total"] for row in mine]))
        for name, mine in found.items()
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


@dataclass(frozen=True)
class Turn:
    """A bundle, and the crash before it: none, one between two turns, or one before the commit."""

    readings: list[Reading]
    crash: str = "no"


class Levels:
    """A hosted graph of windows over windows, and its oracle."""

    def __init__(self, inner: str, between: str, outer: str, intervals: int, late: int = LATE) -> None:
        self.clock = ManualClock(START_US)
        self.database = MemoryDatabase(self.clock)
        graph = graph_of(inner, between, outer, intervals, late)
        self.host = HostedGraph(graph, MemoryState(self.database), LIMITS, self.clock.now_us())
        self.loop = PlainLoop(INNER[inner])
        self.between, self.outer = between, outer
        self.amended = False

    def rows(self, table: str) -> list[dict[str, Any]]:
        (found,) = [table_ for table_ in self.database.tables.values() if table_.spec.name == table]
        return [dict(row) for row in found.rows.values()]

    def turn(self, turn: Turn) -> None:
        if turn.crash == "between":
            self.host.restart()
        if turn.crash == "stepped":
            self.host.step({})
            self.host.restart()
        self.clock.advance(1)
        self.host.now_us = self.clock.now_us()
        if turn.readings:
            self.host.feed("readings", list(map(msgspec.json.encode, turn.readings)))
        for reading in turn.readings:
            self.loop.take(reading)

    def check(self) -> None:
        """Compare all tables with the batch."""
        panes = self.rows("inner")
        wanted = self.loop.fired()
        found = {(r["group"], r["device"], r["window_start"], r["window_end"]): r for r in panes}
        assert found.keys() == wanted.keys()
        assert all(found[name]["n"] == len(values) for name, values in wanted.items())
        totals = self.rows("outer")
        self._compare(totals, PARTS, batch(panes, self.between, self.outer, self.loop.watermark))
        self._compare(self.rows("days"), ("windows", "parts", "total"), days(totals, self.loop.watermark))
        assert self.database.accounting(1).balanced
        assert not self.database.late_records or all(
            late.computation == "inner" and not any(late.retracts) for _, _, late in self.database.late_records
        )
        assert not self.database.dead_letters or self.between != "nothing"
        self.amended |= any(row["pane_index"] for row in totals)

    def _compare(
        self, rows: Sequence[Row], columns: Sequence[str], wanted: Mapping[tuple[str, int], tuple[Any, ...]]
    ) -> None:
        found = {
            (row["group"], row["window_start"]): tuple(row[name] for name in columns if name in row) for row in rows
        }
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert all(map(same, found[name], values)), (name, found[name], values)


def play(levels: Levels, script: Sequence[Turn]) -> None:
    for turn in script:
        levels.turn(turn)
        levels.check()
    levels.clock.advance(1)
    levels.host.now_us = levels.clock.now_us()
    levels.host.end("readings")
    levels.loop.newest = 10**9
    levels.check()


VALUES = st.sampled_from([0.0, -0.0, 1.5, 0.1, 1e16, -1e16, 1.7e308, -1.7e308, 5e-324]) | st.floats(-1e6, 1e6)
rows = st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(-45, 8), VALUES)
crashes = st.sampled_from(["no", "no", "no", "between", "stepped"])
scripts = st.lists(st.tuples(st.lists(rows, max_size=12), crashes), min_size=1, max_size=12)


def scripted(drawn: Sequence[tuple[list[tuple[str, str, int, float]], str]]) -> list[Turn]:
    """Turns whose event times rise, with late records for windows that have fired."""
    script, at = [], 0
    for readings, crash in drawn:
        at += 9
        made = [Reading(device, group, max(0, at + back), value) for device, group, back, value in readings]
        script.append(Turn(made, crash))
    return script


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("inner", INNER)
@settings(max_examples=6, deadline=None)
@given(drawn=scripts, outer=st.sampled_from(list(OUTER)), intervals=st.sampled_from([1, 3]))
def test_windows_over_windows_are_those_of_a_batch(
    inner: str, between: str, drawn: Any, outer: str, intervals: int
) -> None:
    play(Levels(inner, between, outer, intervals), scripted(drawn))


@pytest.mark.parametrize("inner", INNER)
@settings(max_examples=6, deadline=None)
@given(drawn=scripts, late=st.sampled_from([0, 10, 30]))
def test_a_retraction_is_late_where_its_record_would_be_late_now(inner: str, drawn: Any, late: int) -> None:
    """Outer windows that end before the inner ones: they keep what they have, and everything is counted."""
    levels = Levels(inner, "nothing", "sliding", 2, late)
    for turn in scripted(drawn):
        levels.turn(turn)
        assert levels.database.accounting(1).balanced
        assert all(row["parts"] > 0 and row["n"] > 0 for row in levels.rows("outer"))
    levels.host.end("readings")
    assert levels.database.accounting(1).balanced
    assert all(row["parts"] > 0 and row["n"] > 0 for row in levels.rows("outer"))


def of_seed(seed: int) -> list[Turn]:
    rng = random.Random(seed)
    drawn = []
    for _ in range(10):
        readings = [
            (rng.choice("abc"), rng.choice("xy"), rng.choice([0, 0, 3, -20, -45]), rng.choice([1.0, 2.5, -0.1]))
            for _ in range(rng.randrange(80 if seed % 2 else 12))
        ]
        drawn.append((readings, rng.choice(["no", "between", "stepped"])))
    return scripted(drawn)


@pytest.mark.parametrize("inner", INNER)
def test_large_bundles_are_those_of_a_batch(inner: str) -> None:
    """More records than are added one by one; and the scripts of the canaries are about something."""
    for seed in range(4):
        levels = Levels(inner, "operators" if seed == 3 else "nothing", "sliding", 2)
        play(levels, of_seed(seed))
        assert levels.amended


def amending(times: Sequence[int], count: int = 1, crash: str = "no") -> list[Turn]:
    """Turns that each bring a device's next reading: one in time, then late ones."""
    first = Turn([Reading("a", "x", times[0], 1.0), Reading("b", "y", 90, 1.0)])
    return [first, *(Turn([Reading("a", "x", at, 1.0)] * count, crash) for at in times[1:])]


EMPTIED = amending([1, 2, 3, 4, 4])
"""A pane that the filter lets through, with 1, 2, 4 and 5 readings, and rejects, with 3."""


@pytest.mark.parametrize("crash", ["no", "between", "stepped"])
@pytest.mark.parametrize("intervals", [1, 3])
def test_a_window_whose_every_record_is_retracted_loses_its_row_and_gets_it_back(intervals: int, crash: str) -> None:
    levels = Levels("fixed", "operators", "fixed", intervals)
    found = []
    for turn in amending([1, 2, 3, 4, 4], crash=crash):
        levels.turn(turn)
        levels.check()
        found.append([(row["parts"], row["pane_index"]) for row in levels.rows("outer") if row["group"] == "x"])

    assert found == [[(2, 0)], [(1, 1)], [], [(2, 2)], [(1, 3)]]


def test_a_record_and_its_retraction_before_the_window_fires_leave_no_row() -> None:
    """The inner window fires and is amended before the outer one ends."""
    levels = Levels("fixed", "operators", "fixed", 1)
    script = [Turn([Reading("a", "x", 1, 1.0), Reading("b", "y", 20, 1.0)]), Turn([Reading("a", "x", 2, 1.0)] * 2)]
    for turn in [*script, Turn([Reading("b", "y", 60, 1.0)])]:
        levels.turn(turn)
        levels.check()

    assert [row["group"] for row in levels.rows("outer")] == ["y"]
    for at in (3, 4):  # the filter rejects the third pane, too
        levels.turn(Turn([Reading("a", "x", at, 1.0)]))
        levels.check()
    assert [(r["parts"], r["pane_index"]) for r in levels.rows("outer") if r["group"] == "x"] == [(1, 0)]


def added(_: Any) -> Any:
    return AccumulatorSet.add


def all_values(_: Any) -> Any:
    return lambda self, rows: np.ones(len(rows), np.int64)


def dropped(_: Any) -> Any:
    return lambda self, panes: None


def newest_content(retract: Any) -> Any:
    """Retract what the pane has become, as if nothing had been kept."""

    def retracted(self: Emission, panes: Any) -> None:
        for *_, pane in panes:
            pane.kept = None
        retract(self, panes)

    return retracted


CANARIES: dict[str, list[tuple[Any, str, Any]]] = {
    "a retraction is added": [(AccumulatorSet, "subtract", added), (Groups, "signs", all_values)],
    "a retraction is dropped": [(Emission, "_retract", dropped)],
    "the new pane is retracted": [(Emission, "_retract", newest_content)],
    "an empty window keeps its row": [(AccumulatorSet, "is_empty", lambda _: lambda self, values: False)],
}


@pytest.mark.parametrize("canary", CANARIES)
def test_a_broken_engine_is_caught(canary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name, broken in CANARIES[canary]:
        monkeypatch.setattr(place, name, broken(getattr(place, name)))

    with pytest.raises((AssertionError, ZeroDivisionError)):
        play(Levels("fixed", "operators", "fixed", 2), EMPTIED)
        for seed in range(6):
            for inner in ("fixed", "sessions"):
                play(Levels(inner, "operators", "fixed", 2), of_seed(seed))
