"""Messages are cut out of whatever pieces the network delivers; packets are built by the standard's text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from millpy.sources.mqtt.packets import Messages, PacketCutter, PacketError, pubacks

SUBACK = b"\x90\x04\x00\x01\x00\x01"
PINGRESP = b"\xd0\x00"


def remaining_length(number: int) -> bytes:
    encoded = bytearray()
    while True:
        number, digit = divmod(number, 128)
        encoded.append(digit | (0x80 if number else 0))
        if not number:
            return bytes(encoded)


def a_publish(
    topic: bytes = b"t", payload: bytes = b"p", packet_id: int = 7, *, qos: int = 1, retain: bool = False,
    dup: bool = False, properties: bytes | None = b"\x00",
) -> bytes:  # fmt: skip
    body = len(topic).to_bytes(2, "big") + topic
    body += packet_id.to_bytes(2, "big") if qos else b""
    body += (properties or b"") + payload
    return bytes([0x30 | dup << 3 | qos << 1 | retain]) + remaining_length(len(body)) + body


def a_cutter(*, five: bool = True, packet_bytes_max: int = 1_000_000, kept_bytes: int = 1_000) -> PacketCutter:
    return PacketCutter(five=five, packet_bytes_max=packet_bytes_max, kept_bytes=kept_bytes)


def fed(cutter: PacketCutter, data: bytes, sizes: list[int]) -> tuple[Messages, bytes]:
    """The data in pieces of these sizes, over and over."""
    found, others, at, turn = Messages(), b"", 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        published, rest = cutter.feed(data[at : at + size])
        found.retained += [len(found) + index for index in published.retained]
        found.redelivered += [len(found) + index for index in published.redelivered]
        found.topics += published.topics
        found.payloads += published.payloads
        found.packet_ids += published.packet_ids
        others += b"".join(rest)
        at, turn = at + size, turn + 1
    return found, others


messages = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=8), st.binary(max_size=300), st.integers(1, 65_535), st.integers(0, 1),
        st.booleans(), st.booleans(),
    )
)  # fmt: skip


@settings(deadline=None)
@given(messages, st.booleans(), st.lists(st.integers(1, 400), min_size=1))
def test_messages_do_not_depend_on_how_bytes_arrive(
    rows: list[tuple[bytes, bytes, int, int, bool, bool]], five: bool, sizes: list[int]
) -> None:
    none = b"\x00" if five else None
    data = SUBACK + PINGRESP.join(
        a_publish(topic, payload, packet_id, qos=qos, retain=retain, dup=dup, properties=none)
        for topic, payload, packet_id, qos, retain, dup in rows
    )

    found, others = fed(a_cutter(five=five, packet_bytes_max=128, kept_bytes=100), data, sizes)

    def is_long(row: tuple[bytes, bytes, int, int, bool, bool]) -> bool:
        return len(a_publish(*row[:3], qos=row[3], properties=none)) > 128

    assert found.topics == [row[0] for row in rows]
    assert found.payloads == [row[1][:100] if is_long(row) else row[1] for row in rows]
    assert found.packet_ids == [row[2] if row[3] else 0 for row in rows]
    assert found.retained == [index for index, row in enumerate(rows) if row[4]]
    assert found.redelivered == [index for index, row in enumerate(rows) if row[5] and row[3]]
    assert others == SUBACK + PINGRESP * max(0, len(rows) - 1)


def test_properties_are_skipped() -> None:
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = "x" * 300
    properties.UserProperty = [("a", "b")]
    packet = a_publish(payload=b"{}", properties=properties.pack())

    found, _ = a_cutter().feed(packet)

    assert found.payloads == [b"{}"]


def test_only_the_beginning_of_a_long_payload_is_kept() -> None:
    cutter = a_cutter(packet_bytes_max=1_000, kept_bytes=10)
    packet = a_publish(payload=b"0123456789" * 100_000, packet_id=9)

    for start in range(0, len(packet) - 1, 500):
        found, _ = cutter.feed(packet[start : min(start + 500, len(packet) - 1)])
        assert not len(found), "acknowledging now would be before the message is there"
        assert len(cutter._rest) <= 1_500
    found, _ = cutter.feed(packet[-1:] + a_publish(payload=b"next", packet_id=10))

    assert found.payloads == [b"0123456789", b"next"]
    assert found.packet_ids == [9, 10]


@pytest.mark.parametrize(
    "packet",
    [
        a_publish(qos=2),
        b"\x32\xff\xff\xff\xff\x01",
        b"\x32\x04\x00\xff\x00\x00",
        b"\x32\x05\x00\x01t\x00\x01",
        b"\x32\x06\x00\x01t\x00\x01\xff",
        b"\x32\x06\x00\x01t\x00\x01\x05",
    ],
    ids=["qos 2", "length", "topic", "no properties", "cut properties", "properties beyond the end"],
)
def test_packet_that_contradicts_itself_ends_the_connection(packet: bytes) -> None:
    with pytest.raises(PacketError):
        a_cutter().feed(packet)


def test_acknowledgements_are_packets_of_the_standard_in_their_order() -> None:
    assert pubacks([1, 65_535, 256]) == b"\x40\x02\x00\x01\x40\x02\xff\xff\x40\x02\x01\x00"


def test_messages_without_an_acknowledgement_get_none() -> None:
    assert pubacks([0, 3, 0]) == b"\x40\x02\x00\x03"
