"""One-dimensional arrays in PostgreSQL's binary format, made from whole columns.

psycopg adapts lists element by element and picks the element type by the values. Here the type is fixed, so that a
statement is planned once, and numpy packs columns of fixed width.

    array    dimensions int32 = 1, has nulls int32, element type int32, length int32, lower bound int32 = 1
    element  length int32 (-1 for null), the bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from datetime import date
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
from psycopg import AsyncConnection
from psycopg.adapt import Dumper
from psycopg.pq import Format

_HEAD = struct.Struct("!iiIii")
_LENGTH = struct.Struct("!i")
_NULL = _LENGTH.pack(-1)
FEW_MAX = 16
"""Fewer values than this are packed one by one."""
PG_EPOCH_DAY = 730_120
"""PostgreSQL's epoch as days from the beginning of the year 1, which is day 1."""
PG_EPOCH_US = 946_684_800_000_000
"""PostgreSQL's epoch, 2000-01-01, in µs since 1970."""


class PgArray:
    """An array in wire format; one subclass per element type."""

    __slots__ = ("encoded",)
    element_oid: ClassVar[int]
    array_oid: ClassVar[int]

    def __init__(self, count: int, body: bytes) -> None:
        self.encoded = _HEAD.pack(1, 1, self.element_oid, count, 1) + body


class _FixedWidthArray(PgArray):
    """An array of elements that `struct` and numpy can pack; None is null."""

    __slots__ = ()
    numpy_type: ClassVar[str]
    python_type: ClassVar[str]

    def __init__(self, values: Sequence[Any] | npt.NDArray[Any]) -> None:
        super().__init__(len(values), self._body(values))

    @classmethod
    def _body(cls, values: Sequence[Any] | npt.NDArray[Any]) -> bytes:
        element = struct.Struct("!i" + cls.python_type)
        width = element.size - _LENGTH.size
        if cls.python_type == "q" and not isinstance(values, np.ndarray):
            values = whole_numbers(values)
        if isinstance(values, np.ndarray):
            packed = np.empty(len(values), dtype=[("length", ">i4"), ("value", cls.numpy_type)])
            packed["length"] = width
            packed["value"] = values
            return packed.tobytes()
        return b"".join([_NULL if value is None else element.pack(width, value) for value in values])


def whole_numbers(values: Sequence[Any]) -> Sequence[Any] | npt.NDArray[np.int64]:
    """Return values as int64, which is ten times as fast to pack, if all of them are ints that fit; else unchanged."""
    if len(values) < FEW_MAX:
        return values
    try:
        found = np.array(values)
    except OverflowError:
        return values
    return found if found.dtype == np.int64 else values


class Bigints(_FixedWidthArray):
    """`bigint[]`."""

    __slots__ = ()
    element_oid, array_oid, numpy_type, python_type = 20, 1016, ">i8", "q"


class Doubles(_FixedWidthArray):
    """`double precision[]`."""

    __slots__ = ()
    element_oid, array_oid, numpy_type, python_type = 701, 1022, ">f8", "d"


class Booleans(_FixedWidthArray):
    """`boolean[]`."""

    __slots__ = ()
    element_oid, array_oid, numpy_type, python_type = 16, 1000, "?", "?"


class Timestamps(_FixedWidthArray):
    """`timestamptz[]` of µs since 1970."""

    __slots__ = ()
    element_oid, array_oid, numpy_type, python_type = 1184, 1185, ">i8", "q"

    def __init__(self, values: Sequence[int | None] | npt.NDArray[np.int64]) -> None:
        numbers = values if isinstance(values, np.ndarray) else whole_numbers(values)
        if isinstance(numbers, np.ndarray):
            super().__init__(numbers - PG_EPOCH_US)
        else:
            super().__init__([None if value is None else value - PG_EPOCH_US for value in numbers])


class Dates(_FixedWidthArray):
    """`date[]`."""

    __slots__ = ()
    element_oid, array_oid, numpy_type, python_type = 1082, 1182, ">i4", "i"

    def __init__(self, values: Sequence[date | None]) -> None:
        super().__init__([None if value is None else value.toordinal() - PG_EPOCH_DAY for value in values])


SIGN_NEGATIVE = 0x4000
_NUMERIC_BASE = 10_000
_INT64_DIGITS = 5
"""Base-10,000 digits of a 64-bit number."""


class Numerics(PgArray):
    """`numeric[]`, from whole numbers of any width."""

    __slots__ = ()
    element_oid, array_oid = 1700, 1231

    def __init__(self, values: Sequence[int | None]) -> None:
        numbers = whole_numbers(values)
        if isinstance(numbers, np.ndarray):
            digits = packed_numerics(numbers)
            packed = np.empty(len(numbers), [("length", ">i4"), ("value", digits.dtype)])
            packed["length"], packed["value"] = digits.dtype.itemsize, digits
            super().__init__(len(values), packed.tobytes())
        else:
            super().__init__(len(values), _variable(None if v is None else numeric_bytes(int(v)) for v in values))


