"""Sliding windows as slices: a record is stored once, panes are merged from what is stored and what comes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX
from millpy.store.memory.tables import column_values
from millpy.windowing.aggregates.numeric import Count, Sum
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.sliding import ENTRIES_MAX
from millpy.windowing.window import SlidingWindows
from tests.stage_driver import StageDriver

us = timedelta(microseconds=1)
paths = pytest.mark.parametrize("few", [0, 100], ids=["columns", "few"])


class Reading(msgspec.Struct):
    key: str
    value: int


def driver(few: int, *, size: int, every: int, lateness: int = 0, max_disorder: int = 0) -> StageDriver:
    logic = WindowedLogic(
        SlidingWindows(size * us, every=every * us),
        lateness * us,
        {"n": Count(), "total": Sum("value")},
        few_records_max=few,
    )
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, tables={"windows": 1}, max_disorder=max_disorder)


def of(at: int, key: str = "a", value: int = 1) -> tuple[Reading, int]:
    return Reading(key, value), at


def rows(result: Any) -> list[tuple[Any, ...]]:
    """(key, start, end, n, total, pane index, timing, late count), and whether it is first."""
    return [
        (*row, part.first) for part in result.results for row in zip(*map(column_values, part.columns), strict=True)
    ]


@paths
def test_record_in_many_windows_is_stored_once(few: int) -> None:
    subject = driver(few, size=600, every=10)

    subject.feed([of(1000), of(1003), of(1011)])

    stored = {name[3]: msgspec.json.decode(value) for name, (value, _, _) in subject.stored.items()}
    assert {name: pane["values"][0] for name, pane in stored.items()} == {"1000/1600": 2, "1010/1610": 1}
    assert subject.interval.oldest_work() == 1019
    assert subject.interval.next_due()[0] == 1020


@paths
def test_window_is_merged_from_slices_of_several_bundles_and_a_restart(few: int) -> None:
    subject = driver(few, size=30, every=10, max_disorder=5)

    subject.feed([of(1, value=1), of(12, value=2), of(2, "b", value=4)])
    subject.restart()
    subject.feed([of(21, value=8), of(22, "b", value=16)])
    result = subject.feed([of(36, value=32)])

    assert {row[:5] for row in rows(result)} == {
        ("a", -10, 20, 2, 3),
        ("b", -10, 20, 1, 4),
        ("a", 0, 30, 3, 11),
        ("b", 0, 30, 2, 20),
    }


@paths
def test_row_too_late_for_one_window_counts_in_the_next_of_the_same_slice(few: int) -> None:
    subject = driver(few, size=20, every=10)

    result = subject.feed([of(11), of(20), of(12), of(30)])

    # 12 came when the watermark was 20: too late for [0, 20), not for [10, 30).
    assert {row[:4] for row in rows(result)} == {("a", 0, 20, 1), ("a", 10, 30, 3)}
    (late,) = result.late
    assert (late.event_times, late.window_starts, late.whole) == ([12], [0], [False])
    assert result.late_by_input == {}


@paths
def test_late_panes_of_a_window_continue_to_count_after_a_restart(few: int) -> None:
    subject = driver(few, size=20, every=10, lateness=100)

    subject.feed([of(11), of(31)])
    first = subject.feed([of(12), of(5, "b")])
    subject.restart()
    second = subject.feed([of(13), of(6, "b")])

    assert {row for row in rows(first) if row[1] == 0} == {
        ("a", 0, 20, 2, 2, 1, "late", 1, False),
        ("b", 0, 20, 1, 1, 0, "late", 1, True),
    }
    assert {row for row in rows(second) if row[1] == 0} == {
        ("a", 0, 20, 3, 3, 2, "late", 2, False),
        ("b", 0, 20, 2, 2, 1, "late", 2, False),
    }
    subject.finish()
    assert not {name for name in subject.stored if name[0] is Kind.WINDOW}


def test_windows_due_at_once_are_merged_in_pieces() -> None:
    size, keys = 500, "abcdefghij"
    subject = driver(0, size=size, every=1)
    subject.feed([of(at, key) for at in range(size) for key in keys])
    assert size * size * len(keys) / 2 > ENTRIES_MAX

    result = subject.feed([of(10 * size, "z")])

    found = {row[:2]: row[3] for row in rows(result) if row[0] != "z"}
    first_due = 0  # those before it were due in the first bundle
    assert found == {(key, start): size - start for key in keys for start in range(first_due, size)}


@paths
def test_windows_that_have_fired_hold_nothing_after_a_restart(few: int) -> None:
    subject = driver(few, size=20, every=10, lateness=1_000)
    subject.feed([of(5)])
    subject.feed([], watermark=200)
    assert subject.interval.oldest_work() == INSTANT_MAX

    subject.restart()

    assert subject.interval.oldest_work() == INSTANT_MAX
