"""Operators: the same for a handful of records as for whole columns, and no record lost or doubled by a failing one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from millpy.errors import GraphError, SchemaError
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.identity_text import identity_text
from millpy.model.record import Records, RecordType
from millpy.model.time import seconds
from millpy.operators.map import FlatMap, Map
from millpy.operators.stateless import Chain, ChainOutput, Chains, Filter, Split
from millpy.sources.files.source import File


class Reading(msgspec.Struct):
    device: str
    value: int


class Half(msgspec.Struct):
    device: str
    half: float | None
    at: datetime | None = None


TYPE, HALF = RecordType(Reading), RecordType(Half)
VALUES = [3, 8, 42, 5, 0, 42, 7, 6]


def records(form: str = "objects", values: list[int] = VALUES) -> Records:
    objects = [Reading(f"d{value % 3}", value) for value in values]
    times = np.arange(len(values), dtype=np.int64) * 10
    watermarks = times - 5
    if form == "objects":
        return Records(TYPE, times, watermarks=watermarks, objects=objects)
    return Records(TYPE, times, watermarks=watermarks, batch=TYPE.batch_of(objects))


def passed(*chain: Any, form: str = "objects", attempts: int = 3) -> ChainOutput:
    found = Chains({"s": records(form)}, attempts).output_of("s", tuple(chain))
    assert found is not None
    return found


def seen(found: ChainOutput) -> list[Any]:
    assert found.records.watermarks is not None
    return list(
        zip(found.records.objects(), found.records.event_times.tolist(), found.records.watermarks.tolist(), strict=True)
    )


def refuse(value: int) -> int:
    if value == 42:
        raise ValueError("42 again")
    return value


def refuse_any(batch: pa.RecordBatch) -> pa.Array:
    for value in batch.column("value").to_pylist():
        refuse(value)
    return batch.column("value")


def half(record: Reading) -> Half:
    return Half(record.device, refuse(record.value) / 2)


def half_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return {
        "device": batch.column("device"),
        "half": pc.divide(refuse_any(batch).cast(pa.float64()), 2.0),
        "at": pa.nulls(len(batch)),
    }


def repeated(record: Reading) -> list[Half]:
    return [Half(record.device, n / 2) for n in range(refuse(record.value) % 3)]


def repeated_columns(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    counts = np.array(refuse_any(batch)) % 3
    parents = np.repeat(np.arange(len(batch)), counts)
    halves = np.concatenate([np.arange(n) / 2 for n in counts])
    devices = batch.column("device").take(pa.array(parents))
    return HALF.batch_of([Half(d, h) for d, h in zip(devices.to_pylist(), halves.tolist(), strict=True)]), parents


PAIRS: list[Callable[[bool], Chain]] = [
    lambda columns: (
        Filter(
            (lambda b: pc.greater(refuse_any(b), 4)) if columns else (lambda r: refuse(r.value) > 4),
            TYPE,
            columns=columns,
        ),
    ),
    lambda columns: (Map(half_columns if columns else half, TYPE, HALF, columns=columns, event_time=None),),
    lambda columns: (FlatMap(repeated_columns if columns else repeated, TYPE, HALF, columns=columns, event_time=None),),
    lambda columns: (
        split := Split(
            (lambda b: pc.if_else(pc.greater(refuse_any(b), 4), "big", pa.scalar(None, pa.string())))
            if columns
            else (lambda r: "big" if refuse(r.value) > 4 else None),
            TYPE,
            ["big", "small"],
            columns=columns,
        ),
        split.branch("big"),
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=["filter", "map", "flat_map", "split"])
@pytest.mark.parametrize("form", ["objects", "columns"])
def test_functions_of_columns_equal_functions_of_records(pair: Callable[[bool], Chain], form: str) -> None:
    by_record, by_column = passed(*pair(False), form=form), passed(*pair(True), form=form)

    assert seen(by_record) == seen(by_column) != []
    assert [row for row, _ in by_record.failures] == [row for row, _ in by_column.failures] == [2, 5]
    assert {str(error) for _, error in by_record.failures} == {"42 again"}


@pytest.mark.parametrize("pair", PAIRS, ids=["filter", "map", "flat_map", "split"])
@pytest.mark.parametrize("columns", [False, True], ids=["objects", "columns"])
def test_filtered_records_do_not_depend_on_bundles(pair: Callable[[bool], Chain], columns: bool) -> None:
    whole, pieces = records(), []
    for start in range(0, len(VALUES), 3):
        found = Chains({"s": whole.slice(start, start + 3)}, 1).output_of("s", pair(columns))
        assert found is not None
        pieces.extend(seen(found))

    assert pieces == seen(passed(*pair(columns)))


def test_rows_keep_the_watermark_of_their_record() -> None:
    big = Filter(lambda r: r.value > 4, TYPE, columns=False)
    twice = FlatMap(lambda r: [r, r], TYPE, TYPE, columns=False, event_time=None)

    found = passed(big, twice)

    assert [(r.value, at, mark) for r, at, mark in seen(found)][:4] == [
        (8, 10, 5),
        (8, 10, 5),
        (42, 20, 15),
        (42, 20, 15),
    ]
    assert found.rows is not None
    assert found.rows.tolist() == [1, 1, 2, 2, 3, 3, 5, 5, 6, 6, 7, 7]


def test_a_record_is_tried_again_before_it_is_dead_lettered() -> None:
    calls: list[int] = []

    def flaky(record: Reading) -> bool:
        calls.append(record.value)
        return bool(refuse(record.value if calls.count(42) != 2 else 0) + 1)

    found = passed(Filter(flaky, TYPE, columns=False), attempts=2)

    assert len(found.records) == len(VALUES) - 1
    assert [row for row, _ in found.failures] == [5]
    assert calls.count(42) == 4


def test_a_function_that_mutates_its_record_affects_no_other_consumer() -> None:
    def double(record: Reading) -> Reading:
        record.value *= 2
        return record

    doubled = Map(double, TYPE, TYPE, columns=False, event_time=None)
    chains = Chains({"s": records()}, 3)

    first, plain, second = (
        chains.output_of("s", (doubled,)),
        chains.output_of("s", ()),
        chains.output_of("s", (doubled, doubled)),
    )

    assert first is not None and plain is not None and second is not None
    assert [r.value for r in first.records.objects()] == [2 * v for v in VALUES]
    assert [r.value for r in plain.records.objects()] == VALUES
    assert [r.value for r in second.records.objects()] == [4 * v for v in VALUES]


def test_operators_shared_by_consumers_run_once() -> None:
    calls: list[int] = []
    counted = Filter(lambda r: calls.append(r.value) or True, TYPE, columns=False)
    split = Split(lambda r: calls.append(r.value) or "a", TYPE, ["a", "b"], columns=False)
    chains = Chains({"s": records()}, 3)

    for end in ((counted,), (counted, split, split.branch("a")), (counted, split, split.branch("b"))):
        chains.output_of("s", end)

    assert len(calls) == 2 * len(VALUES)


def test_a_map_may_only_move_event_times_forward() -> None:
    def moved(record: Reading) -> Half:
        return Half(record.device, None, datetime.fromtimestamp(record.value / 1e6, UTC) if record.value else None)

    by_record = passed(Map(moved, TYPE, HALF, columns=False, event_time="at"))

    def moved_columns(batch: pa.RecordBatch) -> pa.RecordBatch:
        return HALF.batch_of([moved(record) for record in TYPE.objects_of(batch)])

    by_column = passed(Map(moved_columns, TYPE, HALF, columns=True, event_time="at"))

    # Event times are 0, 10, 20, ... µs; those made are the values.
    assert by_record.records.event_times.tolist() == by_column.records.event_times.tolist() == [3, 42]
    errors = [f"{type(error).__name__}: {error}" for _, error in by_record.failures]
    assert errors == [f"{type(e).__name__}: {e}".replace("moved_columns", "moved") for _, e in by_column.failures]
    assert "older than its original" in errors[0]
    assert "the event time at is None" in errors[2]
    assert [row for row, _ in by_record.failures] == [row for row, _ in by_column.failures] == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("columns", [False, True], ids=["objects", "columns"])
def test_values_that_cannot_be_stored_are_dead_lettered(columns: bool) -> None:
    def bad(record: Reading) -> Half:
        return Half("\0" if record.value == 3 else record.device, float("nan") if record.value == 8 else 1.0)

    function = (lambda b: HALF.batch_of([bad(r) for r in TYPE.objects_of(b)])) if columns else bad
    found = passed(Map(function, TYPE, HALF, columns=columns, event_time=None))

    assert [row for row, _ in found.failures] == [0, 1]
    assert {type(error).__name__ for _, error in found.failures} == {"RefusedValueError"}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b: 7, "returned int"),
        (lambda b: {"device": b.column("device")}, "returned the columns device"),
        (lambda b: {"device": b.column("device"), "half": pa.array([1.0]), "at": pa.nulls(1)}, "values for 8 records"),
        (
            lambda b: {"device": b.column("value"), "half": b.column("value"), "at": pa.nulls(8)},
            "returned int64 for 'device'",
        ),
    ],
)
def test_columns_of_a_wrong_shape_are_a_program_error(function: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        passed(Map(function, TYPE, HALF, columns=True, event_time=None))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b: b.column("value"), "returned int64"),
        (lambda b: np.array([True]), "1 values for 8 records"),
    ],
)
def test_a_filter_returns_one_truth_value_a_record(function: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        passed(Filter(function, TYPE, columns=True))


@pytest.mark.parametrize("rows", [[1, 0], [-1, 0], [7, 8]])
def test_a_flat_map_names_rows_that_exist_in_order(rows: list[int]) -> None:
    answer = (HALF.batch_of([Half("a", 1.0)] * 2), rows)

    with pytest.raises(SchemaError, match="row indexes that are not ascending"):
        passed(FlatMap(lambda b: answer, TYPE, HALF, columns=True, event_time=None))


def test_a_flat_map_that_never_ends_refuses_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpy.operators.map.CALL_RECORDS_MAX", 5)

    def make(record: Reading) -> Iterator[Half]:
        return itertools.repeat(Half("d", 1.0)) if record.value == 8 else itertools.repeat(Half("d", 1.0), 5)

    found = passed(FlatMap(make, TYPE, HALF, columns=False, event_time=None))

    assert len(found.records) == 5 * (len(VALUES) - VALUES.count(8))
    assert [VALUES[row] for row, _ in found.failures] == [8]
    assert str(found.failures[0][1]).endswith("makes more than 5 records of one")


def test_a_record_of_another_type_is_dead_lettered_with_a_reason() -> None:
    found = passed(Map(lambda r: r.value, TYPE, HALF, columns=False, event_time=None))

    assert not len(found.records)
    assert str(found.failures[0][1]).endswith("makes Half, not int")


def test_an_unknown_branch_is_dead_lettered() -> None:
    split = Split(lambda r: "big" if r.value > 4 else "tiny", TYPE, ["big"], columns=False)

    found = passed(split, split.branch("big"))

    assert [row for row, _ in found.failures] == [0, 4]
    assert "has no branch 'tiny', only big" in str(found.failures[0][1])


def source(graph: Graph, name: str = "readings") -> Any:
    return graph.inject(
        name, File("x"), schema=Reading, event_time=EventTime("value", unit="s", max_disorder=seconds(1))
    )


def test_a_graph_shows_the_operators_of_a_subscription() -> None:
    graph = Graph("ops")
    from tests.crash.memory_world import Totals  # any Computation

    warm = source(graph).filter(half).map(half, Half)
    warm.key_by("device").process(Totals(), name="totals")

    (subscription,) = graph.spec().subscriptions
    assert subscription.stream == "readings"
    assert [identity_text(operator.identity()) for operator in warm.routes[0].operators] == [
        "filter(half): device: str, value: int",
        "map(half): device: str, half: float | None, at: datetime | None",
    ]
    assert subscription.operators == tuple(operator.identity() for operator in warm.routes[0].operators)
    later = source(Graph("later")).map(half, Half, event_time="at")
    assert identity_text(later.routes[0].operators[0].identity()).startswith("map(half, event_time='at'): device")


async def _waits(record: Reading) -> Reading:
    return record


def test_invalid_operator_is_refused_when_the_graph_is_built() -> None:
    graph = Graph("ops")
    readings = source(graph)

    with pytest.raises(GraphError, match="cannot await _waits"):
        readings.map(_waits)
    with pytest.raises(GraphError, match="no computation that could write"):
        readings.filter(half).to_table("t")
    with pytest.raises(GraphError, match="different types: Reading, Half"):
        readings.union(readings.map(half, Half))
    with pytest.raises(GraphError, match="another graph"):
        readings.union(source(Graph("other")))
    with pytest.raises(GraphError, match="is not a datetime"):
        readings.map(half, Half, event_time="half")
    with pytest.raises(GraphError, match="each once"):
        readings.split(half, into=["a", "a"])
    with pytest.raises(SchemaError, match="has no field 'value'"):
        readings.map(half, Half).key_by("value")