def packed_numerics(numbers: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Encode whole numbers as `numeric_bytes` does, with leading zeros, which PostgreSQL strips."""
    packed = np.zeros(len(numbers), [("head", ">i2", 4), ("digits", ">i2", _INT64_DIGITS)])
    packed["head"][:, 0] = _INT64_DIGITS
    packed["head"][:, 1] = _INT64_DIGITS - 1
    packed["head"][:, 2] = np.where(numbers < 0, SIGN_NEGATIVE, 0)
    rest = np.abs(numbers).view(np.uint64)  # int64 cannot hold the absolute value of its smallest number
    for place in reversed(range(_INT64_DIGITS)):
        packed["digits"][:, place] = rest % _NUMERIC_BASE
        rest //= _NUMERIC_BASE
    return packed


def numeric_bytes(value: int) -> bytes:
    """Encode a whole number as base-10,000 digits, the first of them with the weight of the highest power."""
    digits, rest = [], abs(value)
    while rest:
        rest, digit = divmod(rest, _NUMERIC_BASE)
        digits.append(digit)
    digits.reverse()
    head = (len(digits), len(digits) - 1 if digits else 0, SIGN_NEGATIVE if value < 0 else 0, 0)
    return struct.pack(f"!hhHh{len(digits)}h", *head, *digits)


class Decimals(PgArray):
    """`numeric[]`, from Decimals or their text."""

    __slots__ = ()
    element_oid, array_oid = 1700, 1231

    def __init__(self, values: Sequence[Decimal | str | None]) -> None:
        super().__init__(len(values), _variable(None if v is None else decimal_bytes(v) for v in values))


def decimal_bytes(value: Decimal | str) -> bytes:
    """Encode a Decimal as base-10,000 digits, and how many decimal digits it has behind the point."""
    text = value if isinstance(value, str) else format(value, "f")
    whole, _, fraction = text.partition(".")
    groups = -(-len(fraction) // 4)
    digits, rest = [], abs(int(whole + fraction.ljust(4 * groups, "0")))
    while rest:
        rest, digit = divmod(rest, _NUMERIC_BASE)
        digits.append(digit)
    digits.reverse()
    sign = SIGN_NEGATIVE if digits and text.startswith("-") else 0
    return struct.pack(f"!hhHh{len(digits)}h", len(digits), len(digits) - groups - 1, sign, len(fraction), *digits)


class Byteas(PgArray):
    """`bytea[]`."""

    __slots__ = ()
    element_oid, array_oid = 17, 1001

    def __init__(self, values: Sequence[bytes | None]) -> None:
        super().__init__(len(values), _variable(values))


class Texts(PgArray):
    """`text[]`, from str or UTF-8."""

    __slots__ = ()
    element_oid, array_oid = 25, 1009

    def __init__(self, values: Sequence[str | bytes | None]) -> None:
        super().__init__(len(values), _variable(v.encode() if isinstance(v, str) else v for v in values))


class Uuids(PgArray):
    """`uuid[]`, from UUID or its text."""

    __slots__ = ()
    element_oid, array_oid = 2950, 2951

    def __init__(self, values: Sequence[UUID | str | None]) -> None:
        super().__init__(len(values), _variable(None if v is None else UUID(str(v)).bytes for v in values))


class Jsonbs(PgArray):
    """`jsonb[]`, from JSON text."""

    __slots__ = ()
    element_oid, array_oid = 3802, 3807

    def __init__(self, values: Sequence[bytes | None]) -> None:
        super().__init__(len(values), _variable(None if v is None else b"\x01" + v for v in values))


def _variable(values: Iterable[bytes | None]) -> bytes:
    parts = []
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(_LENGTH.pack(len(value)))
            parts.append(value)
    return b"".join(parts)


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: PgArray) -> bytes:
        return obj.encoded


ARRAY_TYPES: tuple[type[PgArray], ...] = (
    Bigints,
    Dates,
    Decimals,
    Numerics,
    Doubles,
    Booleans,
    Timestamps,
    Byteas,
    Texts,
    Uuids,
    Jsonbs,
)
_DUMPERS = {
    kind: type(f"{kind.__name__}Dumper", (_ArrayDumper,), {"oid": kind.array_oid, "format": Format.BINARY})
    for kind in ARRAY_TYPES
}


def register_arrays(connection: AsyncConnection[Any]) -> None:
    """Let a connection send parameters of these array types."""
    for kind, dumper in _DUMPERS.items():
        connection.adapters.register_dumper(kind, dumper)
