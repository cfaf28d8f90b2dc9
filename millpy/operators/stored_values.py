"""Values of a record's fields in cells, whose JSON holds neither NaN nor infinities: these are stored as text."""

from __future__ import annotations

from typing import Any


def storable_type(kind: type) -> Any:
    """Return the type of a cell that holds values of a field's type."""
    return float | str if kind is float else kind


def to_cell(value: Any) -> Any:
    """Return a value as a cell holds it."""
    return str(value) if isinstance(value, float) and value - value != 0.0 else value


def from_cell(kind: type, stored: Any) -> Any:
    """Return a value from its form in a cell, where JSON may have written 1.0 as 1."""
    return float(stored) if kind is float and stored is not None else stored
