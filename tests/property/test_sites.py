"""Watermarks by site: each site has the windows that it has in a graph of its own, whatever the other sites do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy.graph import Graph
from millpy.ingest.settings import AdvanceWithClock, EventTime, Wait
from millpy.limits import Limits
from millpy.model.stage import UNBOUNDED
from millpy.testing.kit.driver import GraphDriver
from millpy.testing.kit.manual_source import ManualSource
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.aggregates.positional import Last
from millpy.windowing.calendar_windows import CalendarWindows
from millpy.windowing.composite_triggers import AfterWatermark, Repeatedly
from millpy.windowing.pane_rules import DEFAULT_RULES, PaneRules
from millpy.windowing.percentile_trigger import AfterPercentile
from millpy.windowing.predicate_trigger import When
from millpy.windowing.timestamp_combiner import TimestampCombiner
from millpy.windowing.triggers import AfterCount, Every, Trigger
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from millpy.windowing.window_function import WindowFunction
from tests.property.test_pane_triggers import rules_of_panes

EXAMPLES = int(os.environ.get("MILLPY_SITES_EXAMPLES", "15"))
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
SECOND = 1_000_000
BASE = int(NOW.timestamp()) * SECOND
SITES = ("oslo", "rome", "ulm")
PARTITION_OF = {"oslo": "one", "rome": "one", "ulm": "two"}
LIMITS = Limits(lease_ttl_s=1_000_000, progress_every_s=0.001)


def s(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


class Reading(msgspec.Struct):
    site: str
    device: str
    at: int
    value: int


class Trips(WindowFunction):
    """Windows that merge, with a longer gap behind large values."""

    merges = True

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        return [(at, at + s(6 if record.value > 6 else 3))]


class Naps(WindowFunction):
    """Windows around each record that do not merge."""

    def assign(self, record: Any, at: datetime, key: Any) -> list[tuple[datetime, datetime]]:
        return [(at, at + s(3)), (at - s(record.value), at + s(5))]


def large(pane: Any) -> bool:
    return bool(pane.total > 7)


WINDOWS: Sequence[Windows] = (
    Trips(),
    Naps(),
    SessionWindows(s(4), max_records=3),
    FixedWindows(s(10)),
    SlidingWindows(s(10), every=s(5)),
    SlidingWindows(s(10), every=s(4)),
    SessionWindows(s(4)),
    CalendarWindows("hour", zone="Asia/Kolkata"),
)
TRIGGERS: Sequence[Trigger] = (
    AfterWatermark(),
    AfterWatermark(early=Repeatedly(AfterCount(2))),
    AfterWatermark(early=Every(s(7)), late=Repeatedly(AfterCount(2))),
    AfterWatermark(early=AfterPercentile(0.5)),
    Repeatedly(When(large)),
    AfterCount(2),
)


@dataclass(frozen=True)
class Case:
    """What a graph does with its records."""

    windows: Windows
    trigger: Trigger
    mode: Accumulation
    lateness: int
    disorder: int
    idle: AdvanceWithClock | Wait
    intervals: int
    key: tuple[str, ...]
    timestamps: TimestampCombiner = TimestampCombiner.END_OF_WINDOW
    rules: PaneRules = DEFAULT_RULES

    def graph(self, watermark_by: str | None, *partitions: str) -> Graph:
        graph = Graph("sites")
        event_time = EventTime("at", unit="us", max_disorder=s(self.disorder), watermark_by=watermark_by)
        source = ManualSource(*partitions)
        readings = graph.inject("readings", source, schema=Reading, event_time=event_time, idle=self.idle)
        windowed = readings.key_by(*self.key).window(
            self.windows,
            allowed_lateness=s(self.lateness),
            trigger=self.trigger,
            accumulation=self.mode,
            timestamp_combiner=self.timestamps,
            on_time_pane=self.rules.on_time_pane,
            final_pane=self.rules.final_pane,
            pane_info=self.rules.pane_info,
            intervals=self.intervals,
            name="panes",
        )
        windowed.aggregate(n=Count(), total=Sum("value"), last=Last("value")).to_table("panes")
        return graph


cases = st.builds(
    Case,
    windows=st.sampled_from(WINDOWS),
    trigger=st.sampled_from(TRIGGERS),
    mode=st.sampled_from(Accumulation),
    lateness=st.sampled_from([0, 3, 30]),
    disorder=st.sampled_from([0, 4]),
    idle=st.sampled_from([Wait(), AdvanceWithClock(s(5))]),
    intervals=st.integers(1, 3),
    key=st.sampled_from([("device", "site"), ("site",), ("site", "device")]),
    timestamps=st.sampled_from(TimestampCombiner),
    rules=st.just(DEFAULT_RULES) | rules_of_panes,
).filter(lambda case: not (case.windows is WINDOWS[0] and case.trigger.may_finish))
times = st.integers(-60, 12)
one_record = st.tuples(st.sampled_from(SITES), st.sampled_from("xy"), times, st.integers(0, 9))
step = st.one_of(
    st.tuples(st.just("feed"), st.lists(one_record, min_size=1, max_size=6)),
    st.tuples(st.just("feed"), st.lists(one_record, min_size=1, max_size=6)),
    st.tuples(st.just("feed"), st.lists(one_record, min_size=70, max_size=75)),
    st.tuples(st.just("state"), times),
    st.tuples(st.just("clock"), st.sampled_from([1, 6, 30])),
    st.tuples(st.just("crash"), st.none()),
)
steps = st.lists(step, max_size=10)


def readings_of(records: Sequence[tuple[str, str, int, int]], sites: Sequence[str]) -> dict[str, list[Reading]]:
    """Return the readings of some sites, by partition."""
    found: dict[str, list[Reading]] = {}
    for site, device, at, value in records:
        if site in sites:
            found.setdefault(PARTITION_OF[site], []).append(Reading(site, device, BASE + at * SECOND, value))
    return found


def run(driver: GraphDriver, given_steps: Sequence[tuple[str, Any]], sites: Sequence[str]) -> GraphDriver:
    """Drive a graph through the steps, with the records of some sites."""
    for what, how in given_steps:
        if what == "feed":
            for partition, readings in readings_of(how, sites).items():
                driver.feed("readings", readings, partition=partition)
        elif what == "state":
            driver.advance_watermark("readings", BASE + how * SECOND)
        elif what == "clock":
            driver.advance_clock(s(how))
        else:
            driver.crash()
    driver.end()
    return driver


def since_first_record(given_steps: Sequence[tuple[str, Any]], site: str) -> tuple[timedelta, list[tuple[str, Any]]]:
    """Return when a site begins, and the steps without those of the clock before: a site begins with a record."""
    first = next((n for n, (what, how) in enumerate(given_steps) if what == "feed" and site in {r[0] for r in how}), 99)
    began = sum(how for what, how in given_steps[:first] if what == "clock")
    return s(began), [step for n, step in enumerate(given_steps) if n > first or step[0] != "clock"]


def outcome(driver: GraphDriver, key: tuple[str, ...]) -> dict[str, Any]:
    """Return what came out by site: panes in order, rows and late records."""
    place = key.index("site")
    found: dict[str, dict[str, list[Any]]] = {site: {"panes": [], "rows": [], "late": []} for site in SITES}
    for pane in driver.panes("panes"):
        found[pane.key if len(key) == 1 else pane.key[place]]["panes"].append(pane)
    for row in driver.rows("panes"):
        found[row["site"]]["rows"].append(row)
    for late in driver.late_records():
        found[late.record.site]["late"].append(late)
    for of_site in found.values():
        of_site["panes"].sort(key=lambda pane: (str(pane.key), pane.window, pane.index, pane.retraction))
        of_site["late"].sort(key=repr)
    return found


PERCENTILES = Case(
    WINDOWS[3],
    TRIGGERS[3],
    Accumulation.ACCUMULATING,
    3,
    4,
    Wait(),
    1,
    ("site", "device"),
    rules=PaneRules(pane_info=True),
)
LEARNED: list[tuple[str, Any]] = [
    ("feed", [("oslo", "x", at - at % 3, 1) for at in range(-60, -20)]),
    ("feed", [("rome", "x", at - at % 7, 1) for at in range(-60, -21)]),
    ("crash", None),
    ("feed", [("rome", "x", -20, 1), ("oslo", "y", -11, 1)]),
]


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=EXAMPLES, deadline=None)
@example(case=PERCENTILES, given_steps=LEARNED, loses_turns=True, panes_max=UNBOUNDED)
@given(case=cases, given_steps=steps, loses_turns=st.booleans(), panes_max=st.sampled_from([1, 2, UNBOUNDED]))
def test_each_site_has_the_windows_of_a_graph_of_its_own(
    case: Case, given_steps: list[tuple[str, Any]], loses_turns: bool, panes_max: int
) -> None:
    together = GraphDriver(case.graph("site", "one", "two"), now=NOW, limits=LIMITS)
    together.loses_turns = loses_turns
    together._host._steps._budget.panes = panes_max  # type: ignore[misc]

    found = outcome(run(together, given_steps, SITES), case.key)

    for site in SITES:
        began, its_steps = since_first_record(given_steps, site)
        alone = GraphDriver(case.graph(None, PARTITION_OF[site]), now=NOW + began, limits=LIMITS)
        alone.loses_turns = loses_turns
        assert found[site] == outcome(run(alone, its_steps, [site]), case.key)[site]


NAMES = ("a", "b", "c", "d")
placed = st.tuples(
    st.sampled_from(NAMES), st.sampled_from("xy"), times, st.integers(0, 9), st.sampled_from(["one", "two"])
)
cuts = st.lists(st.sampled_from(["bundle", "bundle", "turn", "crash", "lost"]), max_size=25)


def consumed(
    records: Sequence[tuple[str, str, int, int, str]], how: Sequence[str], intervals: int
) -> tuple[list[Any], list[Any]]:
    """Return rows and late records of a graph with two sites of its own, bundled somehow."""
    case = Case(
        FixedWindows(s(10)), AfterWatermark(), Accumulation.ACCUMULATING, 3, 4, Wait(), intervals, ("site", "device")
    )
    limits = Limits(lease_ttl_s=1_000_000, sites_max=2)
    driver = GraphDriver(case.graph("site", "one", "two"), now=NOW, limits=limits)
    waiting: list[Reading] = []
    for number, (site, device, at, value, partition) in enumerate(records):
        waiting.append(Reading(site, device, BASE + at * SECOND, value))
        cut = how[number] if number < len(how) else "turn"
        follows = records[number + 1][4] if number + 1 < len(records) else ""
        if cut == "bundle" and follows == partition:
            continue
        driver.loses_turns = cut == "lost"
        driver.feed("readings", waiting, partition=partition)
        waiting = []
        if cut == "crash":
            driver.crash()
    driver.end()
    rows = [(row["site"], row["device"], row["window_start"], row["n"], row["total"]) for row in driver.rows("panes")]
    late = [(late.record, late.watermark) for late in driver.late_records()]
    return sorted(rows), sorted(late, key=repr)


@settings(max_examples=EXAMPLES, deadline=None)
@given(records=st.lists(placed, max_size=25), how=cuts, intervals=st.integers(1, 3))
def test_bundles_and_crashes_do_not_show_in_sites_of_several_partitions_and_beyond_the_bound(
    records: list[tuple[str, str, int, int, str]], how: list[str], intervals: int
) -> None:
    assert consumed(records, how, intervals) == consumed(records, (), 1)
