"""Windows: half-open intervals `[start, end)` of event time by which records are grouped.

Fixed and calendar windows touch and do not overlap. Sliding windows overlap, so that a record is in several. Fixed and
sliding windows are aligned to the epoch, or to an offset from it; calendar windows (`calendar_windows.py`) follow the
clock of a time zone. A session lasts as long as records keep arriving: each opens [t, t + gap), and those that
intersect merge. A user's function (`window_function.py`) assigns records to windows of its choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from millpy.errors import GraphError
from millpy.model.arguments import check_instance
from millpy.model.identity import Identity, identity_of_value
from millpy.model.identity_text import GraphPart
from millpy.model.keys import Key
from millpy.model.record import Instants, Records
from millpy.model.time import YEARS_HI, YEARS_LO, check_positive, duration_text, microseconds
from millpy.windowing.calendar_windows import CalendarAssigner, CalendarWindows
from millpy.windowing.global_window import GlobalWindow
from millpy.windowing.group_by import Groups, Integers, aligned_groups
from millpy.windowing.window_function import WindowFunction

WINDOWS_PER_RECORD_MAX = 1_000
"""The most sliding windows that a record may be in; more are refused as a mistake."""
MAX_GAP = timedelta(days=1)
"""The longest session gap that a field may have, unless the graph says another."""


def _check_count(records: object) -> None:
    if records is not None and (not isinstance(records, int) or isinstance(records, bool) or records < 1):
        raise GraphError(
            f"max_records must be a positive number, not {records!r}",
            hint="for example SessionWindows(minutes(30), max_records=10_000)",
        )


def _check_offset(offset: object, period: timedelta, what: str) -> None:
    """Refuse an offset that is not in [0, period): each alignment has one offset, so that its identity is one, too."""
    if not isinstance(offset, timedelta):
        raise GraphError(f"the offset must be a duration, not {offset!r}", hint="for example offset=minutes(15)")
    if not timedelta(0) <= offset < period:
        smallest = duration_text(microseconds(offset) % microseconds(period))
        raise GraphError(
            f"the offset must be at least 0 and shorter than {what}, not {duration_text(microseconds(offset))}",
            hint=f"offset={smallest} gives the same windows",
        )


def _aligned(described: Identity, offset_us: int) -> Identity:
    return {**described, "offset_us": offset_us} if offset_us else described


@dataclass(frozen=True, slots=True, repr=False)
class FixedWindows(GraphPart):
    """Windows of one size that touch and do not overlap: `FixedWindows(minutes(1))`.

    Args:
        size: the length of a window.
        offset: the time from the epoch to the start of a window, shorter than the size:
            `FixedWindows(hours(1), offset=minutes(15))` begin a quarter past each hour (UTC).

    Raises:
        GraphError: the size is not a positive duration of at most a thousand years, or the offset is negative or not
            shorter than the size.
    """

    size: timedelta
    offset: timedelta = field(default=timedelta(0), kw_only=True)

    def __post_init__(self) -> None:
        check_positive("the window size", self.size, "for example FixedWindows(minutes(1))")
        _check_offset(self.offset, self.size, "the window size")

    def identity(self) -> Identity:
        """Describe the windows."""
        return _aligned({"kind": "fixed", "size_us": self.size_us}, self.offset_us)

    @property
    def offset_us(self) -> int:
        """The time from the epoch to the start of a window in µs."""
        return microseconds(self.offset)

    @property
    def size_us(self) -> int:
        """The size in µs."""
        return microseconds(self.size)

    @property
    def every_us(self) -> int:
        """The time from one start to the next in µs: the size."""
        return microseconds(self.size)


@dataclass(frozen=True, slots=True, repr=False)
class SlidingWindows(GraphPart):
    """Windows of one size that begin at a regular period: `SlidingWindows(seconds(10), every=seconds(2))`.

    A record is in `size / every` of them. Each window judges it separately: a record that is late for one may be on
    time for the next.

    Args:
        size: the length of a window.
        every: the time from one start to the next.
        offset: the time from the epoch to the start of a window, shorter than `every`.

    Raises:
        GraphError: size or period is not a positive duration, records would fall between windows, a record would be
            in more than 1,000 of them, or the offset is negative or not shorter than the period.
    """

    size: timedelta
    every: timedelta
    offset: timedelta = field(default=timedelta(0), kw_only=True)

    def __post_init__(self) -> None:
        hint = "for example SlidingWindows(seconds(10), every=seconds(2))"
        check_positive("the window size", self.size, hint)
        check_positive("the period", self.every, hint)
        if self.every > self.size:
            raise GraphError(
                f"records would fall between windows of {duration_text(self.size_us)} that begin every"
                f" {duration_text(self.every_us)}",
                hint="make `every` at most the size",
            )
        if self.size > self.every * WINDOWS_PER_RECORD_MAX:
            raise GraphError(
                f"a record would be in {-(-self.size_us // self.every_us):,} windows; the limit is"
                f" {WINDOWS_PER_RECORD_MAX:,}",
                hint="make `every` longer",
            )
        _check_offset(self.offset, self.every, "the period")

    def identity(self) -> Identity:
        """Describe the windows."""
        described = {"kind": "sliding", "size_us": self.size_us, "every_us": self.every_us}
        return _aligned(described, self.offset_us)

    @property
    def offset_us(self) -> int:
        """The time from the epoch to the start of a window in µs."""
        return microseconds(self.offset)

    @property
    def size_us(self) -> int:
        """The size in µs."""
        return microseconds(self.size)

    @property
    def every_us(self) -> int:
        """The time from one start to the next in µs."""
        return microseconds(self.every)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class SessionWindows(GraphPart):
    """Windows that last as long as records of a key follow one another within a gap: `SessionWindows(minutes(30))`.

    A session begins at its first record and ends a gap after its last. A record out of order may join two sessions.

    Args:
        gap: the time without records that ends a session.
        by_key: key -> gap, for keys with another gap; the key is a tuple if `key_by` names several fields.
        by_field: name of a field, whole or floating-point, with the gap behind each record in seconds. Records in
            which it is None have the gap of their key. Without a name, all have.
        max_gap: the longest gap that the field may have. Records with a longer gap, or with one that is not positive,
            become dead letters. Default: a day.
        max_length: the longest session. Every session ends at the next multiple of it since the epoch at the latest,
            and the records from there on begin another. So where a session is cut depends on event times alone: not on
            the order of records, and not on where the session began. A shorter session that lasts beyond such an
            instant is cut there, too.
        max_records: number of records with which a session is full: it ends behind the last one, and later records
            begin another. It then takes only records inside its span, so it may have a few more than this number.

    Raises:
        GraphError: a gap is not a positive duration of at most a thousand years, `max_gap` is given without a field,
            `max_length` is shorter than a gap, or `max_records` is not a positive number.
    """

    gap: timedelta
    by_key: tuple[tuple[Key, timedelta], ...]
    by_field: str
    max_gap: timedelta
    max_length: timedelta | None
    max_records: int | None

    def __init__(
        self,
        gap: timedelta,
        *,
        by_key: Mapping[Key, timedelta] | None = None,
        by_field: str = "",
        max_gap: timedelta | None = None,
        max_length: timedelta | None = None,
        max_records: int | None = None,
    ) -> None:
        check_instance("by_key", by_key or {}, Mapping, 'for example by_key={"slow": hours(2)}')
        gaps = tuple(sorted((by_key or {}).items(), key=repr))
        for one in (gap, *(other for _, other in gaps)):
            check_positive("the session gap", one, 'for example SessionWindows(minutes(30), by_key={"slow": hours(2)})')
        hint = 'for example SessionWindows(minutes(30), by_field="timeout_s", max_gap=days(1))'
        if not isinstance(by_field, str):
            raise GraphError(f"by_field must be the name of a field, not {by_field!r}", hint=hint)
        if max_gap is not None and not by_field:
            raise GraphError("max_gap bounds the gaps of a field, and by_field names none", hint=hint)
        longest = MAX_GAP if max_gap is None else max_gap
        check_positive("max_gap", longest, hint)
        if max_length is not None:
            check_positive("max_length", max_length, "for example SessionWindows(minutes(30), max_length=hours(24))")
            widest = max([gap, *(other for _, other in gaps)])
            if max_length < widest:
                raise GraphError(
                    f"max_length={duration_text(microseconds(max_length))} is shorter than the gap of"
                    f" {duration_text(microseconds(widest))}, so each record would be cut from the next",
                    hint="choose a longer max_length; for windows of a fixed length, use FixedWindows",
                )
        _check_count(max_records)
        for name, value in (("gap", gap), ("by_key", gaps), ("by_field", by_field), ("max_gap", longest)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "max_length", max_length)
        object.__setattr__(self, "max_records", max_records)

    def identity(self) -> Identity:
        """Describe the windows."""
        described: Identity = {
            "kind": "session",
            "gap_us": microseconds(self.gap),
            "by_key": identity_of_value(dict(self.by_key)) if self.by_key else None,
        }
        if self.by_field:
            described = {**described, "by_field": self.by_field, "max_gap_us": microseconds(self.max_gap)}
        if self.max_length is not None:
            described = {**described, "max_length_us": microseconds(self.max_length)}
        if self.max_records is not None:
            described = {**described, "max_records": self.max_records}
        return described


AlignedWindows: TypeAlias = FixedWindows | SlidingWindows | GlobalWindow
Windows: TypeAlias = AlignedWindows | SessionWindows | CalendarWindows | WindowFunction


class WindowAssigner(Protocol):
    """Assigns event times to windows that do not depend on the records in them."""

    @property
    def windows_per_record(self) -> int:
        """The most windows that a record can be in."""
        ...

    def assign(self, event_times: Instants) -> tuple[Instants, npt.NDArray[np.int64] | None]:
        """Return (the starts of all windows of the rows, the row of each; None if row n has start n)."""
        ...

    def ends_of(self, starts: Instants) -> Instants:
        """Return the ends of the windows that begin at the given starts."""
        ...

    def end_of(self, start: int) -> int:
        """Return the end of the window that begins at a start."""
        ...

    def neighbors(self, start: int) -> tuple[int, int]:
        """Return the starts of the windows before and after one."""
        ...

    def pin(self, start: int, end: int) -> None:
        """Keep the bounds of a stored window."""
        ...

    def groups(self, starts: Instants, codes: Integers, keys: int, records: Records, rows: Integers | None) -> Groups:
        """Group entries, of which each has a start and a key code, by window, then key."""
        ...

    def event_time_range(self) -> tuple[int, int]:
        """Return the first and last event time, in µs, whose windows lie in the years 1 to 9999."""
        ...


class Assigner:
    """Assigns event times to aligned windows."""

    def __init__(self, windows: AlignedWindows) -> None:
        self.size_us = windows.size_us
        self.every_us = windows.every_us
        self.offset_us = windows.offset_us
        self.windows_per_record = -(-self.size_us // self.every_us)
        """The most windows that a record can be in."""

    def assign(self, event_times: Instants) -> tuple[Instants, npt.NDArray[np.int64] | None]:
        """Return (the starts of all windows of the rows, the row of each; None if row n has start n)."""
        last = self.newest_starts(event_times)
        if self.windows_per_record == 1:
            return last, None
        starts = (last[:, None] - np.arange(self.windows_per_record) * self.every_us).ravel()
        rows = np.repeat(np.arange(len(event_times)), self.windows_per_record)
        if self.size_us % self.every_us:
            inside = starts > event_times[rows] - self.size_us
            return starts[inside], rows[inside]
        return starts, rows

    def newest_starts(self, event_times: Instants) -> Instants:
        """Return the start of the last window that contains each event time."""
        if not self.offset_us:
            return event_times // self.every_us * self.every_us
        starts: Instants = (event_times - self.offset_us) // self.every_us * self.every_us + self.offset_us
        return starts

    def ends_of(self, starts: Instants) -> Instants:
        """Return the ends of the windows that begin at the given starts."""
        return starts + self.size_us

    def end_of(self, start: int) -> int:
        """Return the end of the window that begins at a start."""
        return start + self.size_us

    def neighbors(self, start: int) -> tuple[int, int]:
        """Return the starts of the windows before and after one."""
        return start - self.every_us, start + self.every_us

    def pin(self, start: int, end: int) -> None:
        """Do nothing: a stored window has the bounds that its definition says."""

    def groups(self, starts: Instants, codes: Integers, keys: int, records: Records, rows: Integers | None) -> Groups:
        """Group entries by window, then key; see `aligned_groups`."""
        return aligned_groups(starts, self.size_us, self.every_us, codes, keys, records, rows)

    def event_time_range(self) -> tuple[int, int]:
        """Return the first and last event time, in µs, whose windows lie in the years 1 to 9999."""
        first = -((self.offset_us - YEARS_LO) // self.every_us) * self.every_us + self.offset_us
        last = (YEARS_HI - self.size_us - self.offset_us) // self.every_us * self.every_us + self.offset_us
        return first + self.size_us - self.every_us, last + self.every_us - 1


def assigner_of(windows: AlignedWindows | CalendarWindows) -> WindowAssigner:
    """Return what assigns event times to windows."""
    return CalendarAssigner(windows) if isinstance(windows, CalendarWindows) else Assigner(windows)
