"""Values of columns, in PostgreSQL's text form, as JSON: the same form as `row_to_json`, with bytes as base64.

The text is that of a session with DateStyle ISO, time zone UTC, bytea_output hex: so the first copy of a table and its
changes give equal records.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable

import msgspec

ToJson = Callable[[bytes], bytes]
_PLAIN = re.compile(rb'[^"\\\x00-\x1f]*')
_SPECIAL = re.compile(rb'["\\\x00-\x1f]')
_NUMBER = re.compile(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_TIMESTAMP = re.compile(rb"([0-9]{4,}-[0-9]{2}-[0-9]{2}) ([0-9:.]+)(\+00)?")


def text(value: bytes) -> bytes:
    """Return text as a JSON string. A database in SQL_ASCII may have text that is not UTF-8: a record refuses it."""
    if _PLAIN.fullmatch(value):
        return b'"' + value + b'"'
    try:
        return msgspec.json.encode(value.decode())
    except UnicodeDecodeError:
        return b'"' + _SPECIAL.sub(_escaped, value) + b'"'


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % found[0][0]


def whole_number(value: bytes) -> bytes:
    """Return an integer."""
    return value


def number(value: bytes) -> bytes:
    """Return a number; NaN and infinities as strings, which no numeric field accepts."""
    return value if _NUMBER.fullmatch(value) else text(value)


def truth(value: bytes) -> bytes:
    """Return a boolean."""
    return b"true" if value == b"t" else b"false"


def json(value: bytes) -> bytes:
    """Return json and jsonb as they are; line ends are whitespace there."""
    return value.replace(b"\n", b" ").replace(b"\r", b" ")


def binary(value: bytes) -> bytes:
    """Return bytea as base64."""
    return b'"' + b64encode(bytes.fromhex(value[2:].decode())) + b'"'


def vector(value: bytes) -> bytes:
    """Return an int2vector or oidvector, such as `1 2 3`."""
    return b"[" + b",".join(value.split()) + b"]"


def moment(value: bytes) -> bytes:
    """Return a timestamp by RFC 3339; infinities, and years before Christ, as they are."""
    found = _TIMESTAMP.fullmatch(value)
    if found is None:
        return text(value)
    return b'"' + found[1] + b"T" + found[2] + (b'+00:00"' if found[3] else b'"')


BY_OID: dict[int, ToJson] = {
    16: truth,
    17: binary,
    20: whole_number,
    21: whole_number,
    22: vector,
    23: whole_number,
    26: whole_number,
    30: vector,
    114: json,
    700: number,
    701: number,
    1082: text,
    1114: moment,
    1184: moment,
    1700: number,
    3802: json,
    **dict.fromkeys((18, 19, 25, 1042, 1043, 1083, 1266, 2950), text),
}
"""OID of a built-in type -> what makes JSON of its text. Other types are domains, arrays, or their text."""


def array_of(element: ToJson, delimiter: str = ",") -> ToJson:
    """Return what makes JSON of an array's text, such as `{1,NULL,"two words"}`; nested for more dimensions."""
    item = re.compile(rb'\s*(?:"((?:[^"\\]|\\.)*)"|([^{}"%b\\]*))' % re.escape(delimiter.encode()), re.DOTALL)

    def to_json(value: bytes) -> bytes:
        begin = value.index(b"{")  # behind the bounds of one that does not begin at 1: [0:2]={…}
        found, at = _array(value, begin)
        assert at == len(value), value
        return found

    def _array(value: bytes, at: int) -> tuple[bytes, int]:
        parts: list[bytes] = []
        at += 1
        while value[at : at + 1] != b"}":
            if value[at : at + 1] == b"{":
                part, at = _array(value, at)
            else:
                match = item.match(value, at)
                assert match is not None, value
                if match[1] is not None:
                    part = element(re.sub(rb"\\(.)", rb"\1", match[1], flags=re.DOTALL))
                else:
                    part = b"null" if match[2] == b"NULL" else element(match[2])
                at = match.end()
            parts.append(part)
            if value[at : at + 1] == delimiter.encode():
                at += 1
            elif value[at : at + 1] != b"}":
                raise ValueError(f"no array: {value!r}")
        return b"[" + b",".join(parts) + b"]", at + 1

    return to_json
