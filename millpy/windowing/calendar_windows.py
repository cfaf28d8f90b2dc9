"""Calendar windows: hours, days, weeks, months, quarters and years of a time zone, of unequal length.

    CalendarWindows     the definition in a graph
    CalendarBounds      the instants at which such windows begin, by the tz database
    CalendarAssigner    event time -> window, by columns; keeps the bounds under which open windows are stored

A window begins at the first instant at which the local clock reads or passes its nominal time, and ends where the next
one begins. A start that the clock skips is therefore the moment of the change, a start that it reads twice is the first
of the two, and a day that a zone skipped has no window. Hours are different in one way: an hour that the clock
repeats is two windows, so that a day of 25 hours has 25.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from typing import Literal, get_args
from zoneinfo import ZoneInfo

import numpy as np

from millpy.errors import GraphError
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import Instants, Records
from millpy.model.time import EPOCH, YEARS_HI, YEARS_LO, duration_text, microseconds
from millpy.model.time_zone import time_zone
from millpy.windowing.group_by import Groups, Integers, unequal_groups

CalendarUnit = Literal["hour", "day", "week", "month", "quarter", "year"]
HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
CHUNKS_MAX = 1_024
"""The most chunks of window starts in memory, each with at most about 70 starts."""
_NAIVE_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a reading of a local clock
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MONDAY_US = 3 * DAY_US  # the epoch is a Thursday
_SHIFT_US = 27 * HOUR_US  # no zone has ever moved its clock by more than a day


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit of the calendar, numbered from some origin.

    Attributes:
        number: reading of the local clock, as µs since its epoch -> the number of the unit that it is in.
        reading: number -> the reading at which that unit begins.
        shortest_us, longest_us: the nominal length; a change of the clock may add or take up to a day.
        chunk_us: the length of a chunk of starts.
    """

    number: Callable[[int], int]
    reading: Callable[[int], int]
    shortest_us: int
    longest_us: int
    chunk_us: int


