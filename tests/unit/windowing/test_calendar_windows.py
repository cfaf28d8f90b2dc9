"""Calendar windows in one interval: what is stored keeps its bounds, and memory and time have theirs."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest

from millpy import CalendarWindows, Count, EventTime, FixedWindows, Graph, hours
from millpy.cli.auditor import _reach
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX, Instant, instant, to_datetime
from millpy.spark.native import native_plans
from millpy.windowing import calendar_windows
from millpy.windowing.calendar_windows import CHUNKS_MAX, CalendarAssigner, CalendarBounds, longest_us
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import Windows
from tests.feed import Feed
from tests.stage_driver import StageDriver

BERLIN_DAYS = CalendarWindows("day", zone="Europe/Berlin")
HOUR = 3_600_000_000


class Reading(msgspec.Struct):
    key: str
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)


def at(text: str) -> int:
    return instant(datetime.fromisoformat(text).replace(tzinfo=UTC))


def subject(windows: Windows, lateness: int = 0) -> StageDriver:
    logic = WindowedLogic(windows, hours(lateness), {"n": Count()})
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, tables={"windows": 1})


def panes(stage: StageDriver) -> list[tuple[str, str, int]]:
    return [
        (f"{pane.window_start:%m-%dT%H}", f"{pane.window_end:%m-%dT%H}", pane.n)
        for result in stage.results
        for part in result.productions.values()
        for pane in part.objects()
    ]


def test_an_open_window_keeps_its_bounds_when_the_tz_database_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = subject(BERLIN_DAYS, lateness=10)
    stage.feed([(Reading("a"), at("2026-07-01T10:00"))])

    monkeypatch.setattr(calendar_windows, "time_zone", lambda _: ZoneInfo("UTC"))
    stage.restart()  # asserts that it is due when it was
    stage.feed([(Reading("a"), at("2026-07-01T21:59")), (Reading("b"), at("2026-06-30T22:00"))])
    stage.feed([(Reading("a"), at("2026-07-01T22:00")), (Reading("a"), at("2026-07-02T00:00"))])
    stage.restart()
    stage.feed([(Reading("a"), at("2026-07-01T23:00"))])
    stage.finish()

    assert panes(stage) == [
        ("06-30T22", "07-01T22", 2),
        ("06-30T22", "07-01T22", 1),
        ("07-01T22", "07-02T00", 1),
        ("07-01T22", "07-02T00", 2),
        ("07-02T00", "07-03T00", 1),
    ]
    assert stage.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)


@pytest.mark.parametrize(("was", "becomes"), [("Europe/Berlin", "Etc/GMT-1"), ("Etc/GMT-1", "Europe/Berlin")])
@pytest.mark.parametrize("first", range(8))  # a chunk of starts ends with 2026-07-05
def test_pinned_windows_and_computed_ones_do_not_overlap_and_leave_no_gap(first: int, was: str, becomes: str) -> None:
    windows = CalendarWindows("day", zone=was)
    assigner = CalendarAssigner(windows, CalendarBounds(windows, ZoneInfo(becomes)))
    pinned = []
    for day in (first, first + 1, first + 4, first + 31):
        noon = at("2026-07-01T12:00") + day * 24 * HOUR
        pinned.append(CalendarBounds(windows).between(noon, noon + HOUR)[:2])
        assigner.pin(*pinned[-1])
    times = np.arange(at("2026-06-25T00:00"), at("2026-08-15T00:00"), HOUR // 2, dtype=np.int64)

    starts = np.concatenate([assigner.assign(part)[0] for part in np.split(times, len(times) // 12)])
    ends = assigner.ends_of(starts)

    assert assigner.assign(times)[0].tolist() == starts.tolist()
    assert (starts <= times).all()
    assert (times < ends).all()
    assert sorted(set(starts.tolist()))[1:] == sorted(set(ends.tolist()))[:-1]
    assert [assigner.end_of(start) for start, _ in pinned] == [end for _, end in pinned]


def test_windows_agree_with_fixed_ones_where_the_clock_never_changes() -> None:
    rows = [(Reading(f"k{n % 3}"), at("2026-01-01T00:00") + n * 7 * HOUR + n) for n in range(200)]
    found = []
    for windows in (FixedWindows(hours(24)), CalendarWindows("day", zone="UTC")):
        stage = subject(windows)
        stage.feed(rows, columns=True)
        stage.finish()
        found.append(sorted(panes(stage)))

    assert found[0] == found[1]


def test_the_starts_in_memory_are_bounded_however_far_apart_the_records_are() -> None:
    assigner = CalendarAssigner(CalendarWindows("hour", zone="Europe/Berlin"))
    times = np.arange(5 * CHUNKS_MAX, dtype=np.int64) * 65 * HOUR

    starts, _ = assigner.assign(times)

    assert (starts // HOUR == times // HOUR).all()
    assert len(assigner._chunks) <= CHUNKS_MAX
    assert len(assigner._recent) <= 100 * CHUNKS_MAX


def test_a_bundle_that_is_assigned_twice_asks_the_tz_database_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assigner = CalendarAssigner(BERLIN_DAYS)
    times = np.arange(65_536, dtype=np.int64) * 60_000_000 + at("2026-03-01T00:00")
    first = assigner.assign(times)[0].tolist()

    def unexpected(*_: Any) -> list[int]:
        raise AssertionError("asked again")

    monkeypatch.setattr(CalendarBounds, "between", unexpected)
    begun = time.process_time()
    assert assigner.assign(times)[0].tolist() == first
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("unit", ["hour", "day", "week", "month", "quarter", "year"])
def test_no_window_is_longer_than_an_audit_reaches(unit: Any) -> None:
    for zone in ("Pacific/Apia", "Australia/Lord_Howe", "America/Havana", "America/Juneau"):
        bounds = CalendarBounds(CalendarWindows(unit, zone=zone))
        for year in (1867, 2011, 2026):
            found = bounds.between(at(f"{year}-01-02T00:00"), at(f"{year}-12-31T00:00"))
            assert max(np.diff(found)) <= longest_us(unit)


def test_an_audit_knows_how_far_they_reach_and_why_spark_has_none() -> None:
    graph = Graph("site")
    stream = graph.inject("readings", Feed(), schema=Reading, event_time=EventTime("at", max_disorder=hours(1)))
    stream.key_by("key").window(BERLIN_DAYS).aggregate(n=Count()).to_table("days")
    spec = graph.spec()

    assert _reach(spec, spec.tables[0]) == longest_us("day")
    assert "calendar" in native_plans(spec)[1]["days"]


def test_the_calendar_ends_with_the_years_that_can_be_written() -> None:
    for unit in ("hour", "day", "week", "month", "quarter", "year"):
        assigner = CalendarAssigner(CalendarWindows(unit, zone="Pacific/Kiritimati"))  # type: ignore[arg-type]
        for edge in assigner.event_time_range():
            start = int(assigner.assign(np.array([edge], np.int64))[0][0])
            assert to_datetime(Instant(start)) <= to_datetime(Instant(edge))
            assert to_datetime(Instant(edge)) < to_datetime(Instant(assigner.end_of(start)))


@pytest.mark.parametrize(
    ("zone", "starts_at", "change"),
    [
        ("Europe/Berlin", 2, "2026-03-29T01:00"),  # 02:00 is skipped, and is 03:00
        ("Africa/Cairo", 0, "2024-04-25T22:00"),  # midnight is skipped, and is 01:00
        ("Pacific/Apia", 5, "2011-12-30T10:00"),  # 05:00 is skipped with its day
    ],
)
def test_a_start_in_a_gap_is_the_moment_of_the_change(zone: str, starts_at: int, change: str) -> None:
    bounds = CalendarBounds(CalendarWindows("day", zone=zone, starts_at=hours(starts_at)))

    assert bounds.between(at(change), at(change) + 1)[0] == at(change)


def test_starts_of_a_day_that_was_lived_twice_are_found() -> None:
    # Alaska went from the Asian to the American side of the date line: 1867-10-18 came twice.
    bounds = CalendarBounds(CalendarWindows("hour", zone="America/Juneau"))
    change = at("1867-10-19T00:31:13")

    found = bounds.between(change - 10 * HOUR, change + 10 * HOUR)

    assert found[0] <= change - 10 * HOUR
    assert found[-1] >= change + 10 * HOUR
    assert set(np.diff(found).tolist()) == {HOUR}
    days = CalendarBounds(CalendarWindows("day", zone="America/Juneau")).between(change - 48 * HOUR, change + 48 * HOUR)
    assert set(np.diff(days).tolist()) == {24 * HOUR, 48 * HOUR}
