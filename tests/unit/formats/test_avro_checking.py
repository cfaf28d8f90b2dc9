"""Bytes that fastavro reads, and that are not of their Avro schema, are dead letters that name the value at fault."""

from __future__ import annotations

from datetime import time
from io import BytesIO
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import Avro
from millpy.formats import Message
from millpy.formats.avro import decoded, parsed
from millpy.ingest.expansion import Expander
from millpy.limits import Limits
from millpy.model.record import RecordType

TYPE = RecordType(msgspec.defstruct("Any", [("device", str)]))
KIND = {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}
MARK = {"type": "fixed", "name": "Mark", "size": 3}
INNER = {"type": "record", "name": "Inner", "fields": [{"name": "kind", "type": KIND}, {"name": "mark", "type": MARK}]}


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields.items()]}


ALL = record(
    text="string", raw="bytes", yes="boolean", small="int", big="long", part=["null", "double", INNER], kind="Kind",
    many={"type": "array", "items": "Inner"}, floats={"type": "array", "items": "float"},
    tags={"type": "map", "values": ["null", "string"]}, day={"type": "int", "logicalType": "date"}, mark="Mark",
)  # fmt: skip
VALUE = {
    "text": "ä", "raw": b"\xff", "yes": True, "small": -(2**31), "big": 2**63 - 1,
    "part": {"kind": "B", "mark": b"abc"}, "kind": "A", "many": [{"kind": "A", "mark": b"xyz"}] * 70,
    "floats": [1.5, -2.0], "tags": {"a": None, "": "ü"}, "day": 12, "mark": b"123",
}  # fmt: skip


def written(schema: Any, value: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def reason(schema: Any, payload: bytes) -> str:
    found = Expander(Avro(schema), TYPE, Limits()).expand([Message(payload)], records_max=10, bytes_max=10**6)
    assert found.payloads == [payload]
    return found.refused[0].detail


WRONG = [
    (record(kind=KIND), b"\1", "Kind: -1 is no index of an enum of 2"),
    (record(kind=KIND), b"\4", "Kind: 2 is no index of an enum of 2"),
    (record(part=["null", "int"]), b"\1\2", "R.part: -1 is no index of a union of 2"),
    (record(part=["null", "int"]), b"\x80\1", "R.part: 64 is no index of a union of 2"),
    (record(n="int"), b"\x80\x80\x80\x80\x10", "R.n: 2147483648 is no int, which has 32 bits"),
    (record(n="int"), b"\x81\x80\x80\x80\x10", "R.n: -2147483649 is no int, which has 32 bits"),
    (record(day={"type": "int", "logicalType": "date"}), b"\x80\x80\x80\x80\x10", "R.day: 2147483648 is no int"),
    (record(n="long"), b"\xff" * 9 + b"\2", "R.n: a number of more than 64 bits"),
    (record(n="long"), b"\x80" * 10 + b"\0", "R.n: a number of more than 64 bits"),
    (record(n="long"), b"\x80" * 9, "the message is cut off"),
    (record(raw="bytes", n="int"), b"\1\2", "R.raw: a length of -1 bytes"),
    (record(text="string", n="int"), b"\1\2", "R.text: a length of -1 bytes"),
    (record(text="string"), b"\4\xc3\x28", "R.text: a text is not UTF-8"),
    (record(text="string"), b"\4\xc3", "the message is cut off"),
    (record(text="string"), b"\6ab", "the message is cut off"),
    (record(tags={"type": "map", "values": "int"}), b"\2\2\xff\2\0", "R.tags: a text is not UTF-8"),
    (record(tags={"type": "map", "values": "int"}), b"\2\1\2\0", "R.tags: a length of -1 bytes"),
    (record(many={"type": "array", "items": "int"}), b"\1\4\2\0", "R.many: a block has 1 bytes, and says 2"),
    (record(many={"type": "array", "items": "int"}), b"\1\1\2\0", "R.many: a length of -1 bytes"),
    (record(many={"type": "array", "items": "int"}), b"\4\2", "the message is cut off"),
    (record(yes="boolean"), b"\2", "R.yes: byte 2 is no boolean"),
    (record(mark=MARK), b"ab", "the message is cut off"),
    (record(part=["null", INNER]), b"\2\5abc", "Kind: -3 is no index of an enum of 2"),
    (record(n="int"), b"\2\0", "bytes follow the value"),
    ({"type": "double"}, b"\0" * 7, "the message is cut off"),
]


@pytest.mark.parametrize(("schema", "payload", "why"), WRONG)
def test_bytes_that_are_not_of_the_schema_are_a_dead_letter(schema: Any, payload: bytes, why: str) -> None:
    assert why in reason(schema, payload)


@pytest.mark.parametrize(
    ("kind", "unit", "of_day"), [("int", "millis", 86_400_000), ("long", "micros", 86_400_000_000)]
)
def test_a_number_beyond_a_day_is_no_time_of_day(kind: str, unit: str, of_day: int) -> None:
    schema = record(at={"type": kind, "logicalType": f"time-{unit}"})
    found = parsed(Avro(schema).schema or "")

    assert decoded(written(record(at=kind), {"at": 0}), found, None) == {"at": time(0)}
    last = decoded(written(record(at=kind), {"at": of_day - 1}), found, None)["at"]
    assert last.isoformat().startswith("23:59:59.999")
    for number in (-1, of_day):  # fastavro reads -1 as the end of a second
        assert "no time of day" in reason(schema, written(record(at=kind), {"at": number}))


def test_what_a_schema_permits_passes_and_nothing_shorter_or_longer() -> None:
    check = parsed(Avro(ALL).schema or "").check
    payload = written(ALL, VALUE)

    check(payload)
    for end in range(len(payload)):
        with pytest.raises(ValueError, match="cut off"):
            check(payload[:end])
    with pytest.raises(ValueError, match="bytes follow"):
        check(payload + b"\0")


def test_blocks_that_say_their_bytes_and_numbers_with_zeros_in_front_pass() -> None:
    many = parsed(Avro(record(many={"type": "array", "items": "int"})).schema or "")
    for payload in (b"\1\2\2\0", b"\3\4\2\2\2\6\0", b"\2\x82\0\0"):
        many.check(payload)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=8), st.integers(0, 120))
def test_a_damaged_message_that_passes_is_written_as_it_was(damage: bytes, place: int) -> None:
    whole = written(ALL, VALUE)
    payload = whole[:place] + damage + whole[place + len(damage) :]
    schema = parsed(Avro(ALL).schema or "")
    try:
        schema.check(payload)
    except ValueError:
        return
    value = fastavro.schemaless_reader(BytesIO(payload), schema.parsed, None)

    again = fastavro.schemaless_reader(BytesIO(written(ALL, value)), schema.parsed, None)
    assert repr(again) == repr(value)


def test_a_field_that_the_reader_does_not_have_is_checked_too() -> None:
    writer = parsed(Avro(record(a="int", text="string")).schema or "")
    reader = parsed(Avro(record(a="int")).schema or "")

    assert decoded(b"\2\2x", writer, reader) == {"a": 1}
    with pytest.raises(ValueError, match="UTF-8"):
        decoded(b"\2\2\xff", writer, reader)
