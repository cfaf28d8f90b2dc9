"""Aggregates that keep more than a number: their results at their limits, and bounds on their state."""

from __future__ import annotations

import math
import random
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.errors import SchemaError
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType, WideInt
from millpy.windowing.accumulator import AccumulatorSet, Aggregate, ArrayAccumulator
from millpy.windowing.aggregates.distinct import ApproxDistinct
from millpy.windowing.aggregates.numeric import StandardDeviation, Variance
from millpy.windowing.aggregates.positional import COLLECT_BYTES_MAX, Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import BUCKETS_MAX, Quantile
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows
from tests.stage_driver import StageDriver

WIDE = FixedWindows(timedelta(seconds=1))


class Reading(msgspec.Struct):
    key: str = "a"
    value: float | None = None
    number: int | None = None
    text: str | None = None
    seen: datetime | None = None
    total: WideInt | None = None


def driver(few: int, **aggregates: Aggregate) -> StageDriver:
    logic = WindowedLogic(WIDE, timedelta(0), aggregates, few_records_max=few)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, max_disorder=1_000_000)


def result(few: int, bundles: list[list[tuple[Reading, int]]], aggregate: Aggregate) -> Any:
    """The only result of the only window, through the state and a restart after each bundle."""
    subject = driver(few, result=aggregate)
    for bundle in bundles:
        subject.feed(bundle, columns=few == 0)
        subject.restart()
    subject.finish()
    ((record, _),) = subject.produced("windows")
    return record.result


def joined(bundles: list[list[Any]]) -> list[Any]:
    return [row for bundle in bundles for row in bundle]


def merged_at_once(rows: list[tuple[Reading, int]], aggregate: Aggregate) -> Any:
    """The result of accumulators of one record each, merged as columns."""
    accumulator = aggregate.bind(RecordType(Reading))
    assert isinstance(accumulator, ArrayAccumulator)
    each = [
        accumulator.empty() if record.value is None else accumulator.add(accumulator.empty(), record.value, at)
        for record, at in rows
    ]
    (whole,) = accumulator.accumulators_of(accumulator.merge_neighbors(accumulator.gather(each), np.zeros(1, np.int64)))
    return accumulator.result_of(whole)


paths = pytest.mark.parametrize("few", [0, 100_000], ids=["columns", "plain"])


@paths
def test_first_and_last_are_ordered_by_event_time_then_by_arrival(few: int) -> None:
    rows = [(5, 1.0), (3, None), (7, 2.0), (7, 3.0), (4, 4.0), (4, 5.0), (8, None)]
    bundles = [[(Reading(value=value), at)] for at, value in rows]

    for given in (bundles, [joined(bundles)]):
        assert result(few, given, First("value")) == 4.0
        assert result(few, given, Last("value")) == 3.0


@paths
def test_datetimes_and_booleans_are_kept_too(few: int) -> None:
    moments = [datetime(2024, 1, day, tzinfo=UTC) for day in (1, 2, 3)]
    bundle = [(Reading(seen=moment), at) for at, moment in enumerate(moments)]

    assert result(few, [bundle], Last("seen")) == moments[2]
    assert result(few, [bundle], Top("seen", n=2)) == [moments[2], moments[1]]
    assert result(few, [bundle], Collect("seen")) == moments


@paths
def test_collect_keeps_the_earliest_up_to_its_limit(few: int) -> None:
    rows = [(Reading(number=at), at) for at in range(50)]
    random.Random(1).shuffle(rows)

    assert result(few, [rows[:20], rows[20:]], Collect("number", limit=7)) == list(range(7))
    assert result(few, [rows[:20], rows[20:]], Collect("number")) == list(range(50))


