"""SinkMessages: what a sink delivers, as columns, and how they are stored in an outbox.

The columns of a bundle are one row of `mill.outbox`: a MessagePack list of columns, compressed where that pays. They
hold what the other side gets, so that a row stays deliverable when the class of the records changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import xxhash

from millpy.errors import SegmentChecksumError
from millpy.model.checkpoint import OutboxRows

COMPRESS_BYTES_MIN = 4_096
_PLAIN, _LZ4 = b"\x00", b"\x01"
_SIZE_BYTES = 8
Headers = Sequence[tuple[str, bytes]]


class _EncodedMessages(msgspec.Struct, array_like=True):
    keys: list[bytes | None]
    values: list[bytes | None]
    event_times: list[int]
    headers: list[list[tuple[str, bytes]]]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_EncodedMessages)


@dataclass(slots=True)
class SinkMessages:
    """SinkMessages of one interval of a sink, in order.

    Attributes:
        position: number of the first message in its interval. The number of a message never changes, so the name of
            the interval and the number identify the message at the other side.
        keys, values: the bytes of each; the value is None where the field that holds it is.
        event_times: the event time of each, in µs since the epoch.
        headers: the headers of each; empty if no message has any.
    """

    position: int
    keys: list[bytes | None]
    values: list[bytes | None]
    event_times: list[int]
    headers: list[list[tuple[str, bytes]]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def end(self) -> int:
        """The position behind the last message."""
        return self.position + len(self)

    @property
    def size(self) -> int:
        """Bytes of keys, values and headers."""
        size = sum(map(len, filter(None, self.values))) + sum(map(len, filter(None, self.keys)))
        return size + sum(len(name) + len(value) for headers in self.headers for name, value in headers)

    def sizes(self) -> list[int]:
        """Return the bytes of each message."""
        found = [len(key or b"") + len(value or b"") for key, value in zip(self.keys, self.values, strict=True)]
        if self.headers:
            of_headers = [sum(len(name) + len(value) for name, value in headers) for headers in self.headers]
            found = [size + more for size, more in zip(found, of_headers, strict=True)]
        return found

    def headers_of(self, place: int) -> Headers:
        """Return the headers of one message."""
        return self.headers[place] if self.headers else ()

    def part(self, lo: int, hi: int) -> SinkMessages:
        """Return the messages at the places [lo, hi)."""
        position, headers = self.position + lo, self.headers[lo:hi]
        return SinkMessages(position, self.keys[lo:hi], self.values[lo:hi], self.event_times[lo:hi], headers)

    def take(self, places: Sequence[int]) -> SinkMessages:
        """Return the messages at some places as messages that follow each other."""
        return SinkMessages(
            self.position,
            [self.keys[place] for place in places],
            [self.values[place] for place in places],
            [self.event_times[place] for place in places],
            [self.headers[place] for place in places] if self.headers else [],
        )

    def encode(self) -> OutboxRows:
        """Return the messages as a row of an outbox."""
        payload = _ENCODER.encode(_EncodedMessages(self.keys, self.values, self.event_times, self.headers))
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
    return SinkMessages(rows.position, found.keys, found.values, found.event_times, found.headers)


def joined(parts: Sequence[SinkMessages]) -> SinkMessages:
    """Return messages that follow each other as one; there must be at least one part."""
    if len(parts) == 1:
        return parts[0]
    together = SinkMessages(parts[0].position, [], [], [])
    with_headers = any(part.headers for part in parts)
    for part in parts:
        assert part.position == together.end, (part.position, together.end)
        together.keys += part.keys
        together.values += part.values
        together.event_times += part.event_times
        if with_headers:
            together.headers += part.headers or [[]] * len(part)
    return together
