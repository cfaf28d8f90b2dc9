"""Binary formats that need no schema: MessagePack and CBOR."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import msgspec

from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.formats.json_objects import Json
from millpy.formats.message import Format, Message, Part, Reader, check_objects
from millpy.formats.values import json_of
from millpy.model.identity import Identity
from millpy.model.record import RecordType

_PLAIN = Json()


@dataclass(frozen=True, slots=True, repr=False)
class _Binary(Format):
    """A format whose values are those of JSON.

    Args:
        inside: how records are found in the decoded value, as in JSON; by default it is a record, or a list of them.
    """

    inside: Json = _PLAIN

    def __post_init__(self) -> None:
        if not isinstance(self.inside, Json):
            raise GraphError(f"inside={self.inside!r} is no Json", hint='for example Json(many="readings")')

    @property
    def reads_lines(self) -> bool:
        """A line of a file is no message."""
        return False

    @property
    def _kind(self) -> str:
        raise NotImplementedError

    def identity(self) -> Identity:
        """Describe the format."""
        own = self.inside.identity()
        return {"kind": self._kind, **({} if own == _PLAIN.identity() else {"inside": own})}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class. Raises GraphError."""
        check_objects(record_type, self)
        self.inside.validate(record_type)

    def _value(self, payload: bytes) -> Any:
        raise NotImplementedError

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that decodes a message and finds the records in it."""
        inside = self.inside.reader(record_type)

        def read(message: Message) -> Iterable[Part]:
            text = json_of(self._value(message.payload), len(message.payload))
            return inside(Message(text, message.topic, arrived_at=message.arrived_at))

        return read


@dataclass(frozen=True, slots=True, repr=False)
class MessagePack(_Binary):
    """MessagePack: a map for one record, or an array of them. Timestamps become datetimes, binary becomes base64.

    Args:
        inside: where the records are, as for JSON: `MessagePack(Json(many="readings"))`.
    """

    @property
    def _kind(self) -> str:
        return "message_pack"

    def _value(self, payload: bytes) -> Any:
        return msgspec.msgpack.decode(payload)


@dataclass(frozen=True, slots=True, repr=False)
class Cbor(_Binary):
    """CBOR (RFC 8949): a map for one record, or an array of them. Needs the package cbor2.

    Times (tags 0 and 1) become datetimes, byte strings base64. Shared values (tags 25 and 29) are rejected if they
    contain themselves, or make the value more than 16 times as large as its payload.

    Args:
        inside: where the records are, as for JSON: `Cbor(Json(many="readings"))`.
    """

    @property
    def _kind(self) -> str:
        return "cbor"

    def validate(self, record_type: RecordType) -> None:
        """Check the record class, and that the package is there. Raises GraphError, ConfigError."""
        _Binary.validate(self, record_type)
        try:
            import cbor2  # noqa: F401
        except ImportError as error:
            raise ConfigError("CBOR needs the package cbor2", hint=to_install("cbor")) from error

    def _value(self, payload: bytes) -> Any:
        import cbor2

        with BytesIO(payload) as stream:
            value = cbor2.load(stream, tag_hook=_refuse_tag)
            if stream.read(1):
                raise ValueError("bytes follow the value")
        return value


def _refuse_tag(_decoder: Any, tag: Any) -> Any:
    raise ValueError(f"tag {tag.tag} has no form in JSON")
