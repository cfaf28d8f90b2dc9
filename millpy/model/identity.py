"""Identity: types and values as text, for what a deployed graph is compared by.

Two texts are equal when what is stored under the one reads back with the same meaning under the other. They are the
same in every process and on every machine: no address, no order of a set.

    type    its shape, by what msgspec reads: fields with their names in JSON, bounds, tags, members of an enum; the
            defaults of fields where the encoding leaves defaults out
    value   its class and what it is made of, as Python writes it
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, get_origin

import msgspec
import msgspec.inspect as shapes

_BOUNDS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz")
_ADDRESS = " at 0x"
_LEFT_OUT = (msgspec.NODEFAULT, list, dict, set, tuple, frozenset)
"""Factories of defaults that msgspec leaves out; what a function makes, which may differ each time, it writes."""


def type_text(type_: Any) -> str:
    """The shape of a type that msgspec can write as JSON: `list[int]`, `Usual(mean: float, n: int)`."""
    return _shape_text(shapes.type_info(type_), ())


def value_text(value: Any) -> str:
    """A parameter as text. Of an object that does not say what it is made of: the name of its type."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) or (callable(value) and not isinstance(value, msgspec.Struct)):
        return function_text(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{value_text(k)}: {value_text(v)}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(value_text, value)))}}}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        parts = ", ".join(map(value_text, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, msgspec.Struct):
        return _with_parameters(type(value).__name__, {n: getattr(value, n) for n in value.__struct_fields__})
    if dataclasses.is_dataclass(value):
        found = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return _with_parameters(type(value).__name__, found)
    text = repr(value)
    return type(value).__name__ if _ADDRESS in text else text


def parameters_text(of: Any) -> str:
    """An object by its class and what it was given, those that are None left out: `Band(high=3, low=1)`."""
    given = {name: value for name, value in sorted(vars(of).items()) if value is not None}
    return _with_parameters(type(of).__name__, given)


def function_text(function: Callable[..., Any]) -> str:
    """A function by its name; what it does is its own business. A partial one with what it was given."""
    if isinstance(function, functools.partial):
        inner = [function_text(function.func), *map(value_text, function.args)]
        inner += [f"{name}={value_text(value)}" for name, value in sorted(function.keywords.items())]
        return f"partial({', '.join(inner)})"
    name = getattr(function, "__name__", None)
    return str(name) if name is not None else type(function).__name__


def json_text(value: Any) -> str:
    """A value as JSON, sets and dicts in order."""
    return msgspec.json.encode(value, order="deterministic").decode()


def _with_parameters(name: str, parameters: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{own}={value_text(value)}' for own, value in parameters.items())})"


def _shape_text(shape: Any, outer: tuple[Any, ...]) -> str:
    """`outer`: the classes that it is nested in, of which a recursive one is told by its name alone."""
    kind = type(shape)
    if (own := getattr(shape, "cls", None)) is not None:
        return _class_text(shape, own, outer)
    if kind is shapes.UnionType:
        parts = [_shape_text(part, outer) for part in shape.types]
        return " | ".join(sorted(parts, key=lambda text: (text == "None", text)))
    if kind is shapes.LiteralType:
        return f"Literal[{', '.join(map(repr, shape.values))}]"
    name = kind.__name__.removesuffix("Type").removesuffix("Collection").lower()
    name = {"none": "None", "any": "Any", "vartuple": "tuple"}.get(name, name)
    nested = [getattr(shape, part) for part in ("item_type", "key_type", "value_type") if hasattr(shape, part)]
    nested += getattr(shape, "item_types", ())
    members = [_shape_text(part, outer) for part in nested] + ["..."] * (kind is shapes.VarTupleType)
    bounds = [f"{b}={value!r}" for b in _BOUNDS if (value := getattr(shape, b, None)) is not None]
    return name + (f"[{', '.join(members)}]" if members else "") + (f"({', '.join(bounds)})" if bounds else "")


def _class_text(shape: Any, cls: Any, outer: tuple[Any, ...]) -> str:
    plain = get_origin(cls) or cls
    name = str(plain.__name__)
    if cls in outer:
        return name
    if issubclass(plain, enum.Enum):
        return f"{name}({' | '.join(value_text(member.value) for member in plain)})"
    if not hasattr(shape, "fields"):
        return name
    left_out = getattr(getattr(plain, "__struct_config__", None), "omit_defaults", False)
    parts = []
    for field in shape.fields:
        default = ""
        if left_out and not field.required and field.default_factory in _LEFT_OUT:
            made = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            default = f" = {value_text(made)}"
        parts.append(f"{field.encode_name}: {_shape_text(field.type, (*outer, cls))}{default}")
    marks = [f"{mark}={told!r}" for mark in ("array_like", "tag_field", "tag") if (told := getattr(shape, mark, None))]
    return f"{name}({', '.join([*marks, *parts])})"
