"""Identity: descriptions of the parts of a graph as plain JSON, by which a graph is compared with the deployed one.

Two descriptions are equal if data stored under one has the same meaning when it is read under the other. A description
is the same in every process and on every machine, and contains no name of a class or module of millpy. The parts of a
graph (windows, aggregates, cells, dedupe, sources, operators) describe themselves by `identity()`:

    {"kind": "sliding", "size_us": 600000000, "every_us": 60000000}

A kind is a word of the stored format and never changes; the name of a parameter in µs ends in `_us`. A parameter that
is added later is left out while it has the value that means the earlier behavior.

    type        its shape, as msgspec reads it: a word, or an object with `type`: fields with their names in JSON,
                bounds, tags, values of an enum, and the defaults of fields where JSON omits them; no class names
    value       JSON itself, or one pair: {"uuid": "..."}, {"us": 60000000}
    function    the name that its author gave it, and the arguments of a partial function; not its code
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any, TypeAlias, get_origin
from uuid import UUID

import msgspec
import msgspec.inspect as shapes
import numpy as np

from millpy.errors import SchemaError
from millpy.model.time import microseconds

Identity: TypeAlias = Mapping[str, Any]
"""The description of a part of a graph: plain JSON."""

NONE = "none"
_WORDS: Mapping[str, str] = {
    "AnyType": "any",
    "NoneType": NONE,
    "BoolType": "bool",
    "IntType": "int",
    "FloatType": "float",
    "StrType": "str",
    "BytesType": "bytes",
    "ByteArrayType": "bytes",
    "MemoryViewType": "bytes",
    "DateTimeType": "datetime",
    "DateType": "date",
    "TimeType": "time",
    "TimeDeltaType": "timedelta",
    "UUIDType": "uuid",
    "DecimalType": "decimal",
    "RawType": "raw",
    "ExtType": "ext",
    "ListType": "list",
    "CollectionType": "list",
    "SetType": "set",
    "FrozenSetType": "set",
    "VarTupleType": "tuple",
    "TupleType": "tuple",
    "DictType": "dict",
    "FrozenDictType": "dict",
}
"""Name of a class of `msgspec.inspect` -> word of the stored format."""
_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz")
_INSIDE = {"item_type": "items", "key_type": "keys", "value_type": "values"}
_LEFT_OUT = (msgspec.NODEFAULT, list, dict, set, tuple, frozenset)
"""Factories whose defaults msgspec omits. It always writes fields with other factories, which may return anything."""


def identity_of_type(type_: Any) -> Any:
    """Describe the JSON form of a type: `"int"`, `{"type": "list", "items": "int"}`."""
    return _shape(shapes.type_info(type_), ())


def or_none(type_: Any) -> Any:
    """Return a described type with None added."""
    return type_ if allows_none(type_) else _union([type_, NONE])


def allows_none(type_: Any) -> bool:
    """Tell whether a described type allows None."""
    return type_ == NONE or (isinstance(type_, Mapping) and type_["type"] == "union" and NONE in type_["of"])


def identity_of_value(value: Any) -> Any:
    """Describe the value of a parameter.

    Raises:
        SchemaError: the value is neither data nor a function, and has no `identity()`.
    """
    for kind, describe in _DATA.items():
        if isinstance(value, kind):
            return describe(value)
    own = getattr(value, "identity", None)
    if callable(own) and not isinstance(value, type):
        return own()
    if isinstance(value, msgspec.Struct):
        return _object(value, value.__struct_fields__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _object(value, [field.name for field in dataclasses.fields(value)])
    if callable(value):
        return identity_of_function(value)
    raise SchemaError(
        f"cannot detect changes of parameter {value!r}: its type has no identity()",
        hint=f"give {type(value).__name__} a method identity() that returns JSON, or name only plain parameters: "
        "see Combiner.parameters",
    )


def identity_of_function(function: Callable[..., Any]) -> Any:
    """Describe a function or class by its name, and a partial function also by its arguments.

    The name is the attribute `stored_as`, with which a function can be renamed, or else the name in Python.
    """
    if isinstance(function, functools.partial):
        found = {"function": identity_of_function(function.func)}
        if function.args:
            found["arguments"] = list(map(identity_of_value, function.args))
        if function.keywords:
            found["keywords"] = {name: identity_of_value(value) for name, value in sorted(function.keywords.items())}
        return found
    named = function if hasattr(function, "__name__") else type(function)
    return {"function": str(getattr(function, "stored_as", "") or named.__name__)}


def canonical_json(value: Any) -> bytes:
    """Encode a value as JSON, with sets and dicts in sorted order."""
    return msgspec.json.encode(value, order="deterministic")


def _object(value: Any, fields: Iterable[str]) -> Identity:
    parameters = {name: identity_of_value(getattr(value, name, None)) for name in fields}
    return {**identity_of_function(type(value)), "keywords": parameters}


def _integer(value: int) -> Any:
    return int(value) if -(2**63) <= value < 2**63 else {"int": str(int(value))}


def _number(value: float) -> Any:
    """Describe a float: from 2**53 on as text, because jsonb may return a large one as another number."""
    return float(value) if abs(value) < 2**53 else {"float": str(float(value))}


def _mapping(value: Mapping[Any, Any]) -> Identity:
    return {"dict": _sorted([identity_of_value(k), identity_of_value(v)] for k, v in value.items())}


def _set(value: Iterable[Any]) -> Identity:
    return {"set": _sorted(map(identity_of_value, value))}


_DATA: Mapping[type, Callable[[Any], Any]] = {
    enum.Enum: lambda value: identity_of_value(value.value),
    type(None): lambda value: None,
    bool: bool,
    str: str,
    int: _integer,
    float: _number,
    timedelta: lambda value: {"us": microseconds(value)},
    datetime: lambda value: {"datetime": value.isoformat()},
    date: lambda value: {"date": value.isoformat()},
    time: lambda value: {"time": value.isoformat()},
    UUID: lambda value: {"uuid": str(value)},
    Decimal: lambda value: {"decimal": str(value)},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    PurePath: str,
    np.generic: lambda value: identity_of_value(value.item()),
    Mapping: _mapping,
    set: _set,
    frozenset: _set,
    list: lambda value: list(map(identity_of_value, value)),
    tuple: lambda value: {"tuple": list(map(identity_of_value, value))},
}
"""Type of data -> its description. The first match counts: a member of an enum may be a str, and a bool is an int."""


def _sorted(found: Iterable[Any]) -> list[Any]:
    return sorted(found, key=canonical_json)


def _shape(shape: Any, outer: tuple[Any, ...]) -> Any:
    """Describe a type, given the classes around it. One of these, met again, is described by its distance in levels."""
    if isinstance(shape, shapes.Metadata):
        return _shape(shape.type, outer)
    if isinstance(shape, shapes.UnionType):
        return _union(_shape(part, outer) for part in shape.types)
    if isinstance(shape, shapes.LiteralType):
        return {"type": "literal", "values": _sorted(map(identity_of_value, shape.values))}
    if isinstance(shape, shapes.EnumType):
        return {"type": "enum", "values": _sorted(identity_of_value(member.value) for member in shape.cls)}
    if isinstance(shape, shapes.CustomType):
        return {"type": "custom", "name": shape.cls.__name__}
    if hasattr(shape, "fields"):
        return _fields(shape, outer)
    word = _WORDS[type(shape).__name__]
    found: dict[str, Any] = {"type": word}
    found |= {name: _shape(getattr(shape, part), outer) for part, name in _INSIDE.items() if hasattr(shape, part)}
    if isinstance(shape, shapes.TupleType):
        found["members"] = [_shape(part, outer) for part in shape.item_types]
    bounds = {name: identity_of_value(getattr(shape, name, None)) for name in _BOUNDS}
    found |= {name: bound for name, bound in bounds.items() if bound is not None}
    return found if len(found) > 1 else word


def _union(parts: Iterable[Any]) -> Identity:
    """Describe a union: nested unions are flattened, members are sorted, and None comes last."""
    flat = [own for part in parts for own in (part["of"] if _is_union(part) else [part])]
    return {"type": "union", "of": [*_sorted(part for part in flat if part != NONE), *([NONE] * (NONE in flat))]}


def _is_union(part: Any) -> bool:
    return isinstance(part, Mapping) and part["type"] == "union"


def _fields(shape: Any, outer: tuple[Any, ...]) -> Identity:
    """Describe a class with fields as the JSON object or array that it is encoded to."""
    if shape.cls in outer:
        return {"type": "outer", "levels": outer[::-1].index(shape.cls) + 1}
    plain = get_origin(shape.cls) or shape.cls
    omits = getattr(getattr(plain, "__struct_config__", None), "omit_defaults", False)
    fields = []
    for field in shape.fields:
        described = [field.encode_name, _shape(field.type, (*outer, shape.cls))]
        if omits and not field.required and field.default_factory in _LEFT_OUT:
            made = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            described.append({"default": identity_of_value(made)})
        fields.append(described)
    array = isinstance(shape, shapes.NamedTupleType) or getattr(shape, "array_like", False)
    found: dict[str, Any] = {"type": "array" if array else "object", "fields": fields}
    return found | {mark: tag for mark in ("tag_field", "tag") if (tag := getattr(shape, mark, None)) is not None}
