"""What every input means, by the rules of docs/bad-input.md and docs/files.md: slow, plain, and nothing of millpy's.

    bytes -> records (bytes each) -> Outcome: values by field, or a refusal

The standard library reads JSON; CSV is read a byte at a time; every rule about values is written out here.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

REQUIRED = object()
DEPTH_MAX = 500
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<fraction>\.[0-9]+)?(?P<exponent>[eE][-+]?[0-9]+)?")
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:([Zz])|([-+])(\d\d)(?::?(\d\d))?)?", re.ASCII
)
_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_LINE_END = re.compile(rb"\r+(?:\n|\Z)")
_BLANK = b" \t\r\n\v\f"
_SPACE = " \t\r\n"
_INT64 = range(-(2**63), 2**63)
codecs.register_error("strange", lambda error: ("\ufffd", error.end))  # type: ignore[attr-defined]


class RefusedError(Exception):
    """Why something is no record."""


class Number(str):
    """A number with its original text."""


class Members(list[tuple[str, Any]]):
    """An object as its list of pairs, in which a name may occur twice."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record class.

    Attributes:
        kind: of its values; a list of `inner`, an object of `inner` by any name, or a record of `fields`.
        default: what it is when it is missing.
    """

    kind: Literal["int", "float", "bool", "text", "time", "uuid", "list", "object", "record"]
    nullable: bool = False
    default: Any = REQUIRED
    inner: Field | None = None
    fields: Mapping[str, Field] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A record class."""

    fields: Mapping[str, Field]
    strict: bool = False
    """Fields that it does not have are forbidden."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The expected outcome for the bytes of one record: its values, or rejection."""

    payload: bytes
    values: dict[str, Any] | None
    why: str = ""


def json_lines(data: bytes, shape: Shape, *, bytes_max: int) -> Iterator[Outcome]:
    """A file: a mark of byte order is passed over, each line that is not blank is a record."""
    for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip(_BLANK):
            yield json_record(line, shape, bytes_max=bytes_max)


def json_record(payload: bytes, shape: Shape, *, bytes_max: int) -> Outcome:
    """One payload; a mark of byte order is passed over."""
    if len(payload) > bytes_max:
        return Outcome(payload, None, "oversize")
    try:
        return Outcome(payload, record_of(parsed(payload.removeprefix(b"\xef\xbb\xbf")), shape))
    except RefusedError as why:
        return Outcome(payload, None, str(why))


def json_message(payload: bytes, shape: Shape, *, bytes_max: int, elements_max: int) -> Iterator[Outcome]:
    """A message: an array that begins with an object, or is empty, is a record for each element."""
    plain = payload.removeprefix(b"\xef\xbb\xbf")
    try:
        text = plain.decode(errors="strange")  # one element's bytes that are no UTF-8 are its own fault
        begins = re.match(r"[ \t\r\n]*\[[ \t\r\n]*[{\]]", text)
        elements = _loaded(text) if begins else None
    except RefusedError:
        elements = None
    if not isinstance(elements, list):
        yield json_record(payload, shape, bytes_max=bytes_max)
    elif len(elements) > elements_max:
        yield Outcome(payload, None, "oversize")
    else:
        for element in _elements(plain.decode(errors="surrogateescape")):
            yield json_record(element.encode(errors="surrogateescape"), shape, bytes_max=bytes_max)


def _elements(text: str) -> Iterator[str]:
    """The texts of the elements of an array that is known to be one."""
    decoder, at = json.JSONDecoder(), text.index("[") + 1
    while True:
        while text[at] in _SPACE + ",":
            at += 1
        if text[at] == "]":
            return
        _, end = decoder.raw_decode(text, at)
        yield text[at:end]
        at = end


def parsed(payload: bytes) -> Any:
    """Parse a JSON text; keep numbers and objects in their original form."""
    try:
        text = payload.decode()
    except UnicodeDecodeError as error:
        raise RefusedError("no UTF-8") from error
    return _loaded(text)


def _loaded(text: str) -> Any:
    if text.startswith("\ufeff"):
        raise RefusedError("begins with a mark of byte order")
    try:
        found = json.loads(
            text, parse_int=Number, parse_float=Number, parse_constant=_no_constant, object_pairs_hook=Members
        )
    except (ValueError, RecursionError) as error:
        raise RefusedError("no JSON") from error
    _check_text(found, DEPTH_MAX)
    return found


