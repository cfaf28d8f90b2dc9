"""A seed repeats the plan of faults, and every kind that was asked for comes."""

from __future__ import annotations

import pytest

from millpy.errors import UsageError
from millpy.testing.crash_test.options import FaultKind, Options, fault_kinds
from millpy.testing.crash_test.plan import draw, likely_s, pause_s

ALL = tuple(FaultKind)


def test_same_seed_draws_the_same_faults() -> None:
    assert draw(ALL, 50, 7) == draw(ALL, 50, 7)
    assert draw(ALL, 50, 7) != draw(ALL, 50, 8)


@pytest.mark.parametrize("count", [5, 6, 50])
def test_every_kind_of_fault_is_drawn(count: int) -> None:
    plan = draw(ALL, count, 1)

    assert len(plan) == count
    assert {fault.kind for fault in plan} == set(ALL)


def test_only_requested_kinds_are_drawn() -> None:
    plan = draw((FaultKind.KILL, FaultKind.NETWORK), 40, 3)

    assert {fault.kind for fault in plan} == {FaultKind.KILL, FaultKind.NETWORK}
    assert all((fault.network is not None) == (fault.kind is FaultKind.NETWORK) for fault in plan)


def test_fewer_faults_than_kinds_is_possible() -> None:
    assert len(draw(ALL, 2, 1)) == 2


def test_simultaneous_fault_strikes_within_the_lease_of_the_one_before() -> None:
    plan = draw(ALL, 200, 1)

    assert not plan[0].at_once
    assert any(fault.at_once for fault in plan)
    assert all(pause_s(fault, 2.0) < 2.0 for fault in plan)
    assert all(likely_s(fault, 2.0) > pause_s(fault, 2.0) for fault in plan)


def test_kinds_are_named() -> None:
    assert fault_kinds(["db", " kill", "db"]) == (FaultKind.KILL, FaultKind.DB)
    with pytest.raises(UsageError, match="unknown fault 'fire'"):
        fault_kinds(["kill", "fire"])
    with pytest.raises(UsageError, match="names no fault"):
        fault_kinds([""])


@pytest.mark.parametrize("wrong", [{"count": 0}, {"workers": 0}, {"workers": 99}, {"generate": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="invalid --"):
        Options(graph="g.py", **wrong)  # type: ignore[arg-type]
