"""The properties of MQTT 5 in packets from a broker, and what its CONNACK says of a session. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpy.sources.mqtt.packets import PacketError

CONNACK_FIRST = 0x20
_EXPIRY, _PAIR = 0x11, 0x26
_WIDTHS = {
    **dict.fromkeys((0x01, 0x17, 0x19, 0x24, 0x25, 0x28, 0x29, 0x2A), 1),
    **dict.fromkeys((0x13, 0x21, 0x22, 0x23), 2),
    **dict.fromkeys((0x02, 0x11, 0x18, 0x27), 4),
}
"""Property -> bytes of its number; the others that a broker may send are text or bytes behind their length."""
_VARIABLE = 0x0B


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """What a broker says of the session at the beginning of a connection.

    Attributes:
        resumed: whether the broker has kept the session of the client id; otherwise this one is new.
        expiry_s: how long it keeps the session without a connection, if that differs from what was asked for.
    """

    resumed: bool
    expiry_s: int | None


def session_grant(connack: bytes, *, five: bool) -> SessionGrant:
    """Return what a CONNACK says. Raises PacketError."""
    at = body_of(connack)
    if len(connack) < at + 2:
        raise PacketError("the broker's answer to our connection is too short")
    found = dict(properties_at(connack, at + 2)) if five else {}
    return SessionGrant(bool(connack[at] & 1), number_of(found[_EXPIRY], 0) if _EXPIRY in found else None)


def properties_at(packet: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the properties that begin at an index, with the bytes of their values; none at the end of the packet."""
    if at >= len(packet):
        return
    length, at = variable_at(packet, at)
    end = at + length
    if end > len(packet):
        raise PacketError("a packet from the broker ends within its properties")
    while at < end:
        kind, at = packet[at], at + 1
        if kind == _VARIABLE:
            stop = variable_at(packet, at)[1]
        elif kind in _WIDTHS:
            stop = at + _WIDTHS[kind]
        else:
            stop = at
            for _ in range(2 if kind == _PAIR else 1):
                stop += 2 + int.from_bytes(packet[stop : stop + 2])
        if stop > end:
            raise PacketError("a property from the broker is longer than its packet")
        yield kind, packet[at:stop] if kind in _WIDTHS else packet[at + 2 : stop]
        at = stop


def body_of(packet: bytes) -> int:
    """Return the index behind the length of a whole packet. Raises PacketError."""
    return variable_at(packet, 1)[1]


def variable_at(packet: bytes, at: int) -> tuple[int, int]:
    """Return a variable byte integer, and the index behind it."""
    value = 0
    for count in range(4):
        if at + count >= len(packet):
            break
        byte = packet[at + count]
        value |= (byte & 0x7F) << 7 * count
        if not byte & 0x80:
            return value, at + count + 1
    raise PacketError("a packet from the broker has an invalid length")


def number_of(value: bytes | None, default: int) -> int:
    """Return the number of a property, or a default if the packet lacks it."""
    return default if value is None else int.from_bytes(value)
