"""Protocol Buffers: messages of a generated class, or of a message in a compiled set of descriptors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.formats.binary import PLAIN, BinaryFormat
from millpy.formats.json_objects import Json
from millpy.formats.message import Reader
from millpy.formats.schema_registry import unframed
from millpy.formats.values import json_of
from millpy.model.arguments import check_flags
from millpy.model.identity import Identity
from millpy.model.record import RecordType

PROTOBUF_BYTES_MAX = 1_000_000
"""The most bytes of one message: its values take many times as much in memory."""
KEYED_BYTES_MAX = 100_000
"""The same for messages that have a map by integers: keys that are chosen for it cost the square of their number."""
FIELDS_MAX = 800_000
"""The most fields of one message, with those of the messages in it, present or missing."""
MESSAGE_COST = 4
"""As how many fields each message in a message counts."""
INDEXES_MAX = 32
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WRAPPERS = "Double Float Int64 UInt64 Int32 UInt32 Bool String Bytes"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Protobuf(BinaryFormat):
    """Protobuf messages: a record each, as an object with the names of the .proto file. Needs the package protobuf.

    A field without presence has its default when it is missing; others are then left out. Enums become their names,
    bytes base64, `Timestamp` a datetime, `Duration` seconds, wrappers their values, `Struct` an object. Text of proto2
    that is not UTF-8 becomes `{"not_utf8": base64}`, which spoils only the record that has it in a field of text.

    Args:
        message: the generated class (`readings_pb2.Reading`), or the full name of a message in `descriptors`.
        descriptors: what `protoc --descriptor_set_out=… --include_imports` has written, as bytes or a path.
        framed: whether messages begin with the id of a schema, as those of a schema registry do. The registry is not
            asked: fields are recognized by their numbers.
        inside: where the records are, as for JSON: `Protobuf(Batch, inside=Json(many="readings"))`.
    """

    message: str
    framed: bool
    class_of: Callable[[], Any]

    def __init__(
        self,
        message: Any,
        *,
        descriptors: bytes | str | Path | None = None,
        framed: bool = False,
        inside: Json = PLAIN,
    ) -> None:
        check_flags(framed=framed)
        if isinstance(message, str) == (descriptors is None):
            raise GraphError(
                "Protobuf needs a generated class, or the name of a message and descriptors=",
                hint='Protobuf(readings_pb2.Reading), or Protobuf("plant.Reading", descriptors=Path("plant.desc"))',
            )
        if descriptors is None:
            if getattr(message, "DESCRIPTOR", None) is None or not hasattr(message, "FromString"):
                raise GraphError(f"{message!r} is no message class of protobuf", hint="Protobuf(readings_pb2.Reading)")
            name, made = str(message.DESCRIPTOR.full_name), lambda: message
        else:
            name, made = message, lambda: _class_in(descriptors, message)
        object.__setattr__(self, "message", name)
        object.__setattr__(self, "class_of", made)
        object.__setattr__(self, "framed", framed)
        object.__setattr__(self, "inside", inside)
        self.__post_init__()

    def identity(self) -> Identity:
        """Describe the message by its name: a newer version of it is another only in fields that are added."""
        return {"kind": "protobuf", "message": self.message, "framed": self.framed, **self._identity_inside()}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class, the message, and that the package is there. Raises GraphError, ConfigError."""
        BinaryFormat.validate(self, record_type)
        try:
            import google.protobuf  # noqa: F401
        except ImportError as error:
            raise ConfigError("Protobuf needs the package protobuf", hint=to_install("protobuf")) from error
        self.class_of()

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that decodes a message and finds the records in it."""
        from google.protobuf.message import DecodeError

        kind, framed = self.class_of(), self.framed
        layouts: dict[str, list[_Field]] = {}
        has_map = _has_integer_map(kind.DESCRIPTOR, set())
        bytes_max = KEYED_BYTES_MAX if has_map else PROTOBUF_BYTES_MAX

        def json_in(payload: bytes) -> bytes:
            schema = ""
            if len(payload) > bytes_max:
                why = ", with a map by integers" if has_map else ""
                raise ValueError(f"the message has more than {bytes_max} bytes{why}")
            if framed:
                schema_id, payload = unframed(payload)
                schema = f"schema {schema_id}: "
            try:
                if framed:
                    payload = _message_part(payload, kind.DESCRIPTOR)
                return json_of(_Objects(layouts).object_of(kind.FromString(payload)))
            except (DecodeError, ValueError) as error:
                raise ValueError(f"{schema}{error}") from None

        return self._reader(record_type, json_in)


def _class_in(descriptors: bytes | str | Path, name: str) -> Any:
    """Return the class of a message in a set of descriptors. Raises GraphError."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise ConfigError("Protobuf needs the package protobuf", hint=to_install("protobuf")) from error
    hint = "write them by: protoc --include_imports --descriptor_set_out=plant.desc plant.proto"
    try:
        text = descriptors if isinstance(descriptors, bytes) else Path(descriptors).read_bytes()
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(text).file:
            pool.AddSerializedFile(file.SerializeToString())
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except KeyError as error:
        raise GraphError(
            f"the descriptors have no message {name!r}", hint="give its full name, with the package"
        ) from error
    except (OSError, DecodeError, TypeError) as error:
        raise GraphError(f"the descriptors of {name!r} cannot be read: {error}", hint=hint) from error


