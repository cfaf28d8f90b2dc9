"""The guarded clock: what it takes for the time while the database's clock and the host's go wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.limits import Limits
from millpy.model.time import ClockReading, Instant, plausible_floor
from millpy.runtime.guarded_clock import READ_EVERY_IN_DOUBT_S, ClockGuard

S = 1_000_000
HOUR = 3_600.0
YEAR = 365 * 24 * HOUR
BEGIN_US = 1_800_000_000 * S
LIMITS = Limits()
STEP_US = round(LIMITS.clock_step_s * S)


@dataclass
class Clocks:
    """True time, and how far each clock is from it, in seconds."""

    server_s: float = 0.0
    wall_s: float = 0.0
    elapsed_s: float = 0.0
    monotonic_s: float = 1_000.0
    quartz: float = 1.0
    reported: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guard = ClockGuard(LIMITS, lambda kind, _: self.reported.append(kind))
        self.observe()

    def true_us(self) -> Instant:
        return Instant(BEGIN_US + round(self.elapsed_s * S))

    def wall_us(self) -> Instant:
        return Instant(self.true_us() + round(self.wall_s * S))

    def observe(self) -> None:
        server_us = Instant(self.true_us() + round(self.server_s * S))
        self.guard.observe(server_us, 0.001, self.wall_us(), self.monotonic_s)

    def read(self) -> ClockReading:
        return self.guard.read(self.wall_us(), self.monotonic_s)

    def pass_time(self, seconds: float) -> None:
        """As a worker does it: the database's clock is read every so often."""
        while seconds > 0:
            part = min(seconds, READ_EVERY_IN_DOUBT_S)
            self.elapsed_s += part
            self.monotonic_s += part * self.quartz
            self.observe()
            seconds -= part

    def suspend(self, seconds: float, *, corrected: bool) -> None:
        """The host freezes; its wall clock is corrected afterwards, or not."""
        self.elapsed_s += seconds
        if not corrected:
            self.wall_s -= seconds
        self.observe()

    def error_s(self) -> float:
        return (self.read().now_us - self.true_us()) / S


FAR = st.sampled_from([10.0, 600.0, HOUR, 24 * HOUR, 10 * YEAR]).flatmap(lambda s: st.sampled_from([s, -s]))


@settings(deadline=None)
@given(FAR, st.floats(1, LIMITS.clock_settle_s - 10))
def test_a_step_of_the_databases_clock_alone_is_rejected_while_it_may_be_undone(step_s: float, lasts_s: float) -> None:
    clocks = Clocks()
    clocks.pass_time(100)

    clocks.server_s = step_s
    clocks.pass_time(lasts_s)
    assert abs(clocks.error_s()) < 0.1
    assert clocks.read().earliest_us == clocks.read().now_us
    clocks.server_s = 0
    clocks.pass_time(10)

    assert abs(clocks.error_s()) < 0.1
    assert clocks.reported == ["clock_refused", "clock_agrees"]


@settings(deadline=None)
@given(FAR)
def test_another_clock_after_a_failover_is_followed_once_it_has_run_evenly(step_s: float) -> None:
    clocks = Clocks()
    clocks.pass_time(100)

    clocks.server_s = step_s
    clocks.pass_time(LIMITS.clock_settle_s + 20)

    assert abs(clocks.error_s() - step_s) < 0.1
    assert clocks.reported == ["clock_refused", "clock_followed"]
    assert clocks.read().elapsed_us == BEGIN_US + round(clocks.elapsed_s * S), "a step is no elapsed time"


@settings(deadline=None)
@given(FAR, st.booleans())
def test_clocks_that_step_together_are_followed_once_they_have_agreed(step_s: float, lasts: bool) -> None:
    clocks = Clocks()
    clocks.pass_time(100)

    clocks.server_s = clocks.wall_s = step_s
    clocks.pass_time(LIMITS.clock_agree_s - 10)
    assert abs(clocks.error_s()) < 0.1
    if lasts:
        clocks.pass_time(20)
    else:
        clocks.server_s = clocks.wall_s = 0
        clocks.pass_time(5)

    assert abs(clocks.error_s() - (step_s if lasts else 0)) < 0.1


@settings(deadline=None)
@given(st.lists(FAR, max_size=5))
def test_the_hosts_clock_alone_moves_nothing(steps: list[float]) -> None:
    clocks = Clocks()
    for step_s in steps:
        clocks.pass_time(100)
        clocks.wall_s = step_s
        clocks.pass_time(HOUR)
        assert abs(clocks.error_s()) < 0.1
        assert clocks.read() == ClockReading.certain(clocks.true_us())


@pytest.mark.parametrize("corrected", [True, False])
def test_a_suspended_host_is_behind_for_a_while_and_then_right(corrected: bool) -> None:
    clocks = Clocks()
    clocks.pass_time(100)

    clocks.suspend(HOUR, corrected=corrected)

    assert clocks.error_s() < -HOUR / 2
    assert clocks.read().latest_us >= clocks.true_us(), "records are not from the future meanwhile"
    clocks.pass_time((LIMITS.clock_agree_s if corrected else LIMITS.clock_settle_s) + 10)
    assert abs(clocks.error_s()) < 0.1


@settings(deadline=None)
@given(FAR)
def test_a_host_with_a_wrong_clock_at_boot_uses_the_databases_time(wrong_s: float) -> None:
    clocks = Clocks(wall_s=wrong_s)
    clocks.pass_time(30)

    assert abs(clocks.error_s()) < 0.1
    assert clocks.read().earliest_us <= clocks.true_us() <= clocks.read().latest_us
    clocks.wall_s = 0
    clocks.pass_time(10)
    assert clocks.read() == ClockReading.certain(clocks.true_us())


