"""Messages of anybody: the cost of each is linear in its bytes, and only what has no meaning is rejected."""

from __future__ import annotations

import gzip
import io
import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import fastavro
import msgpack
import msgspec
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from millpy import Avro, Cbor, Csv, Format, Gzip, Json, LineProtocol, MessagePack, Protobuf
from millpy.formats import BadPart, Message
from millpy.formats.binary_values import CborReader, MessagePackReader
from millpy.ingest.expansion import Expander, Expansion
from millpy.limits import Limits
from millpy.model.record import RecordType


class Reading(msgspec.Struct):
    device: str = ""
    at: int = 0
    v: Any = None


TYPE = RecordType(Reading)
PRIME = 2**61 - 1
"""Integers that differ by a multiple of it have equal hashes."""
DECIMAL = {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}
SCHEMA = {"type": "record", "name": "R", "fields": [{"name": "v", "type": ["null", DECIMAL]}]}


def expanded(format: Format, payload: bytes) -> Expansion:
    return Expander(format, TYPE, Limits()).expand([Message(payload)], records_max=10**6, bytes_max=10**9)


def large(size: int) -> bytes:
    return b"\xc2\x5a" + size.to_bytes(4, "big") + b"\x7f" * size


def colliding(count: int) -> bytes:
    keys = [b"\xc2\x4c" + (number * PRIME).to_bytes(12, "big") for number in range(count)]
    return b"\xb9" + count.to_bytes(2, "big") + b"".join(key + b"\0" for key in keys)


