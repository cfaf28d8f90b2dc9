"""Whatever a message contains, its format makes records and dead letters of it, and raises nothing.

`make fuzz MINUTES=60` tries more examples.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import cbor2
import fastavro
import msgpack
import msgspec
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st

from millpy import Avro, Cbor, Csv, Decode, Format, Gzip, Json, LineProtocol, MessagePack, Protobuf, Scalar
from millpy.formats import Message
from millpy.formats.binary_values import CborReader, MessagePackReader
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.testing import GraphDriver
from tests.unit.test_sparkplug import NBIRTH, NDATA, NDEATH, TYPES, graph_of

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
EXAMPLES = 25 if not MINUTES else int(MINUTES * 200)
pytestmark = pytest.mark.timeout(MINUTES * 60 + 300)
NO_SHRINK = [phase for phase in Phase if phase is not Phase.shrink]
LIMITS = Limits(record_bytes_max=2_000, message_records_max=20)


class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float | None = None
    ok: bool = True


TYPE = RecordType(Reading)
FIELDS = [("device", "string"), ("at", "long"), ("temperature", ["null", "double"]), ("ok", "boolean")]
SCHEMA = {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in FIELDS]}
SEVERAL = {"type": "record", "name": "S", "fields": [{"name": "a", "type": {"type": "array", "items": SCHEMA}}]}


def protobuf_classes() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="r.proto", package="fuzz", syntax="proto3")
    reading, several = file.message_type.add(name="R"), file.message_type.add(name="S")
    reading.oneof_decl.add(name="_temperature")
    for number, (name, kind) in enumerate([("device", 9), ("at", 3), ("ok", 8), ("temperature", 1)], 1):
        reading.field.add(name=name, number=number, type=kind, label=1)
    reading.field[3].proto3_optional, reading.field[3].oneof_index = True, 0
    several.field.add(name="a", number=1, type=11, label=3, type_name=".fuzz.R")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    one, other = (message_factory.GetMessageClass(pool.FindMessageTypeByName(f"fuzz.{name}")) for name in "RS")
    return one, other


ONE, MANY = protobuf_classes()
FORMATS: dict[str, Format] = {
    "json": Json(),
    "many": Json(path="a", many="b.0", envelope={"device": "d"}, fields={"at": "x.y"}, arrival="at"),
    "scalar": Scalar("temperature", arrival="at"),
    "csv": Csv(),
    "semicolons": Csv(delimiter=";", decimal=",", encoding="cp1252", null=["", "-"], header=["device", "at", "ok"]),
    "preamble": Csv(skip=2, skip_below=1, comment="#"),
    "unpivoted": Csv(skip=1, null=["", "-"], unpivot=("device", "temperature")),
    "lines": LineProtocol(precision="s", time="at", measurement="device"),
    "message_pack": MessagePack(),
    "cbor": Cbor(Json(many="a")),
    "avro": Avro(SEVERAL, inside=Json(many="a")),
    "protobuf": Protobuf(MANY, inside=Json(many="a")),
    "gzip": Gzip(Csv()),
    "function": Decode(lambda message: [Reading(message.payload.decode(), len(message.payload))]),
}

NAMES = st.sampled_from(["a", "b", "d", "x", "y", "at", "device", "temperature", "ok"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner),
    max_leaves=12,
)
WORDS = b"device at temperature 1 1.5 1,5 - t 3i # m { } [ ] : , ; = null 1e999 '".split(b" ")
TOKENS = st.lists(
    st.sampled_from([*WORDS, b" ", b"\n", b"\r", b'"', b"\\", b"\xef\xbb\xbf", b"\xff", b"\0"]), max_size=40
).map(b"".join)


def json_text(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (ValueError, OverflowError):
        return b"{"


PAYLOADS = (
    st.binary(max_size=60)
    | TOKENS
    | JSON.map(json_text)
    | JSON.map(lambda value: msgspec.msgpack.encode(value) if not _is_large(value) else b"\xc1")
    | (TOKENS | JSON.map(json_text)).map(gzip.compress)
)


def _is_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return any(map(_is_large, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def expanded(format: Format, payloads: Sequence[bytes | Message]) -> Expansion:
    messages = [
        payload if isinstance(payload, Message) else Message(payload, "topic", arrived_at=7, ending=b',"device":"t"}')
        for payload in payloads
    ]
    found = Expander(format, TYPE, LIMITS).expand(messages, records_max=10**6, bytes_max=10**9)
    assert found.taken == len(payloads)
    assert len(found.origins) == len(found.payloads)
    assert {bad.row for bad in found.refused} == set(found.messages)
    return found


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(payloads=st.lists(PAYLOADS, min_size=1, max_size=3))
@example(payloads=[b"t\n\xef\xbb\xbf"])
def test_any_bytes_become_records_and_dead_letters(name: str, payloads: list[bytes]) -> None:
    """The same in columns, one by one and bundled otherwise; and a bad part read again is one bad part."""
    format = FORMATS[name]
    found = expanded(format, payloads)
    one_by_one = [part for payload in payloads for part in expanded(format, [payload]).payloads]
    assert found.payloads == one_by_one
    for row, message in found.messages.items():
        again = expanded(format, [message])
        if format.identity()["kind"] not in ("gzip", "separated_values"):  # their bytes are not unique
            assert found.payloads[row] in again.payloads
        assert len(again.refused) >= 1
    copies = 1 + 300 // max(1, len(found.payloads))
    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads * copies, refused=[]))
    single = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads))
    rows = single.rows.tolist()
    size = len(found.payloads)
    assert decoded.rows.tolist() == [row + copy * size for copy in range(copies) for row in rows]
    if decoded.batch is not None and rows:
        columns = decoded.batch.slice(0, len(rows)).to_pylist()
        objects = single.objects if single.objects is not None else []
        assert not objects or columns == [msgspec.to_builtins(record) for record in objects]


@settings(max_examples=4 * EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(value=JSON, shared=st.booleans())
def test_values_of_independent_encoders_come_back(value: Any, shared: bool) -> None:
    """Also integers of more than 64 bits, as their digits; and texts and lists that CBOR writes once.

    (What the encoder refers to where texts are not ASCII is wrong for its own decoder, too.)
    """
    text = json_text_of(value)
    written = cbor2.dumps([value, value], string_referencing=shared and text.isascii(), value_sharing=shared)
    assert msgspec.json.encode(CborReader(written).read()) == b"[%b,%b]" % (text, text)
    if not _is_large(value):
        assert msgspec.json.encode(MessagePackReader(msgpack.packb(value)).read()) == text


def json_text_of(value: Any) -> bytes:
    """Return a value as JSON, with all digits of its integers, and a number that is none as 1e999."""
    if isinstance(value, dict):
        return b"{%b}" % b",".join(json_text_of(key) + b":" + json_text_of(own) for key, own in value.items())
    if isinstance(value, list):
        return b"[%b]" % b",".join(map(json_text_of, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value).encode()
    if isinstance(value, float) and not math.isfinite(value):
        return b"1e999"
    return msgspec.json.encode(value)


@settings(max_examples=4 * EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(
    value=JSON,
    changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3),
    cut=st.integers(1, 400),
)
def test_damaged_values_are_read_or_rejected(value: Any, changes: list[tuple[int, int]], cut: int) -> None:
    """Without another error, and as JSON."""
    for reader, encode in ((CborReader, cbor2.dumps), (MessagePackReader, msgspec.msgpack.encode)):
        data = bytearray(encode(value) if reader is CborReader or not _is_large(value) else b"\xc0")
        for place, byte in changes:
            data[place % len(data)] = byte
        payload = bytes(data[:cut])
        try:
            found = reader(payload).read()
        except ValueError:
            continue
        msgspec.json.decode(msgspec.json.encode(found), type=msgspec.Raw)


READINGS = st.lists(
    st.builds(
        Reading,
        device=st.text(st.characters(codec="cp1252", exclude_categories=["Cc"]), min_size=1, max_size=8).map(
            lambda text: f"d{text}d"
        ),
        at=st.integers(0, 10**9),
        temperature=st.none() | st.floats(-1e9, 1e9).map(lambda value: value + 0.0),
        ok=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def as_csv(readings: list[Reading]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=";", lineterminator="\n")
    writer.writerow(["ok", "unknown", "device", "temperature", "at"])
    for r in readings:
        temperature = "" if r.temperature is None else repr(r.temperature).replace(".", ",")
        writer.writerow([str(r.ok).lower(), "x", r.device, temperature, f"+0{r.at}"])
    return out.getvalue().encode("cp1252")


def with_units(readings: list[Reading]) -> bytes:
    header, rows = as_csv(readings).split(b"\n", 1)
    return b"\n".join([b'the "title; of a table', header, b'";;C;s', rows])


def as_lines(readings: list[Reading]) -> bytes:
    lines = []
    for r in readings:
        device = "".join(f"\\{c}" if c in ",= " else c for c in r.device)
        text = r.device.replace("\\", "\\\\").replace('"', '\\"')
        temperature = "" if r.temperature is None else f",temperature={r.temperature!r}"
        lines.append(f'a\\ b,device={device},z=1 ok={str(r.ok)[0]}{temperature},u=5i,s="{text}\n{text}" {r.at}')
    return "\n".join(lines).encode()


def as_map(r: Reading) -> dict[str, Any]:
    return {"device": r.device, "at": r.at, "temperature": r.temperature, "ok": r.ok}


def as_avro(readings: list[Reading]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(SEVERAL), {"a": list(map(as_map, readings))})
    return out.getvalue()


ENCODERS: dict[str, tuple[Format, Any]] = {
    "csv": (Csv(delimiter=";", decimal=",", encoding="cp1252"), as_csv),
    "units": (Csv(delimiter=";", decimal=",", encoding="cp1252", skip=1, skip_below=1), with_units),
    "lines": (LineProtocol(precision="s", time="at"), as_lines),
    "message_pack": (MessagePack(), lambda readings: msgpack.packb([as_map(r) for r in readings])),
    "gzip": (Gzip(Json()), lambda readings: gzip.compress(msgspec.json.encode(readings))),
    "function": (Decode(lambda m: msgspec.json.decode(m.payload, type=list[Reading])), msgspec.json.encode),
    "avro": (Avro(SEVERAL, inside=Json(many="a")), as_avro),
    "protobuf": (
        Protobuf(MANY, inside=Json(many="a")),
        lambda readings: MANY(a=[ONE(**as_map(r)) for r in readings]).SerializeToString(),
    ),
    "nested": (
        Json(path="p", many="q.1", envelope={"device": "e"}),
        lambda readings: msgspec.json.encode({"e": "never", "p": {"q": [0, readings]}}),
    ),
}


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=EXAMPLES, deadline=None, phases=NO_SHRINK)
@given(readings=READINGS)
@example(readings=[Reading('d\\‹="d', 97, 1.5, False)])
def test_records_of_an_independent_encoder_come_back(name: str, readings: list[Reading]) -> None:
    format, encode = ENCODERS[name]
    # The line protocol cannot write it: the backslash would escape that of the character behind.
    assume(name != "lines" or not any(re.search(r"\\[,= ]", reading.device) for reading in readings))
    found = Expander(format, TYPE, LIMITS).expand([Message(encode(readings))], records_max=10**6, bytes_max=10**9)
    assert found.refused == []
    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=found.payloads))
    assert decoded.objects == readings
    assert np.array_equal(decoded.rows, np.arange(len(readings)))


HEX = st.sampled_from([NBIRTH, NDATA, NDEATH, TYPES])
CHANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)
MUTATIONS = st.tuples(HEX, CHANGES, st.integers(0, 400))
KINDS = st.sampled_from(["NBIRTH", "NBIRTH", "NDATA", "NDEATH", "DBIRTH/d", "DDATA/d", "DDEATH/d", "NCMD", "X"])


@settings(max_examples=max(5, EXAMPLES // 5), deadline=None, phases=NO_SHRINK)
@given(sent=st.lists(st.tuples(KINDS, MUTATIONS), min_size=1, max_size=12))
def test_any_sparkplug_becomes_metrics_events_and_dead_letters(sent: list[tuple[str, Any]]) -> None:
    """Payloads of which bytes are changed and cut off, in any order: each message has an outcome."""
    driver = GraphDriver(graph_of())
    messages = []
    for kind, (payload, changes, cut) in sent:
        changed = bytearray(payload)
        for place, byte in changes:
            changed[place % len(changed)] = byte
        head, _, device = kind.partition("/")
        topic = "/".join(["spBv1.0", "g", head, "n", *([device] if device else [])])
        messages.append(Message(bytes(changed)[: max(cut, 2)] if cut < 300 else bytes(changed), topic))
    driver.feed("messages", messages)
    for letter in driver.dead_letters():
        assert letter.reason in ("undecodable", "future", "event_time", "user_code", "failed"), letter