@settings(deadline=None)
@given(FAR)
def test_a_worker_that_starts_with_a_wrong_databases_clock_takes_nothing_over_by_it(wrong_s: float) -> None:
    clocks = Clocks(server_s=wrong_s)

    clocks.pass_time(30)
    assert clocks.read().earliest_us <= clocks.true_us() <= clocks.read().latest_us
    clocks.server_s = 0
    clocks.pass_time(10)

    assert abs(clocks.error_s()) < 0.1
    assert clocks.read().earliest_us == clocks.read().now_us


def test_a_clock_that_was_never_set_is_no_witness() -> None:
    clocks = Clocks(wall_s=-BEGIN_US / S)

    assert clocks.read() == ClockReading.certain(clocks.true_us())


@settings(deadline=None)
@given(FAR, FAR)
def test_clocks_wrong_by_years_at_the_start_are_corrected(server_s: float, wall_s: float) -> None:
    clocks = Clocks(server_s=server_s, wall_s=wall_s)
    clocks.pass_time(60)
    clocks.server_s = 0
    clocks.pass_time(60)
    clocks.wall_s = 0
    clocks.pass_time(LIMITS.clock_agree_s + 10)

    assert abs(clocks.error_s()) < 0.1
    assert clocks.read().earliest_us == clocks.read().now_us


@settings(deadline=None)
@given(st.floats(-500e-6, 500e-6), st.sampled_from([-1.0, 0.0, 1.0]))
def test_slewing_and_a_leap_second_are_followed(rate: float, leap_s: float) -> None:
    clocks = Clocks()
    for minute in range(120):
        clocks.server_s += rate * 60 + (leap_s if minute == 60 else 0)
        clocks.elapsed_s += 60
        clocks.monotonic_s += 60
        clocks.observe()

    assert clocks.reported == []
    assert abs(clocks.error_s() - clocks.server_s) < 0.1


MOVES = st.lists(st.tuples(st.sampled_from(["server", "wall"]), FAR, st.floats(1, 3_000), st.floats(1, 7_200)))


@settings(deadline=None)
@given(MOVES)
def test_one_wrong_clock_never_misleads_a_worker(moves: list[tuple[str, float, float, float]]) -> None:
    clocks = Clocks()
    for which, step_s, wrong_s, right_s in moves:
        setattr(clocks, f"{which}_s", step_s)
        clocks.pass_time(wrong_s)
        assert abs(clocks.error_s()) < 0.1
        assert abs(clocks.read().earliest_us - clocks.true_us()) < S
        setattr(clocks, f"{which}_s", 0.0)
        clocks.pass_time(right_s)
        assert abs(clocks.error_s()) < 0.1


def moves_of(clocks: Clocks, moves: list[tuple[str, float, float, float]]) -> Iterator[None]:
    for which, step_s, lasts_s, _ in moves:
        setattr(clocks, f"{which}_s", step_s)
        clocks.pass_time(lasts_s)
        yield


@settings(deadline=None)
@given(MOVES)
def test_elapsed_time_runs_evenly_and_doubt_ends_in_any_history(
    moves: list[tuple[str, float, float, float]],
) -> None:
    clocks = Clocks()
    origin = clocks.read().elapsed_us
    for _ in moves_of(clocks, moves):
        reading = clocks.read()
        assert reading.earliest_us <= reading.now_us <= reading.latest_us
        assert abs(reading.elapsed_us - origin - clocks.elapsed_s * S) < S * (1 + len(moves))
    clocks.pass_time(LIMITS.clock_settle_s + 10)

    assert not clocks.guard.doubtful


@settings(deadline=None)
@given(st.integers(-(10**18), 10**18), FAR)
def test_a_floor_is_believed_unless_no_clock_can_have_been_there(floor_s: int, ahead_s: float) -> None:
    clocks = Clocks(server_s=ahead_s)
    reading = clocks.read()
    floor = Instant(BEGIN_US + floor_s)

    believed = plausible_floor(floor, reading, STEP_US)

    assert believed <= reading.latest_us + STEP_US
    assert believed == (floor if floor <= reading.latest_us + STEP_US else reading.now_us)


@pytest.mark.parametrize("quartz", [0.99, 0.999, 1.001, 1.01])
@pytest.mark.parametrize("step_s", [HOUR, -HOUR])
def test_step_that_lasts_is_followed_though_the_hosts_quartz_is_slow_or_fast(step_s: float, quartz: float) -> None:
    clocks = Clocks(quartz=quartz)
    clocks.server_s = step_s
    clocks.pass_time(2 * HOUR)

    assert [kind for kind in clocks.reported if kind != "clock_agrees"] == ["clock_refused", "clock_followed"]
    assert abs(clocks.read().now_us - clocks.true_us() - step_s * S) <= STEP_US


@pytest.mark.parametrize("stepped_s", [-10 * YEAR, -86_400, 86_400, 10 * YEAR])
def test_a_host_clock_that_steps_during_doubt_settles_nothing(stepped_s: float) -> None:
    guard = ClockGuard(LIMITS, lambda _kind, _detail: None)

    guard.observe(Instant(BEGIN_US + 3_600 * S), 0.0, Instant(BEGIN_US), 0.0)
    reading = guard.read(Instant(round(BEGIN_US + (stepped_s + 1) * S)), 1.0)

    assert reading.earliest_us <= BEGIN_US + S
    assert reading.latest_us >= BEGIN_US + 3_601 * S
