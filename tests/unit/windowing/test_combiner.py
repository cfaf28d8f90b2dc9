"""A user's own combiner: counted like any aggregate; a record that it does not take is dead-lettered, alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import msgspec
import pytest

from millpy.errors import SchemaError
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.runtime.lease import Lease
from millpy.testing.clock import ManualClock
from millpy.windowing.aggregates.combiner import Combiner
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, SlidingWindows, Windows
from tests.stage_driver import StageDriver

us = timedelta(microseconds=1)


class Reading(msgspec.Struct):
    key: str
    value: float = 0.0


class Extremes(msgspec.Struct):
    low: float
    high: float
    seen: list[float] = []


class Spread(Combiner[Extremes]):
    """Refuses 13 when it is added, two accumulators that hold 7 and 8 when merged, and a result of 99."""

    accumulator = Extremes
    result_type = float

    def create(self) -> Extremes:
        return Extremes(float("1e300"), float("-1e300"))

    def add(self, accumulator: Extremes, record: Reading) -> Extremes:
        accumulator.low = min(accumulator.low, record.value)
        accumulator.high = max(accumulator.high, record.value)
        accumulator.seen.append(record.value)
        if record.value == 13:
            raise ValueError("thirteen")
        return accumulator

    def merge(self, one: Extremes, other: Extremes) -> Extremes:
        one.seen += other.seen
        one.low, one.high = min(one.low, other.low), max(one.high, other.high)
        if {7, 8} <= set(one.seen):
            raise ValueError("seven and eight")
        return one

    def result(self, accumulator: Extremes) -> float:
        if accumulator.high - accumulator.low == 99:
            raise ValueError("ninety-nine")
        return accumulator.high - accumulator.low


class Values(Combiner[list[float]]):
    """A list, as a column of lists."""

    accumulator = list[float]
    result_type = list[float]

    def create(self) -> list[float]:
        return []

    def add(self, accumulator: list[float], record: Reading) -> list[float]:
        return [*accumulator, record.value]

    def merge(self, one: list[float], other: list[float]) -> list[float]:
        return one + other

    def result(self, accumulator: list[float]) -> list[float]:
        return sorted(accumulator)


def driver(windows: Windows) -> StageDriver:
    logic = WindowedLogic(windows, timedelta(0), {"n": Count(), "spread": Spread(), "values": Values()})
    output = logic.output_type(RecordType(Reading), ("key",))
    return StageDriver(logic, Reading, outputs={"windows": output}, tables={"windows": 5}, max_disorder=100)


def of(at: int, value: float, key: str = "a") -> tuple[Reading, int]:
    return Reading(key, value), at


def panes(subject: StageDriver) -> list[tuple[Any, ...]]:
    return sorted((r.key, r.n, r.spread, r.values) for r, _ in subject.produced("windows"))


class Consuming(Values):
    """Takes the value out of the record."""

    def add(self, accumulator: list[float], record: Reading) -> list[float]:
        value, record.value = record.value, -1.0
        return [*accumulator, value]


def test_record_mutated_by_add_is_unchanged_in_other_windows_and_aggregates() -> None:
    windows = SlidingWindows(1000 * us, every=500 * us)
    logic = WindowedLogic(windows, timedelta(0), {"consumed": Consuming(), "values": Values()})
    output = logic.output_type(RecordType(Reading), ("key",))
    subject = StageDriver(logic, Reading, outputs={"windows": output}, tables={"windows": 5}, max_disorder=100)

    subject.feed([of(600, 3), of(700, 5)])
    subject.finish()

    found = [(r.consumed, r.values) for r, _ in subject.produced("windows")]
    assert found == [([3.0, 5.0], [3.0, 5.0])] * 2


ALL: dict[str, Windows] = {"fixed": FixedWindows(1000 * us), "sessions": SessionWindows(1000 * us)}
kinds = pytest.mark.parametrize("windows", ALL.values(), ids=ALL)


@kinds
@pytest.mark.parametrize("restart", [False, True])
def test_combiner_sees_every_record_once_in_any_bundles(windows: Windows, restart: bool) -> None:
    subject = driver(windows)

    for bundle in ([of(0, 3)], [of(1, 5), of(2, 1)], [of(3, 2, "b")]):
        subject.feed(bundle)
        if restart:
            subject.restart()
    subject.finish()

    assert panes(subject) == [("a", 3, 4.0, [1.0, 3.0, 5.0]), ("b", 1, 0.0, [2.0])]
    assert not subject.interval.immediate


@kinds
def test_rejected_record_is_counted_by_no_aggregate(windows: Windows) -> None:
    subject = driver(windows)

    result = subject.feed([of(0, 3), of(1, 13), of(2, 5), of(3, 13, "b"), of(4, 4, "b")])
    subject.finish()

    assert [(dead_letter.reason, dead_letter.key, dead_letter.event_time) for dead_letter in result.dead_letters] == [
        ("user_error", b'"a"', 1),
        ("user_error", b'"b"', 3),
    ]
    assert "thirteen" in result.dead_letters[0].traceback
    assert result.dead_lettered_by_input == {0: 2}
    assert panes(subject) == [("a", 2, 2.0, [3.0, 5.0]), ("b", 1, 0.0, [4.0])]


@kinds
@pytest.mark.parametrize(("first", "second"), [(7.0, 8.0), (1.0, 100.0)], ids=["merge", "result"])
def test_merge_or_result_that_raises_rejects_the_new_records_and_keeps_the_window(
    windows: Windows, first: float, second: float
) -> None:
    subject = driver(windows)
    subject.feed([of(0, first)])

    result = subject.feed([of(1, second), of(2, 5, "b")])
    subject.restart()
    subject.finish()

    assert [dead_letter.event_time for dead_letter in result.dead_letters] == [1]
    assert panes(subject) == [("a", 1, 0.0, [first]), ("b", 1, 0.0, [5.0])]


def test_rejected_record_is_removed_from_all_its_sliding_windows() -> None:
    subject = driver(SlidingWindows(20 * us, every=10 * us))

    result = subject.feed([of(12, 13), of(13, 4)])
    subject.finish()

    assert len(result.dead_letters) == 1
    assert panes(subject) == [("a", 1, 0.0, [4.0]), ("a", 1, 0.0, [4.0])]


def test_record_too_late_for_one_of_its_windows_counts_as_taken() -> None:
    subject = driver(SlidingWindows(20 * us, every=10 * us))

    subject.feed([of(121, 1)])
    result = subject.feed([of(12, 2), of(12, 3), of(22, 4), of(150, 5)])

    # The watermark was 21: too late for [0, 20), not for [10, 30).
    assert [(late.event_times, late.window_starts, late.whole) for late in result.late] == [
        ([12, 12], [0, 0], [False] * 2)
    ]
    assert (result.late_by_input, result.consumed_by_input) == ({}, {0: 4})

    result = subject.feed([of(11, 6), of(12, 7), of(23, 8)])

    # The watermark was 50: the last one is too late for [10, 30) and [20, 40).
    assert [late.whole for late in result.late] == [[True, False, True, False, True, False]]
    assert (result.late_by_input, result.consumed_by_input) == ({0: 3}, {})


def test_combiner_declares_its_types() -> None:
    class Nameless(Combiner[int]):
        result_type = int

    with pytest.raises(SchemaError, match="accumulator"):
        Nameless().bind(RecordType(Reading))


class Ponders(Values):
    """Takes a second for each result and each merge, by a clock that is moved by hand."""

    clock: ClassVar[ManualClock]
    look: ClassVar[Callable[[], None]]

    def _ponder(self) -> None:
        self.clock.advance(1)
        type(self).look()

    def merge(self, one: list[float], other: list[float]) -> list[float]:
        self._ponder()
        return super().merge(one, other)

    def result(self, accumulator: list[float]) -> list[float]:
        self._ponder()
        return super().result(accumulator)


@pytest.mark.parametrize(
    "windows", [FixedWindows(10 * us), SlidingWindows(10 * us, every=5 * us), SessionWindows(5 * us)], ids=repr
)
def test_worker_that_waits_for_the_results_of_many_panes_is_not_stuck(windows: Windows) -> None:
    limits, clock = Limits(), ManualClock()
    Ponders.clock = clock
    logic = WindowedLogic(windows, timedelta(0), {"values": Ponders()})
    output = logic.output_type(RecordType(Reading), ("key",))
    subject = StageDriver(logic, Reading, outputs={"windows": output}, tables={"windows": 5}, max_disorder=100)
    lease = Lease(limits, clock)
    lease.watch(subject.binding.progress)
    subject.binding.progress.stepping = True
    keys = [f"key-{number}" for number in range(2 * int(limits.call_s_max))]
    stuck: list[bool] = []
    Ponders.look = lambda: stuck.append(lease.is_stuck())
    for value in (1.0, 2.0):
        subject.feed([of(1, value, key) for key in keys])
    subject.finish()

    assert clock.monotonic() > 2 * limits.call_s_max
    assert not any(stuck)
