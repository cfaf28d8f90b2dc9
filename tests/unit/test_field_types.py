"""Fields of every type: the same values as objects and as columns, from every payload, in state, tables and windows."""

from __future__ import annotations

import asyncio
import enum
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from millpy import (
    Collect,
    Combiner,
    Computation,
    Context,
    Count,
    Csv,
    EventTime,
    File,
    First,
    FixedWindows,
    Graph,
    Last,
    Max,
    Mean,
    Min,
    Mqtt,
    Quantile,
    Scalar,
    Sum,
    Value,
    Variance,
    minutes,
    seconds,
)
from millpy.errors import GraphError, RefusedValueError, SchemaError
from millpy.formats import Message
from millpy.ingest.decode import Decoder
from millpy.ingest.expansion import Expander
from millpy.ingest.protocol import FixedBound, SourceBatch, SourceSetup
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.operators.validation import Admission
from millpy.testing import GraphDriver, ManualSource
from millpy.testing.clock import ManualClock


class State(enum.Enum):
    ON = "on"
    OFF = "off"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Part(msgspec.Struct):
    price: Decimal
    day: date | None = None
    state: State = State.ON


class Everything(msgspec.Struct):
    device: str
    at: datetime
    price: Decimal
    day: date
    state: State
    level: Level
    mode: Literal["auto", "hand"]
    anything: Any
    tags: dict
    either: int | str
    parts: list[Part]
    by_name: dict[str, Decimal]
    mixed: list[int | str]
    share: Decimal | None = None
    closed: date | None = None
    past: State | None = None
    manual: Literal[1, 2] | None = None
    spread: dict[str, Any] = {}
    mark: UUID | None = None


TYPE = RecordType(Everything)
JSON = (
    b'{"device":"a","at":"2026-01-01T00:00:01Z","price":1.10,"day":"2026-01-02","state":"on","level":2,"mode":"auto",'
    b'"anything":[1,{"a":null,"b":1.5}],"tags":{"x":[true]},"either":"5","parts":[{"price":"2.50","day":"2026-01-03"}],'
    b'"by_name":{"a":0.10},"mixed":[1,"a"]}'
)
OTHER = (
    b'{"device":"b","at":"2026-01-01T00:00:02Z","price":"-0.05","day":"0001-01-01","state":"off","level":1,'
    b'"mode":"hand","anything":null,"tags":{},"either":7,"parts":[],"by_name":{},"mixed":[],"share":"12e3",'
    b'"closed":"9999-12-31","past":"on","manual":2,"spread":{"a":{"b":[]}},"mark":"12345678-1234-5678-1234-567812345678"}'
)
AT = datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
DECODED = Everything(
    "a", AT, Decimal("1.10"), date(2026, 1, 2), State.ON, Level.HIGH, "auto", [1, {"a": None, "b": 1.5}], {"x": [True]},
    "5", [Part(Decimal("2.50"), date(2026, 1, 3))], {"a": Decimal("0.10")}, [1, "a"],
)  # fmt: skip


def decoded(*payloads: bytes) -> tuple[list[Any], list[str]]:
    found = Decoder(TYPE, time_field="at").decode(SourceBatch("json", Instant(0), payloads=payloads))
    objects = found.objects if found.objects is not None else TYPE.objects_of(found.batch)
    return objects, [refused.detail for refused in found.refused]


def test_values_are_the_same_as_objects_and_as_columns() -> None:
    objects, refused = decoded(JSON, OTHER)

    assert refused == []
    assert objects[0] == DECODED
    again = TYPE.objects_of(TYPE.batch_of(objects))
    assert list(map(repr, again)) == list(map(repr, objects))
    assert repr(objects[1].share) == "Decimal('12000')"
    many, _ = decoded(*[JSON, OTHER] * 100)
    assert list(map(repr, many)) == list(map(repr, objects)) * 100


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("price", '"NaN"', "price: NaN cannot be stored"),
        ("price", '"-Infinity"', "cannot be stored"),
        ("price", "1e38", "more than 38 digits"),
        ("price", "1e-39", "more than 38 digits"),
        ("price", '"1e-999999999"', "more than 38 digits"),
        ("price", '"0e999999999"', "more than 38 digits"),
        ("parts", '[{"price":"NaN"}]', "cannot be stored"),
        ("day", '"2026-02-30"', "Invalid RFC3339 encoded date"),
        ("state", '"broken"', "Invalid enum value 'broken'"),
        ("level", "3", "Invalid enum value 3"),
        ("mode", '"x"', "Invalid enum value 'x'"),
        ("manual", "3", "Invalid enum value 3"),
        ("either", "1.5", "Expected `int | str`"),
        ("tags", "[]", "Expected `object`"),
        ("anything", str(2**64), "exceeds 64 bits"),
        ("anything", '["a\\u0000"]', "NUL in text"),
        ("anything", "[" * 101 + "1" + "]" * 101, "nested more than 100 deep"),
        ("tags", '{"a":' * 600 + "1" + "}" * 600, "nested more than 100 deep"),
    ],
)
def test_what_cannot_be_stored_is_refused(field: str, value: str, reason: str) -> None:
    payload = msgspec.json.encode({**msgspec.json.decode(JSON), field: msgspec.Raw(value.encode())})

    objects, refused = decoded(payload, JSON)

    assert objects == [DECODED]
    assert reason in refused[0]


