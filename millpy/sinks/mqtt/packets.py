"""Codec for the packets of a publisher: PUBLISH out; CONNACK, answers and DISCONNECT in. MQTT 5, no I/O.

The client library waits for each message alone and drops the broker's reason codes, so messages pass it by, as they do
at a source (`sources/mqtt/packets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpy.sources.mqtt.packets import PacketError
from millpy.sources.mqtt.properties import body_of, number_of, properties_at

CONNACK, PUBACK, PUBREC, PUBCOMP, DISCONNECT = 2, 4, 5, 7, 14
"""Types of packets from the broker."""
ID_MAX = 65_535
PACKET_BYTES_MAX = 268_435_460
"""The protocol's own limit."""
REASON_CHARACTERS_MAX = 200
_CONTENT_TYPE, _EXPIRY, _IS_TEXT, _USER = b"\x03", b"\x02", b"\x01\x01", b"\x26"
_RECEIVE_MAX, _QOS_MAX, _RETAINS, _PACKET_MAX, _REASON, _PAIR = 0x21, 0x24, 0x25, 0x27, 0x1F, 0x26
REASONS = {
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x87: "not authorized",
    0x89: "server busy",
    0x8B: "server shutting down",
    0x8D: "keep alive timeout",
    0x8E: "session taken over",
    0x90: "topic name invalid",
    0x91: "packet identifier in use",
    0x92: "packet identifier not found",
    0x93: "receive maximum exceeded",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format invalid",
    0x9A: "retain not supported",
    0x9B: "QoS not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9F: "connection rate exceeded",
    0xA0: "maximum connect time",
}
REFUSED_MIN = 0x80


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What a broker says in CONNACK that it takes; the defaults are those of the protocol."""

    receive_max: int = ID_MAX
    packet_bytes_max: int = PACKET_BYTES_MAX
    qos_max: int = 2
    retains: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """A PUBACK, PUBREC or PUBCOMP: the id of a message, and how the broker has judged it."""

    packet_id: int
    code: int
    why: str


def packet_type(packet: bytes) -> int:
    """Return the type of a whole packet."""
    return packet[0] >> 4


def user_properties(pairs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return user properties."""
    return b"".join([_USER + _text(name) + _text(value) for name, value in pairs])


def message_properties(content_type: str, expiry_s: int | None, *, is_text: bool) -> bytes:
    """Return the properties that all messages of a sink have."""
    found = _IS_TEXT if is_text else b""
    if content_type:
        found += _CONTENT_TYPE + _text(content_type.encode())
    return found if expiry_s is None else found + _EXPIRY + expiry_s.to_bytes(4)


def publish_end(topic: bytes, properties: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return a PUBLISH from its topic on, without its first bytes: before, and behind the packet id."""
    return _text(topic), _length(len(properties)) + properties + payload


def publish(end: tuple[bytes, bytes], packet_id: int, *, qos: int, retain: bool) -> bytes:
    """Return a PUBLISH with its id."""
    topic, rest = end
    first = 0x30 | qos << 1 | retain
    return b"%c%b%b%b%b" % (first, _length(len(topic) + 2 + len(rest)), topic, packet_id.to_bytes(2), rest)


def publish_size(end: tuple[bytes, bytes]) -> int:
    """Return the bytes of the PUBLISH, as a broker counts them."""
    length = len(end[0]) + 2 + len(end[1])
    return 1 + len(_length(length)) + length


def pubrel(packet_id: int) -> bytes:
    """Return a PUBREL."""
    return b"\x62\x02" + packet_id.to_bytes(2)


def limits_of(connack: bytes) -> BrokerLimits:
    """Return what the broker takes. Raises PacketError."""
    found = dict(properties_at(connack, body_of(connack) + 2))
    return BrokerLimits(
        receive_max=number_of(found.get(_RECEIVE_MAX), ID_MAX) or 1,
        packet_bytes_max=number_of(found.get(_PACKET_MAX), PACKET_BYTES_MAX) or PACKET_BYTES_MAX,
        qos_max=number_of(found.get(_QOS_MAX), 2),
        retains=bool(number_of(found.get(_RETAINS), 1)),
    )


def answer_of(packet: bytes) -> Answer:
    """Return a PUBACK, PUBREC or PUBCOMP. Raises PacketError."""
    at = body_of(packet)
    if len(packet) < at + 2:
        raise PacketError("the broker's answer to a message names no message")
    code = packet[at + 2] if len(packet) > at + 2 else 0
    return Answer(int.from_bytes(packet[at : at + 2]), code, why(code, packet, at + 3) if code >= REFUSED_MIN else "")


def farewell_of(packet: bytes) -> tuple[int, str]:
    """Return the reason code of a DISCONNECT, and what it says. Raises PacketError."""
    at = body_of(packet)
    code = packet[at] if len(packet) > at else 0
    return code, why(code, packet, at + 1)


def why(code: int, packet: bytes, at: int) -> str:
    """Return a reason code with what the broker adds, which begins at an index. Raises PacketError."""
    said = dict(properties_at(packet, at)).get(_REASON, b"").decode(errors="replace")[:REASON_CHARACTERS_MAX]
    printable = "".join(character if character.isprintable() else "\ufffd" for character in said)
    text = f"{REASONS.get(code, 'unknown reason')} (0x{code:02x})"
    return f"{text}: {printable}" if printable else text


def _length(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(value: bytes) -> bytes:
    return len(value).to_bytes(2) + value
