"""Sessions grow, merge, delete emitted rows, and are stored under one name at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy.errors import GraphError
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stage import StepResult
from millpy.model.time import INSTANT_MAX, INSTANT_MIN
from millpy.store.memory.tables import column_values
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.session_assign import merge_sessions, replay
from millpy.windowing.session_size import SizeBound
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.stage_driver import StageDriver

us = timedelta(microseconds=1)


@dataclass(frozen=True)
class Span:
    start: int
    end: int


class Reading(msgspec.Struct):
    key: str
    value: int = 1


def driver(few: int, *, lateness: int = 0, windows: Windows | None = None, **settings: Any) -> StageDriver:
    """Sessions with a gap of 10 µs."""
    logic = WindowedLogic(
        windows or SessionWindows(10 * us), lateness * us, {"n": Count(), "total": Sum("value")}, few_records_max=few
    )
    output = logic.output_type(RecordType(Reading), ("key",))
    return StageDriver(logic, Reading, outputs={"windows": output}, tables={"windows": 5}, **settings)


paths = pytest.mark.parametrize("few", [0, 1_000], ids=["columns", "plain"])


def of(at: int, key: str = "a", value: int = 1) -> tuple[Reading, int]:
    return Reading(key, value), at


def rows(result: StepResult) -> list[tuple[Any, ...]]:
    """Result rows: key, start, end, n, total, index, timing, late count, whether first."""
    found = []
    for part in result.results:
        found += [(*row, part.first) for row in zip(*map(column_values, part.columns), strict=True)]
    return sorted(found)


def absorbed(result: StepResult) -> list[tuple[Any, ...]]:
    return [row for part in result.deleted for row in zip(*map(column_values, part.columns), strict=True)]


@paths
def test_session_ends_a_gap_after_its_last_record(few: int) -> None:
    subject = driver(few)

    subject.feed([of(1), of(9), of(18), of(12, "b")])
    assert subject.interval.oldest_work() == 21
    assert subject.interval.next_due() == (22, INSTANT_MAX)
    subject.restart()
    result = subject.feed([of(28)])

    assert rows(result) == [("a", 1, 28, 3, 3, 0, "on_time", 0, True), ("b", 12, 22, 1, 1, 0, "on_time", 0, True)]
    assert {name[3] for name in subject.stored} == {"28/38"}


@paths
def test_record_a_gap_later_begins_another_session(few: int) -> None:
    subject = driver(few)

    result = subject.feed([of(0), of(10), of(100)])

    assert [row[:4] for row in rows(result)] == [("a", 0, 10, 1), ("a", 10, 20, 1)]
    assert not result.deleted


@paths
@pytest.mark.parametrize("restart", [False, True])
def test_record_out_of_order_joins_two_open_sessions(few: int, restart: bool) -> None:
    subject = driver(few, max_disorder=100)

    subject.feed([of(0), of(15)])
    assert {name[3] for name in subject.stored} == {"0/10", "15/25"}
    if restart:
        subject.restart()
    result = subject.feed([of(7)])

    assert {name[3] for name in subject.stored} == {"0/25"}
    assert not result.deleted
    assert [row[:5] for row in rows(subject.finish())] == [("a", 0, 25, 3, 3)]
    assert not subject.stored


@paths
def test_emitted_session_deletes_its_row_when_it_grows(few: int) -> None:
    subject = driver(few, lateness=100)
    subject.feed([of(0, value=5), of(20, "other")])

    result = subject.feed([of(5, value=2)])

    assert absorbed(result) == [("a", 0, 10)]
    assert rows(result) == [("a", 0, 15, 2, 7, 0, "late", 1, True)]
    (grown,) = [record for record, _ in subject.produced("windows") if record.key == "a"][1:]
    assert (grown.total, grown.pane_index, grown.pane_timing) == (7, 0, "late")
    assert {name[3] for name in subject.stored if name[2] == b'"a"'} == {"0/15"}


@paths
def test_emitted_session_that_grows_beyond_the_watermark_waits_again(few: int) -> None:
    subject = driver(few, lateness=100)
    subject.feed([of(0), of(12, "other")])

    result = subject.feed([of(8)])

    assert absorbed(result) == [("a", 0, 10)]
    assert rows(result) == []
    assert subject.interval.oldest_work() == 17
    assert [row[:4] for row in rows(subject.feed([of(18, "other")]))] == [("a", 0, 18, 2)]


@paths
def test_two_emitted_sessions_become_one(few: int) -> None:
    subject = driver(few, lateness=100)
    subject.feed([of(0), of(15), of(60, "other")])

    result = subject.feed([of(7)])

    assert absorbed(result) == [("a", 0, 10), ("a", 15, 25)]
    assert rows(result) == [("a", 0, 25, 3, 3, 0, "late", 1, True)]


@paths
def test_late_record_within_the_extent_makes_the_next_pane_of_its_session(few: int) -> None:
    subject = driver(few, lateness=100)
    subject.feed([of(0), of(8), of(60, "other")])

    result = subject.feed([of(4)])

    assert not result.deleted
    assert rows(result) == [("a", 0, 18, 3, 3, 1, "late", 1, False)]


@paths
def test_lateness_is_judged_on_the_merged_session(few: int) -> None:
    """A record whose own 10 µs are over is in time for an open session."""
    subject = driver(few)

    result = subject.feed([of(20), of(29), of(35, "other"), of(22)])

    assert not result.late
    result = subject.feed([of(10), of(11)])
    (late,) = result.late
    assert (late.event_times, late.window_starts, late.window_ends) == ([10], [10], [20])
    assert result.late_by_input == {0: 1}


@paths
def test_record_of_a_session_that_is_over_begins_another(few: int) -> None:
    """Its session has expired, its own end has not: the two sessions overlap, as in Beam and Flink."""
    subject = driver(few)

    result = subject.feed([of(0), of(12, "other"), of(8), of(40)])

    assert [row[:4] for row in rows(result)] == [("a", 0, 10, 1), ("a", 8, 18, 1), ("other", 12, 22, 1)]


@paths
def test_gap_may_depend_on_the_key(few: int) -> None:
    subject = driver(few, windows=SessionWindows(10 * us, by_key={"slow": 50 * us}))

    subject.feed([of(0), of(0, "slow"), of(30), of(30, "slow")])

    assert [row[:4] for row in rows(subject.finish())] == [("a", 30, 40, 1), ("slow", 0, 80, 2)]


def test_events_years_apart_are_merged_singly() -> None:
    """Key and time do not fit in one number then."""
    far = 2**59
    times = np.array([-far, far, far + 5, -far + 3])
    codes = np.array([0, 0, 1, 7])

    found = merge_sessions(times, np.full(4, INSTANT_MIN), codes, np.full(8, 10), 0, {})

    assert sorted(zip(found.codes.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True)) == [
        (0, -far, -far + 10),
        (0, far, far + 10),
        (1, far + 5, far + 15),
        (7, -far + 3, -far + 13),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SessionWindows(0 * us),
        lambda: SessionWindows(us, by_key={"a": 0 * us}),
        lambda: SlidingWindows(10 * us, every=0 * us),
        lambda: SlidingWindows(10 * us, every=11 * us),
        lambda: SlidingWindows(1001 * us, every=us),
        lambda: FixedWindows(0 * us),
    ],
)
def test_invalid_windows_are_refused(make: Any) -> None:
    with pytest.raises(GraphError):
        make()


def test_windows_are_values_with_a_readable_repr() -> None:
    assert SessionWindows(us, by_key={"b": 2 * us, "a": us}) == SessionWindows(us, by_key={"a": us, "b": 2 * us})
    assert "by_key" not in repr(SessionWindows(us))
    assert SessionWindows(us) != SessionWindows(2 * us)
    assert repr(SessionWindows(60_000_000 * us, by_key={"a": 2 * us})) == (
        "SessionWindows(minutes(1), by_key={'a': timedelta(microseconds=2)})"
    )


@paths
def test_record_is_in_every_sliding_window_of_its_time_and_may_miss_some(few: int) -> None:
    subject = driver(few, windows=SlidingWindows(10 * us, every=5 * us))

    subject.feed([of(7), of(14)])
    result = subject.feed([of(3), of(-9)])

    late = [row for part in result.late for row in zip(part.event_times, part.window_starts, strict=True)]
    assert late == [(3, 0), (3, -5), (-9, -10), (-9, -15)]
    assert result.late_by_input == {0: 2}
    result = subject.feed([of(6), of(30)])
    assert [row for part in result.late for row in zip(part.event_times, part.window_starts, strict=True)] == [(6, 0)]
    assert not result.late_by_input
    assert [row[:4] for row in rows(result)] == [("a", 5, 15, 3), ("a", 10, 20, 1)]


def test_a_new_owner_that_has_read_all_sessions_knows_which_rows_are_deleted() -> None:
    """Its sessions may leave memory before a fold; the row of one that has grown is then still there."""
    of_one: Any = driver(0).interval
    subject = driver(1_000, lateness=1_000, limits=Limits(closed_windows_bytes_max=4 * of_one._open.weights.each))
    stage: Any = subject.stage
    assert stage.closed_rows_max == 4
    subject.feed([of(20, key) for key in ("a", "b", "c", "d")])
    subject.feed([], watermark=40)
    subject.fold()
    subject.feed([of(15), *(of(20, f"more{n}") for n in range(6))])  # [20, 30) becomes a part of [15, 30)
    subject.restart()
    assert subject.interval.waits_for_fold(), "those that are folded have left"

    result = subject.feed([of(16)])

    assert [row[:4] for row in rows(result)] == [("a", 15, 30, 3)]
    assert not absorbed(result)


@pytest.mark.parametrize("assign", [replay, SizeBound(10).replay])
def test_late_records_of_one_key_take_linear_time_however_many_sessions_it_has(assign: Any) -> None:
    count, watermark = 20_000, 10**9
    rows = [(row, 10 * row, watermark, 5) for row in range(count)]

    begun = time.process_time()
    sessions, late = assign(rows, watermark, ())

    assert len(sessions) == len(late) == count
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize("assign", [replay, SizeBound(10, lambda _: [1, 0]).replay])
def test_a_session_that_is_over_takes_no_record_although_another_intersects_it(assign: Any) -> None:
    longer, over = Span(-5, 25), Span(0, 10)

    sessions, late = assign([(0, 3, 12, 5), (1, 20, 13, 9)], 0, [longer, over])

    assert [(one.start, one.end, one.rows, one.open) for one in sessions] == [(-5, 29, [0, 1], [longer])]
    assert late == []
