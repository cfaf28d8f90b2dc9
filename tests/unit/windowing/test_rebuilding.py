"""Accumulators rebuilt from a row: records added to them give what all records together give, or a reason."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.model.record import RecordType
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.aggregates.balance import CountBalance
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Min, StandardDeviation, Sum, Variance
from millpy.windowing.aggregates.positional import First
from millpy.windowing.rebuilding import NotRebuiltError, Rebuilder, read_row


class Reading(msgspec.Struct):
    n: int
    x: float | None
    name: str
    at: datetime
    price: Decimal = Decimal(0)
    day: date | None = None


TYPE = RecordType(Reading)
ALL: dict[str, Aggregate] = {
    "count": Count(),
    "xs": Count("x"),
    "total": Sum("n"),
    "sum_x": Sum("x"),
    "mean_n": Mean("n"),
    "mean_x": Mean("x"),
    "low": Min("n"),
    "high": Max("x"),
    "first_name": Min("name"),
    "last_at": Max("at"),
    "cost": Sum("price"),
    "price": Mean("price"),
    "cheapest": Min("price"),
    "day": Max("day"),
    "var_n": Variance("n"),
    "dev_n": StandardDeviation("n"),
    "var_x": Variance("x", population=True),
}
FLOATS = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
READINGS = st.builds(
    Reading,
    st.integers(-(2**40), 2**40),
    st.none() | FLOATS,
    st.sampled_from(["a", "b", "é"]),
    st.integers(0, 10**6).map(lambda s: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=s)),
    st.sampled_from([Decimal("0.1"), Decimal("-1e-38"), Decimal(10**37), Decimal("12.340")]),
    st.dates(),
)


def row_of(accumulators: AccumulatorSet, names: list[str], values: list[Any]) -> dict[str, Any]:
    """The row as the store reads it: JSON, with times as text."""
    results = dict(zip(names, accumulators.results(values), strict=True))
    texts = {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in results.items()}
    types = [member.result for _, member in accumulators.columns]
    row = msgspec.json.Encoder(decimal_format="number").encode(texts)
    return read_row(row, dict(zip(names, types, strict=True)))


def filled(accumulators: AccumulatorSet, records: list[Reading]) -> list[Any]:
    values = accumulators.empty()
    for record in records:
        accumulators.add(values, record, 0)
    return values


def rebuilt(aggregates: dict[str, Aggregate], records: list[Reading], **changed: Any) -> tuple[AccumulatorSet, Any]:
    accumulators = AccumulatorSet(aggregates, TYPE)
    row = row_of(accumulators, list(aggregates), filled(accumulators, records)) | changed
    return accumulators, Rebuilder(accumulators, list(aggregates), TYPE).accumulators_of(row)


@given(before=st.lists(READINGS, min_size=1, max_size=6), late=st.lists(READINGS, max_size=3))
def test_records_added_to_a_row_give_the_result_of_all_records(before: list[Reading], late: list[Reading]) -> None:
    accumulators, values = rebuilt(ALL, before)
    for record in late:
        accumulators.add(values, record, 0)

    expected = accumulators.results(filled(accumulators, [*before, *late]))
    scale = max((abs(r.n) for r in [*before, *late]), default=1) + 1e6
    for name, found, right in zip(ALL, accumulators.results(values), expected, strict=True):
        if isinstance(right, float):
            width = scale * scale if name.startswith("var") else scale
            assert math.isclose(found, right, rel_tol=1e-6, abs_tol=width * 1e-9), name
        else:
            assert found == right, name


@given(before=st.lists(READINGS, min_size=1, max_size=5), late=READINGS)
def test_retraction_is_taken_out_of_a_row(before: list[Reading], late: Reading) -> None:
    aggregates: dict[str, Aggregate] = {"n": Count(), "xs": Count("x"), "total": Sum("n"), "mean": Mean("x")}
    accumulators = AccumulatorSet(aggregates, TYPE, CountBalance())
    row = row_of(accumulators, list(aggregates), filled(accumulators, [*before, late]))
    values = Rebuilder(accumulators, list(aggregates), TYPE).accumulators_of(row)
    accumulators.subtract(values, late, 0)

    n, xs, total, mean = accumulators.results(values)
    assert [n, xs, total] == accumulators.results(filled(accumulators, before))[:3]
    right = accumulators.results(filled(accumulators, before))[3]
    assert mean == right or math.isclose(mean, right, rel_tol=1e-6, abs_tol=1e-6)


ONE = Reading(3, 1.5, "a", datetime(2026, 1, 1, tzinfo=UTC))
NONE = Reading(3, None, "a", datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("aggregates", "records", "message"),
    [
        ({"n": Count(), "who": First("name")}, [ONE], "column who cannot be added to: its aggregate keeps more"),
        ({"mean": Mean("n")}, [ONE], "column mean cannot be added to: no column has the number of its values"),
        ({"n": Count(), "mean": Mean("x")}, [ONE], "no column has the number of its values"),
        ({"n": Count(), "high": Max("x")}, [NONE], "column high is NULL, and nothing says whether"),
        ({"n": Count(), "v": Variance("n")}, [ONE, ONE], "no column has the mean of its values"),
        ({"n": Count(), "m": Mean("price")}, [ONE, ONE], "no column has the sum of its values"),
        ({"n": Count(), "m": Mean("n")}, [Reading(3, math.inf, "a", ONE.at)], ""),
        ({"n": Count("x"), "m": Mean("x")}, [Reading(3, math.inf, "a", ONE.at)], "its values are not finite"),
    ],
)
def test_what_a_row_does_not_tell_is_refused(
    aggregates: dict[str, Aggregate], records: list[Reading], message: str
) -> None:
    if not message:
        rebuilt(aggregates, records)
        return
    with pytest.raises(NotRebuiltError, match=message):
        rebuilt(aggregates, records)


def test_null_of_an_aggregate_that_was_appended_later_stays_null() -> None:
    aggregates: dict[str, Aggregate] = {"n": Count(), "total": Sum("n"), "high": Max("n")}
    accumulators, values = rebuilt(aggregates, [ONE, ONE], high=None)
    accumulators.add(values, ONE, 0)

    assert accumulators.results(values) == [3, 9, None]
    with pytest.raises(NotRebuiltError, match="one before it is from before its aggregate"):
        rebuilt(aggregates, [ONE], total=None)
