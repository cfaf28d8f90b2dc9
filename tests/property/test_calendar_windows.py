"""Calendar windows begin where a walk along the clock says, and their panes are those of a plain loop."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import CalendarWindows, hours, minutes
from millpy.model.time import instant
from millpy.windowing.calendar_windows import CalendarAssigner, CalendarBounds
from tests.property.plain_calendar import walked_starts
from tests.property.test_windowed import Reading, assert_same, breaks, columnar, keyed, oracle, readings

ZONES = [
    "Africa/Cairo",  # changes at midnight
    "Africa/Casablanca",  # winter time within summer time
    "America/Havana",  # repeats midnight
    "America/Sao_Paulo",  # skipped midnight
    "America/St_Johns",  # half an hour; two hours in 1988
    "Antarctica/Troll",  # changes by two hours
    "Asia/Kathmandu",  # a quarter of an hour
    "Atlantic/Azores",  # changes into the day before
    "Australia/Lord_Howe",  # changes by half an hour
    "Europe/Berlin",
    "Europe/Dublin",  # winter time is the change
    "Pacific/Apia",  # had no 2011-12-30
    "Pacific/Kwajalein",  # had no 1993-08-21
    "UTC",
]
UNITS = ["hour", "day", "week", "month", "quarter", "year"]
HOUR = 3_600_000_000


@cache
def changes(zone: str, year: int) -> list[datetime]:
    """Return the days of a year on which the clock of a zone changes, and one on which it may not."""
    days = [datetime(year, 1, 1, tzinfo=UTC) + timedelta(days=n) for n in range(366)]
    offsets = [day.astimezone(ZoneInfo(zone)).utcoffset() for day in days]
    return [day for day, offset, later in zip(days, offsets, offsets[1:], strict=False) if offset != later] or days[:1]


@settings(max_examples=150, deadline=None)
@given(
    zone=st.sampled_from([zone for zone in ZONES if zone in available_timezones()]),
    unit=st.sampled_from([*UNITS, "hour", "day", "day"]),
    year=st.integers(1974, 2060),
    nth=st.integers(0, 5),
    before=st.integers(0, 6),
    quarters=st.integers(0, 12) | st.integers(0, 95),
    days=st.integers(0, 6),
)
def test_windows_begin_where_a_walk_along_the_clock_says(
    zone: str, unit: str, year: int, nth: int, before: int, quarters: int, days: int
) -> None:
    starts_at = minutes(15 * (quarters if unit != "hour" else quarters % 4))
    if unit not in ("hour", "day"):
        starts_at += timedelta(days=days)
    windows = CalendarWindows(unit, zone=zone, starts_at=starts_at)  # type: ignore[arg-type]
    found = changes(zone, year)
    first = found[nth % len(found)] - timedelta(days=before)
    last = first + timedelta(days=10)

    bounds = CalendarBounds(windows).between(instant(first), instant(last))
    inside = [bound for bound in bounds if instant(first) < bound <= instant(last)]

    assert inside == walked_starts(windows, first, last)


@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("Europe/Berlin", "2026-03-29T01:00"),
        ("Europe/Berlin", "2026-10-25T01:00"),
        ("Australia/Lord_Howe", "2026-04-04T15:00"),
        ("Pacific/Apia", "2011-12-30T10:00"),
        ("America/Havana", "2026-11-01T05:00"),
    ],
)
@pytest.mark.parametrize("unit", ["hour", "day"])
@pytest.mark.parametrize("starts_at", [0, 6])
@settings(max_examples=12, deadline=None)
@given(
    rows=st.lists(st.tuples(readings, st.integers(-40, 40)), max_size=30),
    where=breaks,
    elsewhere=breaks,
    allowed=st.sampled_from([0, 1, 30]),
)
def test_panes_around_a_change_of_the_clock_are_those_of_a_plain_loop(
    zone: str,
    change: str,
    unit: Any,
    starts_at: int,
    rows: list[tuple[Reading, int]],
    where: list[str],
    elsewhere: list[str],
    allowed: int,
) -> None:
    windows = CalendarWindows(unit, zone=zone, starts_at=hours(starts_at) if unit == "day" else minutes(starts_at * 5))
    at = instant(datetime.fromisoformat(change + "Z"))
    feed = [(record, at + half * HOUR // 2 - half % 3) for record, half in rows]

    wanted = oracle(windows, feed, allowed * HOUR)

    assert_same(columnar(windows, feed, where, allowed * HOUR, few=0), wanted)
    assert_same(columnar(windows, feed, elsewhere, allowed * HOUR, few=10_000), wanted)
    assert_same(keyed(windows, feed, elsewhere, allowed * HOUR), wanted)


@settings(max_examples=40, deadline=None)
@given(
    unit=st.sampled_from(UNITS),
    hours_=st.lists(st.integers(-10_000_000, 60_000_000), min_size=1, max_size=50),
    near=st.lists(st.integers(-2_000, 2_000), max_size=50),
)
def test_every_event_time_is_in_its_window_wherever_the_others_are(
    unit: Any, hours_: list[int], near: list[int]
) -> None:
    assigner = CalendarAssigner(CalendarWindows(unit, zone="Europe/Berlin"))
    for bundle in (near, hours_, [*hours_, *near]):
        times = np.array([at * HOUR for at in bundle], np.int64)
        if not len(times):
            continue
        starts, _ = assigner.assign(times)
        ends = assigner.ends_of(starts)

        assert (starts <= times).all()
        assert (times < ends).all()
        assert [assigner.end_of(start) for start in starts.tolist()] == ends.tolist()
        assert [assigner.start_before(end) for end in ends.tolist()] == starts.tolist()
        assert assigner.assign(starts)[0].tolist() == starts.tolist()
