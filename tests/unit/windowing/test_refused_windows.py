"""Windows that are refused when they are made, with a hint that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pytest

from millpy import CalendarWindows, FixedWindows, SlidingWindows, hours, minutes, seconds
from millpy.errors import GraphError
from millpy.model import time_zone

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a negative offset": (lambda: FixedWindows(hours(1), offset=minutes(-15)), "offset=minutes(45)"),
    "an offset of the size": (lambda: FixedWindows(hours(1), offset=hours(1)), "offset=seconds(0)"),
    "an offset that is a number": (
        lambda: FixedWindows(hours(1), offset=900),  # type: ignore[arg-type]
        "offset=minutes(15)",
    ),
    "an offset of the period": (
        lambda: SlidingWindows(hours(1), every=minutes(10), offset=minutes(15)),
        "offset=minutes(5)",
    ),
    "a negative offset of sliding windows": (
        lambda: SlidingWindows(hours(1), every=minutes(10), offset=seconds(-1)),
        "offset=seconds(599)",
    ),
    "a unit that no calendar has": (
        lambda: CalendarWindows("fortnight", zone="UTC"),  # type: ignore[arg-type]
        "hour, day, week, month, quarter, year",
    ),
    "a zone that does not exist": (lambda: CalendarWindows("day", zone="Europe/Berlim"), 'zone="Europe/Berlin"'),
    "a zone that is a folder": (lambda: CalendarWindows("day", zone="Europe"), "for example zone="),
    "a zone that is a path": (lambda: CalendarWindows("day", zone="../../etc/passwd"), "for example zone="),
    "a zone that is an absolute path": (lambda: CalendarWindows("day", zone="/etc/localtime"), "for example zone="),
    "a zone with a NUL character": (lambda: CalendarWindows("day", zone="UTC\0"), "for example zone="),
    "the zone of the machine": (lambda: CalendarWindows("day", zone="localtime"), "for example zone="),
    "a zone that is no name": (
        lambda: CalendarWindows("day", zone=ZoneInfo("UTC")),  # type: ignore[arg-type]
        'zone="Europe/Berlin"',
    ),
    "a day that starts a day later": (
        lambda: CalendarWindows("day", zone="UTC", starts_at=hours(24)),
        "starts_at=hours(6)",
    ),
    "a day that starts before itself": (
        lambda: CalendarWindows("day", zone="UTC", starts_at=hours(-6)),
        "starts_at=hours(6)",
    ),
    "a start that is a number": (
        lambda: CalendarWindows("day", zone="UTC", starts_at=6),  # type: ignore[arg-type]
        "for example hours(6)",
    ),
}


@pytest.mark.parametrize(("make", "hint"), REFUSED.values(), ids=REFUSED)
def test_windows_are_refused_with_a_hint(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(GraphError) as refused:
        make()

    assert hint in refused.value.hint


def test_windows_with_an_offset_of_zero_are_those_without() -> None:
    assert FixedWindows(hours(1), offset=timedelta(0)).identity() == FixedWindows(hours(1)).identity()
    assert repr(FixedWindows(hours(1), offset=minutes(5))) == "FixedWindows(hours(1), offset=minutes(5))"


def test_a_machine_without_a_tz_database_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ZoneInfo:
        raise ZoneInfoNotFoundError(name)

    monkeypatch.setattr(time_zone, "ZoneInfo", missing)
    monkeypatch.setattr(time_zone, "available_timezones", set)

    with pytest.raises(GraphError, match="no tz database") as refused:
        CalendarWindows("day", zone="Europe/Berlin")

    assert "pip install tzdata" in refused.value.hint
