"""JSON payloads whose records are nested in an object, or are bare values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from millpy.errors import GraphError
from millpy.formats.byte_order_marks import without_mark
from millpy.formats.message import (
    BadPart,
    Format,
    Message,
    Part,
    Reader,
    arrival_writer,
    check_arrival,
    check_field,
    check_objects,
    encoded_names,
)
from millpy.formats.values import cell_writer
from millpy.model.arguments import are_texts
from millpy.model.identity import Identity, identity_of_value
from millpy.model.record import RecordType

_SPACE = b" \t\r\n"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ANY = msgspec.json.Decoder(msgspec.Raw)
ENVELOPES_MAX = 50_000
"""The most envelopes of one message: those without records do not count as records."""
Path = str | tuple[str, ...]


def _steps(path: Path | None, setting: str) -> tuple[str, ...]:
    if path is None:
        return ()
    steps = tuple(path.split(".")) if isinstance(path, str) else tuple(path) if isinstance(path, tuple | list) else ()
    if not steps or not all(isinstance(step, str) and step for step in steps):
        raise GraphError(f"{setting}={path!r} is not a path", hint='separate names by dots: "uplink_message.rx.0.rssi"')
    return steps


def _paths(paths: Mapping[str, Path] | None, setting: str) -> dict[str, tuple[str, ...]]:
    if paths is not None and not isinstance(paths, Mapping):
        raise GraphError(
            f"{setting}={paths!r} is not a dict", hint=f'field -> path: {setting}={{"device": "info.name"}}'
        )
    return {name: _steps(own, f"{setting}[{name!r}]") for name, own in (paths or {}).items()}


def _found(text: bytes, steps: tuple[str, ...]) -> bytes | None:
    """Return the JSON text at a path; None if there is none."""
    for step in steps:
        begin = text.lstrip(_SPACE)[:1]
        if begin == b"{":
            members = _OBJECT.decode(text)
            if step not in members:
                return None
            text = bytes(members[step])
        elif begin == b"[" and step.isascii() and step.isdigit():
            items = _LIST.decode(text)
            if len(step) > 9 or int(step) >= len(items):
                return None
            text = bytes(items[int(step)])
        else:
            return None
    return text


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Json(Format):
    """JSON objects; the records may be nested in an envelope.

    A path is names joined by dots, with numbers for items of a list (`rx_metadata.0.rssi`); names that have dots
    themselves are written as a tuple. A message that is a list is a list of envelopes.

    Args:
        path: where the record is in the envelope; by default the envelope is the record.
        many: where a list of records is, from `path`: one record for each item. A missing or null list gives none.
        envelope: record field -> path from the envelope's top, the same for each record. A field that a record has
            itself wins, so each reading may have its own time.
        fields: record field -> path inside the record, for values that lie deeper or have another name. It wins over a
            field of that name.
        arrival: the field that gets the time of arrival where the record has none: a datetime, or an int in µs.
    """

    path: tuple[str, ...]
    many: tuple[str, ...]
    envelope: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, tuple[str, ...]]
    arrival: str | None

    def __init__(
        self,
        *,
        path: Path | None = None,
        many: Path | None = None,
        envelope: Mapping[str, Path] | None = None,
        fields: Mapping[str, Path] | None = None,
        arrival: str | None = None,
    ) -> None:
        values = {
            "path": _steps(path, "path"),
            "many": _steps(many, "many"),
            "envelope": _paths(envelope, "envelope"),
            "fields": _paths(fields, "fields"),
            "arrival": arrival,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the paths."""
        plain: dict[str, Any] = {"path": _written(self.path), "many": _written(self.many), "arrival": self.arrival}
        nested = {"envelope": self.envelope, "fields": self.fields}
        plain |= {n: identity_of_value({k: _written(v) for k, v in own.items()}) for n, own in nested.items() if own}
        return {"kind": "json", **{name: value for name, value in plain.items() if value}}

    def validate(self, record_type: RecordType) -> None:
        """Check the fields that are filled. Raises GraphError."""
        check_objects(record_type, self)
        for setting, names in (("envelope=", self.envelope), ("fields=", self.fields)):
            for name in names:
                check_field(record_type, name, setting)
        check_arrival(record_type, self.arrival)

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that finds the records of a message."""
        return _JsonReader(self, record_type).read


class _JsonReader:
    """Reads the messages of one form into one record type."""

    def __init__(self, form: Json, record_type: RecordType) -> None:
        names = encoded_names(record_type)
        self._path, self._many = form.path, form.many
        self._envelope = [(names[name], steps) for name, steps in form.envelope.items()]
        self._fields = [(names[name], steps) for name, steps in form.fields.items()]
        self._arrival = "" if form.arrival is None else names[form.arrival]
        self._arrived = None if form.arrival is None else arrival_writer(record_type, form.arrival)
        self._changes = bool(self._envelope or self._fields or self._arrival)
        self._plain = not (self._changes or self._path or self._many)

    def read(self, message: Message) -> Iterable[Part]:
        """Yield the records of a message."""
        text = without_mark(message.payload)
        if self._plain and text[:1] == b"{":
            yield text
            return
        text.decode()  # msgspec does not check the text that it skips
        _ANY.decode(text)
        if text.lstrip(_SPACE)[:1] != b"[":
            yield from self._parts(message, text)
            return
        envelopes = _LIST.decode(text)
        if len(envelopes) > ENVELOPES_MAX and self._many:
            raise ValueError(f"the message has more than {ENVELOPES_MAX:,} envelopes")
        for envelope in map(bytes, envelopes):
            try:
                yield from self._parts(message, envelope)
            except ValueError as error:  # raised before the first record
                # A list inside the list stays in brackets: read again without them, it would be a list of envelopes.
                is_list = envelope.lstrip(_SPACE)[:1] == b"["
                yield BadPart(b"[%b]" % envelope if is_list else envelope, str(error))

    def _parts(self, message: Message, envelope: bytes) -> Iterable[Part]:
        """Yield the records of an envelope. Raises ValueError, before the first, if it has none."""
        taken = [(name, _found(envelope, steps)) for name, steps in self._envelope]
        outer = {name: msgspec.Raw(value) for name, value in taken if value is not None}
        for record in self._records(envelope):
            yield self._merged(message, outer, record)

    def _records(self, envelope: bytes) -> Iterable[bytes]:
        record = _found(envelope, self._path)
        if record is None:
            raise ValueError(f"there is nothing at {'.'.join(self._path)}")
        if not self._many:
            return (record,)
        if record.lstrip(_SPACE)[:1] not in (b"{", b"["):
            raise ValueError(f"there is no object with {'.'.join(self._many)}")
        listed = _found(record, self._many)
        if listed is None or listed.strip(_SPACE) == b"null":
            return ()
        if listed.lstrip(_SPACE)[:1] != b"[":
            raise ValueError(f"{'.'.join(self._many)} is not a list")
        return map(bytes, _LIST.decode(listed))

    def _merged(self, message: Message, outer: dict[str, msgspec.Raw], text: bytes) -> Part:
        """Return a record with what it gets from its envelope, from deeper inside and from its arrival."""
        if not self._changes or text.lstrip(_SPACE)[:1] != b"{":
            return text  # the record class decides what is no object
        own = _OBJECT.decode(text)
        found = outer | own
        for name, steps in self._fields:
            value = _found(text, steps)
            if value is not None:
                found[name] = msgspec.Raw(value)
            elif name in outer:
                found[name] = outer[name]
            else:
                found.pop(name, None)
        if self._arrived is not None and self._arrival not in found:
            found[self._arrival] = msgspec.Raw(self._arrived(message))
        return msgspec.json.encode(found)


def _written(steps: tuple[str, ...]) -> Any:
    return list(steps) if any("." in step for step in steps) else ".".join(steps)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Scalar(Format):
    """A bare value, such as `21.5`; the topic, key or arrival fills the other fields.

    Args:
        field: the field that gets the value. A number may have a sign, leading zeros and surrounding space. A bool is
            true, 1, on, yes or t, or the opposite, in any case. Text is the whole payload, in UTF-8.
        decimal: the decimal mark of a number.
        arrival: the field that gets the time of arrival: a datetime, or an int in µs.
        null: texts that mean no value, such as "nan" or "unavailable", for a field that may be None. Empty payloads and
            `null` mean it anyway.
    """

    field: str
    decimal: str
    arrival: str | None
    null: tuple[str, ...]

    def __init__(self, field: str, *, decimal: str = ".", arrival: str | None = None, null: Sequence[str] = ()) -> None:
        if decimal not in (".", ","):
            raise GraphError(f"decimal={decimal!r} is no decimal mark", hint='choose "." or ","')
        if not are_texts(null):
            raise GraphError(f"null={null!r} is not a list of texts", hint='null=["nan", "unavailable"]')
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "decimal", decimal)
        object.__setattr__(self, "arrival", arrival)
        object.__setattr__(self, "null", tuple(null))

    def identity(self) -> Identity:
        """Describe the field and how its value is written."""
        more: dict[str, Any] = {} if self.arrival is None else {"arrival": self.arrival}
        more |= {"null": list(self.null)} if self.null else {}
        return {"kind": "scalar", "field": self.field, **({} if self.decimal == "." else {"decimal": ","}), **more}

    def validate(self, record_type: RecordType) -> None:
        """Check the fields. Raises GraphError."""
        check_objects(record_type, self)
        kind = check_field(record_type, self.field, "Scalar")
        if kind not in (float, int, Decimal, str, bool, datetime, UUID):
            raise GraphError(f"Scalar: {self.field!r} cannot hold a bare value", hint="use a number, str or bool field")
        if self.null and not record_type.is_nullable(self.field):
            name = getattr(kind, "__name__", kind)
            raise GraphError(
                f"Scalar: {self.field!r} cannot be None, as null= asks", hint=f"declare {self.field}: {name} | None"
            )
        check_arrival(record_type, self.arrival)

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that makes an object of the value."""
        names = encoded_names(record_type)
        begin = b"{" + msgspec.json.encode(names[self.field]) + b":"
        kind = record_type.field_type(self.field)
        write = cell_writer(kind, self.decimal)
        nothing = set(self.null)
        if record_type.is_nullable(self.field):
            nothing |= {"", "null"}
        arrived = None if self.arrival is None else arrival_writer(record_type, self.arrival)
        arrival = b"" if self.arrival is None else b"," + msgspec.json.encode(names[self.arrival]) + b":"

        def read(message: Message) -> Iterable[Part]:
            text = without_mark(message.payload).decode()
            if kind is not str and len(text) > 1 and text.startswith('"') and text.rstrip().endswith('"'):
                text = text.strip()[1:-1]  # "21.5" is what some bridges make of a number
            value = b"null" if text.strip() in nothing else write(text)
            yield begin + value + (b"" if arrived is None else arrival + arrived(message)) + b"}"

        return read