def protobuf_of(count: int = 50_000, *, empty: int = 0) -> tuple[Format, bytes]:
    """A map of integers whose halves are equal, and so their hashes in the library; or empty messages in a message."""
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="hostile", syntax="proto3")
    kind = file.message_type.add(name="M")
    entry = kind.nested_type.add(name="VEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=6, label=1)
    entry.field.add(name="value", number=2, type=5, label=1)
    kind.field.add(name="v", number=1, type=11, label=3, type_name=".hostile.M.VEntry")
    of_lists = file.message_type.add(name="L")
    of_lists.field.add(name="v", number=1, type=11, label=3, type_name=".hostile.L")
    of_lists.field.add(name="device", number=2, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    of = message_factory.GetMessageClass(pool.FindMessageTypeByName("hostile.L" if empty else "hostile.M"))
    if empty:
        return Protobuf(of), b"\x0a\x00" * empty
    entries = [b"\x0a\x0b\x09" + struct.pack("<Q", number << 32 | number) + b"\x10\x01" for number in range(count)]
    return Protobuf(of), b"".join(entries)


def as_avro(size: int) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, {"type": "record", "name": "R", "fields": [
        {"name": "v", "type": ["null", "bytes"]}]}, {"v": b"\x7f" * size})  # fmt: skip
    return out.getvalue()


HEADER = b"x" * 60_000
COSTLY_S_MAX = 5.0
COSTLY: dict[str, Callable[[], tuple[Format, bytes]]] = {
    "a float of 400 kB": lambda: (Cbor(), b"\xa1\x61v\xc5\x82\x00" + large(400_000)),
    "a fraction of 400 kB": lambda: (Cbor(), b"\xa1\x61v\xc4\x82\x00" + large(400_000)),
    "keys of equal hashes": lambda: (Cbor(), colliding(20_000)),
    "as many empty lists as bytes": lambda: (MessagePack(), b"\xdd\x00\x3d\x09\x00" + b"\x90" * 4_000_000),
    "a decimal of 400 kB": lambda: (Avro(SCHEMA), as_avro(400_000)),
    "a map of integers": protobuf_of,
    "a map of few integers": lambda: protobuf_of(7_500),
    "many empty messages": lambda: protobuf_of(empty=499_000),
    "envelopes without records": lambda: (Json(many="r"), b"[" + b"{}," * 1_000_000 + b"{}]"),
    "bad rows under a long header": lambda: (
        Gzip(Csv(header=True)),
        gzip.compress(b"device," + HEADER + b"\n" + b"x\n" * 9_000, 1),
    ),
    "blank lines": lambda: (LineProtocol(time="at"), b"\n" * 3_000_000 + b"m v=1 1"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_message_does_not_stop_a_worker(name: str) -> None:
    format, payload = COSTLY[name]()
    begun = time.process_time()
    found = expanded(format, payload)
    assert time.process_time() - begun < COSTLY_S_MAX
    assert found.taken == 1


@pytest.mark.parametrize(
    ("format", "payload"),
    [
        (LineProtocol(time="at"), b"m,%s=a v=1 1" % (b"x" * 100_000)),
        (LineProtocol(time="at"), b"%s v=1 1" % (b"\\," * 50_000)),
        (LineProtocol(time="at"), b'm v="%s" 1' % (b'\\"' * 20_000)),
        (Csv(), b"device,v\n" + b'"' + b'""' * 50_000 + b'",1\n'),
        (Csv(header=("device", "v")), b'"a"' + b"," * 100_000),
    ],
    ids=["name", "escapes", "text", "quotes", "cells"],
)
def test_reading_a_message_takes_a_few_times_its_bytes_in_memory(format: Format, payload: bytes) -> None:
    expander = Expander(format, TYPE, Limits())
    expander.expand([Message(payload[:100])], records_max=10**6, bytes_max=10**9)
    tracemalloc.start()
    try:
        expander.expand([Message(payload)], records_max=10**6, bytes_max=10**9)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(payload)
    finally:
        tracemalloc.stop()


KNOWN = [
    (b"\xc1\x1a\x65\x92\x00\x80", datetime(2024, 1, 1, 0, 0, tzinfo=UTC)),
    (b"\xc0\x74" + b"2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
    (cbor2.dumps(2**64), 2**64),
    (cbor2.dumps(-(2**64)), -(2**64)),
    (cbor2.dumps(Decimal("-12.50")), -12.5),
    (b"\xc5\x82\x20\x03", 1.5),
    (b"\xc5\x82\x03\x21", -16),
    (b"\xd8\x25\x50" + bytes(range(16)), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
    (b"\xd8\x64\x19\x4d\x0f", "2024-01-05"),
    (b"\xd9\xd9\xf7\xf6", None),
    (b"\xf7", None),
    (b"\xf9\x3c\x00", 1.0),
    (b"\x7f\x61a\x62bc\xff", "abc"),
    (b"\x5f\x41a\x42bc\xff", "YWJj"),
    (b"\x9f\x01\xbf\x61a\x02\xff\xff", [1, {"a": 2}]),
    (b"\xa1\x05\xa1\x20\x01", {"5": {"-1": 1}}),
    (b"\xd9\x01\x00\x83\x63abc\xd8\x19\x00\x63xyz", ["abc", "abc", "xyz"]),
    (b"\x82\xd8\x1c\x81\x01\xd8\x1d\x00", [[1], [1]]),
    # What has no form in JSON:
    (b"\xd8\x1e\x82\x01\x03", {"tag": 30, "value": [1, 3]}),
    (b"\xf8\xff", {"simple": 255}),
    (b"\xc2\x58\x81" + b"\1" * 129, {"tag": 2, "value": "AQEB" * 43}),
    (b"\xc4\x82\x61x\x01", {"tag": 4, "value": ["x", 1]}),
    (b"\xc4\x82\x3b\xff\xff\xff\xff\xff\xff\xff\xfe\x01", {"tag": 4, "value": [-(2**64) + 1, 1]}),
    (b"\xc1\x61x", {"tag": 1, "value": "x"}),
    (b"\xc1\xfb\x7e\x37\xe4\x3c\x88\x00\x75\x9c", {"tag": 1, "value": 1e300}),
]


@pytest.mark.parametrize(("payload", "value"), KNOWN)
def test_every_value_of_cbor_has_a_form_in_json(payload: bytes, value: Any) -> None:
    found = msgspec.json.decode(msgspec.json.encode(CborReader(payload).read()))
    assert found == (msgspec.json.decode(msgspec.json.encode(value)) if isinstance(value, datetime) else value)


@pytest.mark.parametrize("type_code", [-1, 5])
def test_an_extension_of_message_pack_is_a_time_or_an_object(type_code: int) -> None:
    times = [struct.pack(">Q", nanos << 34 | 1) for nanos in (499, 500, 999_999_499, 999_999_999)]
    for data in (b"\x65\x92\x00\x80", *times, struct.pack(">Iq", 5_500, -1), b"??", struct.pack(">Iq", 1, 2**40)):
        payload = b"\xc7%c%c" % (len(data), type_code % 256) + data
        found = MessagePackReader(payload).read()
        if type_code == -1 and data not in (b"??", struct.pack(">Iq", 1, 2**40)):
            assert found == msgspec.msgpack.decode(payload)
        else:
            assert found == {"ext": type_code, "value": data}


@pytest.mark.parametrize(
    ("reader", "payload", "why"),
    [
        (CborReader, b"", "cut off"),
        (CborReader, b"\x82\x01", "cut off"),
        (CborReader, b"\x61", "cut off"),
        (CborReader, b"\x9f\x01", "cut off"),
        (CborReader, b"\x01\x01", "bytes follow"),
        (CborReader, b"\xff", "ends where none has begun"),
        (CborReader, b"\x1c", "begins no value"),
        (CborReader, b"\x1f", "without a length"),
        (CborReader, b"\x7f\x41a\xff", "another type"),
        (CborReader, b"\x7f\x7f\xff\xff", "another type"),
        (CborReader, b"\x61\xff", "utf-8"),
        (CborReader, b"\x81" * 101 + b"\x01", "nested"),
        (CborReader, b"\xc6" * 101 + b"\x01", "nested"),
        (CborReader, b"\x9b" + b"\x01" * 8, "too large"),
        (CborReader, b"\xf8\x1f", "simple value 31 is in two bytes"),
        (CborReader, b"\xa2\x61a\x01\x61a\x02", "a key twice"),
        (CborReader, b"\xa2\x01\x01\x611\x02", "a key twice"),
        (CborReader, b"\xbf\x61a\x01\x61a\x02\xff", "a key twice"),
        (CborReader, b"\xa1\x81\x01\x01", "a key is"),
        (CborReader, b"\xa1\xf5\x01", "a key is"),
        (CborReader, b"\xa1" + large(9) + b"\x01", "a key is"),
        (CborReader, b"\xd8\x1c\x81\xd8\x1d\x00", "contains itself"),
        (CborReader, b"\xd8\x1d\x05", "not there"),
        (CborReader, b"\x82\xd8\x1c\x81\x01\xd8\x1d\x20", "not there"),
        (CborReader, b"\xd8\x19\x00", "not there"),
        (CborReader, b"\x82\xd8\x1c" + b"\x81" * 60 + b"\x01" + b"\x81" * 60 + b"\xd8\x1d\x00", "nested"),
        (CborReader, b"\xd9\x01\x00\x98\xc8\x79\x27\x10" + b"x" * 10_000 + b"\xd8\x19\x00" * 199, "too large"),
        (MessagePackReader, b"\xc1", "begins no value"),
        (MessagePackReader, b"\x81\x91\x01\x01", "a key is"),
        (MessagePackReader, b"\x81\xca\x00\x00\x00\x00\x01", "a key is"),
        (MessagePackReader, b"\x92\x01", "cut off"),
        (MessagePackReader, b"\xdf\xff\xff\xff\xff", "too large"),
        (MessagePackReader, b"\x91" * 101 + b"\x01", "nested"),
    ],
)
def test_a_message_that_is_none_says_why(reader: Any, payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        reader(payload).read()


@pytest.mark.parametrize(
    ("format", "payload"),
    [
        (
            MessagePack(),
            msgpack.packb([{"at": 1}, {"at": msgpack.ExtType(5, b"x")}, {"at": 3, "w": msgpack.ExtType(5, b"")}]),
        ),
        (Cbor(), cbor2.dumps([{"at": 1}, {"at": cbor2.CBORTag(30, [1, 3])}, {"at": 3, "w": cbor2.CBORTag(999, 1)}])),
        (Cbor(), cbor2.dumps([{"at": 1}, {"at": 2**70}, {"at": 3, "w": 2**2000}])),
    ],
)
def test_a_value_without_a_meaning_spoils_only_the_record_that_has_it_in_a_field(
    format: Format, payload: bytes
) -> None:
    found = expanded(format, payload)
    assert found.refused == []
    decoder, good = msgspec.json.Decoder(Reading), []
    for part in found.payloads:
        try:
            good.append(decoder.decode(part).at)
        except msgspec.ValidationError:
            good.append(None)
    assert good[::2] == [1, 3]
    assert good[1] is None or good[1] == 2**70  # more than 64 bits, which no record accepts


def test_a_decimal_of_avro_keeps_its_digits() -> None:
    out = io.BytesIO()
    value = Decimal("-1234567890123456789012345678.90")
    fastavro.schemaless_writer(out, json.loads(json.dumps(SCHEMA)), {"v": value})
    assert expanded(Avro(SCHEMA), out.getvalue()).payloads == [b'{"v":%s}' % str(value).encode()]


@pytest.mark.parametrize("header", [None, b"device,v"], ids=["message", "file"])
def test_a_quoted_cell_that_does_not_end_in_its_line_says_so(header: bytes | None) -> None:
    payload = b'"two' if header else b'device,v\n"two'
    read = Csv().reader(TYPE)

    (bad,) = read(Message(payload, header=header))

    assert isinstance(bad, BadPart)
    assert bad.detail.startswith("a quoted cell does not end")
    assert ("in a file, each line is a row" in bad.detail) == (header is not None)
