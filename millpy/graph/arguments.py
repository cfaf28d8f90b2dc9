"""Checks of the arguments of a graph's methods: durations, and names of fields."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from millpy.errors import GraphError
from millpy.model.arguments import check_instance
from millpy.model.time import check_length

COMPUTED = 'name a field, such as "device"; a computed value needs a map(…) before, to a class that has it as a field'


def check_not_negative(what: str, duration: Any, hint: str) -> None:
    """Raise GraphError for what is no duration, or one that is negative or too long."""
    check_instance(what, duration, timedelta, hint)
    if duration < timedelta(0):
        raise GraphError(f"{what} must not be negative", hint="use zero or a positive duration")
    check_length(what, duration)


def field_names(what: str, fields: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of fields that are given as one name or several.

    Raises:
        GraphError: a name is no text, such as a function of the record.
    """
    found = (fields,) if isinstance(fields, str) or not isinstance(fields, Sequence) else tuple(fields)
    for name in found:
        if not isinstance(name, str):
            raise GraphError(f"{what} takes names of fields, not {name!r}", hint=COMPUTED)
    return found
