"""Values of MessagePack (its specification of 2013) and CBOR (RFC 8949), read into types that JSON has.

The messages come from anybody, so the cost of each is linear in its bytes, with small constants:

* All keys become text before they are in a dict. Integers, and arrays as keys, could be chosen to have equal hashes,
  which makes a dict of n keys cost n² steps; the hash of text has a secret seed.
* No integer, fraction or float of more than `NUMBER_BYTES_MAX` bytes becomes a number: the conversion to decimal digits
  is quadratic.
* A message has at most `VALUES_MAX` values. Values that CBOR shares count as often as they occur, and may make a
  message `SHARED_MAX` times as large.

What has no form in JSON becomes an object that says what it is, such as `{"tag": 30, "value": [1, 3]}`. So only those
records are rejected that have it in a field, not all of their message.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

import msgspec

from millpy.formats.message import NESTING_MAX
from millpy.formats.values import NO_NUMBER, number_or_text

VALUES_MAX = 1_000_000
"""The most values of one message."""
SHARED_MAX = 16
"""How many times as large as its payload a message of CBOR may be, by values that are shared in it."""
NUMBER_BYTES_MAX = 128
"""The most bytes of an integer; 1,024 bits are more than the range of a double."""
NUMBER_COST = 8
"""As how many values a number in bytes, or a fraction, counts."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INT64 = range(-(2**63), 2**64)
_HALF, _SINGLE, _DOUBLE = struct.Struct(">e"), struct.Struct(">f"), struct.Struct(">d")
_FLOATS = {2: _HALF, 4: _SINGLE, 8: _DOUBLE}
_NUMBERS = (2, 3, 4, 5)
_POWER_MAX = 200
_REFERENCE_MIN = ((24, 3), (256, 4), (65_536, 5), (2**32, 7))


