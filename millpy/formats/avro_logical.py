"""Logical types of Avro schemas, and what else of a value fastavro alone would change.

What is written by a given schema is what the record has, or an error: of fastavro alone, a finite number beyond the
range of a `float` becomes infinite, one in an `int` or `long` loses its fraction, a time in a `timestamp-millis` its
microseconds, and one in a `date` its hours; any text passes as a `uuid`. A union takes the value by a branch that has
it. A number in the range of a `float` is rounded to it: the type says so.

A value that is read as another schema gets the logical type of that one, as in Avro for Java: fastavro takes that of
the schema which it was written with.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

_RESOLVED = "millpy-resolved"
_UNFIT = object()
"""What no type has, so that a union takes another branch."""
_UUID = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_PACKED = struct.Struct("<f")
_WITH_LOGICAL = ("int", "long", "bytes", "string")
_PRIMITIVE = frozenset({*_WITH_LOGICAL, "float", "double"})


def parts_of_schema(schema: Any, seen: set[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the types and fields in a parsed schema, each once."""
    seen = set() if seen is None else seen
    if isinstance(schema, list):
        for part in schema:
            yield from parts_of_schema(part, seen)
    elif isinstance(schema, dict) and id(schema) not in seen:
        seen.add(id(schema))
        yield schema
        for name in ("type", "items", "values", "fields"):
            yield from parts_of_schema(schema.get(name), seen)
        for part in schema.get("__named_schemas", {}).values():
            yield from parts_of_schema(part, seen)


def write_exactly(schema: Any) -> None:
    """Let the values of a parsed schema be written as they are, or be refused."""
    from fastavro.write import LOGICAL_WRITERS

    parts = list(_types(schema, ("float", "int", "long")))
    choices = _choices(schema)
    for part in parts:
        kind, logical = part["type"], part.get("logicalType")
        checks = [check for name in (kind, f"{kind}-{logical}") if (check := _CHECKS.get(name)) is not None]
        if checks:
            is_choice = id(part) in choices
            part["logicalType"] = f"millpy-{'choice' if is_choice else 'only'}-{logical}"
            write = LOGICAL_WRITERS.get(f"{kind}-{logical}")
            LOGICAL_WRITERS[f"{kind}-{part['logicalType']}"] = _checked(checks, write, is_choice=is_choice)


def _choices(schema: Any) -> set[int]:
    """Return the ids of the types in unions of several types beside null."""
    unions = [part.get(name) for part in parts_of_schema(schema) for name in ("type", "items", "values")]
    several = [union for union in unions if isinstance(union, list) and sum(each != "null" for each in union) > 1]
    return {id(each) for union in several for each in union}


def read_by_reader(schema: Any) -> None:
    """Let the values of a parsed schema be read with the logical types of the schema that they are read as."""
    from fastavro.read import LOGICAL_READERS

    for part in _types(schema, _WITH_LOGICAL):
        if part["type"] in (*_WITH_LOGICAL, "fixed"):
            part["own"], part["logicalType"] = part.get("logicalType"), _RESOLVED
            LOGICAL_READERS[f"{part['type']}-{_RESOLVED}"] = _resolver(LOGICAL_READERS)


def _types(schema: Any, kinds: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the types in a parsed schema, in which the names of some primitive ones become objects."""
    for part in list(parts_of_schema(schema)):
        for name in ("type", "items", "values"):
            inner = part.get(name)
            if isinstance(inner, list):
                inner[:] = [{"type": each} if isinstance(each, str) and each in kinds else each for each in inner]
            elif isinstance(inner, str) and inner in kinds and (name != "type" or "name" in part):
                part[name] = {"type": inner}
    for part in list(parts_of_schema(schema)):
        if isinstance(part.get("type"), str) and ("name" not in part or part["type"] == "fixed"):
            yield part


def _resolver(readers: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return what makes a value of one schema one of another, given what reads logical types."""

    def resolved(value: Any, writer_schema: Any, reader_schema: Any) -> Any:
        if type(reader_schema) is dict:
            kind, logical = reader_schema["type"], reader_schema.get("logicalType")
        elif reader_schema in _PRIMITIVE:
            kind, logical = reader_schema, None
        else:  # a fixed that is named
            kind, reader_schema, logical = writer_schema["type"], writer_schema, writer_schema["own"]
        if kind != writer_schema["type"]:
            value = _promoted(value, kind)
        read = None if logical is None else readers.get(f"{kind}-{logical}")
        return value if read is None else read(value, reader_schema, None)

    return resolved


def _promoted(value: Any, kind: str) -> Any:
    """Return a value as one of a wider type."""
    if kind in ("float", "double"):
        return float(value)
    if isinstance(value, str) and kind == "bytes":
        return value.encode()
    return value.decode() if isinstance(value, bytes) and kind == "string" else value


def _checked(
    checks: Sequence[Callable[[Any], str | None]], write: Callable[[Any, Any], Any] | None, *, is_choice: bool
) -> Callable[[Any, Any], Any]:
    def prepare(value: Any, schema: Any) -> Any:
        for check in checks:
            if why := check(value):
                if is_choice:
                    return _UNFIT
                raise ValueError(why)
        return value if write is None else write(value, schema)

    return prepare


def _float(value: Any) -> str | None:
    if isinstance(value, float | int):
        try:
            _PACKED.pack(value)
        except OverflowError:
            return f"{value} is beyond the range of a float, which has 32 bits"
    return None


def _whole(value: Any) -> str | None:
    if isinstance(value, float | Decimal) and value % 1 != 0:
        return f"{value} is not a whole number, which the schema has: round it in a map"
    return None


def _milliseconds(value: Any) -> str | None:
    if isinstance(value, datetime) and value.microsecond % 1_000:
        return f"{value} has microseconds, and timestamp-millis has none: round it in a map"
    return None


def _date(value: Any) -> str | None:
    if isinstance(value, datetime):
        return f"{value} is a time, and the schema has a date: take its date() in a map"
    return None


def _uuid(value: Any) -> str | None:
    if isinstance(value, str) and not _UUID.fullmatch(value):
        return f"{value!r} is no UUID, which the schema has"
    return None


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "float": _float,
    "int": _whole,
    "long": _whole,
    "long-timestamp-millis": _milliseconds,
    "long-local-timestamp-millis": _milliseconds,
    "int-date": _date,
    "string-uuid": _uuid,
}
"""What a type does not have, by the type and by its logical type: each returns why, or None."""
