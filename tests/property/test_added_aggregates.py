"""Aggregates added to open windows: old aggregates continue, new ones are exact or NULL.

It is NULL where a window has a record from before, because of that record nobody knows it; in every other window it is
what it would have been from the beginning.
"""

from __future__ import annotations

from copy import copy
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MIN, instant
from millpy.windowing.accumulator import AccumulatorSet, Aggregate
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import Windows
from tests.property.test_windowed import (
    AGGREGATES,
    MAX_DISORDER,
    Group,
    Name,
    PlainLoop,
    Reading,
    assert_close,
    breaks,
    kinds,
    lateness,
    rows,
    run,
    summary,
    us,
)
from tests.stage_driver import StageDriver

NAMES = list(AGGREGATES)


def logic_of(windows: Windows, allowed: int, aggregates: dict[str, Aggregate], few: int) -> tuple[Any, Any]:
    logic = WindowedLogic(windows, allowed * us, aggregates, few_records_max=few)
    return logic, {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}


def newest(subject: StageDriver) -> dict[Name, tuple[Any, ...]]:
    """Newest pane of each window; indexes rise by one over the change (I7)."""
    found: dict[Name, tuple[Any, ...]] = {}
    indexes: dict[Name, int] = {}
    for result in subject.results:
        for name in subject.deleted(result):
            del found[name]
        if "windows" not in result.productions:
            continue
        for row in result.productions["windows"].batch().to_pylist(maps_as_pydicts="strict"):
            name = (row["key"], row["site"], instant(row["window_start"]), instant(row["window_end"]))
            assert row["pane_index"] == indexes.get(name, -1) + 1
            indexes[name] = row["pane_index"]
            values = [row.get(column) for column in NAMES]
            found[name] = tuple(int(value) if isinstance(value, Decimal) else value for value in values)
    return found


def expected(
    windows: Windows, feed: list[Any], changed_at: int, allowed: int, known: list[bool]
) -> dict[Name, tuple[Any, ...]]:
    """Recount all columns by a plain loop; None for columns unknown in a window with an earlier record."""
    loop, largest = PlainLoop(windows, allowed), None
    earlier: dict[int, Reading] = {}
    for place, (record, at) in enumerate(feed):
        watermark = INSTANT_MIN if largest is None else largest - MAX_DISORDER
        largest = at if largest is None else max(largest, at)
        own = copy(record)
        if place < changed_at:
            earlier[id(own)] = own
        loop.take(own, at, watermark)

    def columns_of(group: Group) -> tuple[Any, ...]:
        short = any(id(record) in earlier for record, _ in group.records)
        return tuple(value if k or not short else None for value, k in zip(summary(group), known, strict=True))

    return {name: values[:-2] for name, values in loop.outcome(columns_of).items()}


def known_before(count: int) -> list[bool]:
    """Tell for each column whether windows of the first `count` aggregates know it, perhaps by a shared accumulator."""
    kept = len(AccumulatorSet({name: AGGREGATES[name] for name in NAMES[:count]}, RecordType(Reading)).members)
    return [place < kept for place, _ in AccumulatorSet(AGGREGATES, RecordType(Reading)).columns]


@kinds
@settings(max_examples=60, deadline=None)
@given(
    feed=rows,
    where=breaks,
    allowed=lateness,
    cut=st.integers(0, 40),
    count=st.integers(1, len(NAMES)),
    few=st.sampled_from([0, 3, 10_000]),
)
def test_added_aggregates_are_exact_or_null(
    windows: Windows, feed: list[Any], where: list[str], allowed: int, cut: int, count: int, few: int
) -> None:
    before, outputs = logic_of(windows, allowed, {name: AGGREGATES[name] for name in NAMES[:count]}, few)
    after, more_outputs = logic_of(windows, allowed, AGGREGATES, few)
    subject = StageDriver(
        before, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )
    feed_until(subject, feed[:cut], where[:cut], columns=few == 0)
    over = newest(subject)
    subject.deploy(after, more_outputs)
    run(subject, feed[cut:], where[cut:], columns=few == 0)

    found, wanted = newest(subject), expected(windows, feed, cut, allowed, known_before(count))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        gone = over.get(name) == found[name]  # the row of a closed window is not written again
        assert_close(values[:count] if gone else values, found[name][:count] if gone else found[name])


def feed_until(subject: StageDriver, feed: list[Any], where: list[str], *, columns: bool) -> None:
    """As `run`, without an end."""
    bundle: list[Any] = []
    for row, after in zip(feed, [*where, *["none"] * len(feed)], strict=False):
        bundle.append(row)
        if after != "none":
            subject.feed(bundle, columns=columns)
            bundle = []
    subject.feed(bundle, columns=columns)
