"""Enrichment by the rows of a SQL table, and rules that a Computation reads from one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest

from millpy import Computation, Context, Count, EventTime, FixedWindows, Graph, LookupTable, minutes, seconds
from millpy.errors import GraphError, SchemaError, TableLoadError, UsageError
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.testing import GraphDriver, ManualSource
from tests.alarms import Alarms, Alert, Rule

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: float


class Device(msgspec.Struct, frozen=True):
    device: str
    site: str
    limit: float | None = None
    value: int = 0


def reading(device: str, value: float = 1.0, second: int = 0) -> dict[str, Any]:
    return {"device": device, "at": NOON.replace(second=second), "value": value}


def device(name: str, site: str, **more: Any) -> dict[str, Any]:
    return {"device": name, "site": site, "limit": None, "value": 0, **more}


def enriching(**changes: Any) -> Graph:
    graph = Graph("factory")
    readings = graph.inject(
        "readings", ManualSource(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(0))
    )
    arguments = {"table": "devices", "row": Device, "key": "device", "refresh": seconds(30), **changes}
    readings.lookup(**arguments).to_table("known")
    return graph


def driven(graph: Graph, **more: Any) -> GraphDriver:
    driver = GraphDriver(graph, **more)
    driver.set_table("devices", [device("a", "north", limit=2.5, value=7), device("b", "south")])
    return driver


def columns(driver: GraphDriver, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in driver.rows("known")]


def versions(driver: GraphDriver) -> set[str]:
    entries = [e for e in driver._entries("known") if e.kind is Kind.LOOKUP]
    return {msgspec.json.decode(value)["version"] for e in entries for value in e.values if value is not None}


def test_a_record_gets_the_columns_of_its_row() -> None:
    driver = driven(enriching())

    driver.feed("readings", [reading("a", 1.5), reading("b", 2.5)])

    assert sorted(columns(driver, "device", "value", "site", "limit", "value_table")) == [
        ("a", 1.5, "north", 2.5, 7),
        ("b", 2.5, "south", None, 0),
    ]
    driver.check_accounting()


@pytest.mark.parametrize(
    "missing, rows, letters",
    [("null", [("a", "north"), ("x", None)], 0), ("drop", [("a", "north")], 0), ("dead_letter", [("a", "north")], 1)],
)
def test_a_record_without_a_row_takes_the_way_that_the_graph_says(
    missing: str, rows: list[tuple[Any, ...]], letters: int
) -> None:
    driver = driven(enriching(missing=missing))

    driver.feed("readings", [reading("a"), reading("x")])

    assert sorted(columns(driver, "device", "site")) == rows
    assert [letter.reason for letter in driver.dead_letters()] == ["no_row"] * letters
    counted = [e for e in driver._entries("known") if e.kind is Kind.COUNTER and e.namespace == "unmatched"]
    assert [value for e in counted for value in e.values] == [b"1"]
    driver.check_accounting()


def test_columns_and_objects_agree() -> None:
    few, many = driven(enriching()), driven(enriching())
    records = [reading("abx"[i % 3], float(i)) for i in range(600)]

    for record in records:
        few.feed("readings", [record])
    many.feed("readings", records)

    assert sorted(map(str, columns(few, "device", "value", "site", "limit"))) == sorted(
        map(str, columns(many, "device", "value", "site", "limit"))
    )


def test_a_changed_row_counts_from_the_next_turn_on_and_the_commit_names_the_version() -> None:
    driver = driven(enriching(intervals=1))
    driver.feed("readings", [reading("a")])
    before = versions(driver)

    driver.set_table("devices", [device("a", "west")])
    driver.feed("readings", [reading("a")])

    assert columns(driver, "site") == [("north",), ("west",)]
    assert len(before) == 1 and versions(driver) != before


def test_the_same_rows_are_the_same_version_also_after_a_restart() -> None:
    driver = driven(enriching(intervals=1))
    driver.feed("readings", [reading("a")])
    before = versions(driver)

    driver.crash()
    driver.set_table("devices", [device("a", "north", limit=2.5, value=7), device("b", "south")])
    driver.feed("readings", [reading("a")])

    assert versions(driver) == before


def test_records_wait_for_the_first_read_and_none_is_lost() -> None:
    driver = GraphDriver(enriching())
    driver.feed("readings", [reading("a"), reading("x")])
    driver.feed("readings", [reading("b")])
    driver.crash()
    driver.end()
    assert driver.rows("known") == []

    driver.set_table("devices", [device("a", "north")])

    assert sorted(columns(driver, "device", "site"), key=str) == [("a", "north"), ("b", None), ("x", None)]
    driver.check_accounting()


def test_a_window_behind_a_lookup_waits_with_it_and_then_closes() -> None:
    graph = Graph("factory")
    readings = graph.inject(
        "readings", ManualSource(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(0))
    )
    known = readings.lookup("devices", Device, key="device", refresh=seconds(1), missing="drop", name="enriched")
    known.key_by("site").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("known")
    driver = GraphDriver(graph)
    driver.feed("readings", [reading("a"), reading("b"), reading("x")])
    driver.end()
    assert driver.rows("known") == []

    driver.set_table("devices", [device("a", "north"), device("b", "north")])

    assert columns(driver, "site", "n") == [("north", 2)]


def test_every_turn_that_a_crash_has_lost_is_made_again() -> None:
    driver = driven(enriching())

    with driver.crashing():
        driver.feed("readings", [reading("a"), reading("x")])

    assert sorted(columns(driver, "device", "site"), key=str) == [("a", "north"), ("x", None)]
    driver.check_accounting()


def test_a_row_that_does_not_fit_is_missing_and_counted() -> None:
    driver = GraphDriver(enriching())

    with pytest.raises(UsageError, match="set_table takes a list of rows"):
        driver.set_table("devices", device("a", "north"))  # type: ignore[arg-type]
    driver.set_table("devices", [device("a", "north"), {"device": "b", "site": 5}, b'{"device":\n"c"}'])
    driver.feed("readings", [reading("a"), reading("b"), reading("c")])

    assert sorted(columns(driver, "device", "site"), key=str) == [("a", "north"), ("b", None), ("c", None)]
    (version,) = driver._host.tables.values()
    assert (version.rows, version.misfits) == (1, 2)
    assert "site" in version.misfit


@pytest.mark.parametrize(
    "rows, limits, why",
    [
        ([device("a", "north"), device("b", "x"), device("a", "south")], Limits(), "2 rows with the key 'a'"),
        ([device(str(i), "north") for i in range(11)], Limits(lookup_rows_max=10), "more than 10 rows"),
        ([device("a", "n" * 1000)], Limits(lookup_bytes_max=1_000), "more than 1,000 bytes"),
    ],
)
def test_a_table_beyond_its_bounds_is_not_taken_and_the_version_before_stays(
    rows: list[Any], limits: Limits, why: str
) -> None:
    driver = driven(enriching(), limits=limits)

    with pytest.raises(TableLoadError, match=why):
        driver.set_table("devices", rows)

    driver.feed("readings", [reading("a")])
    assert columns(driver, "site") == [("north",)]


class Typed(msgspec.Struct):
    a: int
    b: UUID
    at: datetime


class Row(msgspec.Struct):
    number: int
    id: UUID
    moment: datetime | None
    tags: list[str] = []
    raw: bytes | None = None


def test_keys_of_several_fields_and_values_of_all_types_are_found() -> None:
    graph = Graph("typed")
    stream = graph.inject("typed", ManualSource(), schema=Typed, event_time=EventTime("at", max_disorder=seconds(0)))
    stream.lookup("s.t", Row, key=["a", "b"], table_key=["number", "id"], refresh=seconds(1), missing="drop").to_table(
        "known"
    )
    driver = GraphDriver(graph)
    one, two = UUID(int=1), UUID(int=2)
    driver.set_table("s.t", [Row(1, one, NOON, ["x"], b"\0\1"), Row(1, two, None)])

    driver.feed("typed", [Typed(1, one, NOON), Typed(1, two, NOON), Typed(2, one, NOON)])

    assert sorted(columns(driver, "b", "moment", "tags", "raw"), key=str) == [
        (one, NOON, ["x"], b"\0\1"),
        (two, None, [], None),
    ]


def alarming(computation: Computation | None = None) -> Graph:
    graph = Graph("alarms")
    readings = graph.inject(
        "readings", ManualSource(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(0))
    )
    readings.key_by("device").process(computation or Alarms(), name="alarms", output=Alert).to_table("known")
    return graph


def test_a_computation_reads_a_whole_table_and_a_changed_rule_changes_it() -> None:
    driver = GraphDriver(alarming())
    driver.feed("readings", [reading("a", 5.0)])
    assert driver.rows("known") == []

    driver.set_table("rules", [Rule("hot", 4.0), Rule("hotter", 8.0)])
    driver.feed("readings", [reading("b", 9.0)])
    driver.set_table("rules", [Rule("cold", -1.0)])
    driver.feed("readings", [reading("c", 0.0)])

    assert columns(driver, "device", "rule") == [("a", "hot"), ("b", "hot"), ("b", "hotter"), ("c", "cold")]
    driver.check_accounting()


def test_async_calls_and_timers_see_the_table_too() -> None:
    class Delayed(Computation):
        rules = LookupTable("rules", Rule, key="name", refresh=seconds(5))

        async def process_record(self, context: Context, record: Reading) -> None:
            context.set_timer("later", at=context.event_time_us)

        def process_timer(self, context: Context, timer: Any) -> None:
            context.produce(Alert(context.key, context.table(Delayed.rules)["hot"].name))

    driver = GraphDriver(alarming(Delayed()))
    driver.set_table("rules", [Rule("hot", 4.0)])

    driver.feed("readings", [reading("a", second=1)])
    driver.end()

    assert columns(driver, "device", "rule") == [("a", "hot")]


def test_a_table_that_is_no_attribute_is_refused_with_a_hint() -> None:
    class Wrong(Computation):
        def process_record(self, context: Context, record: Reading) -> None:
            context.table(Alarms.rules)

    driver = GraphDriver(alarming(Wrong()))

    driver.feed("readings", [reading("a")])

    (letter,) = driver.dead_letters()
    assert "no table of this class" in letter.detail


class Mutable(msgspec.Struct):
    name: str


class Wide(msgspec.Struct):
    device: int
    site: str


@pytest.mark.parametrize(
    "changes, error, why",
    [
        ({"table": ""}, GraphError, "not the name of a table"),
        ({"table": "a.b.c"}, GraphError, "not the name of a table"),
        ({"table": "a" * 64}, GraphError, "not the name of a table"),
        ({"refresh": seconds(0)}, GraphError, "not a duration"),
        ({"refresh": 30}, GraphError, "not a duration"),
        ({"missing": "skip"}, GraphError, "unknown missing='skip'"),
        ({"suffix": "-"}, GraphError, "makes no field name"),
        ({"key": "nothing"}, SchemaError, "no field 'nothing'"),
        ({"table_key": "nothing"}, SchemaError, "no field 'nothing'"),
        ({"row": Wide}, GraphError, "cannot look up"),
        ({"row": dict}, SchemaError, "not a msgspec.Struct"),
        ({"name": "With Space"}, GraphError, "not a plain name"),
        ({"suffix": ""}, GraphError, "two fields of the joined record"),
    ],
)
def test_a_wrong_use_is_refused_when_the_graph_is_built(
    changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        enriching(**changes)


def test_rows_that_a_call_could_change_are_refused() -> None:
    class Careless(Computation):
        names = LookupTable("names", Mutable, key="name", refresh=seconds(5))

        def process_record(self, context: Context, record: Any) -> None: ...

    with pytest.raises(GraphError, match="could be changed by a call"):
        alarming(Careless())


def test_two_ways_to_read_a_table_are_refused() -> None:
    graph = enriching()
    readings = graph.inject("more", ManualSource(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(0)))

    with pytest.raises(GraphError, match="in different ways"):
        readings.lookup("devices", Device, key="device", refresh=seconds(1), name="again")
    readings.lookup("public.devices", Device, key="device", refresh=seconds(30), name="once_more")


def test_a_stream_with_retractions_is_refused() -> None:
    from millpy import Accumulation, AfterCount, AfterWatermark

    graph = Graph("factory")
    readings = graph.inject(
        "readings", ManualSource(), schema=Reading, event_time=EventTime("at", max_disorder=seconds(0))
    )
    panes = (
        readings.key_by("device")
        .window(
            FixedWindows(minutes(1)),
            trigger=AfterWatermark(early=AfterCount(1)),
            accumulation=Accumulation.RETRACTING,
            name="counts",
        )
        .aggregate(n=Count())
    )

    with pytest.raises(GraphError, match="may be retracted"):
        panes.lookup("devices", Device, key="device", refresh=seconds(30), name="enriched")


def test_a_driver_names_the_tables_that_it_knows() -> None:
    with pytest.raises(UsageError, match=r"no lookup table 'public\.rules'") as caught:
        GraphDriver(enriching()).set_table("rules", [])
    assert "public.devices" in caught.value.hint
