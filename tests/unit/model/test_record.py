"""Fields by path: "a.b" is field b of the struct in field a, in objects and in columns alike."""

from datetime import UTC, datetime

import msgspec
import numpy as np
import pytest

from millpy.errors import GraphError, SchemaError
from millpy.graph import Graph
from millpy.ingest.decode import DecodeResult
from millpy.ingest.event_times import field_times
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType, column_of, getter
from millpy.model.time import minutes, seconds
from millpy.sources.files.source import File
from millpy.windowing.aggregates.numeric import Count, Max, Mean
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows
from tests.stage_driver import StageDriver


class Fix(msgspec.Struct):
    at: datetime
    speed: float | None = None


class Unit(msgspec.Struct):
    site: str
    number: int


class Report(msgspec.Struct):
    unit: Unit
    fix: Fix | None = None
    note: str = ""


class Part(msgspec.Struct):
    name: str
    parts: "list[Part]" = []


TYPE = RecordType(Report)
REPORTS = [
    Report(Unit(site, number), Fix(datetime.fromtimestamp(number, UTC), speed) if speed != 9 else None)
    for site, number, speed in [("a", 1, 1.5), ("b", 2, None), ("a", 2, 9), ("a", 1, 2.5)]
]


def columns() -> Records:
    return Records(TYPE, np.zeros(4, np.int64), batch=TYPE.batch_of(REPORTS))


@pytest.mark.parametrize("path", ["unit.site", "unit.number", "fix.speed", "fix.at", "note"])
def test_objects_and_columns_have_the_same_values(path: str) -> None:
    from_objects = list(map(getter(path), REPORTS))

    assert column_of(columns().batch(), path).to_pylist() == from_objects


def test_optional_field_of_an_optional_struct_may_be_none() -> None:
    assert TYPE.is_nullable("fix.at")
    assert not TYPE.is_nullable("unit.site")
    assert TYPE.field_type("fix.at") is datetime


@pytest.mark.parametrize("fields", [("unit.site",), ("unit.site", "unit.number")])
def test_keys_of_nested_fields_do_not_depend_on_the_form(fields: tuple[str, ...]) -> None:
    few = Records(TYPE, np.zeros(4, np.int64), objects=REPORTS).keys(fields, KeyHasher())
    many = columns().keys(fields, KeyHasher())

    assert [few.keys[c] for c in few.codes] == [many.keys[c] for c in many.codes]
    assert [few.hashes[c] for c in few.codes] == [many.hashes[c] for c in many.codes]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("unit.sit", "no field 'unit.sit': Unit has no 'sit'"),
        ("note.x", "no field 'note.x': str has no 'x'"),
        ("unt.site", "no field 'unt.site'"),
        ("fix.at", "may be None"),
        ("unit", "cannot be a key"),
    ],
)
def test_a_wrong_path_is_refused_with_a_reason(path: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        TYPE.key_types([path])


def test_a_class_that_contains_itself_is_refused_with_what_to_write() -> None:
    with pytest.raises(SchemaError, match="a field of Part contains its own class") as refused:
        RecordType(Part)

    assert refused.value.hint == "give the field the type Any or dict: it is stored as JSON"


def test_event_time_and_dedupe_accept_paths() -> None:
    EventTime("fix.at", max_disorder=seconds(1)).validate(TYPE)
    Dedupe("unit.site", "unit.number", within=minutes(1)).validate(TYPE)
    with pytest.raises(GraphError, match=r"no field 'fix\.when'"):
        EventTime("fix.when", max_disorder=seconds(1)).validate(TYPE)

    rows = np.arange(4)
    payload = str.encode
    few, few_timed = field_times(DecodeResult(rows, payload, objects=REPORTS), "fix.at", None)  # type: ignore[arg-type]
    many, many_timed = field_times(DecodeResult(rows, payload, batch=columns().batch()), "fix.at", None)  # type: ignore[arg-type]

    assert few_timed.tolist() == many_timed.tolist() == [True, True, False, True]
    assert few[few_timed].tolist() == many[many_timed].tolist() == [1_000_000, 2_000_000, 1_000_000]


@pytest.mark.parametrize("few_records_max", [0, 100], ids=["columns", "rows"])
def test_nested_fields_are_aggregated(few_records_max: int) -> None:
    aggregates = {"n": Count(), "known": Count("fix.speed"), "mean": Mean("fix.speed"), "last": Max("fix.at")}
    logic = WindowedLogic(FixedWindows(minutes(1)), seconds(0), aggregates, few_records_max=few_records_max)
    output = logic.output_type(TYPE, ["unit.site"])
    subject = StageDriver(logic, Report, key=("unit.site",), outputs={"out": output})

    subject.feed([(report, 0) for report in REPORTS], columns=not few_records_max)
    subject.finish()

    found = [(pane.unit_site, pane.n, pane.known, pane.mean, pane.last) for pane, _ in subject.produced("out")]
    moment = datetime.fromtimestamp
    assert sorted(found) == [("a", 3, 2, 2.0, moment(1, UTC)), ("b", 1, 0, None, moment(2, UTC))]


def test_the_column_of_a_nested_key_is_named_after_its_path() -> None:
    graph = Graph("nested")
    reports = graph.inject("reports", File("x"), schema=Report, event_time=EventTime("fix.at", max_disorder=seconds(1)))
    by_unit = reports.key_by("unit.site", "unit.number").window(FixedWindows(minutes(1)))
    by_unit.aggregate(n=Count()).to_table("counts")

    assert [column.name for column in graph.spec().tables[0].keys] == ["unit_site", "unit_number"]
    with pytest.raises(GraphError, match="column 'unit_site' is taken"):
        by_unit.aggregate(unit_site=Count())


class Renamed(msgspec.Struct, rename="camel"):
    device_id: str
    at_all: datetime
    tags: list[int]
    unit: str = "mm"


class InOrder(msgspec.Struct, array_like=True):
    device: str
    tags: list[int]


def test_stored_records_may_hold_none_in_fields_that_were_optional() -> None:
    stored = b'{"deviceId":null,"atAll":"2026-01-01T00:00:00Z","tags":[1]}'
    found = RecordType(Renamed).decode_with_none(stored)
    assert found == Renamed(None, datetime(2026, 1, 1, tzinfo=UTC), [1])  # type: ignore[arg-type]
    assert RecordType(InOrder).decode_with_none(b'["d",null,7]') == InOrder("d", None)  # type: ignore[arg-type]
