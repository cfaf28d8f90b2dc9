"""The laws of accumulators that subtract: exact, in any order, cut anywhere, stored in between."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millpy import Count, Mean, StandardDeviation, Sum, Variance
from millpy.errors import GraphError
from millpy.model.record import Records, RecordType
from millpy.windowing.accumulator import Accumulator, AccumulatorSet, Aggregate
from millpy.windowing.aggregates.balance import CountBalance
from millpy.windowing.group_by import aligned_groups
from millpy.windowing.pane_codec import OpenPane, decode_pane, encode_panes
from millpy.windowing.window_memory import PANE_BYTES, Weights
from tests.property.test_aggregate_laws import as_jsonb, public_aggregates


class Reading(msgspec.Struct):
    number: int | None
    value: float | None
    price: Decimal | None = None


TYPE = RecordType(Reading)
AGGREGATES: dict[str, Aggregate] = {
    "n": Count(),
    "numbers": Count("number"),
    "values": Count("value"),
    "whole": Sum("number"),
    "total": Sum("value"),
    "whole_mean": Mean("number"),
    "mean": Mean("value"),
    "whole_variance": Variance("number"),
    "variance": Variance("value", population=True),
    "prices": Sum("price"),
    "price_mean": Mean("price"),
    "deviation": StandardDeviation("value"),
}
BALANCES = AccumulatorSet(AGGREGATES, TYPE, CountBalance())
FINITE = st.sampled_from(
    [0.0, -0.0, 5e-324, -1.7976931348623157e308, 1.7976931348623157e308, 0.1, 1e16, 1e-16]
) | st.floats(allow_nan=False, allow_infinity=False)
readings = st.builds(
    Reading,
    number=st.none() | st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1),
    value=st.none() | FINITE | st.sampled_from([math.inf, -math.inf, math.nan]),
    price=st.none() | st.decimals(-9, 9, places=2) | st.just(Decimal("9" * 38)),
)
some = st.lists(readings, max_size=8)
Changes = Sequence[tuple[Reading, bool]]


def of(changes: Changes, values: list[Any] | None = None) -> list[Any]:
    """Accumulators of values, and of retractions where the flag is true, one by one."""
    values = BALANCES.empty() if values is None else values
    for record, retracts in changes:
        (BALANCES.subtract if retracts else BALANCES.add)(values, record, 0)
    return values


def expected(records: Sequence[Reading]) -> list[Any]:
    numbers = [record.number for record in records if record.number is not None]
    values = [record.value for record in records if record.value is not None]
    prices = [record.price for record in records if record.price is not None]
    with localcontext(prec=200):
        total = sum(prices) if prices else None
        mean = None if total is None else (total / len(prices)).quantize(Decimal("1e-38"), ROUND_HALF_EVEN)
    return [
        len(records),
        len(numbers),
        len(values),
        sum(numbers) if numbers else None,
        exact_mean(values, 1) if values else None,
        float(Fraction(sum(numbers), len(numbers))) if numbers else None,
        exact_mean(values, len(values)) if values else None,
        exact_variance(list(map(Fraction, numbers)), 1),
        float_variance(values, 0),
        total,
        mean,
        root(float_variance(values, 1)),
    ]


def rounded(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def exact_mean(values: Sequence[float], divisor: int) -> float:
    unusual = {value for value in values if math.isinf(value)}
    if any(map(math.isnan, values)) or len(unusual) > 1:
        return math.nan
    return unusual.pop() if unusual else rounded(sum(map(Fraction, values), Fraction(0)) / divisor)


def exact_variance(values: Sequence[Fraction], least: int) -> float | None:
    if len(values) <= least:
        return None
    mean = sum(values, Fraction(0)) / len(values)
    found = rounded(sum(((value - mean) ** 2 for value in values), Fraction(0)) / (len(values) - least))
    return found if math.isfinite(found) else math.nan


def float_variance(values: Sequence[float], least: int) -> float | None:
    if len(values) <= least:
        return None
    return exact_variance(list(map(Fraction, values)), least) if all(map(math.isfinite, values)) else math.nan


def root(variance: float | None) -> float | None:
    return None if variance is None else math.sqrt(variance) if variance == variance else math.nan


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other) and type(one) is type(other)


def check(values: Sequence[Any], records: Sequence[Reading]) -> None:
    found = dict(zip(AGGREGATES, BALANCES.results(values), strict=True))
    wanted = dict(zip(AGGREGATES, expected(records), strict=True))
    assert all(same(found[name], wanted[name]) for name in AGGREGATES), (found, wanted)
    assert BALANCES.is_empty(values) == (not records)


@settings(max_examples=150, deadline=None)
@given(some, some, st.randoms(use_true_random=False))
def test_what_is_added_and_subtracted_leaves_no_trace(kept: list[Reading], gone: list[Reading], rng: Any) -> None:
    changes = [*((record, False) for record in [*kept, *gone]), *((record, True) for record in gone)]
    rng.shuffle(changes)

    check(of(changes), kept)


@settings(max_examples=100, deadline=None)
@given(some, some, st.data())
@example([Reading(None, 1e16)], [Reading(None, 1e308), Reading(None, 1e308)], None)
def test_results_do_not_depend_on_bundles_and_storage(kept: list[Reading], gone: list[Reading], data: Any) -> None:
    changes = [*((record, False) for record in [*kept, *gone]), *((record, True) for record in gone)]
    cut = len(changes) // 2 if data is None else data.draw(st.integers(0, len(changes)))
    one, other = of(changes[:cut]), of(changes[cut:])
    (stored,) = encode_panes([OpenPane(one)], BALANCES)
    plain = json.loads(stored, parse_constant=pytest.fail)

    for text in (stored, json.dumps(as_jsonb(plain)).encode()):
        restored = decode_pane(text, BALANCES).values
        check(BALANCES.merge(restored, BALANCES.copied(other)), kept)
        check(of(changes[cut:], decode_pane(text, BALANCES).values), kept)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(readings, st.booleans(), st.integers(0, 2)), min_size=1, max_size=12))
def test_columns_agree_with_records(rows: list[tuple[Reading, bool, int]]) -> None:
    records = Records(
        TYPE,
        np.zeros(len(rows), np.int64),
        retracts=np.array([retracts for _, retracts, _ in rows]),
        batch=TYPE.batch_of([record for record, _, _ in rows]),
    )
    codes = np.array([code for *_, code in rows], np.int64)
    groups = aligned_groups(np.zeros(len(rows), np.int64), 1, 1, codes, 3, records, None)
    partials = [member.aggregate(groups).accumulators(slice(None)) for member in BALANCES.members]

    for place, group in enumerate(groups.codes.tolist()):
        wanted = of([(record, retracts) for record, retracts, code in rows if code == group])
        assert [partial[place] for partial in partials] == wanted


def test_an_accumulator_is_bounded() -> None:
    values = of([(Reading(2**63 - 1, value), False) for value in (5e-324, 1.7976931348623157e308)])
    for _ in range(20):  # a million times the records
        values = BALANCES.merge(values, BALANCES.copied(values))

    assert len(encode_panes([OpenPane(values)], BALANCES)[0]) < 6_000


def test_the_memory_of_a_window_is_estimated_from_short_text() -> None:
    aggregates = {"total": Sum("value"), "mean": Mean("value"), "variance": Variance("value"), "whole": Sum("number")}
    balances, count = AccumulatorSet(aggregates, TYPE, CountBalance()), 200
    rng = random.Random(5)
    tracemalloc.start()
    panes = [OpenPane(balances.empty()) for _ in range(count)]
    for pane in panes:
        for _ in range(20):
            balances.add(pane.values, Reading(rng.getrandbits(60), rng.random()), 0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    texts = encode_panes(panes, balances)
    weights = Weights(PANE_BYTES + balances.memory_bytes, count)
    weights.weigh(panes, [b""] * count, texts)

    assert max(map(len, texts)) < 200
    assert used < weights.total < 3 * used


def bound(aggregate: Aggregate) -> Accumulator:
    return aggregate.bind(TYPE, retracts=True)


def test_every_other_aggregate_says_why_it_cannot_subtract() -> None:
    subtracting = {Count, Sum, Mean, Variance, StandardDeviation}
    for class_ in set(public_aggregates()) - subtracting:
        with pytest.raises(GraphError, match="cannot subtract records that are retracted: ") as refused:
            bound(class_("value") if class_.__name__ != "Combiner" else class_())
        assert class_.forgets in refused.value.message
        assert "Accumulation.DISCARDING" in refused.value.hint
    for class_ in subtracting:
        assert bound(class_("value"))
