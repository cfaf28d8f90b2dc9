"""What the dead letter of a rejected record says: the value at fault, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from millpy.formats.message import encoded_names
from millpy.formats.values import JSON_NUMBER
from millpy.ingest.expansion import EMPTY
from millpy.ingest.timestamps import instants_of_numbers
from millpy.model.dead_letter import error_text
from millpy.model.record import RecordType

if TYPE_CHECKING:
    from millpy.ingest.decode import DecodeResult

_AT = re.compile(r" - at `\$\.([^`.\[]+)`$")
_NUMBER_AS_TEXT = re.compile(r"Expected `(?:int|float)[^`]*`, got `str`")
_SHOWN_CHARACTERS = 60
_UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_PLAUSIBLE_US = range(946_684_800_000_000, 4_102_444_800_000_000)  # the years 2000 to 2099

NO_ZONE = 'datetime without a time zone; EventTime(zone="Europe/Berlin") names it'


def shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


class Explainer:
    """Explains why msgspec rejected a payload.

    Args:
        record_type: the type of the records.
        time_field: the field of the event time.
    """

    def __init__(self, record_type: RecordType, time_field: str) -> None:
        names = encoded_names(record_type)
        self._moments = {name for own, name in names.items() if record_type.field_type(own) is datetime}
        self._time_name = names.get(time_field)

    def explain(self, error: BaseException, payload: object) -> str:
        """Return the error with the value that it is about, and how times in this form are read.

        Args:
            error: the error.
            payload: the JSON that was read, or anything else.
        """
        if isinstance(payload, bytes) and not payload.strip():
            return EMPTY
        text = error_text(error)
        place = _AT.search(text)
        if place is None or not isinstance(error, msgspec.ValidationError) or not isinstance(payload, bytes):
            return text
        try:
            found = bytes(msgspec.json.decode(payload, type=dict[str, msgspec.Raw])[place[1]]).strip()
        except (msgspec.DecodeError, KeyError, RecursionError):
            return text
        return f"{text}: {_shortened(found.decode(errors='replace'))}{self._advice(text, place[1], found)}"

    def _advice(self, text: str, name: str, found: bytes) -> str:
        is_number = found[:1] in b"-0123456789"
        if "out of range" in text:
            return "; NaN and infinities of binary formats are written so" if found.endswith(b"1e999") else ""
        if name in self._moments and is_number:
            unit = ", and its unit: EventTime(unit=…)" if name == self._time_name else ""
            return f"; a number needs a field of type int or float{unit}"
        if name in self._moments and name == self._time_name and found[:1] == b'"':
            return "; EventTime(format=…) reads other forms than RFC 3339"
        if _NUMBER_AS_TEXT.search(text) and JSON_NUMBER.fullmatch(found[1:-1].decode(errors="replace")):
            return "; lax= reads numbers that are written as text"
        return ""


def time_problems(decoded: DecodeResult, field: str, unit: str | None) -> Callable[[int], str]:
    """Return a function from the index of a decoded record to why it has no valid event time.

    Args:
        decoded: the records.
        field: the field of the event time.
        unit: the unit of a number.
    """
    return lambda index: _time_problem(field, decoded.value(index, field), unit)


def _time_problem(field: str, value: Any, unit: str | None) -> str:
    if value is None:
        return f"{field} is missing"
    if unit is None:
        return f"{field} is outside the years 1 to 9999"
    likely = [other for other in _UNITS if other != unit and _in_years(value, other)]
    advice = f'; in {_UNITS[likely[0]]} it would be a time of this century: unit="{likely[0]}"' if likely else ""
    return f"{field}: {shown(value)} in {_UNITS[unit]} is outside the years 1 to 9999{advice}"


def _in_years(value: int | float, unit: str) -> bool:
    """Tell whether a number is a time in the years 2000 to 2099."""
    number: Any = np.array([value], np.float64 if isinstance(value, float) else np.int64)
    times, possible = instants_of_numbers(number, unit)
    return bool(possible[0]) and int(times[0]) in _PLAUSIBLE_US
