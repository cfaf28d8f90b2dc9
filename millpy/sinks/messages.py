"""SinkMessages: what a sink delivers, as columns, and how they are stored in an outbox.

The columns of a bundle are one row of `mill.outbox`: a MessagePack list of columns, compressed where that pays. They
hold what the other side gets, so that a row stays deliverable when the class of the records changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa
import xxhash

from millpy.errors import GraphError, SegmentChecksumError
from millpy.model.arguments import are_texts, check_instance
from millpy.model.checkpoint import OutboxRows

COMPRESS_BYTES_MIN = 4_096
_PLAIN, _LZ4 = b"\x00", b"\x01"
_SIZE_BYTES = 8
Headers = Sequence[tuple[str, bytes]]
TOPIC = ":topic"
"""The header with the topic of a message, of a sink that has many; no field has such a name."""


class _EncodedMessages(msgspec.Struct, array_like=True):
    keys: list[bytes]
    values: list[bytes | None]
    event_times: list[int]
    headers: list[list[tuple[str, bytes]]]
    records: list[bytes] = []
    inputs: list[int] = []


_JSON = msgspec.json.Encoder()
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_EncodedMessages)


@dataclass(slots=True)
class SinkMessages:
    """Messages of one interval of a sink, in order.

    Attributes:
        position: number of the first message in its interval.
        keys, values: the bytes of each; the value is None where the field that holds it is.
        event_times: the event time of each, in µs since the epoch.
        headers: the headers of each; empty if no message has any. The topic of a message is the header TOPIC.
        positions: the number of each in its interval, ascending. The number of a message never changes, so the name of
            the interval and the number identify the message at the other side. Numbers are missing where messages were
            refused, and among messages that were refused and are sent again.
        end: the position behind them. For a sink that stores positions: the one to store with them.
        records: the record of each, as JSON; empty if the values are that.
        inputs: the index of the step's input that each comes from; empty if all come from the first.
    """

    position: int
    keys: list[bytes]
    values: list[bytes | None]
    event_times: list[int]
    headers: list[list[tuple[str, bytes]]] = field(default_factory=list)
    positions: Sequence[int] = ()
    end: int = -1
    records: list[bytes] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.values)
        if not self.positions or self.positions[-1] - self.positions[0] + 1 == count:
            self.positions = range(self.position, self.position + count)
        if self.end < 0:
            self.end = self.positions[-1] + 1 if self.positions else self.position

    def __len__(self) -> int:
        return len(self.values)

    @property
    def size(self) -> int:
        """Bytes of keys, values and headers."""
        size = sum(map(len, filter(None, self.values))) + sum(map(len, self.keys))
        return size + sum(len(name) + len(value) for headers in self.headers for name, value in headers)

    def sizes(self) -> list[int]:
        """Return the bytes of each message."""
        found = [len(key) + len(value or b"") for key, value in zip(self.keys, self.values, strict=True)]
        if self.headers:
            of_headers = [sum(len(name) + len(value) for name, value in headers) for headers in self.headers]
            found = [size + more for size, more in zip(found, of_headers, strict=True)]
        return found

    def headers_of(self, place: int) -> Headers:
        """Return the headers of one message."""
        return self.headers[place] if self.headers else ()

    def topic_of(self, place: int) -> bytes | None:
        """Return the topic of one message; None if its sink has only one place."""
        return next((value for name, value in self.headers_of(place) if name == TOPIC), None)

    def record_of(self, place: int) -> bytes:
        """Return the record of one message, as JSON."""
        return self.records[place] if self.records else self.values[place] or b"null"

    def part(self, lo: int, hi: int) -> SinkMessages:
        """Return the messages at the places [lo, hi)."""
        positions = self.positions[lo:hi]
        return SinkMessages(
            positions[0] if positions else self.position + lo,
            self.keys[lo:hi],
            self.values[lo:hi],
            self.event_times[lo:hi],
            self.headers[lo:hi],
            positions,
            records=self.records[lo:hi],
            inputs=self.inputs[lo:hi],
        )

    def select(self, places: Sequence[int]) -> SinkMessages:
        """Return the messages at some places, under their numbers. The end stays."""
        chosen = self.take(places)
        chosen.positions, chosen.end = [self.positions[place] for place in places], self.end
        chosen.position = chosen.positions[0] if places else self.position
        return chosen

    def take(self, places: Sequence[int]) -> SinkMessages:
        """Return the messages at some places, renumbered so that they follow each other."""
        return SinkMessages(
            self.position,
            [self.keys[place] for place in places],
            [self.values[place] for place in places],
            [self.event_times[place] for place in places],
            [self.headers[place] for place in places] if self.headers else [],
            records=[self.records[place] for place in places] if self.records else [],
            inputs=[self.inputs[place] for place in places] if self.inputs else [],
        )

    def encode(self) -> OutboxRows:
        """Return the messages as a row of an outbox."""
        payload = _ENCODER.encode(
            _EncodedMessages(self.keys, self.values, self.event_times, self.headers, self.records, self.inputs)
        )
        if len(payload) < COMPRESS_BYTES_MIN:
            payload = _PLAIN + payload
        else:
            size = len(payload).to_bytes(_SIZE_BYTES, "little")
            payload = _LZ4 + size + pa.compress(payload, codec="lz4", asbytes=True)
        return OutboxRows(self.position, len(self), payload, xxhash.xxh32_intdigest(payload))


def decode(rows: OutboxRows) -> SinkMessages:
    """Return the messages of a row.

    Raises:
        SegmentChecksumError: the payload is not what was stored.
    """
    payload = rows.payload
    if xxhash.xxh32_intdigest(payload) != rows.checksum:
        raise SegmentChecksumError(f"the messages at position {rows.position} of an outbox are damaged")
    if payload[:1] == _LZ4:
        size = int.from_bytes(payload[1 : 1 + _SIZE_BYTES], "little")
        found = _DECODER.decode(pa.decompress(payload[1 + _SIZE_BYTES :], size, codec="lz4", asbytes=True))
    else:
        found = _DECODER.decode(payload[1:])
    if len(found.values) != rows.records:
        raise SegmentChecksumError(f"{len(found.values)} messages at position {rows.position}, not {rows.records}")
    return SinkMessages(
        rows.position,
        found.keys,
        found.values,
        found.event_times,
        found.headers,
        records=found.records,
        inputs=found.inputs,
    )


def joined(parts: Sequence[SinkMessages]) -> SinkMessages:
    """Return messages in the order of their positions as one; there must be at least one part."""
    if len(parts) == 1:
        return parts[0]
    together = SinkMessages(parts[0].position, [], [], [], end=parts[-1].end)
    positions: list[int] = []
    with_headers, with_records, with_inputs = (
        any(getattr(part, name) for part in parts) for name in ("headers", "records", "inputs")
    )
    for part in parts:
        together.keys += part.keys
        together.values += part.values
        together.event_times += part.event_times
        positions += part.positions
        if with_headers:
            together.headers += part.headers or [[]] * len(part)
        if with_records:
            together.records += part.records or [part.record_of(place) for place in range(len(part))]
        if with_inputs:
            together.inputs += part.inputs or [0] * len(part)
    together.positions = positions
    together.__post_init__()
    return together


def field_bytes(value: Any) -> bytes | None:
    """Return the value of one field for a message: text as UTF-8, bytes as they are, everything else as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _JSON.encode(value)


def field_headers(record: Any, readers: Sequence[tuple[str, Callable[[Any], Any]]]) -> list[tuple[str, bytes]]:
    """Return headers of the fields of a record that are not None."""
    found = [(name, field_bytes(read(record))) for name, read in readers]
    return [(name, value) for name, value in found if value is not None]


def check_value(value: object, headers: object) -> None:
    """Check the names of the fields that a sink makes its value and headers of. Raises GraphError."""
    check_instance("value", value, str, "the name of a field; leave it out for the whole record")
    if not are_texts(headers):
        raise GraphError(f"headers={headers!r} is not a list of fields", hint='for example headers=("device",)')
