"""Avro and Protobuf: what their messages become, what a schema registry that is away does, and what hostile ones do."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import fastavro
import msgspec
import pytest
from google.protobuf import descriptor_pb2, duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2

from millpy import Avro, Json, Login, Protobuf, SchemaRegistry
from millpy.errors import ConfigError, GraphError, SourceUnavailableError
from millpy.formats import Format, Message, schema_registry
from millpy.formats.schema_registry import RegisteredSchema, SchemaCache, cache_of
from millpy.ingest import expansion
from millpy.ingest.connection_state import ConnectionState
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.testing.clock import ManualClock


class Reading(msgspec.Struct):
    device: str
    at: datetime | int
    value: float = 0.0


TYPE = RecordType(msgspec.defstruct("Any", [("device", str)]))
BOUND = {"records_max": 100, "bytes_max": 10**6}
FIELDS: list[Any] = [
    {"name": "device", "type": "string"},
    {"name": "value", "type": ["null", "double"], "default": None},
]
READING: dict[str, Any] = {"type": "record", "name": "Reading", "fields": FIELDS}


def encoded(schema: Any, value: Any, schema_id: int | None = None) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return (b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")) + stream.getvalue()


def expanded(format: Format, *payloads: bytes) -> Expansion:
    return Expander(format, TYPE, Limits()).expand([Message(payload) for payload in payloads], **BOUND)


def objects(format: Format, *payloads: bytes) -> list[Any]:
    found = expanded(format, *payloads)
    assert found.refused == []
    return [msgspec.json.decode(payload) for payload in found.payloads]


def reason(format: Format, payload: bytes) -> str:
    found = expanded(format, payload)
    assert found.payloads == [payload]
    return found.refused[0].detail


def registry_of(answers: Any, name: str = "") -> SchemaRegistry:
    """A registry whose answers come from a dict by path."""
    registry = SchemaRegistry(url=f"http://{name or uuid.uuid4()}:1")

    def fetch(path: str) -> Any:
        if path not in answers:
            raise schema_registry._UnknownError
        return answers[path]

    schema_registry._CACHES[registry] = SchemaCache(registry, fetch)
    return registry


def test_avro_values_become_those_of_json() -> None:
    fields = {
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "day": {"type": "int", "logicalType": "date"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "mark": {"type": "string", "logicalType": "uuid"},
        "of_day": {"type": "long", "logicalType": "time-micros"},
        "raw": "bytes",
        "kind": {"type": "enum", "name": "K", "symbols": ["A", "B"]},
        "parts": {"type": "array", "items": ["null", "int", READING]},
        "tags": {"type": "map", "values": "boolean"},
    }
    schema = {"type": "record", "name": "All", "fields": [{"name": name, "type": of} for name, of in fields.items()]}
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    value = {
        "at": at, "day": date(2026, 1, 2), "price": Decimal("12.50"), "mark": uuid.UUID(int=5), "of_day": at.time(),
        "raw": b"\1\2", "kind": "B", "parts": [None, 5, {"device": "a", "value": 0.5}], "tags": {"x": True},
    }  # fmt: skip

    assert objects(Avro(schema), encoded(schema, value)) == [
        {
            "at": "2026-01-02T03:04:05Z", "day": "2026-01-02", "price": 12.5, "mark": str(uuid.UUID(int=5)),
            "of_day": "03:04:05", "raw": "AQI=", "kind": "B", "parts": [None, 5, {"device": "a", "value": 0.5}],
            "tags": {"x": True},
        }
    ]  # fmt: skip
    text = expanded(Avro(schema), encoded(schema, value)).payloads[0]
    assert b'"price":12.50' in text


def test_records_are_found_inside_as_in_json() -> None:
    schema = {"type": "record", "name": "B", "fields": [{"name": "rs", "type": {"type": "array", "items": READING}}]}
    payload = encoded(schema, {"rs": [{"device": "a"}, {"device": "b"}]})

    assert [own["device"] for own in objects(Avro(schema, inside=Json(many="rs")), payload)] == ["a", "b"]


def test_the_default_of_a_schema_is_what_its_type_says() -> None:
    """Its JSON has text for bytes, and numbers for times; in a union it is of the first type, and may lack defaults."""
    day, at = {"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-millis"}
    price = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    own = {"name": "day", "type": day, "default": 1}
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "raw", "type": "bytes"}, own]}
    added: dict[str, tuple[Any, Any, Any]] = {
        "raw": ("bytes", "ab\u00ff", "YWL/"),
        "fixed": ({"type": "fixed", "name": "Two", "size": 2}, "ab", "YWI="),
        "first": (["bytes", "null"], "a", "YQ=="),
        "none": (["null", "bytes"], None, None),
        "at": (at, 1_000, "1970-01-01T00:00:01Z"),
        "price": (price, "\u0001", 0.01),
        "days": ({"type": "array", "items": day}, [1], ["1970-01-02"]),
        "named": ({"type": "map", "values": "bytes"}, {"a": "a"}, {"a": "YQ=="}),
        "inner": (inner, {"raw": "a"}, {"raw": "YQ==", "day": "1970-01-02"}),
        "again": ("Inner", {"raw": "b"}, {"raw": "Yg==", "day": "1970-01-02"}),
        "other": ("Inner", {"raw": "b", "day": 2}, {"raw": "Yg==", "day": "1970-01-03"}),
        "kind": ({"type": "enum", "name": "K", "symbols": ["A", "B"], "default": "A"}, "B", "B"),
    }
    fields = [{"name": name, "type": of, "default": given} for name, (of, given, _) in added.items()]
    registry = registry_of({"/schemas/ids/1": {"schema": json.dumps(READING)}})

    found = objects(
        Avro({**READING, "fields": [*FIELDS, *fields]}, registry=registry), encoded(READING, {"device": "a"}, 1)
    )

    assert found == [{"device": "a", "value": None} | {name: read for name, (_, _, read) in added.items()}]


def test_a_value_has_the_logical_type_of_the_schema_that_it_is_read_as() -> None:
    """Not that of the schema with which it was written, which may be from before the type was named."""
    micros, millis = ({"type": "long", "logicalType": f"timestamp-{unit}"} for unit in ("micros", "millis"))
    day, id_ = {"type": "int", "logicalType": "date"}, {"type": "string", "logicalType": "uuid"}
    price = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    two = {"type": "fixed", "name": "Two", "size": 2}
    at, uuid = "1970-01-01T00:00:01Z", "00000000-0000-0000-0000-000000000007"
    cases: list[tuple[Any, Any, Any, Any]] = [
        ("long", micros, 1_000_000, at),
        (micros, "long", 1_000_000, 1_000_000),
        (millis, micros, 1_000_000, at),
        (micros, micros, 1_000_000, at),
        ("int", micros, 1_000_000, at),
        (day, "int", 1, 1),
        (day, "double", 1, 1.0),
        ("int", day, 1, "1970-01-02"),
        ("bytes", price, b"\1", 0.01),
        (price, "bytes", b"\1", "AQ=="),
        (two, {**two, "logicalType": "decimal", "precision": 4, "scale": 1}, b"\0\1", 0.1),
        ("string", id_, uuid, uuid),
        ("string", "bytes", "a", "YQ=="),
        ("bytes", "string", b"a", "a"),
        (["null", "long"], ["null", micros], 1_000_000, at),
        (["null", "long"], ["null", micros], None, None),
        ("long", ["null", micros], 1_000_000, at),
        ({"type": "array", "items": "long"}, {"type": "array", "items": micros}, [1_000_000], [at]),
        (
            {"type": "map", "values": ["null", "int"]},
            {"type": "map", "values": ["null", day]},
            {"x": 1},
            {"x": "1970-01-02"},
        ),
        ("float", "double", 0.5, 0.5),
    ]
    written, wanted = ([{"name": f"f{n}", "type": case[side]} for n, case in enumerate(cases)] for side in (0, 1))
    schema = {**READING, "fields": written}
    registry = registry_of({"/schemas/ids/1": {"schema": json.dumps(schema)}})

    (found,) = objects(
        Avro({**READING, "fields": wanted}, registry=registry),
        encoded(schema, {f"f{n}": value for n, (_, _, value, _) in enumerate(cases)}, 1),
    )

    assert found == {f"f{n}": read for n, (*_, read) in enumerate(cases)}


def test_messages_of_several_versions_are_read_as_one_schema() -> None:
    newer = {**READING, "fields": [*FIELDS, {"name": "unit", "type": "string", "default": "C"}]}
    other = {**READING, "fields": [{"name": "device", "type": "string"}, {"name": "value", "type": "int"}]}
    shared = {
        "type": "record",
        "name": "Box",
        "fields": [{"name": "device", "type": "string"}, {"name": "r", "type": "Reading"}],
    }
    answers = {
        "/schemas/ids/1": {"schema": json.dumps(READING)},
        "/schemas/ids/2": {"schema": json.dumps(other)},
        "/schemas/ids/3": {
            "schema": json.dumps(shared), "references": [{"name": "Reading", "subject": "a/b", "version": 1}],
        },
        "/subjects/a%2Fb/versions/1": {"schema": json.dumps(READING)},
        "/schemas/ids/4": {"schema": "syntax", "schemaType": "PROTOBUF"},
        "/schemas/ids/5": {"schema": '"string"'},
    }  # fmt: skip
    registry = registry_of(answers)
    old, changed = encoded(READING, {"device": "a"}, 1), encoded(other, {"device": "b", "value": 7}, 2)

    assert objects(Avro(newer, registry=registry), old, changed) == [
        {"device": "a", "value": None, "unit": "C"}, {"device": "b", "value": 7.0, "unit": "C"},
    ]  # fmt: skip
    whole = fastavro.parse_schema([READING, shared])
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, whole, ("Box", {"device": "c", "r": {"device": "d"}}))
    boxed = b"\0\0\0\0\3" + stream.getvalue()[1:]  # without the index of the union
    assert objects(Avro(registry=registry), boxed) == [{"device": "c", "r": {"device": "d", "value": None}}]
    assert "schema 4: it is of PROTOBUF" in reason(Avro(registry=registry), b"\0\0\0\0\4abc")
    assert "schema 5: Schema mismatch" in reason(Avro(newer, registry=registry), encoded("string", "a", 5))
    assert "the registry does not know schema 99" in reason(Avro(registry=registry), b"\0\0\0\0\x63abc")
    assert "does not begin with the id of a schema" in reason(Avro(registry=registry), b"\1abcdefg")
    assert "schema 1: the message is cut off" in reason(Avro(registry=registry), b"\0\0\0\0\1\x0aab")


LIST = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}


def doubling(levels: int) -> dict[str, Any]:
    """A schema of records that each have the next one twice; the innermost has no bytes."""
    schema: Any = "null"
    for level in reversed(range(levels)):
        fields = [
            {"name": "a", "type": schema},
            {"name": "b", "type": f"R{level + 1}" if level + 1 < levels else "null"},
        ]
        schema = {"type": "record", "name": f"R{level}", "fields": fields}
    return dict(schema)


def items(nulls: int) -> dict[str, Any]:
    """A schema of records with a boolean and some nulls."""
    fields = [{"name": f"n{number}", "type": "null"} for number in range(nulls)]
    return {
        "type": "array",
        "items": {"type": "record", "name": "E", "fields": [{"name": "a", "type": "boolean"}, *fields]},
    }


@pytest.mark.parametrize(
    ("schema", "payload", "why"),
    [
        (LIST, b"\2" * 200_000 + b"\0", "Node contains itself"),
        ({"type": "array", "items": "null"}, b"\x80\x94\xeb\xdc\x03\0", "an array has items of almost no bytes"),
        (
            {"type": "array", "items": {"type": "record", "name": "E", "fields": []}},
            b"\2\0",
            "items of almost no bytes",
        ),
        (json.loads('{"type":"array","items":' * 120 + '"int"' + "}" * 120), b"\0", "nested more than 100 deep"),
        (doubling(60), b"", "R47 may have more than 10,000 values in almost no bytes"),
        ({"type": "array", "items": doubling(12)}, b"\2\0\0", "an array has items of almost no bytes"),
        ({"type": "map", "values": doubling(12)}, b"\2\0\0", "a map has items of almost no bytes"),
        (items(997), b"\2\0\0", "an array has items of almost no bytes"),
        ({"type": "array", "items": "int"}, b"\x80\0\2", "bytes follow"),
        ({"type": "fixed", "name": "F", "size": None}, b"", "NoneType"),
        ({"type": "record"}, b"", "required"),
        ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\x7f", "cut off"),
        (["null", "int"], b"\x64", "50 is no index of a union of 2"),
        ("int", b"\2\2", "bytes follow"),
        ({"type": "long", "logicalType": "timestamp-millis"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\1", ""),
        ("string", b"\2\xff", "a text is not UTF-8"),
    ],
)
def test_hostile_avro_is_a_dead_letter(schema: Any, payload: bytes, why: str) -> None:
    registry = registry_of({"/schemas/ids/7": {"schema": json.dumps(schema)}})

    assert why in reason(Avro(registry=registry), b"\0\0\0\0\7" + payload)
    assert "more than 1000000 bytes" in reason(Avro(registry=registry), bytes(1_000_001))


def test_values_of_few_bytes_are_read() -> None:
    assert len(objects(Avro(items(14)), b"\2\1\0")[0]) == 15
    fields = [{"name": "a", "type": {"type": "array", "items": "int"}}, {"name": "b", "type": "int"}]
    assert objects(Avro({"type": "record", "name": "R", "fields": fields}), b"\x80\0\2") == [{"a": [], "b": 1}]


def test_a_registry_that_is_away_delays_messages_and_is_shown() -> None:
    asked, back = threading.Event(), threading.Event()
    attempts: list[str] = []

    def fetch(path: str) -> Any:
        attempts.append(path)
        if len(attempts) == 1:
            raise OSError("connection refused")
        asked.set()
        assert back.wait(30)
        return {"schema": json.dumps(READING)}

    registry = SchemaRegistry(url="http://away:1")
    schema_registry._CACHES[registry] = SchemaCache(registry, fetch, pauses_s=(0.0,))
    messages = [Message(encoded(READING, {"device": "a"}, 1)), Message(b"no")]

    async def read() -> None:
        connection, ready = ConnectionState(lambda: Instant(0)), asyncio.Event()
        connection.connected()
        setup = SourceSetup(
            graph="g", stream="s", partition="p", limits=Limits(), clock=ManualClock(), ready=ready,
            connection=connection,
        )  # fmt: skip
        expander = Expander(Avro(registry=registry), TYPE, Limits(), setup)
        before = expander.expand([Message(b"bad"), *messages], **BOUND)
        assert before.taken == 1
        assert asked.wait(30)
        assert expander.expand(messages, **BOUND).taken == 0
        assert not connection.is_connected
        assert connection.why == "the schema registry does not answer: connection refused"
        connection.connected()  # as the source says of its broker
        assert not connection.is_connected
        back.set()
        async with asyncio.timeout(30):
            await ready.wait()
        after = expander.expand(messages, **BOUND)
        assert (after.taken, len(after.refused)) == (2, 1)
        assert connection.is_connected

    asyncio.run(read())
    assert len(attempts) == 2


def test_a_replay_waits_for_the_registry_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expansion, "PENDING_S_MAX", 0.01)
    hanging = threading.Event()
    registry = SchemaRegistry(url="http://hangs:1")
    schema_registry._CACHES[registry] = SchemaCache(registry, lambda path: hanging.wait(30) and {"schema": '"int"'})

    with pytest.raises(SourceUnavailableError, match="schema registry"):
        expanded(Avro(registry=registry), b"\0\0\0\0\1\2")
    hanging.set()


@contextmanager
def served(answers: dict[str, tuple[int, bytes]]) -> Iterator[tuple[str, list[str | None]]]:
    logins: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self) -> None:
            logins.append(self.headers.get("Authorization"))
            status, body = answers.get(self.path, (404, b'{"error_code":40403}'))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", body.decode())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api", logins
        finally:
            server.shutdown()
            thread.join()


def test_the_registry_is_asked_over_http_once_for_each_schema() -> None:
    answers = {
        "/api/schemas/ids/1": (200, json.dumps({"schema": json.dumps(READING)}).encode()),
        "/api/schemas/ids/2": (200, b'{"schema":"' + b"x" * 1_000_001 + b'"}'),
        "/api/schemas/ids/3": (500, b""),
    }
    with served(answers) as (url, logins):
        registry = SchemaRegistry(url=url, login=Login("key", "hidden"))
        cache = SchemaCache(registry)
        format = Avro(registry=registry)
        assert len(objects(format, *[encoded(READING, {"device": "a"}, 1)] * 3)) == 3
        assert logins == ["Basic a2V5OmhpZGRlbg=="]
        assert "does not know schema 2" in reason(format, b"\0\0\0\0\2a")
        assert "does not know schema 9" in reason(format, b"\0\0\0\0\x09a")
        assert "does not know schema 9" in reason(format, b"\0\0\0\0\x09a")
        assert len(logins) == 3
        with pytest.raises(OSError, match=r"answers 500") as refused:
            cache._found(3)
        assert "hidden" not in str(refused.value)
    assert "hidden" not in repr(registry)


def test_a_login_in_the_address_is_percent_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with served({"/api/schemas/ids/1": (200, b'{"schema":"1"}')}) as (url, logins):
        monkeypatch.setenv("MILLPY_SCHEMA_REGISTRY_URL", url.replace("//", "//k%40y:hid%2Fd+n@"))
        SchemaCache(SchemaRegistry())._found(1)
    assert logins == ["Basic " + b64encode(b"k@y:hid/d+n").decode()]


def test_a_redirect_does_not_take_our_login_elsewhere() -> None:
    with served({"/api/schemas/ids/1": (200, b'{"schema":"1"}')}) as (elsewhere, seen):
        with served({"/api/schemas/ids/1": (302, f"{elsewhere}/schemas/ids/1".encode())}) as (url, logins):
            SchemaCache(SchemaRegistry(url=url, login=Login("key", "hidden")))._found(1)
    assert (logins, seen) == (["Basic a2V5OmhpZGRlbg=="], [None])


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"default backend - 404"),
        (404, b'{"message":"no Route matched with those values"}'),
        (404, b"404"),
        (200, b"<html>log in, please</html>"),
        (200, b"[]"),
        (200, b"{}"),
        (200, b'{"id":null,"schema":null}'),
        (200, b'{"id":1,"sche'),
    ],
)
def test_a_proxy_that_answers_in_place_of_the_registry_is_an_outage(status: int, body: bytes) -> None:
    paths = ("/api/schemas/ids/1", "/api/subjects/readings-value/versions", "/api/subjects/readings-value")
    with served(dict.fromkeys(paths, (status, body))) as (url, _):
        cache = SchemaCache(SchemaRegistry(url=url))
        with pytest.raises(OSError, match="answers"):
            cache._found(1)
        for register in (True, False):
            with pytest.raises(OSError, match="answers"):
                cache.id_of("readings-value", '"int"', register=register)


@pytest.mark.parametrize(
    ("answer_bytes", "said"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x46", "does not speak HTTP"),  # an alert of TLS
        (b"HTTP/1.1 502 Bad Gateway\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n<html>", "answers 502 Bad Gateway"),
    ],
    ids=["not HTTP", "an error that breaks off"],
)
def test_a_server_whose_answer_cannot_be_read_is_an_outage(answer_bytes: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer_bytes)

        thread = threading.Thread(target=answer)
        thread.start()
        cache = SchemaCache(SchemaRegistry(url=f"http://127.0.0.1:{server.getsockname()[1]}"))
        with pytest.raises(OSError, match=said):
            cache._found(1)
        thread.join()


def test_what_is_kept_of_a_registry_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_registry, "SCHEMAS_MAX", 3)
    registry = registry_of({f"/schemas/ids/{n}": {"schema": '"int"'} for n in range(9)})
    cache = cache_of(registry)
    for number in range(20):
        cache_of(registry)._run(number, _future(cache, number))

    assert len(cache._known) == len(cache._unknown) == 3
    assert cache.schema(8) == RegisteredSchema(8, "AVRO", '"int"')
    circle = {"schema": "1", "references": [{"name": "a", "subject": "a", "version": 1}]}
    around = SchemaCache(registry, {"/schemas/ids/1": circle, "/subjects/a/versions/1": circle}.__getitem__)
    with pytest.raises(schema_registry._UnknownError, match="refers to itself"):
        around._found(1)


def _future(cache: SchemaCache, number: int) -> Any:
    from concurrent.futures import Future

    cache._pending[number] = Future()
    return cache._pending[number]


def descriptors() -> bytes:
    """As protoc writes it, of a small .proto file."""
    file = descriptor_pb2.FileDescriptorProto(name="plant.proto", package="plant", syntax="proto3")
    file.dependency.extend(["google/protobuf/timestamp.proto", "google/protobuf/struct.proto"])
    file.dependency.extend(["google/protobuf/duration.proto", "google/protobuf/wrappers.proto"])
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="IDLE", number=0)
    kind.value.add(name="BUSY", number=1)
    file.message_type.add(name="Other")
    own = file.message_type.add(name="Reading")
    own.nested_type.add(name="TagsEntry").options.map_entry = True
    own.nested_type[0].field.add(name="key", number=1, type=9, label=1)
    own.nested_type[0].field.add(name="value", number=2, type=5, label=1)
    fields = [
        ("device", 9, ""), ("count", 3, ""), ("kind", 14, ".plant.Kind"), ("at", 11, ".google.protobuf.Timestamp"),
        ("raw", 12, ""), ("more", 11, ".google.protobuf.Struct"), ("took", 11, ".google.protobuf.Duration"),
        ("maybe", 11, ".google.protobuf.DoubleValue"), ("next", 11, ".plant.Reading"),
    ]  # fmt: skip
    for number, (name, of, named) in enumerate(fields, 1):
        own.field.add(name=name, number=number, type=of, label=1, type_name=named or None)
    own.field.add(name="parts", number=20, type=11, label=3, type_name=".plant.Reading")
    own.field.add(name="tags", number=21, type=11, label=3, type_name=".plant.Reading.TagsEntry")
    files = [timestamp_pb2, struct_pb2, duration_pb2, wrappers_pb2]
    needed = [descriptor_pb2.FileDescriptorProto.FromString(each.DESCRIPTOR.serialized_pb) for each in files]
    return descriptor_pb2.FileDescriptorSet(file=[*needed, file]).SerializeToString()


PLANT = descriptors()
FORMAT = Protobuf("plant.Reading", descriptors=PLANT)
MESSAGE: Any = FORMAT.class_of()


def test_protobuf_values_become_those_of_json() -> None:
    made = MESSAGE(device="a", count=-5, kind=1, raw=b"\1\2", parts=[MESSAGE(device="b")], tags={"x": 7})
    made.at.FromJsonString("2026-01-02T03:04:05.5Z")
    made.more.update({"a": [1.5, None, {"b": True}]})
    made.took.FromMilliseconds(1_500)
    made.maybe.value = 0.0

    assert objects(FORMAT, made.SerializeToString()) == [
        {
            "device": "a", "count": -5, "kind": "BUSY", "raw": "AQI=", "tags": {"x": 7}, "took": 1.5, "maybe": 0.0,
            "at": "2026-01-02T03:04:05.500000Z", "more": {"a": [1.5, None, {"b": True}]},
            "parts": [{"device": "b", "count": 0, "kind": "IDLE", "raw": "", "parts": [], "tags": {}}],
        }
    ]  # fmt: skip
    assert objects(Protobuf(MESSAGE, inside=Json(many="parts")), made.SerializeToString())[0]["device"] == "b"


def test_a_framed_message_must_be_of_the_message_that_is_named() -> None:
    framed = Protobuf("plant.Reading", descriptors=PLANT, framed=True)
    payload = MESSAGE(device="a").SerializeToString()

    assert objects(framed, b"\0\0\0\0\5\2\2" + payload)[0]["device"] == "a"
    assert "schema 5: it is message [0] of its schema, and plant.Reading is [1]" in reason(framed, b"\0\0\0\0\5\0a")
    assert "cut off" in reason(framed, b"\0\0\0\0\5\xff\xff")
    assert "levels of messages" in reason(framed, b"\0\0\0\0\5\xfe\xff\x03")


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\x0a\x05a", "Error parsing"),
        (b"\x0a\x01\xff", "Error parsing"),
        (b"\x4a" * 300, "Error parsing"),
        (b"\x22\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "outside of the years"),
        (bytes(1_000_001), "more than 1000000 bytes"),
    ],
)
def test_hostile_protobuf_is_a_dead_letter(payload: bytes, why: str) -> None:
    assert why in reason(FORMAT, payload)


def test_deeply_nested_protobuf_is_a_dead_letter() -> None:
    text = b""
    for _ in range(60):
        text = b"\x4a" + _varint(len(text)) + text
    assert len(objects(FORMAT, text)) == 1
    for _ in range(240):
        text = b"\x4a" + _varint(len(text)) + text

    assert "Error parsing" in reason(FORMAT, text)


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


def test_wrong_uses_are_refused() -> None:
    for wrong in (lambda: Avro(), lambda: Avro("{"), lambda: Avro(READING, registry="http://x"), lambda: Protobuf("a")):  # type: ignore[arg-type]
        with pytest.raises(GraphError):
            wrong()
    for format in (Avro({"type": "nothing"}), Avro(LIST), Protobuf("plant.Nothing", descriptors=PLANT)):
        with pytest.raises(GraphError):
            format.validate(TYPE)
    with pytest.raises(GraphError, match="no message class"):
        Protobuf(Reading)
    with pytest.raises(GraphError, match="cannot be read"):
        Protobuf("a", descriptors=b"\xff").validate(TYPE)
    with pytest.raises(ConfigError, match="invalid"):
        SchemaRegistry(url="registry:8081")


def test_an_address_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(schema_registry.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="no schema registry is named"):
        SchemaRegistry().address()
    monkeypatch.setenv(schema_registry.VARIABLE, "https://me:secret@registry/")
    assert SchemaRegistry().address() == "https://me:secret@registry"
