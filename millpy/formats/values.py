"""Python values as JSON text, strictly: nothing is rounded, replaced or left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import msgspec

from millpy.formats.message import NESTING_MAX

JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER = re.compile(r"([-+]?)([0-9]*)(?:\.([0-9]*))?([eE][-+]?[0-9]+)?")
_TRUE = frozenset(("true", "t", "1", "on", "yes"))
_FALSE = frozenset(("false", "f", "0", "off", "no"))
_CHARACTERS_MAX = 400
_DIGITS_MAX = 18
NO_NUMBER = msgspec.Raw(b"1e999")
"""What NaN and infinities become: a number that is too large for any field."""
_INT64 = range(-(2**63), 2**64)
VALUE_SIZE_MAX = 4_000_000
"""The most values, characters and bytes of one value together; a shared value counts as often as it occurs."""


def json_of(value: Any) -> bytes:
    """Encode a value of a payload with a schema, or a record of a user's function.

    NaN and infinities become a number that is too large for any field. So only the record whose field has one is
    rejected, not all records of its message.

    Raises:
        ValueError: JSON cannot hold it: an integer beyond 64 bits, a key that is no text, deep nesting. Or it is too
            large.
    """
    return msgspec.json.encode(_Checker(VALUE_SIZE_MAX).checked(value, NESTING_MAX))


def object_of(value: Any) -> bytes:
    """Encode a value that must be an object. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a record is {type(value).__name__}, not an object")
    return json_of(value)


class _Checker:
    """Checks one value, and returns it in types that JSON has.

    Args:
        room: the most values, characters and bytes.
    """

    __slots__ = ("_room",)

    def __init__(self, room: int) -> None:
        self._room = room

    def checked(self, value: Any, levels: int) -> Any:
        """Return a value in types that JSON has. Raises ValueError."""
        self._room -= 1 + (len(value) if isinstance(value, str | bytes | bytearray | memoryview) else 0)
        if self._room < 0:
            raise ValueError("too large: it has too many values, characters and bytes, or shares too many of them")
        kind = type(value)
        if kind is str or kind is bool or value is None:
            return value
        if kind is float:
            return value if math.isfinite(value) else NO_NUMBER
        if kind is int:
            if value not in _INT64:
                raise ValueError("an integer exceeds 64 bits")
            return value
        if levels == 0:
            raise ValueError(f"nested more than {NESTING_MAX} deep")
        if isinstance(value, Mapping):
            return {self._key(key): self.checked(each, levels - 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.checked(each, levels - 1) for each in value]
        return _of_other_type(value)

    def _key(self, key: Any) -> str:
        text = _key(key)
        self._room -= len(text)
        return text


def _of_other_type(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview | datetime | date | time | UUID):
        return value
    if isinstance(value, Decimal):
        return number_or_text(value) if value.is_finite() else NO_NUMBER
    raise ValueError(f"a value of type {type(value).__name__} has no form in JSON")


def number_or_text(value: Decimal) -> Any:
    """Return a finite Decimal as a JSON number with all its digits."""
    text = str(value)
    return msgspec.Raw(text.encode()) if JSON_NUMBER.fullmatch(text) else text


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise ValueError(f"a key is {type(key).__name__}, not text")


def number_text(text: str) -> bytes | None:
    """Return the JSON of a number as devices write it (`+5`, `.5`, `5.`, `007`); None for other text."""
    if JSON_NUMBER.fullmatch(text):
        return text.encode() if len(text) <= _CHARACTERS_MAX else None
    found = _NUMBER.fullmatch(text)
    if found is None or len(text) > _CHARACTERS_MAX or not (found[2] or found[3]):
        return None
    whole = found[2].lstrip("0") or "0"
    fraction = f".{found[3]}" if found[3] else ""
    return f"{'-' if found[1] == '-' else ''}{whole}{fraction}{found[4] or ''}".encode()


def whole_text(number: bytes) -> bytes:
    """Return the JSON of a whole number without fraction and exponent (`12.0`, `1e3`); other numbers unchanged."""
    if number.lstrip(b"-").isdigit():
        return number
    try:
        exact = Decimal(number.decode())
        if not exact:
            return b"0"
        if exact.adjusted() <= _DIGITS_MAX and exact == exact.to_integral_value():
            return b"%d" % int(exact)
    except InvalidOperation:  # its exponent has too many digits
        pass
    return number


def cell_writer(kind: type, decimal: str = ".") -> Callable[[str], bytes]:
    """Return a function from text to JSON, by the type of the record's field.

    A text that is no number becomes JSON text in a number field, so that decoding rejects the record and says why. The
    function raises ValueError for a number with a point where the decimal mark is a comma: `lax` would read it.
    """

    def number(text: str) -> bytes:
        plain = text.strip()
        if decimal != ".":
            if "." in plain:
                raise ValueError(f"{text[:50]!r} has a point, which may mean anything where decimals have a comma")
            plain = plain.replace(decimal, ".", 1)
        found = number_text(plain)
        if found is None:
            return msgspec.json.encode(text)
        return whole_text(found) if kind is int else found

    def truth(text: str) -> bytes:
        plain = text.strip().lower()
        return b"true" if plain in _TRUE else b"false" if plain in _FALSE else msgspec.json.encode(text)

    if kind in (int, float, Decimal):
        return number
    return truth if kind is bool else msgspec.json.encode