def _month_number(reading: int) -> int:
    day = date.fromordinal(min(max(reading // DAY_US + _EPOCH_DAY, date.min.toordinal()), date.max.toordinal()))
    return day.year * 12 + day.month - 1


def _month_reading(number: int) -> int:
    return (date(number // 12, number % 12 + 1, 1).toordinal() - _EPOCH_DAY) * DAY_US


def _equal(length: int, origin: int, in_chunk: int) -> _Unit:
    return _Unit(
        lambda reading: (reading - origin) // length,
        lambda number: number * length + origin,
        length,
        length,
        in_chunk * length,
    )


def _months(count: int, shortest: int, longest: int, in_chunk: int) -> _Unit:
    return _Unit(
        lambda reading: _month_number(reading) // count,
        lambda number: _month_reading(number * count),
        shortest * DAY_US,
        longest * DAY_US,
        in_chunk * longest * DAY_US,
    )


_UNITS: Mapping[CalendarUnit, _Unit] = {
    "hour": _equal(HOUR_US, 0, 64),
    "day": _equal(DAY_US, 0, 32),
    "week": _equal(7 * DAY_US, -_MONDAY_US, 16),
    "month": _months(1, 28, 31, 24),
    "quarter": _months(3, 90, 92, 16),
    "year": _months(12, 365, 366, 16),
}


@dataclass(frozen=True, slots=True, repr=False)
class CalendarWindows(GraphPart):
    """Windows that follow a calendar: `CalendarWindows("day", zone="Europe/Berlin", starts_at=hours(6))`.

    They touch, do not overlap, and follow the clock of the zone: a day has 23 hours or 25 when the clock changes.

    Args:
        unit: "hour", "day", "week" (from Monday, ISO 8601), "month", "quarter" or "year".
        zone: name of the time zone in the IANA database, such as "Europe/Berlin" or "UTC".
        starts_at: the time from the unit's beginning to the window's, on the local clock, shorter than the shortest
            unit (28 days for a month). Days with `hours(6)` begin at 06:00, weeks with `days(6)` on Sundays.

    Raises:
        GraphError: the unit does not exist, the zone is unknown, the start is negative or too long, or this machine
            has no tz database.
    """

    unit: CalendarUnit
    zone: str = field(kw_only=True)
    starts_at: timedelta = field(default=timedelta(0), kw_only=True)

    def __post_init__(self) -> None:
        if self.unit not in get_args(CalendarUnit):
            units = ", ".join(get_args(CalendarUnit))
            raise GraphError(f"a calendar has no unit {self.unit!r}", hint=f"choose from: {units}")
        if not isinstance(self.starts_at, timedelta):
            raise GraphError(f"starts_at must be a duration, not {self.starts_at!r}", hint="for example hours(6)")
        longest = _UNITS[self.unit].shortest_us
        if not 0 <= microseconds(self.starts_at) < longest:
            raise GraphError(
                f"starts_at must be at least 0 and shorter than the shortest {self.unit}, {duration_text(longest)},"
                f" not {duration_text(microseconds(self.starts_at))}",
                hint='for example CalendarWindows("day", zone="Europe/Berlin", starts_at=hours(6))',
            )
        time_zone(self.zone)

    def identity(self) -> Identity:
        """Describe the windows."""
        described = {"kind": "calendar", "unit": self.unit, "zone": self.zone}
        return {**described, "starts_at_us": microseconds(self.starts_at)} if self.starts_at else described


def longest_us(unit: str) -> int:
    """Return a length that no window of a unit exceeds, in µs."""
    return next(_UNITS[known].longest_us for known in _UNITS if known == unit) + _SHIFT_US


class CalendarBounds:
    """The instants at which the windows of a calendar begin.

    Args:
        windows: the calendar.
        zone: another tz database's idea of the zone. Default: this machine's.
    """

    def __init__(self, windows: CalendarWindows, zone: ZoneInfo | None = None) -> None:
        self._zone = zone or time_zone(windows.zone)
        self._unit = _UNITS[windows.unit]
        self._repeats = windows.unit == "hour"
        self._starts_at_us = microseconds(windows.starts_at)
        self.chunk_us = self._unit.chunk_us

    def between(self, lo: int, hi: int) -> list[int]:
        """Return the bounds in order, from the last one that is at most `lo` to the first one that is at least `hi`.

        At the ends of the calendar, in the years 1 and 9999, these two may be missing.
        """
        lo, hi = (min(max(at, YEARS_LO + 2 * _SHIFT_US), YEARS_HI - 2 * _SHIFT_US) for at in (lo, hi))
        first, last = (self._unit.number(self._local(at) - self._starts_at_us + by) for at, by in ((lo, -1), (hi, 1)))
        slack = -(-_SHIFT_US // self._unit.shortest_us) + 1
        found: set[int] = set()
        for number in range(first - slack, last + slack + 1):
            try:
                found.update(self._starts(self._unit.reading(number) + self._starts_at_us))
            except (OverflowError, ValueError):  # outside the years 1 to 9999
                continue
        bounds = sorted(found)
        return bounds[max(bisect_right(bounds, lo) - 1, 0) : bisect_left(bounds, hi) + 1]

    def _starts(self, reading: int) -> Iterable[int]:
        """Return when the local clock reads a nominal time, or when it passes it."""
        one, other = (reading - self._offset_of_reading(reading, fold) for fold in (0, 1))
        if one <= other:
            return (one, other) if self._repeats else (one,)
        lo, hi = other, one  # the clock skips it: find the change
        while hi - lo > 1:
            middle = (lo + hi) // 2
            if self._local(middle) < reading:
                lo = middle
            else:
                hi = middle
        return (hi,)

    def _offset_of_reading(self, reading: int, fold: int) -> int:
        local = (_NAIVE_EPOCH + timedelta(microseconds=reading)).replace(fold=fold)
        return microseconds(self._zone.utcoffset(local) or timedelta(0))

    def _local(self, at: int) -> int:
        """Return what the local clock reads at an instant, as µs since its epoch."""
        utc = (EPOCH + timedelta(microseconds=at)).astimezone(self._zone)
        return at + microseconds(utc.utcoffset() or timedelta(0))


class CalendarAssigner:
    """Assigns event times to calendar windows, by columns.

    The bounds come in chunks, which are kept, so that a bundle asks for them once. An open window keeps the bounds
    under which it is stored: `pin` puts them in the place of what a newer tz database says.
    """

    windows_per_record = 1

    def __init__(self, windows: CalendarWindows, bounds: CalendarBounds | None = None) -> None:
        self._bounds = bounds or CalendarBounds(windows)
        self._chunk_us = self._bounds.chunk_us
        self._chunks: dict[int, Instants] = {}
        self._recent: Instants = np.empty(0, np.int64)
        self._pinned: dict[int, int] = {}

    def pin(self, start: int, end: int) -> None:
        """Keep the bounds of a stored window."""
        if self.end_of(start) != end or self.start_before(end) != start:
            self._pinned[start] = end
            self._chunks.clear()
            self._recent = np.empty(0, np.int64)

    def assign(self, event_times: Instants) -> tuple[Instants, None]:
        """Return the start of the window of each row, and None: row n has start n."""
        return self.newest_starts(event_times), None

    def newest_starts(self, event_times: Instants) -> Instants:
        """Return the start of the window that contains each event time."""
        bounds = self._around(event_times)
        starts: Instants = bounds[np.searchsorted(bounds, event_times, side="right") - 1]
        return starts

    def ends_of(self, starts: Instants) -> Instants:
        """Return the ends of the windows that begin at the given starts."""
        bounds = self._around(starts)
        ends: Instants = bounds[np.searchsorted(bounds, starts, side="right")]
        return ends

    def end_of(self, start: int) -> int:
        """Return the end of the window that begins at a start."""
        bounds = self._chunk(start // self._chunk_us)
        return int(bounds[int(np.searchsorted(bounds, start, side="right"))])

    def start_before(self, end: int) -> int:
        """Return the start of the window that ends at an end."""
        bounds = self._chunk((end - 1) // self._chunk_us)
        return int(bounds[int(np.searchsorted(bounds, end, side="left")) - 1])

    def neighbors(self, start: int) -> tuple[int, int]:
        """Return the starts of the windows before and after one."""
        return self.start_before(start), self.end_of(start)

    def groups(self, starts: Instants, codes: Integers, keys: int, records: Records, rows: Integers | None) -> Groups:
        """Group entries by window, then key; see `unequal_groups`."""
        return unequal_groups(starts, self.ends_of, codes, keys, records, rows)

    def event_time_range(self) -> tuple[int, int]:
        """Return the first and last event time, in µs, whose windows lie in the years 1 to 9999."""
        near = 3 * _SHIFT_US
        first, last = YEARS_LO + near, YEARS_HI - near
        return self._bounds.between(first, first)[-1], self._bounds.between(last, last)[0] - 1

    def _around(self, instants: Instants) -> Instants:
        """Return bounds in order, so that each instant has the start and the end of its window among them."""
        lo, hi = int(instants.min()), int(instants.max())
        recent = self._recent
        if len(recent) and recent[0] <= lo and hi < recent[-1]:
            return recent
        first, last = lo // self._chunk_us, hi // self._chunk_us
        if last - first < CHUNKS_MAX // 4:
            numbers: Iterable[int] = range(first, last + 1)
        else:
            numbers = np.unique(instants // self._chunk_us).tolist()
        bounds = np.unique(np.concatenate([self._chunk(number) for number in numbers]))
        if isinstance(numbers, range):
            self._recent = bounds
        return bounds

    def _chunk(self, number: int) -> Instants:
        """Return the bounds of a chunk of time, from the last one at its beginning to the first one at its end."""
        known = self._chunks.get(number)
        if known is None:
            if len(self._chunks) >= CHUNKS_MAX:
                del self._chunks[next(iter(self._chunks))]
            known = self._chunks[number] = np.array(self._computed(number * self._chunk_us), np.int64)
        return known

    def _computed(self, lo: int) -> list[int]:
        hi = lo + self._chunk_us
        plain = self._bounds.between(lo, hi)
        pins = [(start, end) for start, end in self._pinned.items() if start <= plain[-1] and plain[0] <= end]
        if not pins:
            return plain
        begin, stop = min(lo, *(start for start, _ in pins)), max(hi, *(end for _, end in pins))
        found = set(self._bounds.between(begin - 1, stop + 1))
        for start, end in pins:
            found = {bound for bound in found if not start < bound < end} | {start, end}
        bounds = sorted(found)
        return bounds[max(bisect_right(bounds, lo) - 1, 0) : bisect_left(bounds, hi) + 1]
