"""Sparkplug B (Eclipse Sparkplug 3.0): messages of edge nodes under the topics `spBv1.0/…`.

A payload of Sparkplug has no meaning alone: data names its metrics by aliases that a birth before it has defined. What
must be remembered for that is exact only if it is in the commit, as any state. So the format remembers nothing: it
checks a message, and finds who has sent it and when. `Stream.sparkplug` then makes metrics of the messages, with state
for each edge node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

import msgspec

from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.formats.gzipped import expanded
from millpy.formats.message import Format, Message, Part, Reader
from millpy.formats.sparkplug_schema import NOT_UTF8, payload_class
from millpy.model.identity import Identity
from millpy.model.record import RecordType

NAMESPACE = "spBv1.0"
PAYLOAD_BYTES_MAX = 700_000
"""The most bytes of a payload: as base64 in a record it must stay below `record_bytes_max`."""
METRICS_MAX = 10_000
"""The most metrics of one message."""
NAME_BYTES_MAX = 1_000
"""The most bytes of the name of a metric."""
BD_SEQ = "bdSeq"
_OF_NODE = ("NBIRTH", "NDEATH", "NDATA")
_OF_DEVICE = ("DBIRTH", "DDEATH", "DDATA")
_TO_OTHERS = ("NCMD", "DCMD")
_MS_MAX = 253_402_300_799_999  # the end of the year 9999
_COMPRESSED = "SPBV1.0_COMPRESSED"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SparkplugMessage(msgspec.Struct, frozen=True):
    """A Sparkplug message, before its aliases are resolved: the record class of `format=Sparkplug()`.

    Attributes:
        group, edge_node, device: who has sent it; `device` is empty for the edge node itself.
        type: NBIRTH, NDEATH, NDATA, DBIRTH, DDEATH or DDATA.
        at: the least time in it: its own, or that of a metric before; of a message without one, and of a NDEATH, whose
            time is that of the connection that has ended, its arrival.
        arrived_at: when it arrived, in µs since the epoch.
        id: the same for a message that is delivered again, for `Dedupe("id", …)`; None for a death, which has no time.
        payload: the payload, as protobuf.
    """

    group: str
    edge_node: str
    device: str
    type: str
    at: datetime
    arrived_at: int
    id: str | None
    payload: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Sparkplug(Format):
    """Sparkplug B messages, for a stream of `SparkplugMessage`. Needs the package protobuf.

    Commands (NCMD, DCMD) and the state of hosts (STATE) give no records. A payload may be compressed. One of more than
    700,000 bytes or 10,000 metrics is a dead letter.
    """

    @property
    def reads_lines(self) -> bool:
        """A line of a file is no message."""
        return False

    def identity(self) -> Identity:
        """Describe the format."""
        return {"kind": "sparkplug"}

    def validate(self, record_type: RecordType) -> None:
        """Check the record class, and that the package is there. Raises GraphError, ConfigError."""
        if record_type.struct is not SparkplugMessage:
            raise GraphError(
                f"Sparkplug() gives messages, not {record_type.struct.__name__}",
                hint="inject with schema=SparkplugMessage, and make metrics of them by .sparkplug()",
            )
        try:
            import google.protobuf  # noqa: F401
        except ImportError as error:
            raise ConfigError("Sparkplug needs the package protobuf", hint=to_install("protobuf")) from error

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that checks a message."""
        del record_type
        payloads = payload_class()

        def read(message: Message) -> Iterable[Part]:
            place = _place(message.topic)
            return () if place is None else (msgspec.json.encode(_message(message, *place, payloads)),)

        return read


