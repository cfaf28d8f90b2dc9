"""A message as a source received it, and the contract of a payload format.

A format makes JSON objects of a message, one for each record. The record class then decides, as for any JSON payload,
which of them are valid. A part that cannot become an object is a `BadPart`: its bytes are dead-lettered, together with
the message's topic, key and headers, and the other parts become records. The bytes of a bad part are themselves a
message of the format, or the JSON inside of one, so that a replay, also of a corrected payload, gives the records of
that part only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from millpy.errors import ConfigError, GraphError
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import RecordType

NESTING_MAX = 100
"""How deep objects and lists of a binary payload may be nested."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Message(msgspec.Struct, frozen=True):
    """One message of a source, before it is decoded.

    Attributes:
        payload: its bytes; of a file, one line without the newline.
        topic: the MQTT or Kafka topic; the path of a file.
        key: the Kafka key; None without one.
        headers: the Kafka headers; the last one of a name counts.
        arrived_at: when the worker took the message, in µs since the epoch. It is stored with a dead letter, so that a
            replay sees the same time.
        header: the first line of the file, for formats that begin with a header, with the byte order mark of the file;
            only the mark for others that have an encoding; else None.
        ending: what the source itself adds to each record, as the end of a JSON object: `,"site":"a"}`.
        decoded: whether the payload is the JSON inside of a message of a binary format, as a bad part of one is.
    """

    payload: bytes
    topic: str = ""
    key: bytes | None = None
    headers: Mapping[str, bytes] = {}
    arrived_at: int = 0
    header: bytes | None = None
    ending: bytes = b""
    decoded: bool = False

    @property
    def arrival(self) -> datetime:
        """The time of arrival, in UTC."""
        return _EPOCH + timedelta(microseconds=self.arrived_at)


@dataclass(frozen=True, slots=True)
class BadPart:
    """A part of a message that is no record: its bytes, why, and whether they are JSON, as in `Message.decoded`."""

    payload: bytes
    detail: str
    decoded: bool = False


Part = bytes | BadPart
"""A JSON object, or a part that is none."""
Reader = Callable[[Message], Iterable[Part]]
"""Returns the parts of a message, in order. A ValueError means that the message as a whole is bad."""


@dataclass(frozen=True, slots=True)
class FileHead:
    """The lines of a file that are no messages.

    Attributes:
        has_header: whether a line describes the others.
        skip: the number of lines before it, or before the first message.
        skip_below: the number of lines under it.
        comment: how lines begin that are passed over before the header, too; empty for none.
    """

    has_header: bool = False
    skip: int = 0
    skip_below: int = 0
    comment: bytes = b""

    def is_passed(self, line: bytes) -> bool:
        """Tell whether a line before the header is passed over: it is blank, or a comment."""
        return not line.strip() or (bool(self.comment) and line.startswith(self.comment))


NO_HEAD = FileHead()


class Format(GraphPart, ABC):
    """A payload format. It is immutable; equal settings mean equal records.

    A format of your own defines `identity` and `reader`. Most need less: see `Decode`.
    """

    __slots__ = ()

    @property
    def head(self) -> FileHead:
        """The lines of a file that are no messages; by default all of them are messages."""
        return NO_HEAD

    @property
    def filled_names(self) -> Sequence[str]:
        """The names of JSON of the fields that the format itself fills in each record; by default none."""
        return ()

    def fills(self, name: str, record_type: RecordType) -> bool:
        """Tell whether the format itself fills a field, which nothing else may then fill."""
        return encoded_names(record_type)[name] in self.filled_names

    @property
    def text_encoding(self) -> str | None:
        """The encoding of a file whose byte order mark says no other; None for formats that are always UTF-8."""
        return None

    @property
    def reads_lines(self) -> bool:
        """Whether each line of a file is a message; False for binary formats."""
        return True

    @abstractmethod
    def identity(self) -> Identity:
        """Describe the format; with another one, the same messages would give other records."""

    def validate(self, record_type: RecordType) -> None:
        """Check that the format fits the record class. Raises GraphError."""
        return

    def header_names(self, line: bytes, record_type: RecordType) -> Sequence[str]:
        """Return the names of JSON that the header of a file gives its columns. Raises ValueError.

        Only a format with a header defines it. A file whose header cannot give a record is one defect.
        """
        raise NotImplementedError

    @abstractmethod
    def reader(self, record_type: RecordType) -> Reader:
        """Return a function from a message to its parts. It raises ValueError for a message that has none."""


def check_field(record_type: RecordType, name: str, setting: str) -> type:
    """Return the type of a field that a format fills.

    Raises:
        GraphError: the record class has no such field.
    """
    if not isinstance(name, str) or name not in record_type.annotations:
        struct = record_type.struct.__name__
        raise GraphError(
            f"{setting}: {struct} has no field {name!r}", hint=f"its fields are {', '.join(record_type.fields)}"
        )
    kind: type = record_type.field_type(name)
    return kind


def check_objects(record_type: RecordType, format: Format) -> None:
    """Refuse record classes that are written as arrays. Raises GraphError."""
    if record_type.struct.__struct_config__.array_like:
        raise GraphError(
            f"{format!r} gives objects, and {record_type.struct.__name__} is written as an array",
            hint="remove array_like=True from the class",
        )


def check_arrival(record_type: RecordType, name: str | None) -> None:
    """Check a field that gets the time of arrival. Raises GraphError."""
    if name is not None and check_field(record_type, name, "arrival=") not in (datetime, int):
        raise GraphError(
            f'arrival={name!r} must be a datetime, or an int in µs (unit="us")', hint=f"declare {name}: datetime"
        )


def arrival_writer(record_type: RecordType, name: str) -> Callable[[Message], bytes]:
    """Return a function that writes the time of arrival as the JSON value of a field."""
    if record_type.field_type(name) is int:
        return lambda message: b"%d" % message.arrived_at
    return lambda message: msgspec.json.encode(message.arrival)


def encoded_names(record_type: RecordType) -> dict[str, str]:
    """Return the name in JSON of each field."""
    return dict(zip(record_type.fields, record_type.struct.__struct_encode_fields__, strict=True))


def checked_format(format: Any, decode: Any, *, named: bool = False) -> Any:
    """Return the format that a source is given as `format=` or `decode=`; None as it is, and a name if it may be one.

    Raises:
        ConfigError: both are given, or neither a format nor a function.
    """
    from millpy.formats.function import Decode

    if decode is not None:
        if format is not None:
            raise ConfigError("give either format= or decode=, not both", hint="a function can decode any format")
        return Decode(decode)
    if format is None or isinstance(format, Format) or (named and isinstance(format, str)):
        return format
    if isinstance(format, type) and issubclass(format, Format):
        raise ConfigError(f"format= is the class {format.__name__}", hint=f"call it: format={format.__name__}(…)")
    raise ConfigError(f"unknown format {format!r}", hint='for example format=Json(many="readings"), or decode=function')
