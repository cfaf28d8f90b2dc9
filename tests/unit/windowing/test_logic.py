"""Columnar windows: panes, lateness, expiry, and values that JSON or 64 bits cannot hold."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from millpy.errors import GraphError, SchemaError
from millpy.model.checkpoint import Kind, ResultRows
from millpy.model.record import RecordType
from millpy.model.stage import StepResult
from millpy.model.time import INSTANT_MAX
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, Sum
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows
from tests.stage_driver import StageDriver

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Reading(msgspec.Struct):
    key: str
    value: float | None = None
    number: int | None = None
    text: str | None = None
    seen: datetime | None = None


def driver(
    few: int, *, lateness: int = 0, aggregates: dict[str, Aggregate] | None = None, **settings: Any
) -> StageDriver:
    """Windows of 10 µs."""
    aggregates = aggregates or {"n": Count()}
    logic = WindowedLogic(
        FixedWindows(timedelta(microseconds=10)), timedelta(microseconds=lateness), aggregates, few_records_max=few
    )
    output = logic.output_type(RecordType(Reading), ("key",))
    return StageDriver(logic, Reading, outputs={"windows": output}, tables={"windows": 5}, **settings)


paths = pytest.mark.parametrize("few", [0, 1_000], ids=["columns", "plain"])


def rows(result: StepResult) -> list[tuple[Any, ...]]:
    """Result rows as tuples; whether they are first panes at the end."""
    found = []
    part: ResultRows
    for part in result.results:
        columns = [c if isinstance(c, list) else c.to_pylist() for c in part.columns]
        found += [(*row, part.first) for row in zip(*columns, strict=True)]
        assert part.table_id == 5
        assert all(len(column) == part.count for column in columns)
    return sorted(found, key=str)


def of(at: int, key: str = "a", **fields: Any) -> tuple[Reading, int]:
    return Reading(key, **fields), at


@paths
def test_window_is_emitted_once_the_watermark_reaches_its_end(few: int) -> None:
    subject = driver(few)

    first = subject.feed([of(1), of(2), of(1, "b"), of(9)])
    assert rows(first) == []
    assert subject.interval.oldest_work() == 9
    assert subject.interval.next_due() == (10, INSTANT_MAX)
    second = subject.feed([of(10)])

    assert rows(second) == [("a", 0, 10, 3, 0, "on_time", 0, True), ("b", 0, 10, 1, 0, "on_time", 0, True)]
    assert [at for _, at in subject.produced("windows")] == [9, 9]
    assert {name[3] for name in subject.stored} == {"10/20"}


@paths
def test_window_opened_and_closed_within_a_bundle_never_touches_the_state(few: int) -> None:
    subject = driver(few)

    result = subject.feed([of(1), of(2), of(11), of(12), of(20, "b")])

    assert [row[:4] for row in rows(result)] == [("a", 0, 10, 2), ("a", 10, 20, 2)]
    (entries,) = result.delta
    assert (entries.kind, entries.subkeys, entries.fire_ats) == (Kind.WINDOW, ["20/30"], [30])


@paths
def test_late_record_within_allowed_lateness_makes_the_next_pane(few: int) -> None:
    subject = driver(few, lateness=10)

    subject.feed([of(1), of(12)])
    subject.restart()
    late = subject.feed([of(2), of(3, "b"), of(15)])

    assert rows(late) == [("a", 0, 10, 2, 1, "late", 1, False), ("b", 0, 10, 1, 0, "late", 1, True)]
    assert not late.late
    assert subject.interval.oldest_work() == 19


@paths
def test_late_record_is_stored_with_its_window(few: int) -> None:
    subject = driver(few, lateness=10)

    subject.feed([of(1), of(20)])
    result = subject.feed([of(3, value=1.5), of(21)])

    (late,) = result.late
    assert result.late_by_input == {0: 1}
    assert (late.keys, late.event_times, late.watermarks) == ([b'"a"'], [3], [20])
    assert (late.window_starts, late.window_ends, late.stream) == ([0], [10], "input")
    assert msgspec.json.decode(late.payloads[0], type=Reading).value == 1.5
    assert rows(result) == []


@paths
def test_expired_window_leaves_a_tombstone_only_if_it_was_written(few: int) -> None:
    subject = driver(few, lateness=5)

    subject.feed([of(1), of(11)])
    assert len(subject.stored) == 2
    result = subject.feed([of(40)])

    (entries,) = result.delta
    assert dict(zip(entries.subkeys, entries.values, strict=True))["0/10"] is None
    assert {name[3] for name in subject.stored} == {"40/50"}


@paths
def test_stored_pane_has_its_index_and_late_count(few: int) -> None:
    subject = driver(few, lateness=100)

    subject.feed([of(1), of(12), of(2)])

    stored = msgspec.json.decode(subject.stored[(Kind.WINDOW, "", b'"a"', "0/10")][0])
    assert stored == {"values": [2], "pane_index": 1, "late_count": 1, "emitted": True, "bundle": 1}


ALL: dict[str, Aggregate] = {
    "n": Count(),
    "nn": Count("value"),
    "total": Sum("value"),
    "whole": Sum("number"),
    "mean": Mean("value"),
    "mean_whole": Mean("number"),
    "low": Min("value"),
    "high": Max("number"),
    "first": Min("text"),
    "last": Max("seen"),
}


@paths
@pytest.mark.parametrize("split", [False, True], ids=["direct", "through state"])
def test_every_aggregate_leaves_nulls_out(few: int, split: bool) -> None:
    subject = driver(few, aggregates=ALL)
    moment = EPOCH + timedelta(days=400)
    records = [
        of(1, value=1.5, number=2, text="x", seen=EPOCH),
        of(2),
        of(3, value=2.5, number=5, text="é", seen=moment),
        of(4, "b"),
    ]

    if split:
        for record in records:
            subject.feed([record])
            subject.restart()
        records = []
    result = subject.feed([*records, of(10)])

    assert [row[3:13] for row in rows(result)] == [
        (3, 2, 4.0, 7, 2.0, 3.5, 1.5, 5, "x", moment),
        (1, 0, None, None, None, None, None, None, None, None),
    ]
    types = [type(value) for value in rows(result)[0][3:8]]
    assert types in ([int, int, float, int, float], [int, int, float, Decimal, float])


@paths
def test_integer_sum_beyond_64_bits_is_exact(few: int) -> None:
    subject = driver(few, aggregates={"total": Sum("number"), "mean": Mean("number")})
    wide = 2**62

    subject.feed([of(1, number=wide), of(2, number=wide), of(3, number=wide), of(4, "b", number=-wide)])
    subject.restart()
    result = subject.feed([of(5, number=wide), of(10)])

    assert [row[3:5] for row in rows(result)] == [(4 * wide, float(wide)), (-wide, -float(wide))]


@paths
@pytest.mark.parametrize("cuts", [[4], [2, 2], [1, 1, 1, 1]], ids=["one bundle", "two", "many"])
@pytest.mark.parametrize("restarts", [False, True])
def test_mean_of_integers_beyond_53_bits_is_rounded_once(few: int, cuts: list[int], restarts: bool) -> None:
    subject = driver(few, aggregates={"mean": Mean("number")})
    wide = 2**53 + 1
    coming = [of(1, number=wide), of(2, number=wide), of(3, number=wide), of(10)]

    for count in cuts:
        if restarts:
            subject.restart()
        result = subject.feed(coming[:count])
        del coming[:count]

    assert float(3 * wide) / 3 != 3 * wide / 3, "rounding the sum first is seen"
    assert [row[3] for row in rows(result)] == [3 * wide / 3]


@paths
def test_infinite_sum_survives_a_restart(few: int) -> None:
    subject = driver(few, aggregates={"total": Sum("value"), "low": Min("value")})

    subject.feed([of(1, value=1e308), of(2, value=1e308)])
    subject.restart()
    result = subject.feed([of(3, value=-1e308), of(10)])

    assert [row[3:5] for row in rows(result)] == [(math.inf, -1e308)]


@paths
def test_text_and_keys_with_nul_are_dead_lettered(few: int) -> None:
    subject = driver(few, aggregates={"first": Min("text")})

    result = subject.feed([of(1, text="a\x00"), of(2, "k\x00", text="b"), of(3, text="c"), of(10)])

    assert sorted(dead_letter.reason for dead_letter in result.dead_letters) == ["key", "refused"]
    assert result.dead_lettered_by_input == {0: 2}
    assert [row[3] for row in rows(result)] == ["c"]


@paths
def test_behind_a_keyed_stage_lateness_is_judged_by_the_watermark_before_the_turn(few: int) -> None:
    subject = driver(few, source_fed=False)

    result = subject.feed([of(1), of(25), of(2)], watermark=20)
    assert [row[3] for row in rows(result)] == [2]
    result = subject.feed([of(11)], watermark=20)
    assert result.late_by_input == {0: 1}


@paths
def test_cap_of_other_producers_keeps_records_on_time(few: int) -> None:
    subject = driver(few)

    result = subject.feed([of(1), of(50), of(2)], cap=5)

    assert not result.late
    assert subject.interval.oldest_work() == 9


@paths
def test_many_panes_become_one_batch_of_records(few: int) -> None:
    subject = driver(few)

    result = subject.feed([*(of(n % 10, f"key-{n}") for n in range(100)), of(10)])

    records = result.productions["windows"]
    assert len(records) == 100
    assert records.batch().schema == subject.binding.outputs["windows"].schema
    record = min(records.objects(), key=lambda r: r.key)
    assert (record.key, record.window_start, record.window_end) == ("key-0", EPOCH, EPOCH + timedelta(microseconds=10))


def test_missing_text_of_many_panes_stays_missing_downstream() -> None:
    subject = driver(0, aggregates={"first": Min("text")})

    subject.feed([of(1, f"key-{n}") for n in range(100)])
    result = subject.feed([of(10)])

    assert result.productions["windows"].batch().column("first").null_count == 100


def test_windows_and_aggregates_are_values() -> None:
    assert FixedWindows(timedelta(minutes=1)) == FixedWindows(timedelta(seconds=60))
    assert repr(FixedWindows(timedelta(minutes=1))) == "FixedWindows(minutes(1))"
    assert Mean("x") == Mean("x") != Sum("x")
    assert repr(Count()) == "Count()"
    assert repr(Max("temperature")) == "Max('temperature')"
    assert hash(Count("x")) == hash(Count("x"))


@pytest.mark.parametrize(
    "aggregate",
    [
        Sum("text"),
        Mean("seen"),
        Sum("nowhere"),
        Mean(),
        Max(
            "key",
        ),
    ],
)
def test_aggregate_that_does_not_fit_its_field_is_refused(aggregate: Aggregate) -> None:
    if aggregate == Max("key"):
        assert aggregate.bind(RecordType(Reading)).result == str | None
        return
    with pytest.raises(SchemaError):
        aggregate.bind(RecordType(Reading))


def test_window_without_size_is_refused() -> None:
    with pytest.raises(GraphError):
        FixedWindows(timedelta(0))