def sparkplug_rebirth(group: str, edge_node: str, at: datetime) -> tuple[str, bytes]:
    """Return the topic and payload of the command that asks an edge node for a rebirth.

    Publish it when `events` has a `rebirth_needed`; asking again does no harm.

    Args:
        group: the group of the edge node, as in the event.
        edge_node: its name.
        at: the time of the command.
    """
    payload = payload_class()(timestamp=(at - _EPOCH) // timedelta(milliseconds=1))
    payload.metrics.add(name="Node Control/Rebirth", datatype=11, boolean_value=True)
    return f"{NAMESPACE}/{group}/NCMD/{edge_node}", payload.SerializeToString()


def _place(topic: str) -> tuple[str, str, str, str] | None:
    """Return group, edge node, device and type of a topic; None for messages that go to others.

    Raises:
        ValueError: it is no topic of Sparkplug B.
    """
    levels = topic.split("/")
    if levels[0] != NAMESPACE:
        raise ValueError(f"topic {topic[:200]!r} is not under {NAMESPACE}/")
    if levels[1:2] == ["STATE"]:
        return None
    kind = levels[2] if len(levels) > 3 else ""
    if kind in _TO_OTHERS:
        return None
    if len(levels) == 4 and kind in _OF_NODE and levels[1] and levels[3]:
        return levels[1], levels[3], "", kind
    if len(levels) == 5 and kind in _OF_DEVICE and levels[1] and levels[3] and levels[4]:
        return levels[1], levels[3], levels[4], kind
    raise ValueError(f"topic {topic[:200]!r} names no edge node or device, or no type of message")


def _message(message: Message, group: str, edge_node: str, device: str, kind: str, payloads: Any) -> SparkplugMessage:
    """Return the record of a message. Raises ValueError for a payload that is none."""
    payload, text = parsed(message.payload, payloads)
    check_metrics(payload)
    own = time_of(payload)
    times = [] if own is None else [own]
    times += [found for metric in payload.metrics if (found := time_of(metric)) is not None]
    if kind == "NDEATH":
        times = []
    at = message.arrival if not times else _EPOCH + timedelta(milliseconds=min(times))
    name = None
    if own is not None and kind != "NDEATH":
        name = blake2b(message.topic.encode() + b"\0" + text, digest_size=16).hexdigest()
    return SparkplugMessage(group, edge_node, device, kind, at, message.arrived_at, name, text)


def parsed(text: bytes, payloads: Any) -> tuple[Any, bytes]:
    """Return a payload, and its bytes when it is not compressed.

    Raises:
        ValueError: the bytes are no payload, or too many.
    """
    from google.protobuf.message import DecodeError

    def one(text: bytes) -> Any:
        if len(text) > PAYLOAD_BYTES_MAX:
            raise ValueError(f"the payload has more than {PAYLOAD_BYTES_MAX} bytes")
        try:
            return payloads.FromString(text)
        except DecodeError as error:
            raise ValueError(f"not a Sparkplug payload: {error}") from None

    outer = one(text)
    if outer.uuid != _COMPRESSED:
        return outer, text
    inner = one(expanded(outer.body))
    if inner.uuid == _COMPRESSED:
        raise ValueError("the payload is compressed twice")
    if outer.HasField("seq"):
        inner.seq = outer.seq
    if outer.HasField("timestamp") and not inner.HasField("timestamp"):
        inner.timestamp = outer.timestamp
    return inner, inner.SerializeToString()


def check_metrics(payload: Any) -> None:
    """Check the number of metrics and their names. Raises ValueError."""
    if len(payload.metrics) > METRICS_MAX:
        raise ValueError(f"the message has more than {METRICS_MAX} metrics")
    for metric in payload.metrics:
        name = metric.name
        if isinstance(name, bytes):
            raise ValueError(f"{NOT_UTF8}: the name of a metric")
        if len(name) > NAME_BYTES_MAX or len(name.encode()) > NAME_BYTES_MAX:
            raise ValueError(f"the name of a metric has more than {NAME_BYTES_MAX} bytes")
        if "\0" in name:
            raise ValueError("the name of a metric contains NUL")


def time_of(part: Any) -> int | None:
    """Return the time of a payload or metric in ms since the epoch; None without one.

    Raises:
        ValueError: it is after the year 9999.
    """
    if not part.HasField("timestamp"):
        return None
    if part.timestamp > _MS_MAX:
        raise ValueError(f"timestamp {part.timestamp} is after the year 9999")
    return int(part.timestamp)
