"""Windows recomputed from archived records: a late record added to them gives what all records together give."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.aggregates.numeric import Count, Max, Mean, Sum
from millpy.windowing.aggregates.positional import Collect, First, Last, Top
from millpy.windowing.aggregates.quantile import Quantile
from millpy.windowing.rebuilding import NotRebuiltError, read_row
from millpy.windowing.recomputation import RecomputedWindow, difference_of, restored, stored_form


class Reading(msgspec.Struct):
    n: int
    x: float
    name: str
    at: datetime
    price: Decimal
    day: date | None


class Spread(Combiner[list[float]]):
    accumulator = list[float]
    result_type = dict[str, float]

    def create(self) -> list[float]:
        return []

    def add(self, accumulator: list[float], record: Reading) -> list[float]:
        if record.name == "bad":
            raise ValueError("a bad record")
        return [*accumulator, record.x]

    def merge(self, one: list[float], other: list[float]) -> list[float]:
        return one + other

    def result(self, accumulator: list[float]) -> dict[str, float]:
        return {"spread": max(accumulator) - min(accumulator)} if accumulator else {}


TYPE = RecordType(Reading)
ALL: dict[str, Aggregate] = {
    "n": Count(),
    "total": Sum("n"),
    "mean": Mean("x"),
    "middle": Quantile("x", 0.5),
    "first": First("name"),
    "last": Last("day"),
    "first_at": First("at"),
    "cost": Sum("price"),
    "dearest": Max("price"),
    "top": Top("x", 2),
    "names": Collect("name", 5),
    "spread": Spread(),
}
NAMES = tuple(ALL)
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1e300, 0.1])
READINGS = st.builds(
    Reading,
    st.integers(-(2**40), 2**40),
    VALUES,
    st.sampled_from(["a", "é", 'quoted "text"']),
    st.integers(0, 10**6).map(lambda us: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)),
    st.sampled_from([Decimal("0.1"), Decimal("-1e-18"), Decimal(10**17), Decimal("12.340")]),
    st.none() | st.dates(),
)


def the_set() -> AccumulatorSet:
    return AccumulatorSet(ALL, TYPE)


def row_of(accumulators: AccumulatorSet, values: list[Any]) -> dict[str, Any]:
    """The row as PostgreSQL gives it: JSON, with times as text."""
    results = dict(zip(NAMES, accumulators.results(values), strict=True))
    row = msgspec.json.Encoder(decimal_format="number").encode(results)
    types = [member.result for _, member in accumulators.columns]
    return read_row(row, dict(zip(NAMES, types, strict=True)))


def recomputed(accumulators: AccumulatorSet, records: list[Reading]) -> RecomputedWindow:
    window = RecomputedWindow(accumulators)
    for at, record in enumerate(records):
        window.add(record, Instant(at))
    return window


@settings(max_examples=40)
@given(st.lists(READINGS, min_size=1, max_size=8), READINGS)
def test_a_late_record_added_to_a_recomputed_window_gives_what_all_records_give(
    records: list[Reading], late: Reading
) -> None:
    accumulators = the_set()
    content = recomputed(accumulators, records)
    row = row_of(accumulators, content.values)
    assert difference_of(NAMES, accumulators.results(content.values), row) == ""

    found = restored(accumulators, NAMES, row, stored_form(accumulators, content.values))
    accumulators.add(found, late, len(records))

    whole = recomputed(accumulators, [*records, late])
    assert difference_of(NAMES, accumulators.results(found), row_of(accumulators, whole.values)) == ""


def a_reading(x: float, name: str = "a") -> Reading:
    return Reading(1, x, name, datetime(2026, 1, 1, tzinfo=UTC), Decimal("0.1"), None)


@pytest.mark.parametrize("column", NAMES)
def test_accumulators_that_do_not_give_the_row_are_refused(column: str) -> None:
    accumulators = the_set()
    records = [a_reading(1.0), a_reading(2.0, "b")]
    other = Reading(7, 3.0, "c", datetime(2025, 1, 1, tzinfo=UTC), Decimal("0.7"), date(2026, 1, 2))
    row = row_of(accumulators, recomputed(accumulators, records).values)
    changed = row_of(accumulators, recomputed(accumulators, [other]).values)
    stored = stored_form(accumulators, recomputed(accumulators, records).values)

    with pytest.raises(NotRebuiltError, match=f"the archive does not give the row as it is: {column} is"):
        restored(accumulators, NAMES, {**row, column: changed[column]}, stored)


@pytest.mark.parametrize("stored", [b"", b"[]x", b"{}", b"[1, 2, 3]", b'["a", null, [], {}, 7, 8, 9, 1, 2, 3, 4, 5]'])
def test_what_is_no_form_of_accumulators_is_refused(stored: bytes) -> None:
    accumulators = the_set()
    row = row_of(accumulators, recomputed(accumulators, [a_reading(1.0)]).values)

    with pytest.raises(NotRebuiltError):
        restored(accumulators, NAMES, row, stored)


def test_late_records_that_nobody_added_are_left_out_once_each() -> None:
    window = RecomputedWindow(the_set())
    window.expect(5, b"x", 1, added=False)
    window.expect(6, b"y", 1, added=True)

    assert [window.takes(Instant(5), b"x", may_be_late=True) for _ in range(2)] == [False, True]
    assert window.unclear == 1  # the second: nothing says whether it came too late
    assert window.takes(Instant(6), b"y", may_be_late=True)
    assert window.takes(Instant(7), b"", may_be_late=False)
    assert (window.unclear, window.times) == (1, {5, 6})