def test_a_function_cannot_make_what_a_payload_cannot() -> None:
    admission = Admission(TYPE, "stream 's' carries")
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    for field, value in [("price", Decimal("sNaN")), ("anything", deep), ("anything", {"a": 2**63}), ("state", "on!")]:
        with pytest.raises(RefusedValueError):
            admission.checked_copy(msgspec.structs.replace(DECODED, **{field: value}))

    whole = admission.checked_copy(msgspec.structs.replace(DECODED, price=Decimal("1E+2")))
    assert repr(whole.price) == "Decimal('100')"
    batch = TYPE.batch_of([DECODED, DECODED])
    modes = batch.set_column(batch.schema.get_field_index("mode"), "mode", pa.array(["auto", "x"]))
    assert list(admission.refused(modes)) == [1]


class Echo(Computation):
    before = Value(Everything | None, None)  # type: ignore[arg-type]

    def process_record(self, context: Context, record: Everything) -> None:
        kept = context[Echo.before]
        if kept is not None:
            context.produce(kept)
        context[Echo.before] = record


def graph_of() -> Graph:
    graph = Graph("types")
    readings = graph.inject(
        "readings", ManualSource(), schema=Everything, event_time=EventTime("at", max_disorder=seconds(0))
    )
    readings.key_by("mode").process(Echo(), name="echo", output=Everything).to_table("records")
    readings.key_by("mode").window(FixedWindows(minutes(1))).aggregate(
        total=Sum("price"), mean=Mean("price"), least=Min("price"), most=Max("price"), first=First("price"),
        last=Last("price"), shares=Sum("share"), day=Max("day"), first_day=First("day"), state=Last("state"),
        level=Max("level"), states=Collect("past"), n=Count("anything"),
    ).to_table("windows")  # fmt: skip
    return graph


WINDOWS = [
    {
        "mode": "auto", "total": Decimal(88), "mean": Decimal("1.1"), "least": Decimal("1.1"), "most": Decimal("1.1"),
        "first": Decimal("1.1"), "last": Decimal("1.1"), "shares": None, "day": date(2026, 1, 2),
        "first_day": date(2026, 1, 2), "state": "on", "level": 2, "states": [], "n": 80,
    },
    {
        "mode": "hand", "total": Decimal("-0.1"), "mean": Decimal("-0.05"), "least": Decimal("-0.05"),
        "most": Decimal("-0.05"), "first": Decimal("-0.05"), "last": Decimal("-0.05"), "shares": Decimal(24000),
        "day": date(1, 1, 1), "first_day": date(1, 1, 1), "state": "off", "level": 1, "states": ["on", "on"], "n": 0,
    },
]  # fmt: skip


@pytest.mark.parametrize(("copies", "size"), [(4, 1), (80, 82)])
def test_tables_windows_and_state_hold_every_type(copies: int, size: int) -> None:
    """Of one record at a time, in turns that are lost and made again; and of all at once, as columns."""
    driver = GraphDriver(graph_of())
    payloads = [JSON] * copies + [OTHER] * 2
    driver.loses_turns = size == 1
    for start in range(0, len(payloads), size):
        driver.feed("readings", payloads[start : start + size])
    driver.crash()
    driver.end()

    found = [{name: row[name] for name in WINDOWS[0]} for row in driver.rows("windows")]
    assert found == [{**WINDOWS[0], "total": copies * Decimal("1.1"), "n": copies}, WINDOWS[1]]
    records = [row for row in driver.rows("records") if row["device"] == "a"]
    assert len(records) == copies - 1
    assert {name: records[0][name] for name in ("price", "day", "state", "level", "anything", "tags", "either")} == {
        "price": Decimal("1.10"), "day": date(2026, 1, 2), "state": "on", "level": 2, "tags": {"x": [True]},
        "anything": [1, {"a": None, "b": 1.5}], "either": "5",
    }  # fmt: skip
    assert driver.dead_letters() == []


class Flat(msgspec.Struct):
    at: datetime
    price: Decimal | None
    day: date
    state: State
    mode: Literal["auto", "hand"]


FLAT = Flat(AT, Decimal("1234567890.123456789"), date(2026, 1, 2), State.ON, "auto")


