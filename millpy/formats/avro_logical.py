"""Logical types of Avro schemas, and what else of a value fastavro alone would change.

What is written by a given schema is what the record has, or an error: of fastavro alone, a finite number beyond the
range of a `float` becomes infinite, a time in a `timestamp-millis` loses its microseconds, and one in a `date` its
hours. A number in the range of a `float` is rounded to it: the type says so.

A value that is read as another schema gets the logical type of that one, as in Avro for Java: fastavro takes that of
the schema which it was written with.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import datetime
from typing import Any

_FLOAT, _RESOLVED = "millpy-float", "millpy-resolved"
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

    LOGICAL_WRITERS[f"float-{_FLOAT}"] = _float
    for part in _types(schema, ("float",)):
        kind = f"{part['type']}-{part.get('logicalType')}"
        if part["type"] == "float":
            part["logicalType"] = _FLOAT
        elif (check := _CHECKS.get(kind)) is not None:
            part["logicalType"] = f"millpy-{part['logicalType']}"
            LOGICAL_WRITERS[f"{part['type']}-{part['logicalType']}"] = _checked(check, LOGICAL_WRITERS[kind])


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
    if isinstance(value, datetime):
        raise ValueError(f"{value} is a time, and the schema has a date: take its date() in a map")


_CHECKS = {
    "long-timestamp-millis": _check_milliseconds,
    "long-local-timestamp-millis": _check_milliseconds,
    "int-date": _check_date,
}
