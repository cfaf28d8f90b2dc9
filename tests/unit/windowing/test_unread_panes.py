"""Panes with the state of a trigger that leave memory: the bound holds, and each pane leaves once, in bounded turns."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from millpy import (
    AfterAny,
    AfterCount,
    AfterPercentile,
    AfterProcessingTime,
    AfterWatermark,
    Count,
    Every,
    FixedWindows,
    Never,
    Repeatedly,
    SessionWindows,
    Sum,
    TimestampCombiner,
    When,
)
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import INSTANT_MAX
from millpy.windowing.accumulation import Accumulation
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.stage_driver import StageDriver, timedelta_us

END, KEYS, ROOM = 100, 200, 20
FIXED = FixedWindows(timedelta_us(END))
EARLY_AND_LATE = AfterWatermark(early=AfterCount(2), late=AfterCount(2))
PANE_BYTES = 1_500
"""A little more than a pane with the state of a trigger and two aggregates weighs."""


class Reading(msgspec.Struct):
    key: str
    number: int


def driver(
    trigger: Trigger = EARLY_AND_LATE, *, allowed: int = 1_000, windows: Windows = FIXED, **how: Any
) -> StageDriver:
    """Return a driver that may keep `ROOM` unfired panes in memory, and as many closed ones."""
    logic = WindowedLogic(
        windows, timedelta_us(allowed), {"n": Count(), "total": Sum("number")}, trigger=trigger, **how
    )
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    limits = Limits(unfired_windows_bytes_max=ROOM * PANE_BYTES, closed_windows_bytes_max=ROOM * PANE_BYTES)
    return StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=10**6, limits=limits)


def in_memory(subject: Any) -> int:
    return sum(map(len, subject.interval._open.panes.values()))


def fill(subject: Any, at: int = 1) -> list[tuple[str, int, str]]:
    """Feed a record of each key, some at a time, and fold; memory is bounded. Return the panes that leave."""
    found = []
    for lo in range(0, KEYS, 25):
        found += emitted(subject.feed([(Reading(f"k{n}", 1), at) for n in range(lo, lo + 25)]))
        assert subject.interval.open_bytes <= (ROOM + 25) * PANE_BYTES
        subject.fold()
        assert in_memory(subject) <= ROOM
        assert subject.interval.open_bytes <= ROOM * PANE_BYTES
        assert not subject.interval.waits_for_fold()
    return found


def emitted(result: Any) -> list[tuple[str, int, str]]:
    panes = result.productions.get("panes")
    return [] if panes is None else [(pane.key, pane.n, pane.pane_timing) for pane in panes.objects()]


def drained(subject: StageDriver, interrupts: str, panes_max: int = 30) -> list[tuple[str, int, str]]:
    """Run turns until none leaves work undone, each with bounded panes and memory. Return the panes."""
    subject.panes_max, found = panes_max, []
    for _ in range(10 * KEYS):
        result = subject.feed([])
        found += emitted(result)
        assert len(emitted(result)) <= panes_max
        if not result.unfinished:
            return found
        if "restart" in interrupts:
            subject.restart()
        if "fold" in interrupts:
            subject.fold(behind="behind" in interrupts)
            assert in_memory(subject) <= ROOM + panes_max
    raise AssertionError("panes are left for ever")


@pytest.mark.parametrize("interrupts", ["", "restart", "fold", "fold behind", "restart and fold"])
def test_panes_leave_memory_before_the_end_and_while_late_records_wait(interrupts: str) -> None:
    subject = driver()
    assert fill(subject) == []
    again = fill(subject)
    assert sorted(again) == sorted((f"k{n}", 2, "early") for n in range(KEYS)), "the count has survived"
    fill(subject)

    subject.watermark = END
    on_time = drained(subject, interrupts)
    assert sorted(on_time) == sorted((f"k{n}", 3, "on_time") for n in range(KEYS))
    assert subject.low_watermark == END
    subject.fold()

    subject.largest = END + 10**6 + 1  # the following records are late
    assert fill(subject) == [], "one late record waits for another"
    assert subject.low_watermark == END + 1, "and does not hold the watermark"
    subject.watermark = END + 1_000
    last = drained(subject, interrupts)
    assert sorted(last) == sorted((f"k{n}", 4, "late") for n in range(KEYS))
    assert subject.interval.oldest_work() == INSTANT_MAX
    subject.finish()
    subject.check_ended()


def test_panes_without_new_records_are_asked_at_the_end_and_emit_nothing() -> None:
    subject = driver()
    fill(subject)
    fill(subject)  # the early panes have all records

    subject.watermark = END
    assert drained(subject, "restart and fold") == []
    assert subject.low_watermark == END
    subject.fold()
    late = fill_one_late(subject)
    assert late == [("k3", 4, "late")]
    subject.finish()
    subject.check_ended()


def fill_one_late(subject: StageDriver) -> list[tuple[str, int, str]]:
    """Feed two late records of a key: the second one makes a pane."""
    subject.largest = END + 10**6 + 1
    before = subject.loaded
    found = [*emitted(subject.feed([(Reading("k3", 1), 5)])), *emitted(subject.feed([(Reading("k3", 1), 5)]))]
    assert subject.loaded == before + 1, "a record reads its window, and no other"
    return found


def test_a_window_that_is_over_at_once_emits_each_pane_once() -> None:
    subject = driver(allowed=0)
    fill(subject)
    subject.watermark = 10 * END

    assert sorted(drained(subject, "restart and fold", 7)) == sorted((f"k{n}", 1, "on_time") for n in range(KEYS))
    subject.check_ended()


def test_late_records_that_wait_are_not_lost_with_a_shorter_lateness() -> None:
    """A new owner must not take a window for one that has nothing to emit because it is over."""
    subject = driver()
    fill(subject)
    drained_at_end(subject)
    subject.largest = END + 10**6 + 1
    fill(subject)

    subject.watermark = subject.low_watermark = END + 300
    shorter = WindowedLogic(FIXED, timedelta_us(200), {"n": Count(), "total": Sum("number")}, trigger=EARLY_AND_LATE)
    subject.change_lateness(shorter, 1_000)

    assert sorted(drained(subject, "")) == sorted((f"k{n}", 2, "late") for n in range(KEYS))
    subject.finish()
    subject.check_ended()


def drained_at_end(subject: StageDriver) -> None:
    subject.watermark = END
    drained(subject, "")
    subject.fold()


def test_a_finished_trigger_stays_finished_when_its_pane_is_read_back() -> None:
    subject = driver(AfterWatermark(late=None))
    fill(subject)
    drained_at_end(subject)
    subject.largest = END + 10**6 + 1

    result = subject.feed([(Reading("k3", 1), 5)])

    assert emitted(result) == []
    assert [key for rows in result.late for key in rows.keys] == [b'"k3"']


DELAY = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("trigger", "how", "leaves"),
    [
        (EARLY_AND_LATE, {}, True),
        (AfterWatermark(late=None), {}, True),
        (AfterWatermark(early=When(lambda pane: pane.n > 3), late=Never()), {"windows": FixedWindows(DELAY)}, True),
        (EARLY_AND_LATE, {"accumulation": Accumulation.RETRACTING}, True),
        (AfterWatermark(early=Every(DELAY)), {}, False),
        (AfterWatermark(late=AfterAny(AfterCount(2), AfterProcessingTime(DELAY))), {}, False),
        (AfterWatermark(early=AfterPercentile(0.9)), {}, False),
        (Repeatedly(AfterCount(2)), {}, False),
        (EARLY_AND_LATE, {"timestamps": TimestampCombiner.LATEST}, False),
        (EARLY_AND_LATE, {"windows": SessionWindows(timedelta_us(50))}, False),
    ],
)
def test_panes_leave_before_the_end_if_records_and_the_watermark_alone_make_them_due(
    trigger: Trigger, how: Any, leaves: bool
) -> None:
    subject = driver(trigger, **how)

    assert (subject.stage.closed_kind is ClosedKind.UNFIRED_PANES) is leaves  # type: ignore[attr-defined]
    if "windows" in how:
        return
    subject.feed([(Reading(f"k{n}", 1), 1) for n in range(50)])
    subject.fold()
    assert (in_memory(subject) <= ROOM) is leaves
