"""Event times as text: in a given format, or in the local time of a zone that it does not name.

    TimeFormat     a format, as a pattern that the columnar and the plain reader share
    LocalClock     local time -> UTC, by the tz database, with a rule for the changes of daylight saving
    TimeReader     text or naive datetime -> instant, one by one or as a column

When a clock is set back, an hour comes twice: its times mean the first of the two. When it is set forward, an hour is
skipped: a time in it is counted with the offset before the change, so that 02:30 means the instant of 03:30. That is
the rule of Python (PEP 495, fold=0) and Java; both cases are counted. The columns are read exactly as value by value
(tests/property/test_local_times.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import GraphError
from millpy.ingest.timestamps import DATETIME_HI, DATETIME_LO
from millpy.model.record import Instants, Mask
from millpy.model.time import Instant, to_datetime
from millpy.model.time_zone import time_zone

_OFFSET = r"(?:(?P<zulu>[Zz])|(?P<sign>[+-])(?P<ahead>[0-9]{2})(?::?(?P<ahead_minutes>[0-9]{2}))?)"
_DIRECTIVES = {
    "Y": "(?P<year>[0-9]{4})",
    "y": "(?P<short_year>[0-9]{2})",
    "m": "(?P<month>[0-9]{1,2})",
    "d": "(?P<day>[0-9]{1,2})",
    "H": "(?P<hour>[0-9]{1,2})",
    "I": "(?P<half_hour>[0-9]{1,2})",
    "M": "(?P<minute>[0-9]{1,2})",
    "S": "(?P<second>[0-9]{1,2})",
    "f": "(?P<fraction>[0-9]{1,9})",
    "p": "(?P<half>[AaPp][Mm])",
    "b": "(?P<month_name>[A-Za-z]{3})",
    "z": _OFFSET,
}
_SHORT = {"F": "%Y-%m-%d", "T": "%H:%M:%S", "R": "%H:%M"}
_DIGITS = "YymdHIMSf"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ISO = (
    "(?P<year>[0-9]{4})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})[Tt ](?P<hour>[0-9]{2}):(?P<minute>[0-9]{2})"
    rf":(?P<second>[0-9]{{2}})(?:\.(?P<fraction>[0-9]{{1,9}}))?{_OFFSET}?"
)
_ISO_MATCHES = re.compile(_ISO).fullmatch
_SPECIAL = frozenset(r".^$*+?{}[]\|()-")
_FORMAT_CHARACTERS_MAX = 100
_SHOWN_CHARACTERS = 50
_HOUR_US = 3_600_000_000
_KNOWN_HOURS_MAX = 100_000
_US = timedelta(microseconds=1)


class TimeFormatError(ValueError):
    """A text that is not a time in the format."""


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """A pattern of times, the same for Python and for RE2, and what an error calls it.

    Attributes:
        pattern: the pattern; its groups are the parts of a time.
        zoned: whether a time may name its zone.
        described: what an error says that was expected.
    """

    pattern: str
    zoned: bool
    described: str

    @classmethod
    def iso(cls) -> TimeFormat:
        """Return the format of RFC 3339, where the zone may be missing, or have no minutes as PostgreSQL prints it."""
        return cls(_ISO, zoned=True, described="RFC 3339")

    @classmethod
    def parsed(cls, text: object) -> TimeFormat:
        """Return a format given with the directives of `strftime`.

        Raises:
            GraphError: a directive is unknown, comes twice, or is missing.
        """
        example = 'for example format="%d.%m.%Y %H:%M:%S"'
        if not isinstance(text, str) or not 0 < len(text) <= _FORMAT_CHARACTERS_MAX:
            raise GraphError(
                f"format must be text of 1 to {_FORMAT_CHARACTERS_MAX} characters, not {text!r}", hint=example
            )
        expanded = re.sub("%[FTR]", lambda found: _SHORT[found[0][1]], text)
        tokens = re.findall("%.|[^%]|%$", expanded, re.DOTALL)
        used = [token[1:] for token in tokens if token[0] == "%" and token != "%%"]
        if unknown := [name for name in used if name not in _DIRECTIVES]:
            raise GraphError(
                f"format {text!r}: unknown directive %{unknown[0]}", hint=f"directives are %{' %'.join(_DIRECTIVES)} %%"
            )
        _check_directives(text, used, example)
        pattern = []
        for place, token in enumerate(tokens):
            name = token[1:]
            if token[0] != "%" or token == "%%":
                pattern.append("".join(f"\\{c}" if c in _SPECIAL else c for c in token[-1]))
                continue
            # Digits that follow digits have no end of their own, so they have to have their full width.
            beside = tokens[max(0, place - 1) : place] + tokens[place + 1 : place + 2]
            touches = any(other[0] == "%" and other[1:] in _DIGITS for other in beside)
            pattern.append(_DIRECTIVES[name].replace("{1,2}", "{2}") if touches else _DIRECTIVES[name])
        return cls("".join(pattern), zoned="z" in used, described=repr(text))


def _check_directives(text: str, used: list[str], example: str) -> None:
    """Check that a format names a day and a time of day, each part once."""
    twice = [name for name in used if used.count(name) > 1]
    for these in ("Yy", "mb", "HI"):
        twice += [name for name in these if sum(other in used for other in these) > 1]
    if twice:
        raise GraphError(f"format {text!r}: %{twice[0]} gives a part of the time twice", hint=example)
    for these, part in (("Yy", "year"), ("mb", "month"), ("d", "day"), ("HI", "hour")):
        if not any(name in used for name in these):
            raise GraphError(f"format {text!r} has no {part}", hint=example)
    if ("I" in used) != ("p" in used):
        raise GraphError(f"format {text!r}: %I (hours to 12) and %p (AM or PM) go together", hint="use %H for 0 to 23")
    if ("S" in used and "M" not in used) or ("f" in used and "S" not in used):
        raise GraphError(f"format {text!r} has a gap between hours and its smallest part", hint=example)


class LocalClock:
    """The clock of a time zone: converts local times to UTC.

    Args:
        zone: the name of the zone in the IANA database.
    """

    def __init__(self, zone: tzinfo) -> None:
        self._zone = zone
        self._plain_hours: dict[int, int | None] = {}

    def to_utc(self, local_us: int) -> tuple[int, int]:
        """Return the instant of a local time (µs), and 1 if it comes twice, -1 if it is skipped, else 0."""
        before, after = self._offsets(local_us)
        return local_us - before, (before > after) - (before < after)

    def to_utc_columns(self, local_us: Instants) -> tuple[Instants, npt.NDArray[np.int8]]:
        """Return the same for many local times. Hours without a change are converted as a whole."""
        hours, places = np.unique(local_us // _HOUR_US, return_inverse=True)
        if len(self._plain_hours) + len(hours) > _KNOWN_HOURS_MAX:
            self._plain_hours.clear()
        offsets = np.zeros(len(hours), np.int64)
        changes = np.zeros(len(hours), bool)
        for place, hour in enumerate(hours.tolist()):
            if hour not in self._plain_hours:
                self._plain_hours[hour] = self._plain_offset(hour)
            found = self._plain_hours[hour]
            offsets[place], changes[place] = found or 0, found is None
        times, marks = local_us - offsets[places], np.zeros(len(local_us), np.int8)
        for row in np.flatnonzero(changes[places]).tolist():
            times[row], marks[row] = self.to_utc(int(local_us[row]))
        return times, marks

    def _plain_offset(self, hour: int) -> int | None:
        """Return the offset of a local hour in which the clock is not changed; None if it is."""
        begin, end = hour * _HOUR_US, (hour + 1) * _HOUR_US
        if begin < DATETIME_LO or end > DATETIME_HI:
            return None
        found = {*self._offsets(begin), *self._offsets(end)}
        return found.pop() if len(found) == 1 else None

    def _offsets(self, local_us: int) -> tuple[int, int]:
        """Return the offsets (µs) of a local time by the rule before and after a change that it may be part of."""
        local = to_datetime(Instant(local_us)).replace(tzinfo=self._zone)
        first, second = local.utcoffset(), local.replace(fold=1).utcoffset()
        assert first is not None
        assert second is not None
        return first // _US, second // _US


@dataclass(slots=True)
class LocalTimeCounts:
    """How many local times came twice in the night of a change, and how many were skipped there."""

    repeated: int = 0
    skipped: int = 0

    def add(self, marks: Any) -> None:
        """Count marks of `LocalClock`, a number or an array."""
        self.repeated += int(np.count_nonzero(np.asarray(marks) > 0))
        self.skipped += int(np.count_nonzero(np.asarray(marks) < 0))

    def copy(self) -> LocalTimeCounts:
        """Return a copy."""
        return LocalTimeCounts(self.repeated, self.skipped)


class TimeReader:
    """Reads the values of an event-time field whose text has a format, or lacks its zone.

    Args:
        format: the format with the directives of `strftime`, beside RFC 3339; None for RFC 3339 alone.
        zone: the zone of times that do not name theirs; None refuses them.
    """

    def __init__(self, format: str | None, zone: str | None) -> None:
        self._format = TimeFormat.iso() if format is None else TimeFormat.parsed(format)
        self._matches = re.compile(self._format.pattern).fullmatch
        self._clock = None if zone is None else LocalClock(time_zone(zone))
        self.counts = LocalTimeCounts()

    def read(self, value: Any) -> Any:
        """Return a text or a datetime as an aware datetime in UTC, anything else unchanged.

        Raises:
            TimeFormatError: the text is not a time in the format, or lies outside the years 1 to 9999 in UTC.
        """
        if isinstance(value, datetime):
            if value.tzinfo is not None or self._clock is None:
                return value
            return self._of_local((value - datetime.min) // _US + DATETIME_LO, str(value))  # noqa: DTZ901
        if not isinstance(value, str):
            return value
        # RFC 3339 is not mistaken for anything else, and our own JSON has it: replays, the test kit, the crash test.
        found = self._matches(value) or _ISO_MATCHES(value)
        shown = value[:_SHOWN_CHARACTERS]
        if found is None:
            raise TimeFormatError(f"{shown!r} is not a time in the format {self._format.described}")
        parts = {name: part or "" for name, part in found.groupdict().items()}
        try:
            local_us = _local_of(parts)
        except (ValueError, OverflowError):
            raise TimeFormatError(f"{shown!r} is not a time that exists") from None
        if parts.get("zulu") or parts.get("sign"):
            return _in_years(local_us - _ahead_of(parts, shown), shown)
        return self._of_local(local_us, shown)

    def _of_local(self, local_us: int, shown: str) -> datetime:
        if self._clock is None:
            raise TimeFormatError(f"{shown!r} has no time zone")
        at, mark = self._clock.to_utc(local_us)
        moment = _in_years(at, shown)
        if mark:
            self.counts.add(mark)
        return moment

    def column(self, texts: pa.Array) -> pa.Array | None:
        """Return a column of texts as timestamps in UTC; None if a value has to be judged alone."""
        parts = pc.extract_regex(texts, f"^(?:{self._format.pattern})$")
        if parts.null_count != texts.null_count:
            return None
        valid = None if not texts.null_count else texts.is_valid().to_numpy(zero_copy_only=False)
        columns = {field.name: pc.fill_null(part, "") for field, part in zip(parts.type, parts.flatten(), strict=True)}
        local = _local_columns(columns, valid)
        if local is None:
            return None
        times, marks = local, np.zeros(len(local), np.int8)
        named = np.zeros(len(local), bool)
        if "sign" in columns:
            ahead = _ahead_columns(columns)
            if ahead is None:
                return None
            times = local - ahead
            named = _is_set(columns["zulu"]) | _is_set(columns["sign"])
        unnamed = ~named if valid is None else ~named & valid
        if unnamed.any():
            if self._clock is None:
                return None
            times[unnamed], marks[unnamed] = self._clock.to_utc_columns(local[unnamed])
        return self._timestamps(times, marks, valid)

    def naive_column(self, timestamps: pa.Array) -> pa.Array | None:
        """Return a column of timestamps without a zone as timestamps in UTC; None if this is to be done one by one."""
        if self._clock is None:
            return None
        valid = None if not timestamps.null_count else timestamps.is_valid().to_numpy(zero_copy_only=False)
        local = timestamps.cast(pa.timestamp("us")).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        if (local < DATETIME_LO).any() or (local > DATETIME_HI).any():
            return None
        times, marks = self._clock.to_utc_columns(local)
        return self._timestamps(times, marks if valid is None else np.where(valid, marks, 0), valid)

    def _timestamps(self, times: Instants, marks: Any, valid: Mask | None) -> pa.Array | None:
        inside = (times >= DATETIME_LO) & (times <= DATETIME_HI)
        if not (inside.all() if valid is None else inside[valid].all()):
            return None
        self.counts.add(marks)
        mask = None if valid is None else ~valid
        return pa.array(times, pa.int64(), mask=mask).cast(pa.timestamp("us", tz="UTC"))


def _local_of(parts: dict[str, str]) -> int:
    """Return the local time (µs since 1970) that the parts of a text name. Raises ValueError if there is none."""
    number = {name: int(part) for name, part in parts.items() if part.isascii() and part.isdigit()}
    year = number["year"] if "year" in number else _full_year(number["short_year"])
    month = number["month"] if "month" in number else _MONTHS.index(parts["month_name"].lower()) + 1
    hour = number.get("hour", 0)
    if "half_hour" in number:
        if not 1 <= number["half_hour"] <= 12:
            raise ValueError("hour")
        hour = number["half_hour"] % 12 + (12 if parts["half"].lower() == "pm" else 0)
    local = datetime(year, month, number["day"], hour, number.get("minute", 0), number.get("second", 0))  # noqa: DTZ001
    fraction = (int(parts["fraction"].ljust(9, "0")) + 500) // 1000 if parts.get("fraction") else 0
    at = (local - datetime.min) // _US + DATETIME_LO + fraction  # noqa: DTZ901
    if at > DATETIME_HI:
        raise ValueError("year")
    return at


def _full_year(short: int) -> int:
    """Return the year of two digits by POSIX: 69 to 99 are before 2000."""
    return short + (1900 if short >= 69 else 2000)


def _ahead_of(parts: dict[str, str], shown: str) -> int:
    """Return how far a time is ahead of UTC by the offset that it names, in µs."""
    if parts.get("zulu"):
        return 0
    hours, minutes = int(parts["ahead"]), int(parts["ahead_minutes"] or 0)
    if hours > 23 or minutes > 59:
        raise TimeFormatError(f"{shown!r} is not a time that exists")
    ahead = (hours * 60 + minutes) * 60_000_000
    return ahead if parts["sign"] == "+" else -ahead


def _in_years(at: int, shown: str) -> datetime:
    if not DATETIME_LO <= at <= DATETIME_HI:
        raise TimeFormatError(f"{shown!r} is outside the years 1 to 9999 in UTC")
    return to_datetime(Instant(at))


def _is_set(texts: pa.Array) -> Mask:
    found: Mask = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)
    return found


def _numbers(texts: pa.Array) -> npt.NDArray[np.int64]:
    """Return texts of digits as numbers; no text is 0."""
    found: npt.NDArray[np.int64] = pc.cast(pc.if_else(pc.equal(texts, ""), pa.scalar("0"), texts), pa.int64()).to_numpy(
        zero_copy_only=False
    )
    return found


def _local_columns(columns: dict[str, pa.Array], valid: Mask | None) -> Instants | None:
    """Return the local times (µs since 1970) of columns of parts; None if one does not exist. Nulls become 0."""
    if "year" in columns:
        year = _numbers(columns["year"])
    else:
        short = _numbers(columns["short_year"])
        year = short + np.where(short >= 69, 1900, 2000)
    if "month" in columns:
        month = _numbers(columns["month"])
    else:
        month = pc.index_in(pc.ascii_lower(columns["month_name"]), pa.array(_MONTHS)).fill_null(-1)
        month = month.to_numpy(zero_copy_only=False).astype(np.int64) + 1
    day = _numbers(columns["day"])
    zeros = np.zeros(len(day), np.int64)
    hour, minute, second = (
        _numbers(columns[name]) if name in columns else zeros for name in ("hour", "minute", "second")
    )
    fits = (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1)
    if "half_hour" in columns:
        face = _numbers(columns["half_hour"])
        fits &= (face >= 1) & (face <= 12)
        after_noon = pc.equal(pc.ascii_lower(columns["half"]), "pm").to_numpy(zero_copy_only=False)
        hour = face % 12 + np.where(after_noon, 12, 0)
    fits &= (hour <= 23) & (minute <= 59) & (second <= 59)
    months = (np.where(fits, year, 1970) - 1970) * 12 + np.where(fits, month, 1) - 1
    starts = months.astype("M8[M]").astype("M8[D]").astype(np.int64)
    ends = (months + 1).astype("M8[M]").astype("M8[D]").astype(np.int64)
    days = starts + np.where(fits, day, 1) - 1
    fits &= days < ends
    times = ((days * 24 + hour) * 60 + minute) * 60 + second
    times = times * 1_000_000
    if "fraction" in columns:
        times = times + (_numbers(pc.utf8_rpad(columns["fraction"], 9, "0")) + 500) // 1000
    fits &= times <= DATETIME_HI
    if not (fits.all() if valid is None else fits[valid].all()):
        return None
    return times if valid is None else np.where(valid, times, 0)


def _ahead_columns(columns: dict[str, pa.Array]) -> Instants | None:
    """Return how far each time is ahead of UTC by the offset that it names, in µs; None if an offset is no offset."""
    hours, minutes = _numbers(columns["ahead"]), _numbers(columns["ahead_minutes"])
    if (hours > 23).any() or (minutes > 59).any():
        return None
    behind = pc.equal(columns["sign"], "-").to_numpy(zero_copy_only=False)
    ahead: Instants = np.where(behind, -1, 1) * (hours * 60 + minutes) * 60_000_000
    return ahead
