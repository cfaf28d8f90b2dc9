"""Conversion of columns of times, RFC 3339 text or numbers, to int64 µs since the epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.model.record import Instants
from millpy.model.time import YEARS_HI, YEARS_LO

DATETIME_LO, DATETIME_HI = int(YEARS_LO), int(YEARS_HI)
_US_PER_UNIT = {"s": 1_000_000, "ms": 1_000, "us": 1}

_SUFFIXES = ((1, "Zz"), (6, "+-"), (5, "+-"), (3, "+-"))
"""The lengths of Z, ±HH:MM, ±HHMM and ±HH, and what they begin with."""

Digits = npt.NDArray[np.int64]


def instants_of_text(column: pa.Array) -> Instants | None:
    """Parse a string column of `YYYY-MM-DDTHH:MM:SS[.f{1,6}](Z|±HH:MM)`; return None if any value differs in form.

    A space or t may stand for T, z for Z, and the offset may be ±HHMM, or ±HH as PostgreSQL prints it. The parser is
    strict on purpose: msgspec reads every value that it accepts as the same instant (property test), once ±HH has its
    minutes. Nulls become 0.
    """
    lengths = np.diff(_offsets(column))
    starts = _offsets(column)[:-1]
    valid = np.ones(len(column), bool) if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
    found = np.zeros(len(column), np.int64)
    for length in np.unique(lengths[valid]).tolist():
        if not 20 <= length <= 32:
            return None
        rows = np.flatnonzero(valid & (lengths == length))
        if len(rows) == len(column):  # texts of one length already form a matrix
            text = data[starts[0] : starts[0] + len(rows) * length].reshape(len(rows), length)
        else:
            text = data[starts[rows][:, None] + np.arange(length)]
        left = np.ones(len(rows), bool)
        for suffix, marks in _SUFFIXES:
            chosen = left & _is_one_of(text[:, -suffix], marks)
            left &= ~chosen
            if chosen.any():
                times = _times_of_digits(text if chosen.all() else text[chosen], suffix)
                if times is None:
                    return None
                found[rows[chosen]] = times
        if left.any():
            return None
    return found


def _offsets(column: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]


def _times_of_digits(text: npt.NDArray[np.uint8], suffix: int) -> Instants | None:
    """Return the times of texts of one length, an array of n by length; `suffix` is the length of the zone."""
    length = text.shape[1]
    body = length - suffix
    fraction = body - 20
    if body != 19 and not 1 <= fraction <= 6:
        return None
    punctuation = {4: "-", 7: "-", 10: "T t", 13: ":", 16: ":"} | ({19: "."} if fraction > 0 else {})
    if suffix == 6:
        punctuation[length - 3] = ":"
    if not all(_is_one_of(text[:, place], marks).all() for place, marks in punctuation.items()):
        return None
    places = [p for p in range(length) if p not in punctuation and p != body]
    digits = text - np.uint8(ord("0"))  # characters below "0" wrap around to more than 9
    if any((digits[:, place] > 9).any() for place in places):
        return None
    days = _days(_number(digits, 0, 4), _number(digits, 5, 2), _number(digits, 8, 2))
    hours, minutes, seconds = (_number(digits, place, 2) for place in (11, 14, 17))
    if days is None or (hours > 23).any() or (minutes > 59).any() or (seconds > 59).any():
        return None
    times = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if suffix > 1:
        ahead_hours = _number(digits, body + 1, 2)
        ahead_minutes = np.zeros_like(ahead_hours) if suffix == 3 else _number(digits, length - 2, 2)
        if (ahead_hours > 23).any() or (ahead_minutes > 59).any():
            return None
        sign = np.where(text[:, body] == ord("+"), -1, 1)
        times = times + sign * (ahead_hours * 60 + ahead_minutes) * 60
    times = times * 1_000_000
    if fraction > 0:
        times = times + _number(digits, 20, fraction) * 10 ** (6 - fraction)
    if (times < DATETIME_LO).any() or (times > DATETIME_HI).any():
        return None
    return times


def _is_one_of(codes: npt.NDArray[np.uint8], marks: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = codes == ord(marks[0])
    for mark in marks[1:]:
        if found.all():
            break
        found = found | (codes == ord(mark))
    return found


def _number(digits: npt.NDArray[np.uint8], place: int, count: int) -> Digits:
    number = digits[:, place].astype(np.int64)
    for offset in range(1, count):
        number = number * 10 + digits[:, place + offset]
    return number


def _days(years: Digits, months: Digits, days: Digits) -> Digits | None:
    """Return days since the epoch, or None if a date does not exist."""
    if (years < 1).any() or (months < 1).any() or (months > 12).any() or (days < 1).any():
        return None
    month = (years - 1970) * 12 + months - 1
    starts = month.astype("M8[M]").astype("M8[D]").astype(np.int64)
    ends = (month + 1).astype("M8[M]").astype("M8[D]").astype(np.int64)
    counted = starts + days - 1
    return None if (counted >= ends).any() else counted


def instants_of_numbers(
    numbers: npt.NDArray[np.int64] | npt.NDArray[np.float64], unit: str
) -> tuple[Instants, npt.NDArray[np.bool_]]:
    """Convert numbers since the epoch to µs. Return also which are in the range of a datetime; the others become 0."""
    if numbers.dtype == np.int64:
        lo, hi = (DATETIME_LO * 1000, DATETIME_HI * 1000 + 999) if unit == "ns" else _whole_bounds(_US_PER_UNIT[unit])
        lo, hi = max(lo, -(2**63)), min(hi, 2**63 - 1)
        possible = (numbers >= lo) & (numbers <= hi)
        kept = np.where(possible, numbers, 0)
        return (kept // 1000 if unit == "ns" else kept * _US_PER_UNIT[unit]), possible
    scaled = numbers / 1000 if unit == "ns" else numbers * _US_PER_UNIT[unit]
    possible = (scaled >= DATETIME_LO) & (scaled < DATETIME_HI)  # as a float, that is the year 10000
    return np.rint(np.where(possible, scaled, 0.0)).astype(np.int64), possible


def _whole_bounds(us: int) -> tuple[int, int]:
    return -(-DATETIME_LO // us), DATETIME_HI // us
