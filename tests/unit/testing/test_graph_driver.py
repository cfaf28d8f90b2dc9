"""A `GraphDriver` runs a whole graph by hand, and shows what it has committed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpy import (
    Accumulation,
    AdvanceWithClock,
    Collect,
    Computation,
    Context,
    Count,
    Dedupe,
    EventTime,
    File,
    FixedWindows,
    Graph,
    MapCell,
    SessionWindows,
    Sum,
    Timer,
    Value,
    hours,
    minutes,
    seconds,
)
from millpy.errors import ConfigError, GraphError, UsageError
from millpy.ingest.protocol import Source
from millpy.testing import BEGINNING_OF_TIME, END_OF_TIME, GraphDriver, ManualSource, OpenWindow, Watermarks

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Reading(msgspec.Struct):
    id: int
    device: str
    at: datetime
    value: float


class Report(msgspec.Struct):
    device: str
    seen: int


class Reporter(Computation):
    """Counts readings by device and hour, and reports after a minute of processing time, or five of event time."""

    seen = Value(int, default=0)
    by_hour = MapCell(int, int)

    def process_record(self, context: Context, record: Reading) -> None:
        if record.value < 0:
            raise ValueError("negative")
        context[Reporter.seen] += 1
        by_hour = context[Reporter.by_hour]
        by_hour[record.at.hour] = by_hour.get(record.at.hour, 0) + 1
        context.hold("oldest", record.at)
        context.set_timer("quiet", at=record.at + minutes(5))
        context.set_timer("soon", at=context.now + minutes(1), processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.release("oldest")
        context.produce(Report(context.key, context[Reporter.seen]))


def reading(second: float, device: str = "pump", value: float = 1.0, number: int | None = None) -> Reading:
    return Reading(round(second * 10) if number is None else number, device, NOON + seconds(second), value)


def inject(graph: Graph, source: Source | None = None, **more: Any) -> Any:
    how = {"event_time": EventTime("at", max_disorder=seconds(0)), "dedupe": Dedupe("id", within=hours(1))} | more
    return graph.inject("readings", source or ManualSource(), schema=Reading, **how)


MINUTE = minutes(1)
FIXED = FixedWindows(MINUTE)


def windowed(
    windows: Any = FIXED,
    lateness: timedelta = MINUTE,
    accumulation: Accumulation = Accumulation.ACCUMULATING,
    **more: Any,
) -> Graph:
    graph = Graph("plant")
    keyed = inject(graph, **more).key_by("device")
    keyed = keyed.window(windows, allowed_lateness=lateness, accumulation=accumulation)
    keyed.aggregate(n=Count(), total=Sum("value")).to_table("by_minute")
    return graph


def reporting(**more: Any) -> Graph:
    graph = Graph("plant")
    readings = inject(graph, **more)
    readings.key_by("device").process(Reporter(), name="reports", output=Report).to_table("told")
    return graph


def at(second: float) -> datetime:
    return NOON + seconds(second)


def test_records_of_all_forms_reach_a_table() -> None:
    driver = GraphDriver(windowed())

    as_dict = {"id": 2, "device": "pump", "at": "2026-11-20T12:00:20Z", "value": 2}
    driver.feed("readings", [reading(10), as_dict, msgspec.json.encode(reading(59, value=3))])
    driver.feed("readings", [reading(61)])

    assert driver.rows("by_minute") == [
        {
            "device": "pump",
            "window_start": at(0),
            "window_end": at(60),
            "n": 3,
            "total": 6.0,
            "pane_index": 0,
            "pane_timing": "on_time",
            "late_count": 0,
        }
    ]


def test_a_history_shows_what_a_table_no_longer_has() -> None:
    graph = Graph("plant")
    sessions = inject(graph).key_by("device").window(SessionWindows(seconds(10)), allowed_lateness=MINUTE)
    sessions.aggregate(n=Count()).to_table("visits", history=True)
    driver = GraphDriver(graph, now=NOON + hours(1))

    driver.feed("readings", [reading(0), reading(15)])
    driver.advance_clock(seconds(5))
    driver.feed("readings", [reading(8)])
    driver.end("readings")

    found = [(row["window_end"], row["n"], row["is_retraction"], row["emitted_at"]) for row in driver.history("visits")]
    assert found == [
        (at(10), 1, False, NOON + hours(1)),
        (at(10), 1, True, NOON + hours(1) + seconds(5)),
        (at(25), 3, False, NOON + hours(1) + seconds(5)),
    ]
    assert [row["n"] for row in driver.rows("visits")] == [3]
    with pytest.raises(UsageError, match="no history 'by_minute'"):
        GraphDriver(windowed()).history("by_minute")


def test_panes_show_what_a_table_no_longer_has() -> None:
    driver = GraphDriver(windowed())

    driver.feed("readings", [reading(10), reading(70), reading(20)])
    (first,) = driver.panes("by_minute")  # a bundle emits one pane
    driver.feed("readings", [reading(30)])

    assert [(p.index, p.timing, p.late_count, p.values["n"]) for p in driver.panes("by_minute")] == [
        (0, "late", 1, 2),
        (1, "late", 2, 3),
    ]
    assert first.window == (at(0), at(60))
    assert first.event_time == at(60) - timedelta(microseconds=1)
    assert first.first
    assert not first.retraction
    assert [row["n"] for row in driver.rows("by_minute")] == [3]


def test_a_session_that_grows_is_retracted() -> None:
    graph = windowed(SessionWindows(seconds(10)), minutes(5), Accumulation.RETRACTING)
    driver = GraphDriver(graph)

    driver.feed("readings", [reading(0)])
    driver.advance_watermark("readings", at(10))
    driver.feed("readings", [reading(5)])
    driver.advance_watermark("readings", at(15))

    panes = [(p.retraction, p.window[1], p.values["n"]) for p in driver.panes("by_minute")]
    assert panes == [(False, at(10), 1), (True, at(10), 1), (False, at(15), 2)]
    assert [row["window_end"] for row in driver.rows("by_minute")] == [at(15)]


def test_a_late_retraction_says_what_it_is() -> None:
    graph = Graph("plant")
    by_device = inject(graph).key_by("device")
    minute = by_device.window(
        FixedWindows(minutes(1)), allowed_lateness=minutes(5), accumulation=Accumulation.RETRACTING, name="by_minute"
    )
    strict = minute.aggregate(n=Count()).key_by("device").window(FixedWindows(minutes(1)))
    strict.aggregate(minutes=Count()).to_table("strict")
    driver = GraphDriver(graph)

    driver.feed("readings", [reading(0)])
    driver.advance_watermark("readings", at(60))
    driver.feed("readings", [reading(5)])

    assert [(late.record.n, late.retraction) for late in driver.late_records()] == [(1, True), (2, False)]


def test_bad_records_become_dead_letters_duplicates_and_late_records() -> None:
    driver = GraphDriver(windowed())

    driver.feed(
        "readings", [reading(200), reading(200), b"{", {"id": 1, "device": "pump", "at": "2026-11-20T12:00:00"}]
    )
    driver.feed("readings", [reading(10)])

    assert [letter.reason for letter in driver.dead_letters()] == ["undecodable", "undecodable"]
    assert driver.records("readings") == [reading(200), reading(10)]
    (late,) = driver.late_records()
    assert (late.computation, late.key, late.record) == ("by_minute", "pump", reading(10))
    assert (late.event_time, late.watermark, late.window) == (at(10), at(200), (at(0), at(60)))
    driver.check_accounting()


def test_a_watermark_moves_forward_only_and_judges_what_follows() -> None:
    driver = GraphDriver(windowed())
    assert driver.watermark("readings") == BEGINNING_OF_TIME

    assert driver.advance_watermark("readings", at(130)) == at(130)
    assert driver.advance_watermark("readings", at(100)) == at(130)
    driver.feed("readings", [reading(50), reading(125), reading(140), reading(65)])

    assert driver.watermark("readings") == at(140)
    assert [late.watermark for late in driver.late_records()] == [at(130)]
    assert [p.values["n"] for p in driver.panes("by_minute")] == [1]  # of the minute that is late, not too late
    assert driver.watermarks("by_minute") == Watermarks(at(140), at(140))


def test_the_low_watermark_is_held_by_what_is_pending() -> None:
    driver = GraphDriver(windowed())

    driver.feed("readings", [reading(10)])
    driver.feed("readings", [reading(30)])

    assert driver.watermarks("by_minute") == Watermarks(at(30), at(30))
    driver.advance_watermark("readings", at(50))
    assert driver.open_windows("by_minute") == [OpenWindow("pump", (at(0), at(60)))]


def test_partitions_have_their_own_watermarks() -> None:
    graph = windowed(source=ManualSource("north", "south"))
    driver = GraphDriver(graph)

    driver.feed("readings", [reading(10), reading(200)], partition="north")
    assert driver.watermark("readings", "north") == at(200)
    assert driver.watermark("readings") == BEGINNING_OF_TIME
    assert driver.panes("by_minute") == []

    driver.advance_watermark("readings", at(90), partition="south")
    assert [p.values["n"] for p in driver.panes("by_minute")] == [1]

    driver.end("readings", partition="south")
    assert driver.watermark("readings") == at(200)
    with pytest.raises(UsageError, match="several partitions"):
        driver.feed("readings", [reading(1)])
    with pytest.raises(UsageError, match="no partition of 'readings' 'east'"):
        driver.feed("readings", [reading(1)], partition="east")


def test_the_end_of_the_input_closes_windows() -> None:
    driver = GraphDriver(windowed())
    driver.feed("readings", [reading(10)])

    driver.end()

    assert [p.timing for p in driver.panes("by_minute")] == ["on_time"]
    assert driver.watermark("readings") == END_OF_TIME
    assert driver.open_windows("by_minute") == []
    with pytest.raises(UsageError, match="has ended"):
        driver.feed("readings", [reading(20)])


def test_cells_timers_and_holds_are_shown_by_key() -> None:
    driver = GraphDriver(reporting(), now=NOON + hours(1))

    driver.feed("readings", [reading(0), reading(3600, "fan")])

    assert driver.state("reports") == {"pump": {"seen": 1, "by_hour": {12: 1}}, "fan": {"seen": 1, "by_hour": {13: 1}}}
    assert driver.holds("reports") == {"fan": {"oldest": at(3600)}}  # the pump's timer was due at once
    fan = [(timer.name, timer.at, timer.processing) for timer in driver.timers("reports")["fan"]]
    assert fan == [("soon", at(3660), True), ("quiet", at(3900), False)]
    assert driver.records("reports") == [Report("pump", 1)]
    assert driver.timed_records("reports") == [(at(300), Report("pump", 1))]


def test_processing_timers_fire_when_the_clock_reaches_them() -> None:
    driver = GraphDriver(reporting())
    driver.feed("readings", [reading(0)])

    driver.advance_clock(seconds(59))
    assert driver.rows("told") == []

    driver.advance_clock(seconds(1))
    assert [(row["device"], row["seen"], row["event_time"]) for row in driver.rows("told")] == [("pump", 1, at(0))]


def test_silence_moves_the_watermark_where_the_graph_says_so() -> None:
    driver = GraphDriver(windowed(idle=AdvanceWithClock(after=seconds(30))), now=at(10))
    driver.feed("readings", [reading(10)])

    driver.advance_clock(seconds(29))
    assert driver.watermark("readings") == at(10)

    driver.advance_clock(seconds(1))
    assert driver.watermark("readings") == at(10)  # the clock is at 40, and the watermark 30 s behind it
    driver.advance_clock(seconds(50))
    assert driver.watermark("readings") == at(60)
    assert [p.values["n"] for p in driver.panes("by_minute")] == [1]


def test_a_driver_that_must_know_the_time_says_so() -> None:
    driver = GraphDriver(windowed(idle=AdvanceWithClock(after=seconds(30))))

    with pytest.raises(UsageError, match="advances its watermark with the clock") as refused:
        driver.advance_clock(seconds(1))
    assert "now=" in refused.value.hint


def test_crashes_change_nothing() -> None:
    def outcome(*, crashes: bool) -> Any:
        driver = GraphDriver(windowed(SessionWindows(seconds(10))))
        told = GraphDriver(reporting(source=ManualSource()))
        for one in (driver, told):
            with one.crashing() if crashes else nullcontext():
                one.feed("readings", [reading(0), reading(5), reading(40), b"{"])
                one.advance_watermark("readings", at(60))
                one.feed("readings", [reading(50), reading(70), reading(5)])
                one.advance_clock(minutes(2))
            if crashes:
                one.crash()
            one.end()
            one.check_accounting()
        return (
            driver.rows("by_minute"),
            driver.panes("by_minute"),
            driver.late_records(),
            driver.dead_letters(),
            told.state("reports"),
            told.timed_records("reports"),
        )

    assert outcome(crashes=True) == outcome(crashes=False)


def test_a_lost_turn_leaves_no_productions() -> None:
    driver = GraphDriver(reporting())
    with driver.crashing():
        driver.feed("readings", [reading(0), reading(400, "fan")])

    assert driver.records("reports") == [Report("pump", 1)]


def test_user_code_that_raises_is_seen_as_a_dead_letter() -> None:
    driver = GraphDriver(reporting())

    driver.feed("readings", [reading(0, value=-1)])

    (letter,) = driver.dead_letters()
    assert letter.reason == "user_error"
    assert "ValueError: negative" in letter.traceback


class Odd(msgspec.Struct):
    key: UUID
    at: datetime
    parts: dict[str, int]
    names: list[str]
    maybe: int | None = None


def test_rows_have_the_types_of_their_fields() -> None:
    graph = Graph("plant")
    odd = graph.inject("odd", ManualSource(), schema=Odd, event_time=EventTime("at", sorted=True))

    class Same(Computation):
        def process_record(self, context: Context, record: Odd) -> None:
            context.produce(record)

    odd.key_by("key").process(Same(), name="same", output=Odd).to_table("same")
    windows = odd.key_by("key").window(FixedWindows(minutes(1)))
    windows.aggregate(n=Count("maybe"), all=Sum("maybe"), parts=Collect("maybe")).to_table("odd_1m")
    driver = GraphDriver(graph)
    one = Odd(UUID(int=7), at(0), {"a": 1}, ["x"], 3)

    driver.feed("odd", [one, one])
    driver.feed("odd", [one] * 100)  # columns
    driver.end()

    rows = driver.rows("same")
    assert len(rows) == 102
    for row in (rows[0], rows[-1]):
        shown = {name: row[name] for name in ("key", "at", "parts", "names", "maybe")}
        assert shown == {"key": UUID(int=7), "at": at(0), "parts": {"a": 1}, "names": ["x"], "maybe": 3}
    (row,) = driver.rows("odd_1m")
    assert (row["key"], row["n"], row["all"], row["parts"]) == (UUID(int=7), 102, 306, [3] * 102)


@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (lambda d: d.feed("reading", []), "no source 'reading'", "readings"),
        (lambda d: d.feed("readings", reading(0)), "takes a list", "[record]"),
        (lambda d: d.feed("readings", ["{}"]), "is no record", "Reading, dicts"),
        (lambda d: d.feed("readings", [Report("x", 1)]), "is no record", "Reading"),
        (lambda d: d.rows("by_hour"), "no table 'by_hour'", "by_minute"),
        (lambda d: d.panes("readings"), "no step 'readings'", "by_minute"),
        (lambda d: d.records("nothing"), "no stream 'nothing'", "readings"),
        (lambda d: d.state("by_minute"), "no cells", ""),
        (lambda d: d.advance_watermark("readings", datetime(2026, 1, 1)), "no time zone", "aware"),  # noqa: DTZ001
        (lambda d: d.advance_watermark("readings", 1.5), "is not a time", "aware"),
        (lambda d: d.advance_watermark("readings", True), "is not a time", "aware"),
        (lambda d: d.advance_clock(-seconds(1)), "cannot go back", "positive"),
        (lambda d: d.watermarks("nowhere"), "no step or source 'nowhere'", "readings"),
    ],
)
def test_a_mistake_is_explained(call: Any, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        call(GraphDriver(windowed()))

    assert message in refused.value.message
    assert hint in refused.value.hint


def test_panes_of_a_computation_are_refused() -> None:
    with pytest.raises(UsageError, match="has no windows"):
        GraphDriver(reporting()).panes("reports")


def test_only_a_test_feeds_a_manual_source() -> None:
    assert repr(ManualSource("a", "b")) == "ManualSource(names=['a', 'b'])"
    with pytest.raises(GraphError):
        ManualSource("a", "a")
    with pytest.raises(ConfigError, match="only a test feeds"):
        ManualSource().connect(setup=SetupOf("readings"))


class SetupOf:
    def __init__(self, stream: str) -> None:
        self.stream = stream


def test_a_graph_keeps_its_own_sources_and_opens_none() -> None:
    driver = GraphDriver(windowed(source=File("nowhere.ndjson")))

    driver.feed("readings", [reading(10), reading(70)])

    assert len(driver.rows("by_minute")) == 1


GRAPH = """
import msgspec
from datetime import datetime
from millpy import Count, EventTime, File, FixedWindows, Graph, minutes

