"""Whether the bytes of a message are what its Avro schema says (specification 1.11, "Binary encoding").

fastavro reads some wrong bytes in silence: a negative index of a union or enum counts from the end, as in Python; an
`int` may have more than 32 bits; a negative length is none. A message that is damaged, or was written with another
schema, would so become a record with wrong values. Therefore a message is walked by its schema before it is read.

A check is a function from the message and the place of a value to the place behind the value. A value that always has
as many bytes, and may have any, is that number instead. A place behind the end of the message raises IndexError where
a byte is read there, and is found at the end otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[bytes, int], int]
_FIXED = {"null": 0, "float": 4, "double": 8}
_ONE_BYTE = 0x80
"""A number below it is one byte; a byte from it on is followed by others."""


def message_check(schema: Any, named: Mapping[str, Any]) -> Callable[[bytes], None]:
    """Return a function that checks a message. It raises ValueError for one that the schema does not permit.

    Args:
        schema: the schema as fastavro parses it, which does not contain itself.
        named: the named types that it refers to.
    """
    check = _checked(_Checks(named).make_check(schema, "the value"))

    def check_message(data: bytes) -> None:
        try:
            end = check(data, 0)
        except IndexError:
            raise ValueError("the message is cut off") from None
        if end > len(data):
            raise ValueError("the message is cut off")
        if end < len(data):
            raise ValueError("bytes follow the value")

    return check_message


class _Checks:
    """Makes the checks of a schema, those of each named type once.

    Args:
        named: the named types.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._known: dict[str, Check | int] = {}

    def make_check(self, schema: Any, where: str) -> Check | int:
        """Return the check of a schema.

        Args:
            schema: the schema.
            where: which value it is, for messages.
        """
        if isinstance(schema, list):
            return _union([self.make_check(part, where) for part in schema], where)
        if isinstance(schema, str):
            return _primitive(schema, where) or (0 if schema == "null" else self._of_name(schema))
        kind = schema["type"]
        if kind in ("record", "error", "enum", "fixed"):
            return self._of_name(schema["name"], schema)
        if kind == "array":
            return _blocks(self.make_check(schema["items"], where), where)
        if kind == "map":
            return _blocks(_record([_text(where), self.make_check(schema["values"], where)]), where)
        return self.make_check(kind, where)

    def _of_name(self, name: str, schema: Any = None) -> Check | int:
        if name not in self._known:
            self._known[name] = self._of_definition(name, self._named[name] if schema is None else schema)
        return self._known[name]

    def _of_definition(self, name: str, schema: Any) -> Check | int:
        if schema["type"] == "fixed":
            return int(schema["size"])
        if schema["type"] == "enum":
            return _enum(len(schema["symbols"]), name)
        return _record([self.make_check(field["type"], f"{name}.{field['name']}") for field in schema["fields"]])


def _checked(check: Check | int) -> Check:
    """Return a check also for a value that always has as many bytes."""
    return (lambda _, place: place + check) if isinstance(check, int) else check


def _primitive(kind: str, where: str) -> Check | int | None:
    if kind in ("int", "long"):
        return _number(32 if kind == "int" else 64, kind, where)
    if kind == "bytes":
        return lambda data, place: _length(data, place, where)[1]
    return {"string": _text, "boolean": _boolean}[kind](where) if kind in ("string", "boolean") else _FIXED.get(kind)


def _long_number(data: bytes, place: int, where: str) -> tuple[int, int]:
    """Return a number of several bytes, still in its zigzag form, and the place behind it."""
    found = shift = 0
    while (byte := data[place]) >= _ONE_BYTE and shift < 63:
        found |= (byte & 0x7F) << shift
        shift += 7
        place += 1
    found |= byte << shift
    if found >> 64:
        raise ValueError(f"{where}: a number of more than 64 bits")
    return found, place + 1


def _signed(number: int) -> int:
    """Return a number from its zigzag form."""
    return (number >> 1) ^ -(number & 1)


def _length(data: bytes, place: int, where: str) -> tuple[int, int]:
    """Return the places at which a text begins and ends."""
    number = data[place]
    place += 1
    if number >= _ONE_BYTE:
        number, place = _long_number(data, place - 1, where)
    if number & 1:
        raise ValueError(f"{where}: a length of {_signed(number)} bytes")
    return place, place + (number >> 1)


def _number(bits: int, kind: str, where: str) -> Check:
    def check(data: bytes, place: int) -> int:
        if data[place] < _ONE_BYTE:
            return place + 1
        number, place = _long_number(data, place, where)
        if number >> bits:
            raise ValueError(f"{where}: {_signed(number)} is no {kind}, which has {bits} bits")
        return place

    return check


def _boolean(where: str) -> Check:
    def check(data: bytes, place: int) -> int:
        if data[place] > 1:
            raise ValueError(f"{where}: byte {data[place]} is no boolean")
        return place + 1

    return check


def _text(where: str) -> Check:
    def check(data: bytes, place: int) -> int:
        place, end = _length(data, place, where)
        try:
            data[place:end].decode()
        except UnicodeDecodeError:
            if end > len(data):
                raise IndexError from None
            raise ValueError(f"{where}: a text is not UTF-8") from None
        return end

    return check


def _index(data: bytes, place: int, count: int, where: str, kind: str) -> tuple[int, int]:
    """Return an index, and the place behind it."""
    number = data[place]
    place += 1
    if number >= _ONE_BYTE:
        number, place = _long_number(data, place - 1, where)
    if number & 1 or number >> 1 >= count:
        raise ValueError(f"{where}: {_signed(number)} is no index of {kind} of {count}")
    return number >> 1, place


def _enum(count: int, where: str) -> Check:
    return lambda data, place: _index(data, place, count, where, "an enum")[1]


def _union(parts: list[Check | int], where: str) -> Check:
    checks = [_checked(part) for part in parts]

    def check(data: bytes, place: int) -> int:
        index, place = _index(data, place, len(checks), where, "a union")
        return checks[index](data, place)

    return check


def _record(parts: list[Check | int]) -> Check | int:
    """Return the check of values one behind the other."""
    merged: list[Check | int] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, int) and isinstance(last, int):
            merged[-1] = last + part
        else:
            merged.append(part)
    if len(merged) < 2:
        return merged[0] if merged else 0
    checks = [_checked(part) for part in merged]

    def check(data: bytes, place: int) -> int:
        for own in checks:
            place = own(data, place)
        return place

    return check


def _blocks(item: Check | int, where: str) -> Check:
    """Return the check of an array or map: blocks of items, each with their number, up to an empty block."""

    def items(data: bytes, place: int, count: int) -> int:
        if isinstance(item, int):
            return place + item * count
        for _ in range(count):
            place = item(data, place)
        return place

    def check(data: bytes, place: int) -> int:
        while True:
            number, place = (data[place], place + 1) if data[place] < _ONE_BYTE else _long_number(data, place, where)
            if not number:
                return place
            if not number & 1:
                place = items(data, place, number >> 1)
                continue
            begin, end = _length(data, place, where)  # a negative number is followed by the bytes of the block
            place = items(data, begin, -_signed(number))
            if place != end:
                raise ValueError(f"{where}: a block has {place - begin} bytes, and says {end - begin}")

    return check
