"""Records as Avro messages of a sink: each type comes back as it was, and what does not fit is refused in time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from io import BytesIO
from typing import Any, Literal
from uuid import UUID

import fastavro
import msgspec
import pytest

from millpy import Avro, EventTime, Graph, KafkaTopic, SchemaRegistry, seconds
from millpy.errors import ConfigError, GraphError, SinkUnavailableError
from millpy.formats import Json, Message
from millpy.formats.avro_writing import writer_of
from millpy.model.record import RecordType, WideInt
from millpy.sinks import Sink
from millpy.testing import GraphDriver, ManualSource
from tests.schema_registry_server import RegistryServer, schema_registry

NOON = datetime(2026, 11, 20, 12, 0, 0, 123_456, tzinfo=UTC)
SECOND = NOON.replace(microsecond=0)


class Level(Enum):
    HIGH = "high"


class Place(msgspec.Struct):
    hall: str
    floor: int | None = None


class Everything(msgspec.Struct):
    text: str
    number: int
    value: float
    is_on: bool
    at: datetime
    day: date
    id: UUID
    level: Level
    kind: Literal["a", "b"]
    place: Place
    other: Place | None
    several: list[Place]
    named: dict[str, float | None]
    missing: str | None = None
    renamed: int = msgspec.field(default=0, name="otherName")


RECORD = Everything(
    "é", -(2**62), 0.1, True, NOON, date(2026, 2, 28), UUID(int=7), Level.HIGH, "b", Place("A"), None,
    [Place("B", 3), Place("C")], {"x": 1.5, "y": None}, None, 9,
)  # fmt: skip


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    with schema_registry() as server:
        yield server


def read(format: Avro, struct: type[msgspec.Struct], payload: bytes) -> Any:
    parts = list(format.reader(RecordType(struct))(Message(payload)))
    assert all(isinstance(part, bytes) for part in parts), parts
    (part,) = parts
    return msgspec.json.decode(part, type=struct)  # type: ignore[arg-type]


async def test_every_type_comes_back_as_it_was(registry: RegistryServer) -> None:
    format = Avro(registry=SchemaRegistry(url=registry.url))
    sink, record_type = KafkaTopic("things", format=format), RecordType(Everything)
    sink.validate(record_type)
    await sink.prepare([record_type])
    encode = sink.encoder(record_type)
    assert encode is not None
    payload = encode(RECORD)

    assert payload is not None
    assert payload[:5] == b"\0\0\0\0\1"
    assert registry.subjects == {"things-value": [1]}
    while True:
        try:
            assert read(format, Everything, payload) == RECORD
            break
        except Exception as error:  # the reader waits for the schema in the background
            if not hasattr(error, "done"):
                raise
            error.done.result(10)


async def test_the_registry_is_asked_once_and_what_it_refuses_is_an_error_of_the_deployment(
    registry: RegistryServer,
) -> None:
    sink = KafkaTopic("places", format=Avro(registry=SchemaRegistry(url=registry.url)))
    types = [RecordType(Place)]
    registry.fails = 503
    with pytest.raises(SinkUnavailableError, match="answers 503"):
        await sink.prepare(types)
    registry.fails, registry.refuses = 0, (409, "READER_FIELD_MISSING_DEFAULT_VALUE")
    with pytest.raises(ConfigError, match=r"refuses the schema of subject 'places-value'.*READER_FIELD_MISSING"):
        await sink.prepare(types)
    registry.refuses = (403, "User is denied operation Write on Subject: places-value")
    with pytest.raises(ConfigError, match=r"refuses our login for subject 'places-value'.*denied operation") as refused:
        await sink.prepare(types)
    assert "right to register" in refused.value.hint
    unregistered = KafkaTopic("places", format=Avro(registry=SchemaRegistry(url=registry.url), register=False))
    with pytest.raises(ConfigError, match="it is not registered"):
        await unregistered.prepare(types)
    assert registry.subjects == {}
    registry.refuses = None
    await sink.prepare(types)
    asked = registry.requests
    await unregistered.prepare(types)
    assert registry.requests == asked


class Wide(msgspec.Struct):
    value: WideInt


class Anything(msgspec.Struct):
    value: Any


class Money(msgspec.Struct):
    value: Decimal


class Tagged(msgspec.Struct, tag=True):
    value: int


class Loop(msgspec.Struct):
    hall: str
    extra: int


def namesake() -> type[msgspec.Struct]:
    """Return a class with a `Place` beside the one of this module, as another module may have."""
    other = msgspec.defstruct("Place", [("x", float), ("y", float)])
    return msgspec.defstruct("Trip", [("hall", Place), ("point", other)])


@pytest.mark.parametrize(
    ("sink", "struct", "said"),
    [
        (KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"))), Wide, "any width"),
        (KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"))), Anything, "no exact form"),
        (KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"))), Money, "no exact form"),
        (KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"))), Tagged, "with a tag"),
        (KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"))), namesake(), "are named Place"),
        (KafkaTopic("t", format=Avro('"string"')), Place, "need an Avro record"),
        (KafkaTopic("t", format=Avro('{"type": "record"}')), Place, "schema is invalid"),
        (
            KafkaTopic(
                "t", format=Avro({"type": "record", "name": "P", "fields": [{"name": "hall", "type": "string"}]})
            ),
            Loop,
            "has no field 'extra'",
        ),
        (
            KafkaTopic(
                "t",
                format=Avro(
                    {
                        "type": "record",
                        "name": "P",
                        "fields": [{"name": name, "type": "string"} for name in ("hall", "floor", "more")],
                    }
                ),
            ),
            Place,
            "Place has no field 'more'",
        ),
        (KafkaTopic("t", value="hall", format=Avro(registry=SchemaRegistry(url="http://x"))), Place, "neither value="),
        (
            KafkaTopic("t", format=Avro(registry=SchemaRegistry(url="http://x"), inside=Json(many="x"))),
            Place,
            "neither value=",
        ),
        (KafkaTopic("t", format="avro"), Place, "cannot be written as 'avro'"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused_when_the_graph_is_built(
    sink: Sink, struct: type[msgspec.Struct], said: str
) -> None:
    with pytest.raises(GraphError, match=said):
        sink.validate(RecordType(struct))


def driver_of(struct: type[msgspec.Struct], format: Avro) -> GraphDriver:
    """Drive a graph that sends records of a class to a topic as they are."""
    graph = Graph("g")
    event_time = EventTime("at", max_disorder=seconds(0))
    records = graph.inject("records", ManualSource(), schema=struct, event_time=event_time)
    records.to_sink(KafkaTopic("records", format=format), key="device", name="out")
    return GraphDriver(graph)


class Amount(msgspec.Struct):
    device: str
    at: datetime
    value: Decimal


def test_a_record_that_does_not_fit_a_given_schema_is_a_dead_letter() -> None:
    schema = {
        "type": "record",
        "name": "Amount",
        "fields": [
            {"name": "device", "type": "string"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "value", "type": {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}},
        ],
    }
    driver = driver_of(Amount, Avro(schema, registry=SchemaRegistry(url="http://never-asked:1")))
    driver.feed("records", [Amount("a", SECOND, Decimal("1.25")), Amount("a", SECOND, Decimal("1.255"))])

    ((key, value),) = driver.sent("out")
    assert (key, value[:5]) == (b"a", b"\0\0\0\0\0")
    plain = Avro(schema)
    assert read(plain, Amount, value[5:]).value == Decimal("1.25")
    (letter,) = driver.dead_letters()
    assert letter.reason == "refused"
    assert "does not fit the Avro schema" in letter.detail


class Machine(msgspec.Struct):
    device: str
    at: datetime
    place: Place | None


def test_a_field_of_an_inner_record_that_a_given_schema_lacks_is_not_left_out() -> None:
    place = {"type": "record", "name": "Place", "fields": [{"name": "hall", "type": "string"}]}
    fields = [
        {"name": "device", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "place", "type": ["null", place]},
    ]
    driver = driver_of(Machine, Avro({"type": "record", "name": "Machine", "fields": fields}))
    driver.feed("records", [Machine("a", NOON, None), Machine("b", NOON, Place("B", 3))])

    assert [key for key, _ in driver.sent("out")] == [b"a"]
    (letter,) = driver.dead_letters()
    assert "does not fit the Avro schema" in letter.detail


class Counter(msgspec.Struct):
    device: str
    at: datetime
    count: int


def test_a_number_of_more_than_32_bits_is_no_int_of_a_given_schema() -> None:
    fields = [
        {"name": "device", "type": "string"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "count", "type": "int"},
    ]
    driver = driver_of(Counter, Avro({"type": "record", "name": "Counter", "fields": fields}))
    driver.feed("records", [Counter("a", NOON, 2**31 - 1), Counter("b", NOON, 2**31)])

    assert [key for key, _ in driver.sent("out")] == [b"a"]
    (letter,) = driver.dead_letters()
    assert "2147483648 is no int, which has 32 bits" in letter.detail


class Measure(msgspec.Struct):
    device: str
    at: datetime
    value: float = 0.0
    values: list[float] = []
    named: dict[str, float] = {}
    maybe: float | None = None
    seen: datetime = SECOND


FLOATS = [
    {"name": "value", "type": "float"},
    {"name": "values", "type": {"type": "array", "items": "float"}},
    {"name": "named", "type": {"type": "map", "values": {"type": "float"}}},
    {"name": "maybe", "type": ["null", "float"]},
]


MORE = [
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "seen", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "named", "type": {"type": "map", "values": "double"}},
]
REST = [{"name": "values", "type": {"type": "array", "items": "double"}}, MORE[2]]


@pytest.mark.parametrize("unit", ["timestamp-millis", "local-timestamp-millis"])
def test_what_a_given_schema_would_change_in_silence_is_a_dead_letter(unit: str) -> None:
    time = {"type": "long", "logicalType": unit}
    inner = {"type": "record", "name": "Measure", "fields": [
        {"name": "device", "type": "string"}, {"name": "at", "type": time}, *FLOATS,
        {"name": "seen", "type": ["null", time]},
    ]}  # fmt: skip
    exact = SECOND.replace(microsecond=123_000)
    good = [
        Measure("a", exact, 3.0e38, [-3.4e38], {"x": 0.5}, 0.25, exact),
        Measure("a", SECOND, 0.5, [0.5], {}, None),
    ]
    bad = [
        (Measure("b", SECOND, 1e39), "1e+39 is beyond the range of a float"),
        (Measure("b", SECOND, 0.0, [0.0, -1e39]), "-1e+39 is beyond"),
        (Measure("b", SECOND, named={"x": 1e300}), "1e+300 is beyond"),
        (Measure("b", SECOND, maybe=1e39), "1e+39 is beyond"),
        (Measure("b", SECOND + timedelta(microseconds=1)), "has microseconds"),
        (Measure("b", SECOND, seen=SECOND + timedelta(microseconds=999)), "has microseconds"),
    ]
    driver = driver_of(Measure, Avro(inner))
    driver.feed("records", [*good, *(record for record, _ in bad)])

    infinite = writer_of(json.dumps(inner))(Measure("a", SECOND, math.inf))
    sent: list[Any] = [
        fastavro.schemaless_reader(BytesIO(message), fastavro.parse_schema(inner))
        for message in (*(value for _, value in driver.sent("out")), infinite)
    ]
    assert [message["at"].replace(tzinfo=UTC) for message in sent] == [exact, SECOND, SECOND]
    assert [message["value"] for message in sent] == [pytest.approx(3.0e38), 0.5, math.inf]
    assert (sent[0]["maybe"], sent[1]["maybe"]) == (0.25, None)
    letters = driver.dead_letters()
    assert len(letters) == len(bad)
    for letter, (_, said) in zip(letters, bad, strict=True):
        assert said in letter.detail


@pytest.mark.parametrize("kind", ["int", "long", {"type": "long", "logicalType": "timestamp-millis"}])
def test_a_number_is_not_cut_to_the_whole_number_of_a_given_schema(kind: Any) -> None:
    fields = [
        {"name": "device", "type": "string"},
        {"name": "value", "type": kind},
        {"name": "values", "type": {"type": "array", "items": kind}},
        {"name": "maybe", "type": ["null", kind], "default": None},
    ]
    write = writer_of(json.dumps({"type": "record", "name": "Measure", "fields": [*fields, *MORE]}))

    assert write(Measure("a", SECOND, 2.0, [-3.0], maybe=None)) == write(Measure("a", SECOND, 2, [-3]))  # type: ignore[list-item]
    for record in (
        Measure("a", SECOND, 2.5),
        Measure("a", SECOND, values=[1.0, -0.5]),
        Measure("a", SECOND, maybe=0.1),
        Measure("a", SECOND, math.nan),
        Measure("a", SECOND, math.inf),
    ):
        with pytest.raises(ValueError, match="is not a whole number"):
            write(record)


def test_a_value_takes_the_branch_of_a_union_that_has_it() -> None:
    """Also behind one that would change it."""
    moment = ["null", {"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "timestamp-millis"}]
    fields = [
        {"name": "device", "type": "string"},
        {"name": "value", "type": ["float", "double"]},
        {"name": "maybe", "type": ["null", "int", "double"], "default": None},
        {"name": "seen", "type": [*moment, {"type": "long", "logicalType": "timestamp-micros"}]},
    ]
    schema = {"type": "record", "name": "Measure", "fields": [*fields, *MORE[:1], *REST]}
    write = writer_of(json.dumps(schema))
    read = fastavro.parse_schema(schema)
    for record in (
        Measure("a", SECOND, 1e39, maybe=0.5, seen=SECOND),
        Measure("a", SECOND, 0.5, maybe=3.0, seen=NOON.replace(microsecond=1_000)),
    ):
        found = fastavro.schemaless_reader(BytesIO(write(record)), read)

        assert isinstance(found, dict)
        assert (found["value"], found["maybe"], found["seen"]) == (record.value, record.maybe, record.seen)


def test_a_time_is_not_cut_to_the_date_of_a_given_schema() -> None:
    day = {"type": "int", "logicalType": "date"}
    fields = [{"name": "device", "type": "string"}, {"name": "at", "type": day}, {"name": "count", "type": "int"}]
    driver = driver_of(Counter, Avro({"type": "record", "name": "Counter", "fields": fields}))
    driver.feed("records", [Counter("a", NOON, 1)])

    assert not driver.sent("out")
    assert "the schema has a date" in driver.dead_letters()[0].detail


class Marked(msgspec.Struct):
    device: str
    at: datetime
    mark: str


def test_a_text_that_is_no_uuid_is_not_written_as_one() -> None:
    mark = {"type": "string", "logicalType": "uuid"}
    time = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": "device", "type": "string"}, {"name": "at", "type": time}, {"name": "mark", "type": mark}]
    driver = driver_of(Marked, Avro({"type": "record", "name": "Marked", "fields": fields}))
    good = [Marked("a", NOON, str(UUID(int=5))), Marked("a", NOON, str(UUID(int=2**127 + 10)).upper())]
    driver.feed("records", [*good, *(Marked("b", NOON, text) for text in ("", "five", f"{UUID(int=5)}0", "0" * 32))])

    assert len(driver.sent("out")) == 2
    letters = driver.dead_letters()
    assert len(letters) == 4
    assert all("is no UUID" in letter.detail for letter in letters)


class Short(msgspec.Struct, omit_defaults=True):
    count: int | None = 3


class WithShort(msgspec.Struct):
    device: str
    several: list[Short]


@pytest.mark.parametrize("kind", [Short, WithShort])
def test_a_class_that_leaves_its_defaults_out_is_refused(kind: type[msgspec.Struct]) -> None:
    sink = KafkaTopic("a", format=Avro(registry=SchemaRegistry(url="http://never-asked:1")))

    with pytest.raises(GraphError, match="Short is written without its defaults"):
        sink.validate(RecordType(kind))


def test_a_schema_that_contains_itself_is_refused() -> None:
    inner = {"name": "inner", "type": ["null", "Counter"], "default": None}
    fields = [{"name": "device", "type": "string"}, {"name": "at", "type": "string"}, {"name": "count", "type": "int"}]
    sink = KafkaTopic("a", format=Avro({"type": "record", "name": "Counter", "fields": [*fields, inner]}))

    with pytest.raises(GraphError, match="contains itself"):
        sink.validate(RecordType(Counter))