class Visit(msgspec.Struct):
    page: str
    at: datetime

graph = Graph("visits")
visits = graph.inject("visits", File("visits.ndjson"), schema=Visit, event_time=EventTime("at", sorted=True))
visits.key_by("page").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("by_page")
"""
TESTS = """
def test_visits(graph_driver):
    driver = graph_driver("visits.py")
    driver.feed("visits", [{"page": "/", "at": "2026-11-20T08:00:00Z"}])
    driver.end()
    assert [row["n"] for row in driver.rows("by_page")] == [1]

def test_lost_record(graph_driver):
    driver = graph_driver("visits.py:graph")
    driver._state.unbalanced = lambda: ["one is lost"]
"""


def test_the_fixture_loads_a_file_beside_the_test_and_checks_the_accounting(tmp_path: Path) -> None:
    (tmp_path / "visits.py").write_text(GRAPH)
    (tmp_path / "test_visits.py").write_text(TESTS)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)

    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "one is lost" in done.stdout


def test_importing_the_package_loads_no_engine() -> None:
    code = "import sys, __future__; before = set(sys.modules); import millpy.testing; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert {name for name in done.stdout.split() if name.startswith("millpy")} == {"millpy", "millpy.testing"}


def test_public_names_can_be_loaded() -> None:
    import millpy.testing

    assert sorted(millpy.testing.__all__) == sorted(set(millpy.testing.__all__))
    for name in millpy.testing.__all__:
        assert getattr(millpy.testing, name) is not None
    with pytest.raises(AttributeError):
        millpy.testing.nothing  # noqa: B018
