"""What binary formats have in common, and those that need no schema: MessagePack and CBOR."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec

from millpy.errors import GraphError
from millpy.formats.binary_values import CborReader, MessagePackReader, ValueReader
from millpy.formats.json_objects import Json
from millpy.formats.message import Format, Message, Part, Reader, check_objects
from millpy.model.identity import Identity
from millpy.model.record import RecordType

PLAIN = Json()


@dataclass(frozen=True, slots=True, repr=False)
class BinaryFormat(Format):
    """A format whose messages are values of JSON in another encoding.

    Args:
        inside: how records are found in the decoded value, as in JSON; by default it is a record, or a list of them.
    """

    inside: Json

    def __post_init__(self) -> None:
        if not isinstance(self.inside, Json):
            raise GraphError(f"inside={self.inside!r} is not a Json", hint='for example Json(many="readings")')

    @property
    def reads_lines(self) -> bool:
        """A line of a file is no message."""
        return False

    def _identity_inside(self) -> Identity:
        """Describe where the records are; empty for plain JSON."""
        own = self.inside.identity()
        return {} if own == PLAIN.identity() else {"inside": own}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class. Raises GraphError."""
        check_objects(record_type, self)
        self.inside.validate(record_type)

    def _reader(self, record_type: RecordType, json_in: Callable[[bytes], bytes]) -> Reader:
        """Return a function that finds the records of a message in its JSON, given one that decodes a payload."""
        inside = self.inside.reader(record_type)

        def read(message: Message) -> Iterable[Part]:
            text = message.payload if message.decoded else json_in(message.payload)
            parts = inside(Message(text, message.topic, arrived_at=message.arrived_at))
            return (part if isinstance(part, bytes) else replace(part, decoded=True) for part in parts)

        return read


@dataclass(frozen=True, slots=True, repr=False)
class _SchemalessFormat(BinaryFormat):
    """A binary format whose messages name their fields."""

    inside: Json = PLAIN

    @property
    def _kind(self) -> str:
        raise NotImplementedError

    @property
    def _values(self) -> type[ValueReader]:
        raise NotImplementedError

    def identity(self) -> Identity:
        """Describe the format."""
        return {"kind": self._kind, **self._identity_inside()}

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that decodes a message and finds the records in it."""
        values = self._values
        return self._reader(record_type, lambda payload: msgspec.json.encode(values(payload).read()))


@dataclass(frozen=True, slots=True, repr=False)
class MessagePack(_SchemalessFormat):
    """MessagePack: a map for one record, or an array of them. Timestamps become datetimes, binary becomes base64.

    Other extensions become `{"ext": type, "value": base64}`. A key is text or an integer.

    Args:
        inside: where the records are, as for JSON: `MessagePack(Json(many="readings"))`.
    """

    @property
    def _kind(self) -> str:
        return "message_pack"

    @property
    def _values(self) -> type[ValueReader]:
        return MessagePackReader


@dataclass(frozen=True, slots=True, repr=False)
class Cbor(_SchemalessFormat):
    """CBOR (RFC 8949): a map for one record, or an array of them.

    Times (tags 0 and 1) become datetimes, dates (100 and 1004) dates, integers and fractions (2 to 5) numbers, UUIDs
    (37) text, byte strings base64. Values that refer to others (25, 29) are resolved, unless they contain themselves,
    or make the message more than 16 times as large. Any other tag becomes `{"tag": number, "value": …}`. A key is text
    or an integer. A map that has a key twice makes the message a dead letter.

    Args:
        inside: where the records are, as for JSON: `Cbor(Json(many="readings"))`.
    """

    @property
    def _kind(self) -> str:
        return "cbor"

    @property
    def _values(self) -> type[ValueReader]:
        return CborReader