class _Objects:
    """Makes plain values of messages.

    Args:
        layouts: message type -> its fields, which is filled; the library makes them anew each time.
    """

    def __init__(self, layouts: dict[str, list[_Field]]) -> None:
        self._layouts = layouts
        self._room = FIELDS_MAX

    def object_of(self, message: Any) -> Any:
        """Return a message as plain values.

        Raises:
            ValueError: a value has no form in a record, or the message is too large.
        """
        kind = message.DESCRIPTOR.full_name
        fields = self._layouts.get(kind)
        if fields is None:
            fields = self._layouts[kind] = [_field_of(own) for own in message.DESCRIPTOR.fields]
        self._room -= MESSAGE_COST + len(fields)
        if self._room < 0:
            raise ValueError(f"too large: it has more than {FIELDS_MAX:,} fields, with those that are missing")
        known = _KNOWN.get(kind)
        if known is not None:
            return known(self, message)
        return {
            field.name: self._value(field, getattr(message, field.name))
            for field in fields
            if not field.has_presence or message.HasField(field.name)
        }

    def _value(self, field: _Field, value: Any) -> Any:
        if field.of_map is not None:
            if bytes in map(type, value):
                raise ValueError(f"a key of {field.name} is not UTF-8")
            return {_key(key): self._one(field.of_map, value[key]) for key in sorted(value)}
        if field.is_repeated:
            return [self._one(field, part) for part in value]
        return self._one(field, value)

    def _one(self, field: _Field, value: Any) -> Any:
        if field.is_message:
            return self.object_of(value)
        if field.is_text and type(value) is bytes:  # proto2 does not require UTF-8
            return {"not_utf8": value}
        return value if field.names is None else field.names.get(value, value)

    def struct_value(self, message: Any) -> Any:
        """Return a `google.protobuf.Value`."""
        kind = message.WhichOneof("kind")
        if kind is None or kind == "null_value":
            return None
        value = getattr(message, kind)
        return self.object_of(value) if kind in ("struct_value", "list_value") else value


@dataclass(frozen=True, slots=True)
class _Field:
    """What a field of a message is.

    Attributes:
        name: its name.
        has_presence: whether it may be missing.
        is_repeated, is_message, is_text: whether it is a list, of messages, and of text.
        names: number -> name of an enum; None for other fields.
        of_map: the values of a map; None for other fields.
    """

    name: str
    has_presence: bool
    is_repeated: bool
    is_message: bool
    is_text: bool
    names: dict[int, str] | None
    of_map: _Field | None


def _field_of(field: Any) -> _Field:
    inner, enum = field.message_type, field.enum_type
    is_map = inner is not None and inner.GetOptions().map_entry
    return _Field(
        name=field.name,
        has_presence=field.has_presence,
        is_repeated=_is_repeated(field),
        is_message=inner is not None,
        is_text=field.type == field.TYPE_STRING,
        names=None if enum is None else {number: value.name for number, value in enum.values_by_number.items()},
        of_map=_field_of(inner.fields_by_name["value"]) if is_map else None,
    )


def _is_repeated(field: Any) -> bool:
    found = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED if found is None else found)


def _key(key: Any) -> str:
    """Return a key as text: integers could be chosen to have equal hashes."""
    return str(key).lower() if isinstance(key, bool) else str(key)


def _has_integer_map(descriptor: Any, known: set[str]) -> bool:
    """Tell whether a message, or one inside of it, has a map whose keys are integers."""
    if descriptor.full_name in known:
        return False
    known.add(descriptor.full_name)
    if descriptor.GetOptions().map_entry:
        key = descriptor.fields_by_name["key"]
        if key.cpp_type not in (key.CPPTYPE_STRING, key.CPPTYPE_BOOL):
            return True
    inner = [field.message_type for field in descriptor.fields if field.message_type is not None]
    return any(_has_integer_map(own, known) for own in inner)


def _timestamp(_: _Objects, message: Any) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=message.seconds, microseconds=message.nanos // 1_000)
    except OverflowError:
        raise ValueError(f"a Timestamp of {message.seconds} s is outside of the years 1 to 9999") from None


def _refused(_: _Objects, message: Any) -> Any:
    raise ValueError(f"a value of type {message.DESCRIPTOR.full_name} has no form in a record")


_KNOWN: dict[str, Callable[[_Objects, Any], Any]] = {
    "google.protobuf.Timestamp": _timestamp,
    "google.protobuf.Duration": lambda _, message: message.seconds + message.nanos / 1_000_000_000,
    "google.protobuf.Struct": lambda objects, message: {
        key: objects.struct_value(message.fields[key]) for key in message.fields
    },
    "google.protobuf.ListValue": lambda objects, message: [objects.struct_value(value) for value in message.values],
    "google.protobuf.Value": lambda objects, message: objects.struct_value(message),
    "google.protobuf.Any": _refused,
    **{f"google.protobuf.{name}Value": lambda _, message: message.value for name in _WRAPPERS.split()},
}


def _message_part(payload: bytes, descriptor: Any) -> bytes:
    """Return what is behind the place of the message in its file, which a registry writes behind the id.

    Raises:
        ValueError: the place is that of another message.
    """
    count, place = _zigzag(payload, 0)
    if not 0 <= count <= INDEXES_MAX:
        raise ValueError(f"the message names {count} levels of messages")
    path = []
    for _ in range(count):
        index, place = _zigzag(payload, place)
        path.append(index)
    wanted: list[int] = []
    level = descriptor
    while level is not None:
        outer = level.containing_type
        siblings = level.file.message_types_by_name.values() if outer is None else outer.nested_types
        wanted.insert(0, [own.name for own in siblings].index(level.name))
        level = outer
    if (path or [0]) != wanted:
        raise ValueError(f"it is message {path or [0]} of its schema, and {descriptor.full_name} is {wanted}")
    return payload[place:]


def _zigzag(payload: bytes, place: int) -> tuple[int, int]:
    """Return a number of variable length, and the place behind it."""
    found = shift = 0
    for byte in payload[place : place + 5]:
        place += 1
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (found >> 1) ^ -(found & 1), place
    raise ValueError("the message is cut off")
