"""The laws of `Accumulator`, for every public aggregate and every type of field that it accepts."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millpy
import millpy.windowing
from millpy import (
    ApproxDistinct,
    Collect,
    Combiner,
    Count,
    Mean,
    Quantile,
    StandardDeviation,
    Sum,
    Top,
    Variance,
)
from millpy.model.record import Records, RecordType
from millpy.windowing.accumulator import Accumulator, AccumulatorSet, Aggregate
from millpy.windowing.aggregates.ranking import Ranking
from millpy.windowing.group_by import Groups, aligned_groups
from millpy.windowing.pane_codec import OpenPane, decode_pane, encode_panes


class Reading(msgspec.Struct):
    number: int | None
    value: float | None
    text: str | None
    flag: bool | None
    seen: datetime | None
    price: Decimal | None
    day: date | None


FIELDS: dict[type, str] = {
    int: "number", float: "value", str: "text", bool: "flag", datetime: "seen", Decimal: "price", date: "day"
}  # fmt: skip
TYPE = RecordType(Reading)


class Range(Combiner[list[float]]):
    """The combiner of the documentation, over a field that may be None."""

    accumulator = list[float]
    result_type = float | None

    def create(self) -> list[float]:
        return []

    def add(self, accumulator: list[float], record: Reading) -> list[float]:
        return self.merge(accumulator, [] if record.number is None else [record.number / 2])

    def merge(self, one: list[float], other: list[float]) -> list[float]:
        values = one + other
        return [min(values), max(values)] if values else []

    def result(self, accumulator: list[float]) -> float | None:
        return accumulator[-1] - accumulator[0] if accumulator else None


@dataclass(frozen=True)
class Entry:
    """The instances of an aggregate to check; without an entry, the one with defaults, whose results are exact.

    Attributes:
        of: field -> instances; small bounds, so that they are reached.
        rounding: largest magnitude of the values -> error that rounding may cause; None if results are exact.
    """

    of: Callable[[str], list[Aggregate]]
    rounding: Callable[[float], float] | None = None


ENTRIES: dict[type[Aggregate], Entry] = {
    Sum: Entry(lambda field: [Sum(field)], lambda most: 1e-12 * most),
    Mean: Entry(lambda field: [Mean(field)], lambda most: 1e-12 * most),
    Variance: Entry(lambda field: [Variance(field), Variance(field, population=True)], lambda most: 1e-12 * most**2),
    StandardDeviation: Entry(lambda field: [StandardDeviation(field)], lambda most: 1e-6 * most),
    Top: Entry(lambda field: [Top(field, n=2), Top(field, n=3, smallest=True)]),
    Collect: Entry(lambda field: [Collect(field, limit=3), Collect(field, limit=20)]),
    Quantile: Entry(lambda field: [Quantile(field, 0.75), Quantile(field, 0.1, accuracy=0.001)]),
    ApproxDistinct: Entry(lambda field: [ApproxDistinct(field)] if find_spec("datasketches") else []),
    Combiner: Entry(lambda field: [Range()] if field == "number" else []),
}


def subclasses(of: type[Aggregate]) -> set[type[Aggregate]]:
    """All subclasses that the package defines."""
    found = {one for one in of.__subclasses__() if one.__module__.startswith("millpy.")}
    return found.union(*(subclasses(one) for one in of.__subclasses__()))


def public_aggregates() -> list[type[Aggregate]]:
    public = [one for name in millpy.__all__ if inspect.isclass(one := getattr(millpy, name))]
    return [one for one in public if issubclass(one, Aggregate)]


def test_every_aggregate_is_public() -> None:
    for module in walk_packages(millpy.windowing.__path__, "millpy.windowing."):
        import_module(module.name)

    assert set(public_aggregates()) == subclasses(Aggregate) - {Ranking}  # `Stream.top_n` makes it
    checked = {type(subject.aggregate) for subject, _ in SUBJECTS} - {Range} | {Combiner}
    assert set(public_aggregates()) - checked <= {ApproxDistinct}  # needs an extra


@dataclass(frozen=True)
class Subject:
    """One instance over one type of field."""

    aggregate: Aggregate
    kind: type
    rounding: Callable[[float], float] | None

    def check(self, one: Any, other: Any, rows: Iterable[Row]) -> None:
        """Assert that two results are equal; up to rounding, if floats are summed."""
        assert self.same(one, other, rows), (self, one, other)

    def same(self, one: Any, other: Any, rows: Iterable[Row]) -> bool:
        if isinstance(one, float) and isinstance(other, float) and one != other:
            if math.isnan(one) or math.isnan(other):
                return math.isnan(one) and math.isnan(other)
            exact = self.rounding is None or (self.kind is int and isinstance(self.aggregate, Sum | Mean))
            if exact or math.isinf(one) or math.isinf(other):
                return False
            assert self.rounding is not None
            values = [abs(getattr(record, FIELDS[self.kind]) or 0.0) for record, _ in rows]
            return abs(one - other) <= self.rounding(max([1.0, *values])) + 1e-9 * abs(one)
        return bool(one == other) and type(one) is type(other)


def subjects() -> list[Subject]:
    found = [
        Subject(aggregate, kind, entry.rounding)
        for class_ in public_aggregates()
        for entry in (ENTRIES.get(class_) or Entry(lambda field, class_=class_: [class_(field)]),)
        for kind in class_.takes or FIELDS
        for aggregate in entry.of(FIELDS[kind])
    ]
    rankings = [Ranking("number", {}, int, 2), Ranking("value", {}, float, 3, smallest=True, retracts=True)]
    return [*found, Subject(Count(), int, None), *(Subject(each, int, None) for each in rankings)]


SUBJECTS: list[tuple[Subject, Accumulator]] = [(one, one.aggregate.bind(TYPE)) for one in subjects()]
Row = tuple[Reading, int]
FLOATS = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]) | st.floats(-1e3, 1e3, width=32)
INTEGERS = st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1)
MOMENTS = st.datetimes(timezones=st.just(UTC), min_value=datetime(1970, 1, 1), max_value=datetime(2100, 1, 1))  # noqa: DTZ001
DECIMALS = st.sampled_from(["0", "-0.0", "1.10", "9" * 38, "-0." + "9" * 38]).map(Decimal) | st.decimals(
    -9, 9, places=3
)
readings = st.builds(
    Reading,
    number=st.none() | INTEGERS,
    value=st.none() | FLOATS,
    text=st.none() | st.sampled_from(["", "x", "é", "😀", "xyz"]),
    flag=st.none() | st.booleans(),
    seen=st.none() | MOMENTS,
    price=st.none() | DECIMALS,
    day=st.none() | st.dates(),
)
rows = st.lists(st.tuples(readings, st.integers(-3, 3)), max_size=6)
few_examples = settings(max_examples=60, deadline=None)


def of(member: Accumulator, some: Iterable[Row], accumulator: Any = None) -> Any:
    """The accumulator of some rows, added one by one."""
    accumulator = member.empty() if accumulator is None else accumulator
    for record, at in some:
        value = member.value_of(record)
        if value is not None:
            accumulator = member.add(accumulator, value, at)
    return accumulator


def groups_of(some: list[Row], codes: list[int]) -> Groups:
    records = Records(TYPE, np.array([at for _, at in some], np.int64), batch=TYPE.batch_of([r for r, _ in some]))
    starts = np.zeros(len(some), np.int64)
    return aligned_groups(starts, 1, 1, np.array(codes, np.int64), max(codes) + 1, records, None)


def as_jsonb(value: Any) -> Any:
    """A document as PostgreSQL returns it: whole numbers without a fraction, keys in another order."""
    if isinstance(value, dict):
        return {key: as_jsonb(value[key]) for key in sorted(value, key=lambda key: (len(key), key))}
    if isinstance(value, list):
        return [as_jsonb(part) for part in value]
    return int(value) if isinstance(value, float) and value == int(value) else value


@few_examples
@given(a=rows, b=rows, c=rows)
def test_merge_is_associative(a: list[Row], b: list[Row], c: list[Row]) -> None:
    for subject, member in SUBJECTS:
        left = member.merge(member.merge(of(member, a), of(member, b)), of(member, c))
        right = member.merge(of(member, a), member.merge(of(member, b), of(member, c)))
        subject.check(member.result_of(left), member.result_of(right), a + b + c)


@few_examples
@given(a=rows, b=rows)
def test_merge_is_commutative_as_far_as_claimed(a: list[Row], b: list[Row]) -> None:
    later = [(record, at + 10) for record, at in b]
    for subject, member in SUBJECTS:
        if subject.aggregate.merge_order != "arrival":
            after = later if subject.aggregate.merge_order == "event_time" else b
            one = member.merge(of(member, a), of(member, after))
            other = member.merge(of(member, after), of(member, a))
            subject.check(member.result_of(one), member.result_of(other), a + b)


@few_examples
@given(a=rows, more=rows)
def test_the_accumulator_of_no_records_is_the_identity(a: list[Row], more: list[Row]) -> None:
    for subject, member in SUBJECTS:
        alone, later = member.result_of(of(member, a)), member.result_of(of(member, a + more))
        for empty_first in (True, False):
            for rest, wanted in (([], alone), (more, later)):
                pair = (member.empty(), of(member, a)) if empty_first else (of(member, a), member.empty())
                found = of(member, rest, member.merge(*pair))
                subject.check(member.result_of(found), wanted, a + more)


@few_examples
@given(a=rows, b=rows)
def test_accumulators_do_not_depend_on_bundles(a: list[Row], b: list[Row]) -> None:
    for subject, member in SUBJECTS:
        together = member.result_of(of(member, a + b))
        subject.check(member.result_of(member.merge(of(member, a), of(member, b))), together, a + b)
        subject.check(member.result_of(of(member, b, of(member, a))), together, a + b)


@few_examples
@given(a=rows, more=rows)
def test_stored_accumulator_is_restored_and_finite(a: list[Row], more: list[Row]) -> None:
    for subject, member in SUBJECTS:
        accumulators = AccumulatorSet({"x": subject.aggregate}, TYPE)
        (stored,) = encode_panes([OpenPane([of(member, a)])], accumulators)
        plain = json.loads(stored, parse_constant=pytest.fail)
        for text in (stored, json.dumps(as_jsonb(plain)).encode()):
            for rest in ([], more):
                found = of(member, rest, decode_pane(text, accumulators).values[0])
                subject.check(member.result_of(found), member.result_of(of(member, a + rest)), a + rest)


@settings(max_examples=5, deadline=None)
@given(a=rows)
def test_stored_accumulator_is_bounded(a: list[Row]) -> None:
    for subject, member in SUBJECTS:
        accumulators = AccumulatorSet({"x": subject.aggregate}, TYPE)
        (once,) = often = encode_panes([OpenPane([of(member, a)])], accumulators)
        for _ in range(8):  # 256 times the records
            one, other = decode_pane(often[0], accumulators), decode_pane(often[0], accumulators)
            often = encode_panes([OpenPane(accumulators.merge(one.values, other.values))], accumulators)
        assert len(often[0]) < 20 * len(once) + 100, subject


@few_examples
@given(some=st.lists(st.tuples(readings, st.integers(-3, 3), st.integers(0, 2)), min_size=1, max_size=9))
def test_columns_agree_with_records(some: list[tuple[Reading, int, int]]) -> None:
    groups = groups_of([(record, at) for record, at, _ in some], [code for _, _, code in some])
    of_code = [[(record, at) for record, at, code in some if code == group] for group in groups.codes.tolist()]
    everything, count = slice(None), len(groups)
    pairs = np.arange(2 * count).reshape(2, -1).T.ravel()  # each group, then its equal
    for subject, member in SUBJECTS:
        partial = member.aggregate(groups)
        again = member.gather(partial.accumulators(everything))
        merged = member.combine(member.concatenate(partial, again), pairs, np.arange(0, 2 * count, 2))
        wanted = member.column([member.result_of(of(member, rows)) for rows in of_code])
        for columns in (partial, again):
            results = columns.results(np.arange(count), member)
            assert results.type == wanted.type
            for one, other, rows in zip(results.to_pylist(), wanted.to_pylist(), of_code, strict=True):
                subject.check(one, other, rows)
        for accumulator, rows in zip(merged.accumulators(everything), of_code, strict=True):
            subject.check(member.result_of(accumulator), member.result_of(of(member, rows + rows)), rows)
