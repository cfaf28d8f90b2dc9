"""The records that the per-key tools make: the fields of the key, then those of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millpy.errors import GraphError
from millpy.model.record import column_name


def key_columns(fields: Sequence[str], types: Sequence[type]) -> dict[str, type]:
    """Return the fields of a key as columns of an output: "a.b" becomes a_b.

    Raises:
        GraphError: two of them share a name.
    """
    found = {column_name(field): kind for field, kind in zip(fields, types, strict=True)}
    if len(found) < len(fields):
        raise GraphError(
            f"key fields {tuple(fields)} share a column name", hint="map one of them to a field of another name"
        )
    return found


def output_type(name: str, key: Mapping[str, type], fields: Sequence[tuple[str, Any]]) -> Any:
    """Return the class of the output's records.

    Raises:
        GraphError: a field of the result has the name of a key field.
    """
    if taken := [field for field, _ in fields if field in key]:
        raise GraphError(
            f"the result has a field {taken[0]!r}, and so has the key", hint="map the key to a field of another name"
        )
    return msgspec.defstruct(name, [*key.items(), *fields], frozen=True)


def key_values(key: Any) -> tuple[Any, ...]:
    """Return the values of a key's fields."""
    return key if isinstance(key, tuple) else (key,)
