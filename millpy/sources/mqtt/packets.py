"""Bulk codec for the two frequent MQTT packets, PUBLISH in and PUBACK out. No I/O.

A client library spends about 60 µs on a received message: a call per byte of its header, objects for its properties,
log calls, an iteration of the event loop. Cutting a whole read into messages takes 1 µs per message. All other packets
are rare, and the library handles them.

The layout is that of MQTT 3.1.1 and 5, section 3.3: a first byte with the flags, the remaining length in one to four
bytes, topic, packet id (not at QoS 0), properties (5 only), and the payload to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_PUBLISH = 0x30
_RETAINED = 0x01
_DUP = 0x08
_QOS = 0x06
_QOS_2 = 0x04
_LENGTH_BYTES_MAX = 4
_OTHER_BYTES_MAX = 1 << 18  # of a packet other than PUBLISH: a few reason codes, and properties
_PUBACK = 0x4002  # type and flags, and a remaining length of two


class PacketError(OSError):
    """A packet from the broker that violates the protocol or our subscriptions; the connection becomes unusable."""


@dataclass(slots=True)
class Messages:
    """Messages in the order received; `topics`, `payloads` and `packet_ids` are parallel lists.

    Attributes:
        topics: topics as UTF-8 bytes.
        payloads: whole payloads; only the beginning of a payload that is too long to keep.
        packet_ids: packet ids; 0 for QoS 0, which has no acknowledgement.
        retained: indexes of the messages that the broker retained from before the subscription.
        redelivered: indexes of the messages that the broker has sent to this session before (DUP).
    """

    topics: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    packet_ids: list[int] = field(default_factory=list)
    retained: list[int] = field(default_factory=list)
    redelivered: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.topics)

    def pop(self) -> Messages:
        """Remove the last message and return it."""
        last, marks = len(self) - 1, []
        for indexes in (self.retained, self.redelivered):
            marked = bool(indexes) and indexes[-1] == last
            marks.append([0] if marked else [])
            if marked:
                indexes.pop()
        return Messages([self.topics.pop()], [self.payloads.pop()], [self.packet_ids.pop()], *marks)


class PacketCutter:
    """Cuts the bytes of a socket into messages and other packets, however reads split them.

    Args:
        five: whether the protocol is MQTT 5, where a PUBLISH has properties.
        packet_bytes_max: the length above which a PUBLISH is read to its end but keeps only the beginning of its
            payload.
        kept_bytes: the length of that beginning.
    """

    def __init__(self, *, five: bool, packet_bytes_max: int, kept_bytes: int) -> None:
        assert 0x80 <= packet_bytes_max and 0 < kept_bytes <= packet_bytes_max
        self._five = five
        self._packet_bytes_max = packet_bytes_max
        self._kept_bytes = kept_bytes
        self._rest = bytearray()
        self._wanted = 0  # `_rest` needs this many bytes before it can be cut
        self._skip = 0
        self._long: Messages | None = None

    def feed(self, data: bytes) -> tuple[Messages, list[bytes]]:
        """Return the messages that are complete now, and all other complete packets.

        Raises:
            PacketError: a remaining length has more than four bytes, a message has QoS 2, or a packet contradicts its
                own length.
        """
        published = Messages()
        if self._long is not None:
            passed = min(self._skip, len(data))
            self._skip -= passed
            if self._skip:
                return published, []
            published, self._long, data = self._long, None, data[passed:]
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return published, []
            data = bytes(self._rest)
            self._rest.clear()
        try:
            return published, self._cut(data, published)
        except IndexError as error:
            raise PacketError("a message from the broker is shorter than its length says") from error

    def _cut(self, data: bytes, published: Messages) -> list[bytes]:  # noqa: C901 - the hot loop calls nothing
        topics, payloads, packet_ids = published.topics, published.payloads, published.packet_ids
        others: list[bytes] = []
        five, at, end = self._five, 0, len(data)
        self._wanted = 0
        while at + 2 <= end:
            first, length, start = data[at], data[at + 1], at + 2
            if length & 0x80:
                length, start = _variable(data, at + 1)
                if start < 0:
                    break
            stop = kept = start + length
            is_message = first & 0xF0 == _PUBLISH
            if not is_message and length > _OTHER_BYTES_MAX:
                raise PacketError(f"the broker sent a packet of type {first >> 4} with {length} bytes")
            if is_message and stop - at > self._packet_bytes_max:
                kept = at + self._packet_bytes_max  # the rest is skipped, and may arrive later
            if kept > end:
                self._wanted = kept - at
                break
            if not is_message:
                others.append(data[at:stop])
                at = stop
                continue
            body = start + 2 + (data[start] << 8 | data[start + 1])
            topics.append(data[start + 2 : body])
            packet_id = 0
            if first & _QOS:
                if first & _QOS_2:
                    raise PacketError("the broker sent a message with QoS 2, which was not subscribed to")
                packet_id = data[body] << 8 | data[body + 1]
                body += 2
            packet_ids.append(packet_id)
            if five:
                # Most messages have no properties: one byte that is 0.
                body = body + 1 if not data[body] else _after_properties(data, body)
            if body > kept:
                raise PacketError("a message from the broker is shorter than its length says")
            payloads.append(data[body:kept] if kept == stop else data[body : min(kept, body + self._kept_bytes)])
            if first & _RETAINED:
                published.retained.append(len(topics) - 1)
            if first & _DUP and packet_id:
                published.redelivered.append(len(topics) - 1)
            at = stop
        if at > end:
            self._skip, self._long = at - end, published.pop()
        else:
            self._rest += data[at:]
        return others


def _variable(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable byte integer and the index after it, which is -1 when bytes are missing."""
    value = 0
    for count in range(_LENGTH_BYTES_MAX):
        if at + count >= len(data):
            return 0, -1
        byte = data[at + count]
        value |= (byte & 0x7F) << 7 * count
        if not byte & 0x80:
            return value, at + count + 1
    raise PacketError("the broker sent a length of more than four bytes")


def _after_properties(data: bytes, at: int) -> int:
    length, start = _variable(data, at)
    if start < 0:
        raise PacketError("a message from the broker ends within its properties")
    return start + length


def pubacks(packet_ids: Sequence[int]) -> bytes:
    """Return PUBACK packets in this order, in the short form, which means success. Skip id 0, which is QoS 0."""
    asked = np.array(packet_ids, np.uint16)
    asked = asked[asked > 0]
    packets = np.empty((len(asked), 2), ">u2")
    packets[:, 0] = _PUBACK
    packets[:, 1] = asked
    return packets.tobytes()