@paths
def test_collect_keeps_no_more_bytes_than_its_limit(few: int) -> None:
    long = "x" * (COLLECT_BYTES_MAX // 4)
    rows = [(Reading(text=f"{at}{long}"), at) for at in range(6)]

    kept = result(few, [rows[3:], rows[:3]], Collect("text"))

    assert [text[0] for text in kept] == ["0", "1", "2", "3"]


@paths
def test_collected_long_text_does_not_depend_on_bundles(few: int) -> None:
    # A value that did not fit was dropped, and a shorter one behind it was kept when it came in another bundle.
    sizes = (COLLECT_BYTES_MAX // 2 + 1, COLLECT_BYTES_MAX // 2 + 1, 1)
    rows = [(Reading(text="x" * size), at) for at, size in enumerate(sizes)]

    cut = [result(few, bundles, Collect("text")) for bundles in ([rows], [rows[:2], rows[2:]], [rows[2:], rows[:2]])]

    assert [list(map(len, kept)) for kept in cut] == [list(sizes[:2])] * 3


@paths
def test_lists_show_values_without_a_json_form_as_null(few: int) -> None:
    rows = [(Reading(value=value), at) for at, value in enumerate([1.0, math.inf, math.nan])]

    assert result(few, [rows[:2], rows[2:]], Collect("value")) == [1.0, None, None]
    assert result(few, [rows[:2], rows[2:]], Top("value", n=2)) == [None, 1.0]


@paths
def test_a_list_of_sums_has_none_for_what_exceeds_64_bits(few: int) -> None:
    sums = [2**63 - 1, 2**63, 3, -(2**63), -(2**70)]
    bundles = [[(Reading(total=total), at) for at, total in enumerate(sums)]]

    assert result(few, bundles, Collect("total")) == [2**63 - 1, None, 3, -(2**63), None]
    assert result(few, bundles, Top("total", n=3)) == [None, 2**63 - 1, 3]


@paths
def test_quantiles_are_those_of_the_ddsketch_package(few: int) -> None:
    ddsketch = pytest.importorskip("ddsketch", reason="a test dependency is not installed")
    rng = random.Random(7)
    values = [rng.lognormvariate(0, 2) * rng.choice([1, 1, -1]) for _ in range(500)] + [0.0] * 20
    bundles = [[(Reading(value=value), at)] for at, value in enumerate(values)]
    theirs = ddsketch.DDSketch(0.01)
    for value in values:
        theirs.add(value)

    for q in (0.0, 0.1, 0.33, 0.5, 0.9, 0.999, 1.0):
        ours = result(few, [joined(bundles[:200]), joined(bundles[200:])], Quantile("value", q))
        exact = sorted(values)[math.floor(q * (len(values) - 1))]
        assert math.isclose(ours, exact, rel_tol=0.0100001)
        if q > 0.45:  # below, where values are negative, the package counts from the other side
            assert math.isclose(ours, theirs.get_quantile_value(q), rel_tol=1e-9)


@paths
def test_sketch_of_quantiles_stays_bounded_and_right_at_the_top(few: int) -> None:
    values = [1.03**power for power in range(-3_000, 3_000)]
    random.Random(3).shuffle(values)
    rows = [(Reading(value=value), at) for at, value in enumerate(values)]
    subject = driver(few, top=Quantile("value", 0.999), low=Quantile("value", 0.01))

    for start in range(0, len(rows), 1_000):
        subject.feed(rows[start : start + 1_000], columns=few == 0)
    ((stored, _, _),) = [found for name, found in subject.stored.items() if name[0] is Kind.WINDOW]
    buckets, *others = msgspec.json.decode(stored)["values"]
    subject.finish()

    ((record, _),) = subject.produced("windows")
    assert not others, "both quantiles share one sketch"
    assert len(buckets) == BUCKETS_MAX
    assert sum(buckets.values()) == len(values)
    assert math.isclose(record.top, sorted(values)[5993], rel_tol=0.0100001)
    assert record.low > sorted(values)[59]


@paths
def test_extreme_numbers_have_quantiles(few: int) -> None:
    for value, shown in ((5e-324, 5e-324), (-1.7e308, -1.7e308), (math.inf, sys.float_info.max), (0.0, 0.0)):
        found = result(few, [[(Reading(value=value), 0)]], Quantile("value", 0.5))
        assert math.isclose(found, shown, rel_tol=0.0100001, abs_tol=5e-324)
    assert result(few, [[(Reading(value=math.nan), 0)]], Quantile("value", 0.5)) is None


@paths
def test_distinct_count_is_near_and_the_same_in_any_order(few: int) -> None:
    pytest.importorskip("datasketches", reason="the extra `sketches` is not installed")
    texts = [f"device {number % 2_500}" for number in range(5_000)]
    rows = [(Reading(text=text), 0) for text in texts]

    found = set()
    for size, seed in ((5_000, 0), (5_000, 1), (400, 2)):
        random.Random(seed).shuffle(rows)
        bundles = [rows[start : start + size] for start in range(0, len(rows), size)]
        found.add(result(few, bundles, ApproxDistinct("text")))

    assert len(found) == 1
    assert abs(found.pop() - 2_500) < 2_500 * 0.05


def test_few_distinct_values_are_counted_exactly_and_the_sketch_stays_small() -> None:
    pytest.importorskip("datasketches", reason="the extra `sketches` is not installed")
    for count in (1, 2, 384):
        rows = [(Reading(text=str(number % count) if number % count else ""), 0) for number in range(3_000)]
        assert result(0, [rows], ApproxDistinct("text")) == count
    assert result(0, [[(Reading(), 0)]], ApproxDistinct("text")) == 0
    subject = driver(0, result=ApproxDistinct("number"))
    subject.feed([(Reading(number=number), 0) for number in range(20_000)])
    ((stored, _, _),) = [found for name, found in subject.stored.items() if name[0] is Kind.WINDOW]
    assert len(stored) < 3_500


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)

    with pytest.raises(SchemaError, match="DataSketches") as caught:
        ApproxDistinct("text").bind(RecordType(Reading))

    assert "[sketches]" in str(caught.value.hint)


def test_variance_and_deviation_of_one_field_share_their_accumulator() -> None:
    aggregates = {"a": Variance("value"), "b": StandardDeviation("value", population=True), "c": Variance("number")}

    assert len(AccumulatorSet(aggregates, RecordType(Reading)).members) == 2


@paths
@pytest.mark.parametrize("missing", [[], [(Reading(), 0)]], ids=["values", "missing"])
def test_variance_of_large_equal_values_is_zero_in_any_bundles(few: int, missing: list[tuple[Reading, int]]) -> None:
    rows = [(Reading(value=sys.float_info.max), at) for at in range(3)]

    assert result(few, [missing, rows], StandardDeviation("value")) == 0
    assert result(few, [missing, *([row] for row in rows)], StandardDeviation("value")) == 0
    assert merged_at_once([*missing, *rows], StandardDeviation("value")) == 0


@paths
def test_variance_that_overflows_is_nan_in_any_bundles(few: int) -> None:
    """Of two neighbors at the end of the range, the mean is one of them, and the square of their distance infinite."""
    rows = [(Reading(value=value), 0) for value in (sys.float_info.max, math.nextafter(sys.float_info.max, 0))]

    for bundles in ([rows], [[row] for row in rows]):
        assert math.isnan(result(few, bundles, Variance("value", population=True)))
    assert math.isnan(merged_at_once(rows, Variance("value", population=True)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Top("value", n=0),
        lambda: Top("value", n=1_001),
        lambda: Collect("value", limit=10_001),
        lambda: Quantile("value", 1.5),
        lambda: Quantile("value", 0.5, accuracy=0.5),
        lambda: Quantile("text", 0.5).bind(RecordType(Reading)),
    ],
)
def test_settings_out_of_bounds_are_refused(make: Any) -> None:
    with pytest.raises(SchemaError):
        make()


def test_reprs_are_constructors() -> None:
    assert repr(Top("x", n=3)) == "Top('x', n=3)"
    assert repr(Top("x", smallest=True)) == "Top('x', n=10, smallest=True)"
    assert repr(Collect("x", limit=5)) == "Collect('x', limit=5)"
    assert repr(Quantile("x", 0.9)) == "Quantile('x', 0.9, accuracy=0.01)"
    assert repr(StandardDeviation("x", population=True)) == "StandardDeviation('x', population=True)"