class ValueReader(ABC):
    """Reads the one value of a message.

    Args:
        payload: the message.
    """

    __slots__ = ("_data", "_lowest", "_place", "_room")

    def __init__(self, payload: bytes) -> None:
        self._data = payload
        self._place = 0
        self._room = VALUES_MAX
        self._lowest = NESTING_MAX

    def read(self) -> Any:
        """Return the value. Raises ValueError for a message that is none, or too large."""
        try:
            value = self._value(NESTING_MAX)
        except IndexError:
            raise ValueError("the message is cut off") from None
        if self._place < len(self._data):
            raise ValueError("bytes follow the value")
        return value

    @abstractmethod
    def _value(self, levels: int) -> Any:
        """Return the next value, in which `levels` more may be nested. Raises IndexError where a head is missing."""

    def _taken(self, size: int) -> bytes:
        place = self._place
        self._place = end = place + size
        if end > len(self._data):
            raise ValueError("the message is cut off")
        return self._data[place:end]

    def _number(self, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._taken(size), "big", signed=signed)

    def _float(self, size: int) -> Any:
        (value,) = _FLOATS[size].unpack(self._taken(size))
        return value if math.isfinite(value) else NO_NUMBER

    def _list(self, count: int, levels: int) -> list[Any]:
        if not count and levels > 0:
            return []
        self._enter(count, levels)
        value, inner = self._value, levels - 1
        return [value(inner) for _ in range(count)]

    def _object(self, count: int, levels: int) -> dict[str, Any]:
        if not count and levels > 0:
            return {}
        self._enter(2 * count, levels)
        key, value, inner = self._key, self._value, levels - 1
        return {key(inner): value(inner) for _ in range(count)}

    def _key(self, levels: int) -> str:
        found = self._value(levels)
        if type(found) is str:
            return found
        if type(found) is int:
            return str(found)
        raise ValueError("a key is neither text nor an integer of 64 bits")

    def _enter(self, count: int, levels: int) -> None:
        """Begin a container of values. Raises ValueError if they are too many, or nested too deeply."""
        if levels <= 0:
            raise ValueError(f"nested more than {NESTING_MAX} deep")
        if levels <= self._lowest:
            self._lowest = levels - 1
        self._spend(count)

    def _spend(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise ValueError(f"too large: it has more than {VALUES_MAX:,} values")


class MessagePackReader(ValueReader):
    """Reads the value of a message of MessagePack."""

    __slots__ = ()

    def _value(self, levels: int) -> Any:
        head = self._data[self._place]
        self._place += 1
        if head < 0x80:
            return head
        if head < 0x90:
            return self._object(head & 0x0F, levels)
        if head < 0xA0:
            return self._list(head & 0x0F, levels)
        if head < 0xC0:
            return self._taken(head & 0x1F).decode()
        if head == 0xCB:
            return self._float(8)
        if head >= 0xE0:
            return head - 0x100
        return self._long(head, levels)

    def _long(self, head: int, levels: int) -> Any:
        """Return a value whose head is one of 0xC0 to 0xDF."""
        if head < 0xC4:
            if head == 0xC1:
                raise ValueError("byte 0xc1 begins no value")
            return (None, None, False, True)[head - 0xC0]
        if head < 0xC7:
            return self._taken(self._number(1 << head - 0xC4))
        if head < 0xCA:
            return self._extension(self._number(1 << head - 0xC7))
        if head == 0xCA:
            return self._float(4)
        if head < 0xD0:
            return self._number(1 << head - 0xCC)
        if head < 0xD4:
            return self._number(1 << head - 0xD0, signed=True)
        if head < 0xD9:
            return self._extension(1 << head - 0xD4)
        if head < 0xDC:
            return self._taken(self._number(1 << head - 0xD9)).decode()
        count = self._number(2 << (head & 1))
        return self._list(count, levels) if head < 0xDE else self._object(count, levels)

    def _extension(self, size: int) -> Any:
        kind = self._number(1, signed=True)
        data = self._taken(size)
        at = _timestamp(data) if kind == -1 else None
        return {"ext": kind, "value": data} if at is None else at


def _timestamp(data: bytes) -> datetime | None:
    """Return a timestamp of MessagePack, rounded to the µs; None for bytes that are none."""
    if len(data) == 4:
        seconds, nanos = int.from_bytes(data, "big"), 0
    elif len(data) == 8:
        both = int.from_bytes(data, "big")
        seconds, nanos = both & (2**34 - 1), both >> 34
    elif len(data) == 12:
        seconds, nanos = int.from_bytes(data[4:], "big", signed=True), int.from_bytes(data[:4], "big")
    else:
        return None
    try:
        return _EPOCH + timedelta(seconds=seconds, microseconds=(nanos + 500) // 1_000) if nanos < 10**9 else None
    except OverflowError:
        return None


@dataclass(frozen=True, slots=True)
class _SharedValue:
    """A value that others may refer to.

    Attributes:
        value: the value.
        values: the number of values in it.
        size: its bytes, with those of the values that it refers to.
        height: how deep it is nested.
    """

    value: Any
    values: int
    size: int
    height: int


class CborReader(ValueReader):
    """Reads the value of a message of CBOR."""

    __slots__ = ("_references", "_shared", "_strings")

    def __init__(self, payload: bytes) -> None:
        super().__init__(payload)
        self._shared: list[_SharedValue | None] = []
        self._strings: list[bytes | str] | None = None
        self._references = SHARED_MAX * len(payload)

    def _value(self, levels: int) -> Any:
        head = self._data[self._place]
        self._place += 1
        if head < 0x18:
            return head
        if head == 0xFB:
            return self._float(8)
        kind, size = head >> 5, head & 0x1F
        if kind == 7:
            return self._simple(size)
        if size > 23:
            if size == 31:
                return self._indefinite(kind, levels)
            if size > 27:
                raise ValueError(f"byte 0x{head:02x} begins no value")
            size = self._number(1 << size - 24)
        if kind == 3:
            return self._string(self._taken(size).decode(), size)
        if kind == 5:
            return _distinct(self._object(size, levels), size)
        if kind == 4:
            return self._list(size, levels)
        if kind == 0:
            return size
        if kind == 1:
            return _integer(-1 - size)
        return self._string(self._taken(size), size) if kind == 2 else self._tagged(size, levels)

    def _simple(self, low: int) -> Any:
        """Return a float or simple value."""
        if 20 <= low <= 23:
            return (False, True, None, None)[low - 20]  # the last is "undefined"
        if 25 <= low <= 27:
            return self._float(1 << low - 24)
        if low > 27:
            why = "a value ends where none has begun" if low == 31 else f"byte 0x{0xE0 + low:02x} begins no value"
            raise ValueError(why)
        value = self._number(1) if low == 24 else low
        if low == 24 and value < 32:
            raise ValueError(f"simple value {value} is in two bytes, where one is its only form")
        return {"simple": value}

    def _indefinite(self, kind: int, levels: int) -> Any:
        """Return a value whose length is not known before its end."""
        if kind in (2, 3):
            return self._chunks(kind)
        if kind == 4:
            values = []
            while not self._ends():
                self._enter(1, levels)
                values.append(self._value(levels - 1))
            return values
        if kind != 5:
            raise ValueError("an integer or tag without a length")
        found, count = {}, 0
        while not self._ends():
            self._enter(2, levels)
            key = self._key(levels - 1)
            found[key] = self._value(levels - 1)
            count += 1
        return _distinct(found, count)

    def _chunks(self, kind: int) -> Any:
        """Return a string in several parts, which has no number."""
        chunks: list[Any] = []
        strings, self._strings = self._strings, None
        while not self._ends():
            if self._data[self._place] >> 5 != kind or self._data[self._place] & 0x1F == 31:
                raise ValueError("a string has a part of another type")
            self._spend(1)
            chunks.append(self._value(0))
        self._strings = strings
        return ("" if kind == 3 else b"").join(chunks)

    def _ends(self) -> bool:
        """Pass the end of a value of indefinite length, if it is next."""
        ends = self._data[self._place] == 0xFF
        self._place += ends
        return ends

    def _tagged(self, tag: int, levels: int) -> Any:
        self._enter(NUMBER_COST if tag in _NUMBERS else 1, levels)
        if tag in _STRUCTURAL:
            return _STRUCTURAL[tag](self, levels)
        value = self._value(levels - 1)
        read = _TAGS.get(tag)
        found = None if read is None else read(value)
        return {"tag": tag, "value": value} if found is None else found

    def _shareable(self, levels: int) -> Any:
        """Return a value that others may refer to (tag 28)."""
        number = len(self._shared)
        self._shared.append(None)
        place, room, references, lowest = self._place, self._room, self._references, self._lowest
        self._lowest = levels
        value = self._value(levels - 1)
        size = self._place - place + references - self._references
        self._shared[number] = _SharedValue(value, room - self._room + 1, size, levels - self._lowest)
        self._lowest = min(self._lowest, lowest)
        return value

    def _shared_value(self, levels: int) -> Any:
        """Return the value that is referred to (tag 29)."""
        number = self._value(levels - 1)
        if type(number) is not int or not 0 <= number < len(self._shared):
            raise ValueError("a value refers to one that is not there")
        shared = self._shared[number]
        if shared is None:
            raise ValueError("a value contains itself")
        self._refer(shared.size)
        self._enter(shared.values, levels - shared.height + 1)
        return shared.value

    def _namespace(self, levels: int) -> Any:
        """Return a value whose strings others in it may refer to (tag 256)."""
        outer, self._strings = self._strings, []
        value = self._value(levels - 1)
        self._strings = outer
        return value

    def _string(self, value: Any, size: int) -> Any:
        """Return a string, and remember one that is long enough to be referred to."""
        if self._strings is not None:
            number = len(self._strings)
            least = next((size for below, size in _REFERENCE_MIN if number < below), 11)
            if size >= least:
                self._strings.append(value)
        return value

    def _earlier_string(self, levels: int) -> Any:
        """Return the string that is referred to (tag 25)."""
        number = self._value(levels - 1)
        if self._strings is None or type(number) is not int or not 0 <= number < len(self._strings):
            raise ValueError("a value refers to a string that is not there")
        found = self._strings[number]
        self._refer(len(found))
        return found

    def _refer(self, size: int) -> None:
        self._references -= size
        if self._references < 0:
            raise ValueError(f"too large: what it shares makes it more than {SHARED_MAX} times as large")


_STRUCTURAL: dict[int, Callable[[CborReader, int], Any]] = {
    25: CborReader._earlier_string,
    28: CborReader._shareable,
    29: CborReader._shared_value,
    256: CborReader._namespace,
    55799: lambda reader, levels: reader._value(levels - 1),
}
"""Tag -> a function that reads the value behind it."""


def _distinct(found: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a map. Raises ValueError if it had more keys: a map with a key twice is not valid (RFC 8949, 5.6)."""
    if len(found) != count:
        raise ValueError("a map has a key twice; the integer 1 is the same as the text 1")
    return found


def _integer(value: int) -> Any:
    """Return an integer as JSON; of more than 64 bits with all its digits."""
    return value if value in _INT64 else msgspec.Raw(str(value).encode())


def _big(value: Any) -> int | None:
    """Return the integer of a byte string (tag 2); None for anything else, or for one that is too long."""
    if not isinstance(value, bytes) or len(value) > NUMBER_BYTES_MAX:
        return None
    return int.from_bytes(value, "big")


def _positive(value: Any) -> Any:
    found = _big(value)
    return None if found is None else _integer(found)


def _negative(value: Any) -> Any:
    found = _big(value)
    return None if found is None else _integer(-1 - found)


def _parts(value: Any) -> tuple[int, int] | None:
    """Return the exponent and the mantissa of a fraction; None for anything else."""
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int:
        return None
    exponent, mantissa = value
    if isinstance(mantissa, msgspec.Raw):  # an integer of more than 64 bits
        mantissa = int(bytes(mantissa))
    return (exponent, mantissa) if type(mantissa) is int else None


def _decimal_fraction(value: Any) -> Any:
    parts = _parts(value)
    try:
        return None if parts is None else number_or_text(Decimal(f"{parts[1]}e{parts[0]}"))
    except InvalidOperation:  # an exponent beyond all bounds
        return None


def _binary_fraction(value: Any) -> Any:
    """Return mantissa × 2**exponent, exactly; None beyond 2**200, or below its inverse."""
    parts = _parts(value)
    if parts is None or abs(parts[0]) > _POWER_MAX or parts[1] not in _INT64:
        return None
    exponent, mantissa = parts
    if exponent >= 0:
        return number_or_text(Decimal(mantissa * 2**exponent))
    return number_or_text(Decimal(f"{mantissa * 5**-exponent}e{exponent}"))


def _epoch_time(value: Any) -> datetime | None:
    if type(value) not in (int, float):
        return None
    try:
        return datetime.fromtimestamp(value, UTC)
    except (OverflowError, OSError, ValueError):
        return None


def _epoch_date(value: Any) -> date | None:
    try:
        return _EPOCH.date() + timedelta(days=value) if type(value) is int else None
    except OverflowError:
        return None


def _uuid(value: Any) -> UUID | None:
    return UUID(bytes=value) if isinstance(value, bytes) and len(value) == 16 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_TAGS: dict[int, Callable[[Any], Any]] = {
    0: _text,
    1: _epoch_time,
    2: _positive,
    3: _negative,
    4: _decimal_fraction,
    5: _binary_fraction,
    32: _text,
    37: _uuid,
    100: _epoch_date,
    1004: _text,
}
"""Tag -> a function that returns its meaning in JSON, or None for a value that does not fit it."""