def _no_constant(name: str) -> None:
    raise RefusedError(f"{name} is no number")


def _check_text(value: Any, deeper: int) -> None:
    """Refuse half of a pair of escapes anywhere, and deep nesting."""
    if deeper == 0:
        raise RefusedError("deep nesting")
    if isinstance(value, Members):
        for name, inner in value:
            _check_text(name, deeper)
            _check_text(inner, deeper - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_text(inner, deeper - 1)
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise RefusedError("half of a character")


def record_of(value: Any, shape: Shape) -> dict[str, Any]:
    """The values of a record from JSON, typed and storable."""
    values = _typed_members(value, shape.fields, strict=shape.strict)
    for found in values.values():
        _check_storable(found)
    return values


def _typed_members(value: Any, fields: Mapping[str, Field], *, strict: bool = False) -> dict[str, Any]:
    if not isinstance(value, Members):
        raise RefusedError("no object")
    found = {}
    for name, inner in value:  # one that comes twice has to be valid twice, and the last one counts
        if name in fields:
            found[name] = typed(inner, fields[name])
        elif strict:
            raise RefusedError(f"no field {name}")
    return {name: found[name] if name in found else _default(name, field) for name, field in fields.items()}


def _default(name: str, field: Field) -> Any:
    if field.default is REQUIRED:
        raise RefusedError(f"{name} is missing")
    return field.default


def typed(value: Any, field: Field) -> Any:
    """A value of JSON as one of that kind."""
    if value is None and field.nullable:
        return None
    match field.kind:
        case "int" if type(value) is Number and not ({*".eE"} & {*value}):
            return _any_int(value)
        case "float" if type(value) is Number:
            return _float(value)
        case "bool" if isinstance(value, bool):
            return value
        case "text" if type(value) is str:
            return value
        case "time" if type(value) is str:
            return time_of(value)
        case "uuid" if type(value) is str:
            return uuid_of(value)
        case "list" if isinstance(value, list) and not isinstance(value, Members):
            return [typed(inner, field.inner) for inner in value]  # type: ignore[arg-type]
        case "object" if isinstance(value, Members):
            return {name: typed(inner, field.inner) for name, inner in value}  # type: ignore[arg-type]
        case "record":
            return _typed_members(value, field.fields or {})
    raise RefusedError(f"{value!r:.100} is no {field.kind}")


def _any_int(text: str) -> int:
    if len(text) > 4_000:
        raise RefusedError("a number of thousands of digits")
    return int(text)


def _float(text: str) -> float:
    number = 0.0 if text == "-0" else float(text)  # the whole number 0 has no sign
    if math.isinf(number):
        raise RefusedError("beyond the range of a double")
    return number


def time_of(text: str) -> datetime:
    """Parse RFC 3339, rounded to microseconds; a time without a zone is naive."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise RefusedError(f"{text!r:.100} is no time")
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    fraction, zulu, sign, ahead_hours, ahead_minutes = found.groups()[6:]
    try:
        zone = UTC if zulu else None
        if sign:
            ahead_minutes = ahead_minutes or "0"  # as PostgreSQL prints times
            if int(ahead_hours) > 23 or int(ahead_minutes) > 59:
                raise RefusedError("no zone")
            ahead = timedelta(hours=int(ahead_hours), minutes=int(ahead_minutes))
            zone = timezone(ahead if sign == "+" else -ahead)
        moment = datetime(year, month, day, hour, minute, second, tzinfo=zone)
        return moment + timedelta(microseconds=(int((fraction or "")[:7].ljust(7, "0")) + 5) // 10)
    except (ValueError, OverflowError) as error:
        raise RefusedError(f"{text!r:.100} is no time") from error


def uuid_of(text: str) -> UUID:
    """Parse 32 digits, with all hyphens or none."""
    if not _UUID.fullmatch(text):
        raise RefusedError(f"{text!r:.100} is no UUID")
    return UUID(text)


def _check_storable(value: Any) -> None:
    """Refuse what PostgreSQL cannot hold."""
    if isinstance(value, str) and "\0" in value:
        raise RefusedError("NUL in text")
    if isinstance(value, int) and value not in _INT64:
        raise RefusedError("beyond 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise RefusedError("not finite")
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise RefusedError("a time without a zone")
        try:
            value.astimezone(UTC)
        except OverflowError as error:
            raise RefusedError("outside of the years 1 to 9999") from error
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, list):
        inside = value
    for inner in inside:
        _check_storable(inner)


def csv_file(data: bytes, shape: Shape, *, bytes_max: int) -> Iterator[Outcome]:
    """A file: the first record names the columns, and each other one that is not blank is a record."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    header, _, at = csv_cells(data, 0, bytes_max)
    assert header is not None
    header = [name.strip() for name in header]
    while at < len(data):
        cells, end, after = csv_cells(data, at, bytes_max)
        line, at = data[at:end], after
        if line.strip(_BLANK):
            yield _csv_outcome(line, cells, header, shape, bytes_max)


def csv_record(payload: bytes, header: Sequence[str], shape: Shape, *, bytes_max: int) -> Outcome:
    """Parse one payload, which may contain newlines."""
    cells, end, _ = csv_cells(payload, 0, max(len(payload), 1))
    if payload[end:].strip(b"\r\n"):
        cells = None
    return _csv_outcome(payload, cells if payload else None, header, shape, bytes_max)


def _csv_outcome(line: bytes, cells: list[str] | None, header: Sequence[str], shape: Shape, bytes_max: int) -> Outcome:
    if len(line) > bytes_max:
        return Outcome(line, None, "oversize")
    try:
        if cells is None:
            raise RefusedError("no CSV")
        return Outcome(line, _csv_values(cells, header, shape))
    except RefusedError as why:
        return Outcome(line, None, str(why))


def csv_cells(data: bytes, start: int, bytes_max: int) -> tuple[list[str] | None, int, int]:
    """Return the fields of the record at this position (None: malformed), its end, and the start of the next.

    A quote counts only at the beginning of a field. One that is not closed within reach costs its own line.
    """
    fields, field = [], bytearray()
    state = "begin"
    malformed = False
    at = start
    while at < len(data):
        byte = data[at : at + 1]
        if state == "quoted" and at - start > bytes_max:
            break
        if state == "quoted":
            if byte == b'"' and data[at + 1 : at + 2] == b'"':
                field += byte
                at += 1
            elif byte == b'"':
                state = "closed"
            else:
                field += byte
        elif byte == b"\n":
            break
        elif byte == b",":
            fields.append(bytes(field))
            field.clear()
            state = "begin"
        elif byte == b'"' and state == "begin":
            state = "quoted"
        elif byte == b"\r" and _LINE_END.match(data, at):
            pass  # of the end of the line
        else:
            malformed = malformed or state == "closed" or byte == b"\r"
            field += byte
            state = state if state == "closed" else "plain"
        at += 1
    if state == "quoted" or at - start > bytes_max:
        line_end = data.find(b"\n", start)
        line_end = len(data) if line_end < 0 else line_end
        at, malformed = line_end, malformed or state == "quoted" or line_end != at
    fields.append(bytes(field))
    try:
        texts = None if malformed or state == "quoted" else [cell.decode() for cell in fields]
    except UnicodeDecodeError:
        texts = None
    return texts, at, at + 1


def _csv_values(cells: list[str], header: Sequence[str], shape: Shape) -> dict[str, Any]:
    if len(cells) != len(header):
        raise RefusedError(f"{len(cells)} fields instead of {len(header)}")
    if shape.strict and {*header} - {*shape.fields}:
        raise RefusedError("a field that is unknown")
    given = dict(zip(header, cells, strict=True))
    values = {}
    for name, field in shape.fields.items():
        values[name] = _cell_value(name, given[name], field) if name in given else _default(name, field)
        _check_storable(values[name])
    return values


def _cell_value(name: str, cell: str, field: Field) -> Any:
    if cell == "" and field.nullable:
        return None
    if cell == "" and field.kind != "text":
        return _default(name, field)
    if cell.lower() == "null" and field.nullable and field.kind != "text":
        return None
    number = _NUMBER.fullmatch(cell)
    match field.kind:
        case "int" if number:
            whole = Decimal(cell)
            if whole and (whole.adjusted() > 18 or whole != whole.to_integral_value()):
                raise RefusedError(f"{cell:.100} is no whole number of 64 bits")
            return int(whole)
        case "float" if number:
            return _float(cell)
        case "bool" if cell.lower() in ("true", "1"):
            return True
        case "bool" if cell.lower() in ("false", "0"):
            return False
        case "text":
            return cell
        case "time":
            return time_of(cell)
        case "uuid":
            return uuid_of(cell)
    raise RefusedError(f"{cell!r:.100} is no {field.kind}")
