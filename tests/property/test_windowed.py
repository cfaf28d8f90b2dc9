"""Laws of windows: bundles, restarts and the way of execution do not show; the result is that of a plain loop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, instant
from millpy.runtime.keyed import ComputationLogic
from millpy.windowing.aggregate import Aggregate, Count, Max, Mean, Min, Sum
from millpy.windowing.columnar import WindowedLogic
from millpy.windowing.window import FixedWindows
from millpy.windowing.windowed import WindowedComputation
from tests.stages import StageDriver

SIZE, MAX_DISORDER = 10, 7
WINDOWS = FixedWindows(timedelta(microseconds=SIZE))


class Reading(msgspec.Struct):
    key: str
    site: int
    value: float | None
    number: int | None
    text: str | None


AGGREGATES: dict[str, Aggregate] = {
    "n": Count(),
    "numbers": Count("number"),
    "total": Sum("value"),
    "whole": Sum("number"),
    "mean": Mean("value"),
    "whole_mean": Mean("number"),
    "low": Min("value"),
    "high": Max("number"),
    "first": Min("text"),
}
readings = st.builds(
    Reading,
    key=st.sampled_from("ab"),
    site=st.integers(1, 2),
    value=st.none() | st.floats(-1e6, 1e6, width=32),
    number=st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5),
    text=st.none() | st.sampled_from(["x", "é", "😀", ""]),
)
rows = st.lists(st.tuples(readings, st.integers(-20, 60)), max_size=40)
breaks = st.lists(st.sampled_from(["none", "none", "cut", "cut", "restart"]), max_size=40)
lateness = st.sampled_from([0, 5, 10, 1000])


@dataclass
class Outcome:
    """Newest pane by (key, site, window start), and what was too late."""

    windows: dict[tuple[str, int, int], tuple[Any, ...]] = field(default_factory=dict)
    late: list[tuple[int, bytes]] = field(default_factory=list)


def oracle(feed: list[tuple[Reading, int]], allowed: int) -> Outcome:
    """The same by a loop over all records."""
    outcome = Outcome()
    members: dict[tuple[str, int, int], list[Reading]] = {}
    late: dict[tuple[str, int, int], int] = {}
    largest: int | None = None
    for record, at in feed:
        watermark = INSTANT_MIN if largest is None else largest - MAX_DISORDER
        largest = at if largest is None else max(largest, at)
        name = (record.key, record.site, at // SIZE * SIZE)
        if watermark >= name[2] + SIZE + allowed:
            outcome.late.append((at, msgspec.json.encode(record)))
            continue
        members.setdefault(name, []).append(record)
        late[name] = late.get(name, 0) + (watermark >= name[2] + SIZE)
    for name, records in members.items():
        values = [r.value for r in records if r.value is not None]
        numbers = [r.number for r in records if r.number is not None]
        texts = [r.text for r in records if r.text is not None]
        whole = sum(numbers) if numbers else None
        outcome.windows[name] = (
            len(records),
            len(numbers),
            math.fsum(values) if values else None,
            whole if whole is not None and -(2**63) <= whole < 2**63 else None,
            math.fsum(values) / len(values) if values else None,
            sum(numbers) / len(numbers) if numbers else None,
            min(values, default=None),
            max(numbers, default=None),
            min(texts, default=None),
            "late" if late[name] else "on_time",
            late[name],
        )
    outcome.late.sort()
    return outcome


def run(subject: StageDriver, feed: list[Any], where: list[str], columns: bool) -> None:
    bundle: list[Any] = []
    for row, after in zip(feed, [*where, *["none"] * len(feed)], strict=False):
        bundle.append(row)
        if after == "none":
            continue
        subject.feed(bundle, columns=columns)
        bundle = []
        if after == "restart":
            subject.restart()
    subject.feed(bundle, columns=columns)
    subject.finish()
    assert not {name for name in subject.stored if name[0] is not Kind.COUNTER}
    assert subject.interval.oldest_work() == INSTANT_MAX
    assert subject.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)


def newest_panes(subject: StageDriver) -> dict[tuple[str, int, int], tuple[Any, ...]]:
    """Newest pane of each window; indexes must rise by one (I7)."""
    found: dict[tuple[str, int, int], tuple[Any, ...]] = {}
    indexes: dict[tuple[str, int, int], int] = {}
    for record, at in subject.produced("windows"):
        name = (record.key, record.site, instant(record.window_start))
        assert record.pane_index == indexes.get(name, -1) + 1
        assert at == instant(record.window_end) - 1
        indexes[name] = record.pane_index
        found[name] = tuple(getattr(record, column) for column in [*AGGREGATES, "pane_timing", "late_count"])
    return found


def columnar(feed: list[Any], where: list[str], allowed: int, *, few: int) -> Outcome:
    logic = WindowedLogic(WINDOWS, timedelta(microseconds=allowed), AGGREGATES, few_records_max=few)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    subject = StageDriver(logic, Reading, key=("key", "site"), outputs=outputs, max_disorder=MAX_DISORDER)
    run(subject, feed, where, columns=few == 0)
    late = [
        row for r in subject.results for part in r.late for row in zip(part.event_times, part.payloads, strict=True)
    ]
    return Outcome(newest_panes(subject), sorted(late))


def keyed(feed: list[Any], where: list[str], allowed: int) -> Outcome:
    computation = WindowedComputation(
        WINDOWS,
        timedelta(microseconds=allowed),
        AGGREGATES,
        Reading,
        ("key", "site"),
        to="windows",
        late_to="late",
    )
    outputs = {"windows": RecordType(computation.output), "late": RecordType(Reading)}
    subject = StageDriver(
        ComputationLogic(computation), Reading, key=("key", "site"), outputs=outputs, max_disorder=MAX_DISORDER
    )
    run(subject, feed, where, columns=False)
    assert not [letter for result in subject.results for letter in result.dead_letters]
    late = [(at, msgspec.json.encode(record)) for record, at in subject.produced("late")]
    return Outcome(newest_panes(subject), sorted(late))


def assert_same(one: Outcome, other: Outcome) -> None:
    """Equal, floats to 1e-9; sums that cancel to what 40 values of up to 1e6 lose in double precision."""
    assert one.late == other.late
    assert one.windows.keys() == other.windows.keys()
    for name, values in one.windows.items():
        for mine, theirs in zip(values, other.windows[name], strict=True):
            if isinstance(mine, float) and isinstance(theirs, float):
                assert math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-7), (name, mine, theirs)
            else:
                assert mine == theirs, (name, values, other.windows[name])
                assert type(mine) is type(theirs)


@settings(max_examples=150, deadline=None)
@given(rows, breaks, lateness)
def test_columns_agree_with_a_plain_loop(feed: list[Any], where: list[str], allowed: int) -> None:
    assert_same(columnar(feed, where, allowed, few=0), oracle(feed, allowed))


@settings(max_examples=150, deadline=None)
@given(rows, breaks, lateness)
def test_few_records_agree_with_a_plain_loop(feed: list[Any], where: list[str], allowed: int) -> None:
    assert_same(columnar(feed, where, allowed, few=10_000), oracle(feed, allowed))


@settings(max_examples=150, deadline=None)
@given(rows, breaks, breaks, lateness)
def test_windows_by_a_computation_agree_with_columnar_ones(
    feed: list[Any], where: list[str], elsewhere: list[str], allowed: int
) -> None:
    assert_same(keyed(feed, where, allowed), columnar(feed, elsewhere, allowed, few=3))
