r"""InfluxDB's line protocol, as Telegraf and many gateways write it.

    measurement,tag=value field=1.5,count=3i,ok=true,text="a \"b\"" 1700000000000000000

Source: the InfluxDB documentation, "Line protocol". A backslash escapes a comma or space in a measurement; a comma,
space or equals sign in tags and field names; a quote or backslash in text. Before any other character it is itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from millpy.errors import GraphError
from millpy.formats.message import BadPart, Format, Message, Part, Reader, check_field, check_objects, encoded_names
from millpy.formats.values import number_text
from millpy.model.identity import Identity
from millpy.model.record import RecordType

Precision = Literal["s", "ms", "us", "ns"]
_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_NAME = r"(?:[^,= \\]|\\.|\\$)+"
_MEASUREMENT = re.compile(r"(?:[^, \\]|\\.)+")
_TAG = re.compile(rf",({_NAME})=({_NAME})")
_FIELD = re.compile(rf'({_NAME})=(?:"((?:[^"\\]|\\.)*)"|([^, "]+))', re.DOTALL)
_TIME = re.compile(r"-?[0-9]{1,19}")
_INTEGER = re.compile(r"(-?[0-9]{1,20})[iu]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
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
        if precision not in _NS:
            raise GraphError(f"unknown precision {precision!r}", hint=f"choose one of {', '.join(_NS)}")
        for name, value in {
            "precision": precision, "time": time, "measurement": measurement, "arrival": arrival
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the format."""
        more = {**({"measurement": self.measurement} if self.measurement else {}), **({"arrival": True} if self.arrival else {})}
        return {"kind": "line_protocol", "precision": self.precision, "time": self.time, **more}

    def validate(self, record_type: RecordType) -> None:
        """Check the fields. Raises GraphError."""
        check_objects(record_type, self)
        if check_field(record_type, self.time, "time=") not in (datetime, int):
            raise GraphError(f"time={self.time!r} must be a datetime or an int", hint=f"declare {self.time}: datetime")
        if self.measurement is not None and check_field(record_type, self.measurement, "measurement=") is not str:
            raise GraphError(f"measurement={self.measurement!r} must be a str")

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that reads the lines of a message."""
        names = encoded_names(record_type)
        wanted = set(names.values())
        kinds = {name: record_type.field_type(own) for own, name in names.items()}
        measurement = None if self.measurement is None else names[self.measurement]
        time = names[self.time]
        as_int = record_type.field_type(self.time) is int
        unit = _NS[self.precision]

        def time_of(text: str, message: Message) -> bytes | None:
            if not text:
                if not self.arrival:
                    return None
                return b"%d" % (message.arrived_at * 1_000 // unit) if as_int else msgspec.json.encode(message.arrival)
            if not _TIME.fullmatch(text):
                raise ValueError(f"{text[:50]!r} is not a time")
            if as_int:
                return str(int(text)).encode()
            try:
                return msgspec.json.encode(_EPOCH + timedelta(microseconds=int(text) * unit // 1_000))
            except OverflowError:
                raise ValueError(f"the time {text} is outside the years 1 to 9999") from None

        def record_of(line: str, message: Message) -> bytes:
            found = _MEASUREMENT.match(line)
            if found is None:
                raise ValueError("no measurement")
            values: dict[str, bytes] = {}
            if measurement is not None:
                values[measurement] = msgspec.json.encode(re.sub(r"\\([, ])", r"\1", found[0]))
            place = found.end()
            while tag := _TAG.match(line, place):
                name = _plain(tag[1])
                if name in wanted:
                    values[name] = _tag_value(_plain(tag[2]), kinds[name])
                place = tag.end()
            if line[place : place + 1] != " ":
                raise ValueError(f"unexpected {line[place : place + 20]!r} behind the tags")
            place += len(line[place:]) - len(line[place:].lstrip(" "))
            while True:
                field = _FIELD.match(line, place)
                if field is None:
                    raise ValueError(f"{line[place : place + 20]!r} is not a field")
                name = _plain(field[1])
                value = _field_value(field)
                if name in wanted:
                    values[name] = value
                place = field.end()
                if line[place : place + 1] != ",":
                    break
                place += 1
            rest = line[place:]
            if rest and rest[0] != " ":
                raise ValueError(f"unexpected {rest[:20]!r} behind a field")
            at = time_of(rest.strip(" "), message)
            if at is not None:
                values[time] = at
            return msgspec.json.encode({name: msgspec.Raw(value) for name, value in values.items()})

        def read(message: Message) -> Iterable[Part]:
            for line in _lines(message.payload.decode()):
                text = line.removesuffix("\r").strip(" ")
                if not text or text.startswith("#"):
                    continue
                try:
                    yield record_of(text, message)
                except ValueError as error:
                    yield BadPart(line.encode(), str(error))

        return read


def _plain(text: str) -> str:
    return _UNESCAPE.sub(r"\1", text) if "\\" in text else text


def _tag_value(text: str, kind: type) -> bytes:
    """Return a tag, which is text, as the JSON of a field of this type."""
    if kind in (int, float):
        return number_text(text) or msgspec.json.encode(text)
    if kind is bool and text in (*_TRUE, *_FALSE):
        return b"true" if text in _TRUE else b"false"
    return msgspec.json.encode(text)


def _field_value(field: re.Match[str]) -> bytes:
    if field[2] is not None:
        return msgspec.json.encode(_UNESCAPE_TEXT.sub(r"\1", field[2]))
    text = field[3]
    if integer := _INTEGER.fullmatch(text):
        return str(int(integer[1])).encode()
    if text in _TRUE:
        return b"true"
    if text in _FALSE:
        return b"false"
    number = number_text(text)
    if number is None:
        raise ValueError(f"{text[:50]!r} is not a value: a text needs quotes")
    return number


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a message; a newline inside a quoted text ends none."""
    if '"' not in text:
        yield from text.split("\n")
        return
    quoted = [found.span() for found in _QUOTED.finditer(text) if "\n" in found[0]]
    start = at = 0
    for place in (found.start() for found in re.finditer("\n", text)):
        while at < len(quoted) and quoted[at][1] <= place:
            at += 1
        if at < len(quoted) and quoted[at][0] < place and _opens_text(text, quoted[at][0]):
            continue
        yield text[start:place]
        start = place + 1
    yield text[start:]


def _opens_text(text: str, place: int) -> bool:
    """Tell whether a quote begins the value of a field, and is not a character of a tag or comment."""
    return text[place - 1 : place] == "="
