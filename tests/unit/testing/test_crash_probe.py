"""Traps of the crash probe: when they spring."""

import pytest

from millpy.errors import ConfigError
from millpy.runtime.probe import Point
from millpy.testing.crash import Action, CrashProbe, Moment, Trap, parse_spec

TURN = [Point.AFTER_POLL, Point.AFTER_STEP]
COMMIT = [Point.BEFORE_COMMIT, Point.AFTER_COMMIT, Point.AFTER_ACKNOWLEDGE]


def overlapped(points: list[Point]) -> set[Point]:
    """Points that were reached with another turn in the air."""
    probe = CrashProbe([])
    for point in points:
        probe.reach_now(point)
    return {point for point, times in probe.overlapped.items() if times}


def test_turns_one_after_the_other_do_not_overlap() -> None:
    assert overlapped([*TURN, *COMMIT, *TURN, *COMMIT]) == set()


def test_step_overlaps_with_the_commit_of_the_turn_before() -> None:
    points = [*TURN, Point.BEFORE_COMMIT, *TURN, Point.AFTER_COMMIT]

    assert overlapped(points) == {*TURN, Point.AFTER_COMMIT}


def test_commit_overlaps_with_a_step_that_began_before_it() -> None:
    points = [*TURN, Point.AFTER_POLL, Point.BEFORE_COMMIT, Point.AFTER_COMMIT]

    assert overlapped(points) == {Point.BEFORE_COMMIT, Point.AFTER_COMMIT}


def test_fold_overlaps_with_whatever_is_in_the_air() -> None:
    assert overlapped([Point.AFTER_FOLD, *TURN, *COMMIT]) == set()
    assert overlapped([Point.AFTER_POLL, Point.AFTER_FOLD, Point.AFTER_STEP]) == {Point.AFTER_FOLD}
    assert overlapped([*TURN, Point.BEFORE_COMMIT, Point.AFTER_FOLD]) == {Point.AFTER_FOLD}


@pytest.mark.parametrize(
    ("moment", "times", "overlaps", "springs"),
    [
        (Moment.ANY, 3, False, True),
        (Moment.ANY, 4, False, False),
        (Moment.ALONE, 4, False, True),
        (Moment.ALONE, 4, True, False),
        (Moment.OVERLAPPED, 3, True, True),
        (Moment.OVERLAPPED, 2, True, False),
    ],
)
def test_trap_springs_at_its_time_or_at_the_first_fitting_one_after_it(
    moment: Moment, times: int, overlaps: bool, springs: bool
) -> None:
    assert Trap(Point.AFTER_STEP, 3, Action.KILL, moment).springs(times, overlaps) is springs


def test_spec_may_name_a_moment() -> None:
    assert parse_spec("after_step:25:kill:overlapped,after_fence:1:count") == (
        Trap(Point.AFTER_STEP, 25, Action.KILL, Moment.OVERLAPPED),
        Trap(Point.AFTER_FENCE, 1, Action.COUNT),
    )


@pytest.mark.parametrize("spec", ["after_step", "after_step:1:kill:soon", "after_step:1:kill:alone:now", "x:1:kill"])
def test_what_is_no_trap_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="is no trap"):
        parse_spec(spec)
