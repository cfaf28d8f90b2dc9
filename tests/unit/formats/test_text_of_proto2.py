"""Text of proto2 that is not UTF-8 spoils the record that has it in a field of text, and no other of its message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2

from millpy import Json, Protobuf
from millpy.formats import Message
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant


class Reading(msgspec.Struct):
    device: str
    note: str = ""
    labels: list[str] = []
    more: dict[str, str] = {}


TYPE = RecordType(Reading)


def descriptors() -> bytes:
    file = descriptor_pb2.FileDescriptorProto(name="old.proto", package="old", syntax="proto2")
    own = file.message_type.add(name="Reading")
    own.nested_type.add(name="MoreEntry").options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        own.nested_type[0].field.add(name=name, number=number, type=9, label=1)
    for number, (name, label) in enumerate([("device", 2), ("note", 1), ("labels", 3), ("ignored", 1)], 1):
        own.field.add(name=name, number=number, type=9, label=label)
    own.field.add(name="more", number=5, type=11, label=3, type_name=".old.Reading.MoreEntry")
    several = file.message_type.add(name="Several")
    several.field.add(name="readings", number=1, type=11, label=3, type_name=".old.Reading")
    return descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()


FORMAT = Protobuf("old.Several", descriptors=descriptors(), inside=Json(many="readings"))


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def read(*readings: bytes) -> tuple[list[Any], list[tuple[int, str]]]:
    message = Message(b"".join(field(1, own) for own in readings))
    found = Expander(FORMAT, TYPE, Limits()).expand([message], records_max=10, bytes_max=10**6)
    if found.refused:
        return [], [(own.row, own.detail) for own in found.refused]
    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads))
    return decoded.objects or [], [(own.row, own.detail) for own in decoded.refused]


@pytest.mark.parametrize("bad", [field(2, b"a\xff"), field(3, b"ok") + field(3, b"\xff")])
def test_only_the_record_with_the_text_is_a_dead_letter(bad: bytes) -> None:
    objects, refused = read(field(1, b"a"), field(1, b"b") + bad, field(1, "ü".encode()))

    assert objects == [Reading("a"), Reading("ü")]
    [(row, detail)] = refused
    assert row == 1
    assert "not_utf8" in detail or "got `object`" in detail


def test_text_in_a_field_that_the_class_does_not_have_spoils_nothing() -> None:
    assert read(field(1, b"a") + field(4, b"\xff")) == ([Reading("a")], [])


def test_a_map_with_a_bad_value_spoils_its_record_and_one_with_a_bad_key_its_message() -> None:
    value = field(1, b"a") + field(5, field(1, b"k") + field(2, b"\xff"))
    key = field(1, b"a") + field(5, field(1, b"\xff") + field(2, b"v"))

    objects, [(row, _)] = read(field(1, b"b"), value)
    assert (objects, row) == ([Reading("b")], 1)
    assert read(field(1, b"b"), key)[1] == [(0, "ValueError: a key of more is not UTF-8")]
