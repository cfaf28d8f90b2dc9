"""Windows that leave memory before they fire: memory is bounded, and each pane leaves once, in bounded turns."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpy import Count, First, FixedWindows, Max, Min, SlidingWindows, Sum
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import INSTANT_MAX
from millpy.windowing.aggregates.positional import Collect
from millpy.windowing.aggregates.quantile import Median
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import Windows
from tests.stage_driver import StageDriver, timedelta_us

END, KEYS = 100, 200
FIXED = FixedWindows(timedelta_us(END))


class Reading(msgspec.Struct):
    key: str
    number: int
    text: str = ""


class Long(msgspec.Struct):
    key: int
    number: int


def driver(
    allowed: int = 0, panes: int = 20, windows: Windows = FIXED, record: Any = Reading, **aggregates: Any
) -> Any:
    """Return a driver that may keep `panes` unfired panes in memory."""
    logic = WindowedLogic(windows, timedelta_us(allowed), aggregates or {"n": Count(), "total": Sum("number")})
    outputs = {"panes": logic.output_type(RecordType(record), ("key",))}
    limits = Limits(unfired_windows_bytes_max=panes * 800, closed_windows_bytes_max=panes * 800)
    return StageDriver(logic, record, outputs=outputs, tables={"panes": 1}, max_disorder=1_000, limits=limits)


def in_memory(subject: Any) -> int:
    return sum(map(len, subject.interval._open.panes.values()))


def fill(subject: Any, record: Any = Reading) -> None:
    """Feed a record of each key into the first window, some at a time, and fold."""
    for lo in range(0, KEYS, 25):
        subject.feed([(record(name(record, n), 1), 1) for n in range(lo, lo + 25)])
        assert subject.interval.needs_fold() == (in_memory(subject) > 20)
        subject.fold()
        assert in_memory(subject) <= 20
        assert not subject.interval.waits_for_fold()


def name(record: Any, n: int) -> Any:
    return f"k{n}" if record is Reading else n


def emitted(result: Any) -> list[tuple[Any, int, int]]:
    panes = result.productions.get("panes")
    return [] if panes is None else [(pane.key, pane.n, pane.pane_index) for pane in panes.objects()]


@pytest.mark.parametrize(("record", "allowed"), [(Reading, 0), (Long, 50)])
@pytest.mark.parametrize("interrupts", ["", "restart", "fold", "fold behind", "restart and fold"])
def test_due_windows_fire_in_turns_and_hold_the_watermark_until_all_are_out(
    interrupts: str, allowed: int, record: Any
) -> None:
    subject = driver(allowed, record=record)
    fill(subject, record)
    subject.panes_max = 30
    subject.watermark = END  # of other producers, too
    found: list[Any] = []
    while True:
        result = subject.feed([])
        now = emitted(result)
        found += now
        assert len(now) <= 30
        assert in_memory(subject) <= 20 + (30 if allowed == 0 else len(found))
        assert result.unfinished == (len(found) < KEYS)
        if not result.unfinished:
            break
        assert subject.interval.oldest_work() == END - 1
        assert subject.low_watermark < END
        if "restart" in interrupts:
            subject.restart()
        if "fold" in interrupts:
            subject.fold(behind="behind" in interrupts)

    assert sorted(found) == sorted((name(record, n), 1, 0) for n in range(KEYS))
    assert subject.low_watermark == END
    assert subject.interval.oldest_work() == INSTANT_MAX
    subject.finish()
    subject.check_ended()


def test_a_record_reads_back_its_window_and_no_other() -> None:
    subject = driver()
    fill(subject)
    before = subject.loaded

    subject.feed([(Reading("k3", 1), 2), (Reading("k4", 1), 2), (Reading("new", 1), 2)])

    assert subject.loaded - before <= 2
    found = emitted(subject.feed([], watermark=END))
    assert dict((key, n) for key, n, _ in found if n > 1) == {"k3": 2, "k4": 2}
    assert len(found) == KEYS + 1


def test_windows_that_have_changed_stay_and_others_leave() -> None:
    subject = driver()
    for n in range(6):
        cold = [(Reading(f"cold{n}{at}", 1), 1) for at in range(6)]
        subject.feed(cold + [(Reading(f"hot{at}", 1), 1) for at in range(8)])
        subject.fold()

    assert {f"hot{at}" for at in range(8)} <= set(subject.interval._open.panes[0])
    assert in_memory(subject) <= 20
    assert not subject.loaded


def test_a_late_record_of_a_pane_that_has_left_before_and_after_it_fired() -> None:
    subject = driver(allowed=50)
    fill(subject)
    subject.panes_max = 30
    subject.watermark = END
    left = {key for key, _, _ in emitted(subject.feed([]))}
    subject.fold()
    waiting = {f"k{n}" for n in range(KEYS)} - left
    late = sorted(left)[:2] + sorted(waiting)[:2]

    subject.largest = END + 1_000 + 1  # so that they are late
    result = subject.feed([(Reading(key, 1), 5) for key in late])

    by_key = {key: (n, index) for key, n, index in emitted(result)}
    assert [by_key[key] for key in late] == [(2, 1), (2, 1), (2, 0), (2, 0)]
    assert [pane.pane_timing for pane in result.productions["panes"].objects() if pane.key in late] == ["late"] * 4
    while subject.feed([]).unfinished:
        pass
    found = [pane for one in subject.results for pane in emitted(one)]
    assert len(found) == KEYS + 2, "no pane twice"
    subject.finish()
    subject.check_ended()


def test_a_pane_that_a_record_makes_due_is_not_read_again() -> None:
    subject = driver()
    fill(subject)
    subject.panes_max = 3

    result = subject.feed([(Reading(f"k{n}", 1), 2) for n in range(100)], watermark=END)
    while result.unfinished:
        result = subject.feed([])

    found = [pane for one in subject.results for pane in emitted(one)]
    assert sorted(found) == sorted((f"k{n}", 1 + (n < 100), 0) for n in range(KEYS))
    subject.check_ended()


def test_a_new_owner_reads_no_window_until_it_is_needed() -> None:
    subject = driver()
    fill(subject)

    subject.restart()
    assert in_memory(subject) == 0
    assert subject.interval.oldest_work() == END - 1
    subject.feed([(Reading("k7", 1), 2)])
    assert in_memory(subject) == 1
    assert sorted(emitted(subject.feed([], watermark=END)))[-1] == ("k99", 1, 0)
    subject.check_ended()


def test_what_a_turn_opens_has_room_whatever_is_open() -> None:
    subject = driver(panes=2)
    each = subject.interval._open.weights.each
    subject.interval._bytes_max = 10 * each
    for n in range(5):
        result = subject.feed([(Reading(f"k{n}{at}", 1), 1) for at in range(10)])
        assert not result.dead_letters
        assert subject.interval.waits_for_fold()
        subject.fold()

    result = subject.feed([(Reading(f"more{at}", 1), 1) for at in range(12)])

    assert [letter.reason for letter in result.dead_letters] == ["windows"] * 2
    assert len(emitted(subject.feed([], watermark=END))) == 60


@pytest.mark.parametrize(
    ("aggregates", "leaves"),
    [
        ({"n": Count("text"), "low": Min("number"), "first": First("number")}, True),
        ({"high": Max("text")}, False),
        ({"first": First("text")}, False),
        ({"n": Count(), "all": Collect("number")}, False),
        ({"n": Median("number")}, False),
    ],
)
def test_windows_whose_aggregates_may_be_long_stay_in_memory(aggregates: Any, leaves: bool) -> None:
    subject = driver(**aggregates)
    subject.feed([(Reading(f"k{n}", 1, "text"), 1) for n in range(50)])
    subject.fold()

    assert (in_memory(subject) <= 20) == leaves
    assert (subject.stage.closed_kind is ClosedKind.UNFIRED) == leaves


def test_slices_and_windows_of_triggers_stay_in_memory() -> None:
    slices = driver(windows=SlidingWindows(timedelta_us(END), every=timedelta_us(50)))
    slices.feed([(Reading(f"k{n}", 1), 1) for n in range(50)])
    slices.fold()

    assert in_memory(slices) == 50
