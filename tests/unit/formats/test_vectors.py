"""Public test vectors of the formats; tests/vectors/README.md says what each of them follows."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pytest

from millpy import Avro, Cbor, Csv, Files, Format, Json, LineProtocol, MessagePack
from millpy.errors import GraphError
from millpy.formats import BadPart, Message
from millpy.formats.avro import parsed
from millpy.formats.binary_values import CborReader, MessagePackReader, ValueReader
from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.model.time import Instant
from tests.docs.blocks import ROOT
from tests.unit.sources.test_files import read_all


def vectors(name: str) -> Any:
    return json.loads((ROOT / "tests" / "vectors" / name).read_text())


JSON, CBOR, PACKED = vectors("json.json"), vectors("cbor.json"), vectors("message_pack.json")
CSV, LINES, INTEROP = vectors("csv.json"), vectors("line_protocol.json"), vectors("avro_interop.json")
ANY = RecordType(msgspec.defstruct("Any", [("v", Any, None)]))
NUMBER = RecordType(msgspec.defstruct("Number", [("x", int, 0)]))


class Line(msgspec.Struct):
    time: int | None = None
    measurement: str = ""
    host: str | None = None
    value: float | None = None
    count: int | None = None
    ok: bool | None = None
    note: str | None = None


def parts(format: Format, record_type: RecordType, payload: bytes) -> list[Any]:
    """The JSON of the records of a message, as text; None for a part that is none."""
    found = format.reader(record_type)(Message(payload))
    return [None if isinstance(part, BadPart) else part for part in found]


def decoded(record_type: RecordType, *payloads: bytes) -> DecodeResult:
    return Decoder(record_type).decode(SourceBatch("json", Instant(0), payloads=list(payloads)))


@pytest.mark.parametrize("name", JSON["accepted"])
def test_json_that_must_be_accepted_is(name: str) -> None:
    text = JSON["accepted"][name].encode("latin-1")

    for copies in (1, 100):  # one by one, and as columns
        assert decoded(NUMBER, *[b'{"x":1,"v":%b}' % text] * copies).refused == []
    assert parts(Json(path="v"), NUMBER, b'{"v":%b}' % text)[0].strip() == text.strip()
    if b"\\u0000" not in text or b"\\\\u0000" in text:  # PostgreSQL cannot store NUL
        [record] = decoded(ANY, b'{"v":%b}' % text).objects or []
        assert record.v == json.loads(text)


@pytest.mark.parametrize("name", JSON["refused"])
def test_json_that_must_be_refused_is(name: str) -> None:
    text = JSON["refused"][name].encode("latin-1")

    for payload in (text, b'{"x":1,"v":%b}' % text, b'{"x":1,"v":[%b]}' % text if text.strip() else b"["):
        for copies in (1, 100):
            assert len(decoded(NUMBER, *[payload] * copies).refused) == copies
        try:
            found = parts(Json(), NUMBER, payload)
        except ValueError:
            continue
        assert [record for part in found if part is not None for record in decoded(NUMBER, part).objects or []] == []


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"":' * 50_000])
def test_deep_json_is_refused(text: str) -> None:
    for payload in (text.encode(), b'{"v":%b' % text.encode()):
        assert len(decoded(ANY, payload).refused) == 1


def check_value(format: Format, payload: bytes, expected: str) -> None:
    [text] = parts(format, ANY, payload)
    if expected == "no number":
        assert text == b'{"v":1e999}'
    else:
        assert repr(json.loads(text)) == repr({"v": json.loads(expected)})  # 1 is not 1.0, and -0.0 not 0.0


def check_refused(reader: type[ValueReader], payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        reader(payload).read()


@pytest.mark.parametrize(("text", "expected"), CBOR["accepted"])
def test_the_examples_of_cbor_have_their_values(text: str, expected: str) -> None:
    check_value(Cbor(), b"\xa1\x61v" + bytes.fromhex(text), expected)


@pytest.mark.parametrize("why", CBOR["not_well_formed"])
def test_cbor_that_is_not_well_formed_is_refused(why: str) -> None:
    for text in CBOR["not_well_formed"][why]:
        check_refused(CborReader, bytes.fromhex(text))
        check_refused(CborReader, b"\xa1\x61v" + bytes.fromhex(text))


@pytest.mark.parametrize(("expected", "texts"), PACKED["accepted"])
def test_all_forms_of_a_value_in_message_pack_are_read(expected: str, texts: list[str]) -> None:
    for text in texts:
        check_value(MessagePack(), b"\x81\xa1v" + bytes.fromhex(text), expected)


@pytest.mark.parametrize("why", PACKED["refused"])
def test_message_pack_that_is_none_is_refused(why: str) -> None:
    for text in PACKED["refused"][why]:
        check_refused(MessagePackReader, bytes.fromhex(text))
        check_refused(MessagePackReader, b"\x81\xa1v" + bytes.fromhex(text))


@pytest.mark.parametrize("name", CSV)
async def test_csv_has_the_same_rows_in_a_message_and_in_a_file(name: str, tmp_path: Path) -> None:
    text, (header, *rows) = CSV[name]
    record_type = RecordType(msgspec.defstruct("Row", [(column.strip(), str) for column in header]))
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode())

    in_message = [msgspec.json.decode(part) for part in parts(Csv(), record_type, text.encode())]
    batches = [taken for taken in await read_all(Files(path), record_type=record_type) if taken.records]
    in_file = [record for taken in batches for record in Decoder(record_type).decode(taken).objects or []]

    assert [list(row.values()) for row in in_message] == rows
    assert [list(msgspec.structs.astuple(record)) for record in in_file] == rows


@pytest.mark.parametrize(("text", "records"), LINES["accepted"])
def test_lines_of_the_protocol_are_read(text: str, records: list[dict[str, Any]]) -> None:
    found = parts(LineProtocol(measurement="measurement"), RecordType(Line), text.encode())

    assert [repr(msgspec.json.decode(part, type=Line)) for part in found] == [repr(Line(**own)) for own in records]


@pytest.mark.parametrize("text", LINES["refused"])
def test_lines_that_are_none_are_refused_alone(text: str) -> None:
    assert parts(LineProtocol(), RecordType(Line), f"cpu value=1 1\n{text}".encode())[1:] == [None]


def test_the_interop_schema_of_avro_contains_itself_and_all_else_of_it_is_read() -> None:
    with pytest.raises(GraphError, match=r"org\.apache\.avro\.Node contains itself"):
        Avro(INTEROP).validate(ANY)
    *others, node = INTEROP["fields"]
    label, children = node["type"]["fields"]
    leaf = {"type": "record", "name": "Leaf", "fields": [label]}
    of_leaves = {**children, "type": {"type": "array", "items": leaf}}
    schema = {**INTEROP, "fields": [*others, {**node, "type": {**node["type"], "fields": [label, of_leaves]}}]}
    value = {
        "intField": 12, "longField": 15_234_324, "stringField": "hey", "boolField": True, "floatField": 1234.0,
        "doubleField": -1234.0, "bytesField": b"12312adf", "nullField": None, "arrayField": [5.0, 0.0, 12.0],
        "mapField": {"a": {"label": "a"}, "bee": {"label": "cee"}}, "unionField": 12.0, "enumField": "C",
        "fixedField": b"1019181716151413",
        "recordField": {"label": "blah", "children": [{"label": "inner"}, {"label": "other"}]},
    }  # fmt: skip
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)

    [text] = parts(Avro(schema), ANY, stream.getvalue())

    expected = {**value, "bytesField": "MTIzMTJhZGY=", "fixedField": "MTAxOTE4MTcxNjE1MTQxMw=="}
    assert json.loads(text) == expected
    check = parsed(Avro(schema).schema or "").check
    for end in range(len(stream.getvalue())):
        with pytest.raises(ValueError, match=r"."):
            check(stream.getvalue()[:end])
