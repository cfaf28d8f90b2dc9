"""Calendar windows by a walk along the clock of a zone, in small steps: what tests compare with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

from millpy.model.time import EPOCH
from millpy.windowing.calendar_windows import CalendarWindows

STEP = timedelta(minutes=15)
SMALLER_STEPS = {"America/St_Johns": timedelta(minutes=1)}  # its clock changed at 00:01 until 2011


def label(unit: str, local: datetime) -> tuple[int, ...]:
    """Name the unit of a calendar that a reading of a clock is in; later units have larger names."""
    if unit == "week":
        return tuple(local.isocalendar())[:2]
    of_quarter = (local.month - 1) // 3
    return {
        "year": (local.year,),
        "quarter": (local.year, of_quarter),
        "month": (local.year, local.month),
        "day": (local.year, local.month, local.day),
        "hour": (local.year, local.month, local.day, local.hour),
    }[unit]


@cache
def walked_starts(windows: CalendarWindows, first: datetime, last: datetime) -> list[int]:
    """Return the starts after `first` and up to `last`, in µs."""
    zone, at, starts = ZoneInfo(windows.zone), first, list[int]()
    step = SMALLER_STEPS.get(windows.zone, STEP)
    latest = label(windows.unit, at.astimezone(zone).replace(tzinfo=None) - windows.starts_at)
    while at < last:
        at += step
        local = at.astimezone(zone).replace(tzinfo=None) - windows.starts_at
        found = label(windows.unit, local)
        repeated = windows.unit == "hour" and local.minute == 0
        if found > latest or repeated:
            starts.append((at - EPOCH) // timedelta(microseconds=1))
        latest = found if repeated else max(found, latest)
    return starts


def walked_window(windows: CalendarWindows, at: int) -> tuple[int, int]:
    """Return the window of an event time in µs, for units of up to a day."""
    middle = (EPOCH + timedelta(microseconds=at)).astimezone(UTC).replace(minute=0, second=0, microsecond=0)
    starts = walked_starts(windows, middle - timedelta(days=3), middle + timedelta(days=4))
    return max(start for start in starts if start <= at), min(start for start in starts if start > at)
