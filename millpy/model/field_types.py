"""Types of record fields that Arrow has no column for, or not an exact one: what carries them in a column.

    Literal           the type of its values, text or whole numbers
    Enum              the values of its members
    Decimal           its digits as text, without an exponent, because a column of decimals has one scale for all rows
    date              Arrow's date32
    Any, unions, dict and list without the types of their members: JSON as text

Aggregates compute with whole numbers (`plain_value`): a Decimal in units of 10**-38, a date in days since 1970.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec

from millpy.errors import SchemaError
from millpy.model.time import instant

DIGITS_MAX = 38
"""The most digits of a Decimal before its point, and behind it."""
JSON_DEPTH_MAX = 100
"""How deep the value of a field of type `Any`, dict or list may be nested."""
UNITS = 10**DIGITS_MAX
DAY_0 = date(1970, 1, 1)
BUILTIN = (datetime, bytes, date)
"""What Arrow takes as it is, of the values that msgspec knows."""


def members_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; of another type, that type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def literal_type(annotation: Any) -> Any:
    """Return the type of the values of a Literal; a union if they differ; None for another type."""
    if typing.get_origin(annotation) is not typing.Literal:
        return None
    found: Any = None
    for kind in {type(value): None for value in typing.get_args(annotation)}:
        found = kind if found is None else found | kind
    return found


def is_literal(annotation: Any) -> bool:
    """Tell whether a field takes only the values of a Literal, or None."""
    return any(typing.get_origin(member) is typing.Literal for member in members_of(annotation))


def is_enum(plain: Any) -> bool:
    """Tell whether a type is an Enum."""
    return isinstance(plain, type) and issubclass(plain, enum.Enum)


def enum_type(plain: Any) -> type:
    """Return the type of the values of an Enum.

    Raises:
        SchemaError: they are neither all text nor all whole numbers of 64 bits.
    """
    values = [member.value for member in plain]
    if values and all(isinstance(value, str) for value in values):
        return str
    if values and all(type(value) is int and -(2**63) <= value < 2**63 for value in values):
        return int
    raise SchemaError(
        f"the values of {plain.__name__} are neither all text nor all 64-bit integers",
        hint=f'for example class {plain.__name__}(Enum): ON = "on"; OFF = "off"',
    )


def is_carried(plain: Any) -> bool:
    """Tell whether a plain type is carried by a column of another type: a Decimal, date or Enum."""
    return plain in (Decimal, date) or is_enum(plain)


def is_json(annotation: Any) -> bool:
    """Tell whether a field is stored as JSON: `Any`, a union, a dict or list of anything, or what contains these."""
    return any(map(_is_open, parts_of(annotation)))


def _is_open(part: Any) -> bool:
    if len([member for member in members_of(part) if member is not type(None)]) > 1:
        return True
    return part in (Any, object, dict, list) or (
        typing.get_origin(part) is dict and typing.get_args(part)[0] is not str
    )


def parts_of(annotation: Any) -> Iterator[Any]:
    """Yield a type and what is inside it, each class once."""
    return _parts_of(annotation, set())


def _parts_of(annotation: Any, seen: set[Any]) -> Iterator[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if annotation in seen:
        return
    literal = literal_type(annotation)
    yield annotation if literal is None else literal
    if literal is not None:
        return
    inside: list[Any] = list(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        seen.add(annotation)
        inside = list(typing.get_type_hints(annotation, include_extras=True).values())
    for part in inside:
        yield from _parts_of(part, seen)


def decimal_text(value: Decimal) -> str:
    """Write a Decimal without an exponent, with the digits that it has."""
    return format(value, "f")


def decimal_problem(value: Decimal) -> str | None:
    """Return why a Decimal cannot be stored, or None."""
    if not value.is_finite():
        return f"{value} cannot be stored"
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int), exponent
    if exponent < -DIGITS_MAX or (value and value.adjusted() >= DIGITS_MAX) or exponent > DIGITS_MAX:
        return f"has more than {DIGITS_MAX} digits before or behind the point"
    return None


def units_of(value: Decimal | str) -> int:
    """Return a Decimal as a whole number of units of 10**-38, exactly."""
    text = value if isinstance(value, str) else decimal_text(value)
    whole, _, fraction = text.partition(".")
    return int(whole + fraction + "0" * (DIGITS_MAX - len(fraction)))


def decimal_of(units: int) -> Decimal:
    """Return the Decimal of a whole number of units, without zeros at its end."""
    whole, fraction = divmod(abs(units), UNITS)
    behind = f".{fraction:0{DIGITS_MAX}d}".rstrip("0") if fraction else ""
    return Decimal(f"{'-' if units < 0 else ''}{whole}{behind}")


def mean_decimal(units: int, count: int) -> Decimal:
    """Return a sum of units divided by a count, rounded to 38 digits behind the point, half to even."""
    quotient, rest = divmod(units, count)
    if 2 * rest > count or (2 * rest == count and quotient % 2):
        quotient += 1
    return decimal_of(quotient)


def plain_value(value: Any) -> Any:
    """Return a value as aggregates compute with it: times as µs, Decimals as units, dates as days, Enums as values."""
    convert = _PLAIN.get(type(value))
    if convert is not None:
        return convert(value)
    return value.value if isinstance(value, enum.Enum) else value


def value_of_plain(kind: Any) -> Callable[[Any], Any] | None:
    """Return the inverse of `plain_value` for Decimals and dates; None for other types."""
    return _RESULTS.get(kind)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    datetime: instant,
    Decimal: units_of,
    date: lambda value: (value - DAY_0).days,
}
_RESULTS: dict[Any, Callable[[Any], Any]] = {Decimal: decimal_of, date: lambda days: DAY_0 + timedelta(days=days)}
