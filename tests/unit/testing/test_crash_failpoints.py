"""Traps of crash failpoints: when they spring."""

import pytest

from millpy.errors import ConfigError
from millpy.hosting.failpoints import Failpoint
from millpy.testing.crash import Action, CrashFailpoints, Moment, Trap, parse_spec

TURN = [Failpoint.AFTER_POLL, Failpoint.AFTER_STEP]
COMMIT = [Failpoint.BEFORE_COMMIT, Failpoint.AFTER_COMMIT, Failpoint.AFTER_ACKNOWLEDGE]


def overlapped(points: list[Failpoint]) -> set[Failpoint]:
    """Points that were reached with another turn in the air."""
    failpoints = CrashFailpoints([])
    for point in points:
        failpoints.reach_now(point)
    return {point for point, times in failpoints.overlapped.items() if times}


def test_consecutive_turns_do_not_overlap() -> None:
    assert overlapped([*TURN, *COMMIT, *TURN, *COMMIT]) == set()


def test_step_overlaps_with_the_commit_of_the_turn_before() -> None:
    points = [*TURN, Failpoint.BEFORE_COMMIT, *TURN, Failpoint.AFTER_COMMIT]

    assert overlapped(points) == {*TURN, Failpoint.AFTER_COMMIT}


def test_commit_overlaps_with_a_step_that_began_before_it() -> None:
    points = [*TURN, Failpoint.AFTER_POLL, Failpoint.BEFORE_COMMIT, Failpoint.AFTER_COMMIT]

    assert overlapped(points) == {Failpoint.BEFORE_COMMIT, Failpoint.AFTER_COMMIT}


def test_fold_overlaps_with_any_turn_in_flight() -> None:
    assert overlapped([Failpoint.AFTER_FOLD, *TURN, *COMMIT]) == set()
    assert overlapped([Failpoint.AFTER_POLL, Failpoint.AFTER_FOLD, Failpoint.AFTER_STEP]) == {Failpoint.AFTER_FOLD}
    assert overlapped([*TURN, Failpoint.BEFORE_COMMIT, Failpoint.AFTER_FOLD]) == {Failpoint.AFTER_FOLD}


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
def test_trap_springs_at_its_time_or_at_the_first_fitting_time_after_it(
    moment: Moment, times: int, overlaps: bool, springs: bool
) -> None:
    assert Trap(Failpoint.AFTER_STEP, 3, Action.KILL, moment).springs(times, overlaps) is springs


def test_spec_may_name_a_moment() -> None:
    assert parse_spec("after_step:25:kill:overlapped,after_fence:1:count") == (
        Trap(Failpoint.AFTER_STEP, 25, Action.KILL, Moment.OVERLAPPED),
        Trap(Failpoint.AFTER_FENCE, 1, Action.COUNT),
    )


@pytest.mark.parametrize("spec", ["after_step", "after_step:1:kill:soon", "after_step:1:kill:alone:now", "x:1:kill"])
def test_invalid_trap_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="invalid trap"):
        parse_spec(spec)