def from_file(path: Path, **options: Any) -> list[Any]:
    async def read() -> list[Any]:
        source = File(path, **options)
        setup = SourceSetup(
            graph="g", stream="s", partition=source.partitions()[0], limits=Limits(), clock=ManualClock(),
            ready=asyncio.Event(), record_type=RecordType(Flat), bound=FixedBound(100, 10**6),
        )  # fmt: skip
        injector = source.connect(setup)
        await injector.open(None)
        found: list[Any] = []
        while True:
            await setup.ready.wait()
            setup.ready.clear()
            if (batch := await injector.take()) is not None:
                made = Decoder(RecordType(Flat), time_field="at").decode(batch)
                assert made.refused == []
                found += made.objects if made.objects is not None else RecordType(Flat).objects_of(made.batch)
                if batch.finished:
                    await injector.close()
                    return found

    return asyncio.run(read())


def test_files_of_every_kind_give_exact_values(tmp_path: Path) -> None:
    text = "at,price,day,state,mode\n2026-01-01T00:00:01Z,1234567890.123456789,2026-01-02,on,auto\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "b.txt").write_text(text.replace(",", ";").replace("890.1", "890,1"))
    table = pa.table(
        {
            "at": pa.array([AT], pa.timestamp("us", "UTC")),
            "price": pa.array([FLAT.price], pa.decimal128(30, 12)),
            "day": pa.array([FLAT.day], pa.date32()),
            "state": ["on"],
            "mode": ["auto"],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")

    assert from_file(tmp_path / "a.csv") == [FLAT]
    assert from_file(tmp_path / "b.txt", format=Csv(delimiter=";", decimal=",")) == [FLAT]
    assert from_file(tmp_path / "c.parquet") == [FLAT]
    empty = "at,price,day,state,mode\n2026-01-01T00:00:01Z,,2026-01-02,on,auto\n"
    (tmp_path / "d.csv").write_text(empty)
    assert from_file(tmp_path / "d.csv") == [msgspec.structs.replace(FLAT, price=None)]


class Bare(msgspec.Struct):
    price: Decimal
    at: datetime


def test_a_bare_decimal_keeps_its_digits() -> None:
    expander = Expander(Scalar("price", arrival="at"), RecordType(Bare), Limits())

    made = expander.expand([Message(b"+0012345678901234567890.10")], records_max=10, bytes_max=1000)

    assert msgspec.json.decode(made.payloads[0], type=Bare).price == Decimal("12345678901234567890.10")


@pytest.mark.parametrize(
    ("aggregate", "takes"),
    [(Variance("price"), "int"), (Quantile("price", 0.5), "int"), (Sum("day"), "int"), (Sum("state"), "int")],
)  # fmt: skip
def test_aggregates_that_would_not_be_exact_are_refused(aggregate: Any, takes: str) -> None:
    with pytest.raises(SchemaError, match="does not accept a field of type") as refused:
        aggregate.bind(TYPE)
    assert takes in str(refused.value.hint)


@pytest.mark.parametrize("field", ["price", "day", "state", "anything", "either"])
def test_keys_are_plain(field: str) -> None:
    with pytest.raises((SchemaError, GraphError)):
        Graph("g").inject(
            "a", Mqtt("a"), schema=Everything, event_time=EventTime("at", max_disorder=seconds(0))
        ).key_by(field)


def test_types_without_a_column_are_still_refused() -> None:
    class Mixed(enum.Enum):
        A = 1
        B = "b"

    for kind in (Mixed, set[int], tuple[int, str], complex):
        with pytest.raises(SchemaError):
            RecordType(msgspec.defstruct("Odd", [("odd", kind)]))
    with pytest.raises(SchemaError, match="inside a field that is stored as JSON"):
        RecordType(msgspec.defstruct("Deep", [("a", msgspec.defstruct("In", [("b", Any)]))])).field_type("a.b")


def test_windows_that_were_open_and_windows_of_one_bundle_leave_together() -> None:
    graph = Graph("together")
    readings = graph.inject(
        "readings", ManualSource(), schema=Flat, event_time=EventTime("at", max_disorder=seconds(0))
    )
    panes = readings.key_by("mode").window(FixedWindows(seconds(10)), name="panes").aggregate(
        total=Sum("price"), last=Last("price"), day=Max("day"), state=Last("state")
    )  # fmt: skip
    panes.to_table("short")
    panes.key_by("mode").window(FixedWindows(minutes(10))).aggregate(total=Sum("total")).to_table("totals")
    driver = GraphDriver(graph)
    price = Decimal("0.0000001")
    rows = [msgspec.structs.replace(FLAT, at=AT + seconds(n), price=price) for n in range(200)]
    driver.feed("readings", rows[:1])
    driver.feed("readings", rows[1:])
    driver.end()

    assert [row["total"] for row in driver.rows("totals")] == [price * 200]
    assert {type(row["last"]) for row in driver.rows("short")} == {Decimal}
    assert {row["state"] for row in driver.rows("short")} == {"on"}


def test_combiners_have_plain_results() -> None:
    class Half(Combiner[float]):
        accumulator = float
        result_type: Any = Decimal

    for kind in (Decimal, date, State, Any, dict, int | str):
        Half.result_type = kind
        with pytest.raises(SchemaError, match="result_type cannot be"):
            Half().bind(TYPE)
