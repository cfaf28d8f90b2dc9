r"""InfluxDB's line protocol, as Telegraf and many gateways write it.

    measurement,tag=value field=1.5,count=3i,ok=true,text="a \"b\"" 1700000000000000000

Source: the InfluxDB documentation, "Line protocol". A backslash escapes a comma or space in a measurement; a comma,
space or equals sign in tags and field names; a quote or backslash in text. Before any other character, and at the end,
it is itself: outside of text a backslash escapes no backslash, so the second one of `\\,` escapes the comma.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from millpy.errors import GraphError
from millpy.formats.byte_order_marks import UTF_8, without_mark
from millpy.formats.message import BadPart, Format, Message, Part, Reader, check_field, check_objects, encoded_names
from millpy.formats.values import number_text, whole_text
from millpy.model.arguments import check_flags
from millpy.model.identity import Identity
from millpy.model.record import RecordType

Precision = Literal["s", "ms", "us", "ns"]
_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
# Possessive, because only one match is possible: otherwise each character of a name takes 150 bytes while it is read.
# What is repeated is atomic: before Python 3.11.5 a possessive group that has alternatives matches wrongly.
_NAME = r"(?:(?>[^,= \\]+|\\[,= ]?))++"
_MEASUREMENT = re.compile(r"(?:(?>[^, \\]+|\\[, ]?))++")
_TAG = re.compile(rf",({_NAME})=({_NAME})")
_FIELD = re.compile(rf'({_NAME})=(?:"((?:(?>[^"\\]+|\\.))*+)"|([^, "]++))', re.DOTALL)
_TIME = re.compile(r"-?[0-9]{1,19}")
_INTEGER = re.compile(r"(-?[0-9]{1,20})i|([0-9]{1,20})u")
_NEWLINES = re.compile("(\n+)")
_TAGS = re.compile(r" *+(?:(?>[^ \\\n]+|\\ ?))*+")
_LINE_OR_TEXT = re.compile(r'(?:(?>[^=\\\n]+|\\=?|=(?!")))*+(?:(\n+)|=")')
_REST_OF_TEXT = re.compile(r'(?:(?>[^"\\]+|\\[^\n]|\\(?=\n)))*+"')
_SPACES = re.compile(" *")
_COMMENT = re.compile(" *#")
_UNESCAPE_MEASUREMENT = re.compile(r"\\([, ])")
_UNESCAPE = re.compile(r"\\([,= ])")
_UNESCAPE_TEXT = re.compile(r'\\(["\\])')
_TRUE = ("t", "T", "true", "True", "TRUE")
_FALSE = ("f", "F", "false", "False", "FALSE")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class LineProtocol(Format):
    """InfluxDB's line protocol: each line is a record of the tags and fields that the class names.

    A field wins over a tag of the same name. A line without a time has no value in `time`, unless `arrival` is set. A
    text with a newline in it is read from a message, but not from a file.

    Args:
        precision: the unit of times: "ns" (the default of InfluxDB), "us", "ms" or "s".
        time: the field that gets the time: a datetime (to the µs), or an int in the unit of `precision`.
        measurement: the field that gets the measurement; None for none.
        arrival: whether a line without a time gets the time of arrival, as InfluxDB does. Two deliveries of such a
            line then differ.
    """

    precision: Precision
    time: str
    measurement: str | None
    arrival: bool

    def __init__(
        self, *, precision: Precision = "ns", time: str = "time", measurement: str | None = None, arrival: bool = False
    ) -> None:
        check_flags(arrival=arrival)
        if not isinstance(precision, str) or precision not in _NS:
            raise GraphError(f"unknown precision {precision!r}", hint=f"choose one of {', '.join(_NS)}")
        for name, value in {
            "precision": precision, "time": time, "measurement": measurement, "arrival": arrival
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the format."""
        more = {"measurement": self.measurement, "arrival": self.arrival}
        plain = {"precision": self.precision, "time": self.time}
        return {"kind": "line_protocol", **plain, **{name: value for name, value in more.items() if value}}

    def validate(self, record_type: RecordType) -> None:
        """Check the fields. Raises GraphError."""
        check_objects(record_type, self)
        if check_field(record_type, self.time, "time=") not in (datetime, int):
            raise GraphError(f"time={self.time!r} must be a datetime or an int", hint=f"declare {self.time}: datetime")
        if self.measurement is not None and check_field(record_type, self.measurement, "measurement=") is not str:
            raise GraphError(f"measurement={self.measurement!r} must be a str")

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the lines of a message."""
        return _LinesReader(self, record_type).read


class _LinesReader:
    """Reads lines into one record type."""

    def __init__(self, form: LineProtocol, record_type: RecordType) -> None:
        names = encoded_names(record_type)
        self._kinds = {name: record_type.field_type(own) for own, name in names.items()}
        self._measurement = None if form.measurement is None else names[form.measurement]
        self._time = names[form.time]
        self._as_int = record_type.field_type(form.time) is int
        self._unit_ns = _NS[form.precision]
        self._arrival = form.arrival

    def read(self, message: Message) -> Iterable[Part]:
        """Yield the records of the lines of a message."""
        for line in _lines(without_mark(message.payload).decode()):
            text = line.removesuffix("\r").strip(" ")
            if not text or text.startswith("#"):
                continue
            try:
                yield self._record(text, message)
            except ValueError as error:
                part = line.encode()
                unmarked = b"\n" if part.startswith(UTF_8) else b""  # no mark when it is read again
                yield BadPart(unmarked + part, str(error))

    def _record(self, line: str, message: Message) -> bytes:
        found = _MEASUREMENT.match(line)
        if found is None:
            raise ValueError("there is no measurement")
        values: dict[str, msgspec.Raw] = {}
        if self._measurement is not None:
            values[self._measurement] = msgspec.Raw(msgspec.json.encode(_UNESCAPE_MEASUREMENT.sub(r"\1", found[0])))
        place = self._take_tags(line, found.end(), values)
        if line[place : place + 1] != " ":
            raise ValueError(f"{line[place : place + 20]!r} follows the tags")
        place = self._take_fields(line, _SPACES.match(line, place).end(), values)  # type: ignore[union-attr]
        at = self._time_of(line[place:].strip(" "), message)
        if at is not None:
            values[self._time] = msgspec.Raw(at)
        return msgspec.json.encode(values)

    def _take_tags(self, line: str, place: int, values: dict[str, msgspec.Raw]) -> int:
        while tag := _TAG.match(line, place):
            name = _plain(tag[1])
            if name in self._kinds:
                values[name] = msgspec.Raw(_tag_value(_plain(tag[2]), self._kinds[name]))
            place = tag.end()
        return place

    def _take_fields(self, line: str, place: int, values: dict[str, msgspec.Raw]) -> int:
        while True:
            field = _FIELD.match(line, place)
            if field is None:
                raise ValueError(f"{line[place : place + 20]!r} is not a field")
            name, value = _plain(field[1]), _field_value(field)
            if name in self._kinds:
                values[name] = msgspec.Raw(value)
            place = field.end()
            follows = line[place : place + 1]
            if follows in ("", " "):
                return place
            if follows != ",":
                raise ValueError(f"{line[place : place + 20]!r} follows a field")
            place += 1

    def _time_of(self, text: str, message: Message) -> bytes | None:
        if not text:
            if not self._arrival:
                return None
            if self._as_int:
                return b"%d" % (message.arrived_at * 1_000 // self._unit_ns)
            return msgspec.json.encode(message.arrival)
        if not _TIME.fullmatch(text):
            raise ValueError(f"{text[:50]!r} is not a time")
        if self._as_int:
            return str(int(text)).encode()
        try:
            return msgspec.json.encode(_EPOCH + timedelta(microseconds=int(text) * self._unit_ns // 1_000))
        except OverflowError:
            raise ValueError(f"the time {text} is outside the years 1 to 9999") from None


def _plain(text: str) -> str:
    return _UNESCAPE.sub(r"\1", text) if "\\" in text else text


def _tag_value(text: str, kind: type) -> bytes:
    """Return a tag, which is text, as the JSON of a field of this type."""
    if kind in (int, float):
        found = number_text(text)
        if found is None:
            return msgspec.json.encode(text)
        return whole_text(found) if kind is int else found
    if kind is bool and text in (*_TRUE, *_FALSE):
        return b"true" if text in _TRUE else b"false"
    return msgspec.json.encode(text)


def _field_value(field: re.Match[str]) -> bytes:
    if field[2] is not None:
        return msgspec.json.encode(_UNESCAPE_TEXT.sub(r"\1", field[2]))
    text = field[3]
    if integer := _INTEGER.fullmatch(text):
        return str(int(integer[1] or integer[2])).encode()
    if text in _TRUE:
        return b"true"
    if text in _FALSE:
        return b"false"
    number = number_text(text)
    if number is None:
        raise ValueError(f"{text[:50]!r} is not a value: a text needs quotes")
    return number


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a message; a newline inside a quoted text ends none. One pass, whatever the text."""
    if '"' not in text:
        yield from filter(None, text.split("\n"))
        return
    start = 0
    while start < len(text):
        end = _end_of_line(text, start)
        if end is None:
            break
        yield text[start : end.start(1)]
        start = end.end(1)
    yield text[start:]


def _end_of_line(text: str, start: int) -> re.Match[str] | None:
    """Return the match whose group 1 is the newlines behind a line; None if the text ends before."""
    if _COMMENT.match(text, start):
        return _NEWLINES.search(text, start)
    place = _TAGS.match(text, start).end()  # type: ignore[union-attr]
    # A quote begins a text behind the equals sign of a field; in tags it is a character.
    while (found := _LINE_OR_TEXT.match(text, place)) and found[1] is None:
        rest = _REST_OF_TEXT.match(text, found.end())
        if rest is None:
            return None
        place = rest.end()
    return found
