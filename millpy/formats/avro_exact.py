"""What is written by a given Avro schema is what the record has, or an error: fastavro alone changes some values.

A finite number beyond the range of a `float` becomes infinite, a time in a `timestamp-millis` loses its microseconds,
and one in a `date` its hours. A number in the range of a `float` is rounded to it: the type says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

_FLOAT = "millpy-float"
_FLOAT_TYPE = {"type": "float", "logicalType": _FLOAT}
_PACKED = struct.Struct("<f")


def write_exactly(part: dict[str, Any]) -> None:
    """Let the values of a type or field of a parsed schema be written as they are, or be refused."""
    from fastavro.write import LOGICAL_WRITERS

    LOGICAL_WRITERS[f"float-{_FLOAT}"] = _float
    for name in ("type", "items", "values"):
        inner = part.get(name)
        if isinstance(inner, list):
            inner[:] = [_FLOAT_TYPE if each == "float" else each for each in inner]
        elif inner == "float":
            part |= {name: _FLOAT_TYPE} if name != "type" or "name" in part else _FLOAT_TYPE
    kind = f"{part.get('type')}-{part.get('logicalType')}"
    if (check := _CHECKS.get(kind)) is not None:
        part["logicalType"] = f"millpy-{part['logicalType']}"
        LOGICAL_WRITERS[f"{part['type']}-{part['logicalType']}"] = _checked(check, LOGICAL_WRITERS[kind])


def _checked(check: Callable[[Any], None], write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def prepare(value: Any, schema: Any) -> Any:
        check(value)
        return write(value, schema)

    return prepare


def _float(value: Any, schema: Any) -> Any:
    del schema
    if isinstance(value, float | int):
        try:
            _PACKED.pack(value)
        except OverflowError:
            raise ValueError(f"{value} is beyond the range of a float, which has 32 bits") from None
    return value


def _check_milliseconds(value: Any) -> None:
    if isinstance(value, datetime) and value.microsecond % 1_000:
        raise ValueError(f"{value} has microseconds, and timestamp-millis has none: round it in a map")


def _check_date(value: Any) -> None:
    if isinstance(value, date) and isinstance(value, datetime):
        raise ValueError(f"{value} is a time, and the schema has a date: take its date() in a map")


_CHECKS = {
    "long-timestamp-millis": _check_milliseconds,
    "long-local-timestamp-millis": _check_milliseconds,
    "int-date": _check_date,
}
