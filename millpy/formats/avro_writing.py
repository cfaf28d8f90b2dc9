"""Records as Avro messages: the schema of a record class, and what encodes a record by a schema.

The schema of a class has a field for each of its fields, with the name that it has in JSON. What has no exact form in
Avro is refused: give a schema then. A field that may be None is a union with null, whose default is null.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from millpy.errors import GraphError
from millpy.formats.avro import encoded, parsed_to_write
from millpy.model.field_types import enum_type, is_enum, parts_of
from millpy.model.record import RecordType, is_wide, without_none

_TYPES: dict[Any, Any] = {
    str: "string",
    int: "long",
    float: "double",
    bool: "boolean",
    bytes: "bytes",
    datetime: {"type": "long", "logicalType": "timestamp-micros"},
    date: {"type": "int", "logicalType": "date"},
    UUID: {"type": "string", "logicalType": "uuid"},
}
_BUILTIN = (datetime, date, bytes, UUID, Decimal)
_HINT = "give the schema: Avro(schema, registry=…)"


def schema_of(record_type: RecordType) -> str:
    """Return the Avro schema of a record class, as JSON text.

    Raises:
        GraphError: a field has no exact form in Avro.
    """
    return json.dumps(_record(record_type.struct, {}), separators=(",", ":"))


def _record(struct: type[msgspec.Struct], named: dict[str, type[msgspec.Struct]]) -> Any:
    check_written(struct)
    name = struct.__name__
    if name in named:
        if named[name] is not struct:
            raise GraphError(
                f"two classes are named {name}, and names of records are unique in Avro", hint="rename one of them"
            )
        return name
    named[name] = struct
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = []
    for name, written in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
        plain, nullable = without_none(hints[name])
        kind = _type(hints[name], plain, f"{struct.__name__}.{name}", named)
        fields.append({"name": written, "type": ["null", kind], "default": None} if nullable else
                      {"name": written, "type": kind})  # fmt: skip
    return {"type": "record", "name": struct.__name__, "fields": fields}


def _type(annotation: Any, plain: Any, place: str, named: dict[str, type[msgspec.Struct]]) -> Any:
    if is_wide(annotation):
        raise GraphError(f"{place}: a whole number of any width has no form in Avro", hint=_HINT)
    if is_enum(plain):
        plain = enum_type(plain)
    if (known := _TYPES.get(plain)) is not None:
        return known
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin in (list, dict) and arguments and (origin is list or arguments[0] is str):
        inner, nullable = without_none(arguments[-1])
        kind = _type(arguments[-1], inner, place, named)
        kind = ["null", kind] if nullable else kind
        return {"type": "array", "items": kind} if origin is list else {"type": "map", "values": kind}
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return _record(plain, named)
    raise GraphError(f"{place}: a field of type {annotation!r} has no exact form in Avro", hint=_HINT)


def check_written(struct: type[msgspec.Struct]) -> None:
    """Refuse classes that are not written as plain objects. Raises GraphError."""
    config = struct.__struct_config__
    if config.array_like or config.tag is not None:
        raise GraphError(
            f"{struct.__name__} is written with a tag or as an array, which has no form in Avro",
            hint="remove tag= and array_like= from the class, or map to another one",
        )


def check_fields(schema: str, record_type: RecordType) -> None:
    """Check that a schema has a field for each field of a class, and needs no other ones.

    Raises:
        GraphError: the schema is invalid, or does not fit the class.
    """
    check_written(record_type.struct)
    for part in parts_of(record_type.struct):
        if isinstance(part, type) and issubclass(part, msgspec.Struct) and part.__struct_config__.omit_defaults:
            raise GraphError(
                f"{part.__name__} is written without its defaults, which the Avro schema would replace by its own",
                hint="remove omit_defaults= from the class, or map to another one",
            )
    try:
        found = parsed_to_write(schema).parsed
    except ValueError as error:
        raise GraphError(f"the Avro schema is invalid: {error}") from error
    name, ours = record_type.struct.__name__, set(record_type.struct.__struct_encode_fields__)
    if not isinstance(found, dict) or found.get("type") != "record":
        raise GraphError("messages of a sink need an Avro record as their schema", hint='{"type": "record", …}')
    theirs = {field["name"]: "default" in field for field in found["fields"]}
    if lost := sorted(ours - theirs.keys()):
        raise GraphError(
            f"the Avro schema has no field {lost[0]!r}, which {name} has", hint="add it to the schema, or map it away"
        )
    if missing := sorted(field for field, has_default in theirs.items() if not has_default and field not in ours):
        raise GraphError(
            f"{name} has no field {missing[0]!r}, which the Avro schema needs", hint="add it, or give it a default"
        )


def writer_of(schema: str) -> Callable[[Any], bytes]:
    """Return a function that encodes a record. It raises ValueError for one that does not fit the schema."""
    found = parsed_to_write(schema)
    return lambda record: encoded(msgspec.to_builtins(record, builtin_types=_BUILTIN), found)
