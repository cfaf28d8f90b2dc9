"""Per-key tools equal plain loops over the sorted records: in any order and bundles, over crashes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    Pattern,
    SlidingWindows,
    Sum,
    seconds,
)
from millpy.hosting.host import HostBudget
from millpy.model.stage import UNBOUNDED
from millpy.operators.pattern import AfterMatch, PatternStep
from millpy.testing import GraphDriver, ManualSource

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
DISORDER = 5


class Event(msgspec.Struct, frozen=True):
    device: str
    at: datetime
    number: int
    kind: str
    value: float | None
    counter: int

    @property
    def second(self) -> int:
        return (self.at - NOON) // timedelta(seconds=1)


def kind_is(kind: str) -> Callable[[Event], bool]:
    return lambda event: kind in event.kind


A, B, C = map(kind_is, "abc")
PATTERNS = {
    "two": Pattern("a", A).then("b", B, within=seconds(6)).unless("c", C),
    "three": Pattern("a", A).then("b", B, within=seconds(4)).then("c", C, within=seconds(7)),
    "absent": Pattern("a", A).then_not("b", B, within=seconds(6)),
    "then_absent": Pattern("a", A).then("b", B, within=seconds(6)).then_not("c", C, within=seconds(3)),
    "same": Pattern("a", A).then("again", A, within=seconds(9)).unless("c", C).unless("b", B),
}
METHODS = ("previous", "linear", "null")
MODES: tuple[AfterMatch, ...] = ("past_last", "to_next")
GRIDS = {"coarse": (3, 10, 1), "fine": (1, 45, 0)}
"""Name -> (every, limit, offset), in seconds. A gap of the fine grid has more points than are emitted at once."""


def graph_of_tools() -> Graph:
    graph = Graph("tools")
    event_time = EventTime("at", max_disorder=seconds(DISORDER))
    events = graph.inject("events", ManualSource(), schema=Event, event_time=event_time)
    ordered = events.key_by("device").in_order(name="ordered", intervals=2)
    for name, pattern in PATTERNS.items():
        for mode in MODES:
            ordered.match(pattern, name=f"{name}_{mode}", after_match=mode, intervals=2)
    ordered.changes("value", by=1, max_silence=seconds(12), name="by_1", intervals=1)
    ordered.changes("value", by_ratio=0.5, name="by_half", intervals=1)
    ordered.changes("kind", name="of_kind", intervals=1)
    ordered.rates("counter", wraps_at=10, max_gap=seconds(20), name="rates", intervals=1)
    for name, (every, limit, offset) in GRIDS.items():
        for method in METHODS:
            ordered.fill_gaps(
                "value",
                every=seconds(every),
                limit=seconds(limit),
                offset=seconds(offset),
                method=method,
                name=f"{name}_{method}",
                intervals=1,
            )
    return graph


def count_in_time(graph: Graph, name: str) -> None:
    """Count the records of a step by second: one that is late would be among the late records."""
    stream = next(stream for stream in graph.streams() if stream.name == name)
    stream.key_by("device").window(FixedWindows(seconds(1)), name=f"{name}_counts").aggregate(n=Count())


@st.composite
def events_of(draw: st.DrawFn) -> list[Event]:
    """Events, most of them within the bound of the disorder."""
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["x", "x", "y"]),
                st.one_of(st.integers(0, 3), st.integers(0, 14)),  # how far the time moves on
                st.integers(0, DISORDER + 1),  # how far behind it is
                st.sampled_from(["a", "a", "b", "b", "c", "ab", "bc", ""]),
                st.sampled_from([None, 0.0, 1.0, 1.5, 2.5, -3.0, 10.0, -0.5]),
                st.integers(0, 11),
            ),
            min_size=1,
            max_size=25,
        )
    )
    now, found = 0, []
    for number, (device, step, behind, kind, value, counter) in enumerate(rows):
        now += step
        found.append(Event(device, NOON + seconds(now - behind), number, kind, value, counter))
    return found


def in_order(events: Sequence[Event]) -> dict[str, list[Event]]:
    """The events of each key that are not late, sorted."""
    watermark, found = -math.inf, []
    for event in events:
        if event.second >= watermark:
            found.append(event)
        watermark = max(watermark, event.second - DISORDER)
    found.sort(key=lambda event: event.second)
    return {device: [event for event in found if event.device == device] for device in "xy"}


# Plain loops.


def outcome(steps: Sequence[PatternStep], events: Sequence[Event], start: int) -> tuple[float, int, list[int]] | None:
    """What becomes of a match that begins with an event: (place in the order, time, its events), None without one."""
    taken = [start]
    for step in steps[1:]:
        assert step.within is not None
        until = events[taken[-1]].second + step.within // timedelta(seconds=1)
        reach = [place for place in range(taken[-1] + 1, len(events)) if events[place].second <= until]
        hit = next((place for place in reach if step.condition(events[place])), None)
        if step.absent:
            after = bisect_right([event.second for event in events], until)
            return (after - 0.5, until, taken) if hit is None else None
        if hit is None:
            return None
        if any(own(events[place]) for _, own in step.without for place in reach if place < hit):
            return None
        taken.append(hit)
    return float(taken[-1]), events[taken[-1]].second, taken


def matches(pattern: Pattern, mode: str, events: Sequence[Event]) -> list[tuple[int, list[int]]]:
    """(Time, numbers of the events) of all matches."""
    starts = [place for place, event in enumerate(events) if pattern.steps[0].condition(event)]
    found = [(made, start) for start in starts if (made := outcome(pattern.steps, events, start)) is not None]
    if mode == "past_last":
        chosen = []
        while found:
            first = min(found, key=lambda each: (each[0][0], each[0][1], each[1]))
            chosen.append(first)
            found = [each for each in found if each[1] > first[0][0]]
        found = chosen
    return sorted((at, [events[place].number for place in taken]) for (_, at, taken), _ in found)


def changed(events: Sequence[Event], differs: Callable[[Event, Event], bool], silence: float) -> list[int]:
    last, found = None, []
    for event in events:
        if last is None or event.second - last.second >= silence or differs(last, event):
            last = event
            found.append(event.number)
    return found


def beyond(one: float | None, other: float | None, bound: Callable[[float], float]) -> bool:
    if one is None or other is None:
        return one is not other
    return abs(other - one) > bound(one)


def rates(events: Sequence[Event]) -> list[tuple[int, int, float, bool]]:
    readings: list[Event] = []
    for event in events:
        if event.counter < 10 and (not readings or readings[-1].second < event.second):
            readings.append(event)
    found = []
    for one, other in pairwise(readings):
        length = other.second - one.second
        if length > 20:
            continue
        rise, reset = other.counter - one.counter, False
        if rise < 0:
            rise, reset = (rise + 10, False) if rise + 10 <= 5 else (other.counter, True)
        found.append((other.second, rise, rise / length, reset))
    return found


def grid(events: Sequence[Event], method: str, every: int, limit: int, offset: int) -> list[tuple[int, str, bool]]:
    """(Point, value as text, filled) for all points."""
    times = [event.second for event in events]
    found: list[tuple[int, str, bool]] = []
    if not times:
        return found
    for point in range(offset - 90, times[-1] + limit + 1, every):
        place = bisect_right(times, point) - 1
        if place < 0 or point > times[place] + limit:
            continue
        last, filled = events[place], times[place] <= point - every
        value = last.value
        if method == "null" and filled:
            value = None
        if method == "linear" and point > times[place]:
            if place + 1 == len(times) or times[place + 1] - times[place] > limit:
                continue
            after = events[place + 1]
            if value is None or after.value is None:
                value = None
            else:
                part = (point - times[place]) / (times[place + 1] - times[place])
                value = value * (1 - part) + after.value * part
        found.append((point, repr(value), filled))
    return found


def of_device(driver: GraphDriver, stream: str, device: str) -> list[tuple[int, Any]]:
    records = [each for each in driver.timed_records(stream) if each[1].device == device]
    return [((at - NOON) // timedelta(seconds=1), record) for at, record in records]


def split_turns(driver: GraphDriver, data: st.DataObject) -> None:
    """Bound what a turn of the driver may do, as a worker does."""
    budget = driver._host._steps._budget
    assert isinstance(budget, HostBudget)
    budget.panes = data.draw(st.sampled_from([1, 3, UNBOUNDED]), "panes of a turn")
    budget.timers = data.draw(st.sampled_from([1, 3, UNBOUNDED]), "timers of a turn")


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(events=events_of(), data=st.data())
def test_tools_equal_plain_loops(events: list[Event], data: st.DataObject) -> None:
    graph = graph_of_tools()
    for name in (
        "absent_to_next",
        "then_absent_past_last",
        "by_1",
        "rates",
        "coarse_linear",
        "fine_linear",
        "fine_null",
    ):
        count_in_time(graph, name)
    driver = GraphDriver(graph)
    split_turns(driver, data)

    start = 0
    while start < len(events):
        end = start + data.draw(st.integers(1, 8), "bundle")
        driver.loses_turns = data.draw(st.booleans(), "loses turns")
        driver.feed("events", events[start:end])
        if data.draw(st.booleans(), "crash"):
            driver.crash()
        start = end
    driver.end()

    driver.check_accounting()
    sorted_events = in_order(events)
    kept = sum(map(len, sorted_events.values()))
    late = driver.late_records()
    assert len(late) == len(events) - kept, "a tool has made a late record"
    assert {record.computation for record in late} <= {"ordered"}
    assert {letter.computation for letter in driver.dead_letters()} <= {"rates"}
    assert len(driver.dead_letters()) == sum(event.counter >= 10 for own in sorted_events.values() for event in own)
    for device, mine in sorted_events.items():
        assert [record.number for _, record in of_device(driver, "ordered", device)] == [e.number for e in mine]
        for name, pattern in PATTERNS.items():
            names = [step.name for step in pattern.steps if not step.absent]
            for mode in MODES:
                found = [
                    (at, [getattr(record, step).number for step in names])
                    for at, record in of_device(driver, f"{name}_{mode}", device)
                ]
                assert sorted(found) == matches(pattern, mode, mine), (name, mode, device)
        assert [r.number for _, r in of_device(driver, "by_1", device)] == changed(
            mine, lambda one, other: beyond(one.value, other.value, lambda _: 1), 12
        )
        assert [r.number for _, r in of_device(driver, "by_half", device)] == changed(
            mine, lambda one, other: beyond(one.value, other.value, lambda value: abs(value) / 2), math.inf
        )
        assert [r.number for _, r in of_device(driver, "of_kind", device)] == changed(
            mine, lambda one, other: one.kind != other.kind, math.inf
        )
        assert [
            (at, record.increase, record.per_second, record.reset) for at, record in of_device(driver, "rates", device)
        ] == rates(mine)
        for name, method in product(GRIDS, METHODS):
            made = of_device(driver, f"{name}_{method}", device)
            expected = grid(mine, method, *GRIDS[name])
            assert [(at, repr(record.value), record.filled) for at, record in made] == expected, (name, method)
            assert all((record.at - NOON) // timedelta(seconds=1) == at for at, record in made)
    for name, part in (*product(GRIDS, METHODS), *product(PATTERNS, MODES)):
        name = f"{name}_{part}"
        assert driver.state(name) == {} == driver.timers(name), f"{name} keeps state when all time has passed"


def test_the_oracle_is_not_empty() -> None:
    events = [
        Event("x", NOON + seconds(at), at, kind, 1.0, at) for at, kind in ((0, "a"), (1, "b"), (2, "c"), (9, "a"))
    ]
    assert matches(PATTERNS["two"], "past_last", events) == [(1, [0, 1])]
    assert matches(PATTERNS["absent"], "past_last", events) == [(15, [9])]
    assert [point for point, _, _ in grid(events, "previous", 3, 10, 1)] == [1, 4, 7, 10, 13, 16, 19]


class Post(msgspec.Struct, frozen=True):
    topic: str
    region: str
    at: datetime
    weight: int


WINDOWS = {
    "fixed": FixedWindows(seconds(10)),
    "sliding": SlidingWindows(seconds(10), every=seconds(4), offset=seconds(1)),
}
LATENESS = 8


def graph_of_rankings(early: bool) -> Graph:
    graph = Graph("rankings")
    event_time = EventTime("at", max_disorder=seconds(DISORDER))
    posts = graph.inject("posts", ManualSource(), schema=Post, event_time=event_time)
    for kind, windows in WINDOWS.items():
        counts = (
            posts.key_by("topic", "region")
            .window(
                windows,
                allowed_lateness=seconds(LATENESS),
                trigger=AfterWatermark(early=AfterCount(1)) if early else AfterWatermark(),
                accumulation=Accumulation.RETRACTING,
                name=f"{kind}_counts",
                intervals=2,
            )
            .aggregate(total=Sum("weight"))
        )
        counts.top_n(2, by="total", name=f"{kind}_top", parts=3, intervals=2).to_table(f"{kind}_top")
        counts.top_n(1, by="total", name=f"{kind}_least", per="region", smallest=True, intervals=1).to_table(
            f"{kind}_least"
        )
    return graph


@settings(max_examples=10, deadline=None, phases=[Phase.generate])
@given(
    posts=st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["eu", "us"]), st.integers(0, 40), st.integers(-2, 3)),
        max_size=20,
    ),
    data=st.data(),
)
def test_rankings_are_right_at_every_quiet_moment(posts: list[tuple[str, str, int, int]], data: st.DataObject) -> None:
    early = data.draw(st.booleans(), "early")
    driver = GraphDriver(graph_of_rankings(early))
    split_turns(driver, data)
    start = 0
    while start < len(posts):
        end = start + data.draw(st.integers(1, 7), "bundle")
        driver.loses_turns = data.draw(st.booleans(), "loses turns")
        driver.feed("posts", [Post(topic, region, NOON + seconds(at), n) for topic, region, at, n in posts[start:end]])
        if data.draw(st.booleans(), "crash"):
            driver.crash()
        start = end
        for kind in WINDOWS:
            _check_rankings(driver, kind)
    driver.end()
    for kind in WINDOWS:
        _check_rankings(driver, kind)
    assert {late.computation for late in driver.late_records()} <= {f"{kind}_counts" for kind in WINDOWS}
    assert not driver.dead_letters()
    driver.check_accounting()


def _check_rankings(driver: GraphDriver, kind: str) -> None:
    """Compare the tables with the newest panes of the step that is ranked."""
    newest = {}
    for pane in driver.panes(f"{kind}_counts"):
        newest[(pane.key, pane.window[1])] = None if pane.retraction else pane
    best: dict[datetime, list[Any]] = {}
    least: dict[tuple[str, datetime], list[Any]] = {}
    for (key, end), pane in newest.items():
        if pane is not None and isinstance(key, tuple):
            topic, region = key
            total = pane.values["total"]
            best.setdefault(end, []).append((-total, topic, region))
            least.setdefault((region, end), []).append((total, topic))
    rows = {
        row["window_end"]: [(-each["total"], each["topic"], each["region"]) for each in row["top"]]
        for row in driver.rows(f"{kind}_top")
    }
    assert rows == {end: sorted(own)[:2] for end, own in best.items()}
    rows_of = {
        (row["region"], row["window_end"]): [(each["total"], each["topic"]) for each in row["top"]]
        for row in driver.rows(f"{kind}_least")
    }
    assert rows_of == {group: sorted(own)[:1] for group, own in least.items()}
