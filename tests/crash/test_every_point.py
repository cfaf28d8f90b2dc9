"""SIGKILL at every Point of the turn: nothing lost, doubled or changed, whoever goes on. More of it: `make crash`.

A worker that is started again has died with another turn in the air; where another goes on, its commit was alone.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from millpy.runtime.probe import Point
from millpy.testing.crash import Moment, points_reached
from tests.crash.cases import find, killing
from tests.crash.cases.killing import ALONE, NTH, OF_COMPUTATIONS, OF_INJECTOR, ONE, TWO, impossible
from tests.crash.checks import Observer, faults
from tests.crash.conftest import Survives
from tests.crash.harness import Worker
from tests.crash.workload import Expected
from tests.crash.world import Case, World

PLACED = [
    *((OF_INJECTOR, point) for point in (Point.AFTER_DECODE, Point.AFTER_FENCE, Point.AFTER_COMMIT)),
    *((OF_COMPUTATIONS, point) for point in (Point.AFTER_POLL, Point.AFTER_FENCE, Point.AFTER_COMMIT)),
]


def name(point: Point, placement: str, moment: Moment = Moment.OVERLAPPED) -> tuple[str, str]:
    moment = Moment.ALONE if impossible(point, placement, moment) else moment
    return f"SIGKILL at {point}", f"{placement}, {moment}"


def test_every_point_has_a_kill() -> None:
    names = {(case.fault, case.variant) for case in killing.cases()}
    wanted = {
        (f"SIGKILL at {point}", f"{placement}, {moment}")
        for point, placement, moment in product(
            Point, (ONE, TWO, OF_INJECTOR, OF_COMPUTATIONS), (Moment.ALONE, Moment.OVERLAPPED)
        )
        if not impossible(point, placement, moment)
    }

    assert set(NTH) == set(Point)
    assert names == wanted
    assert {fault for fault, _ in names} == {f"SIGKILL at {point}" for point in Point}


@pytest.mark.parametrize("settings", [{}, ALONE], ids=["overlapping", "alone"])
def test_run_without_faults_reaches_every_point(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, settings: dict[str, float]
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, probe="after_fence:1:count", **settings) as one,
    ):
        one.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []
    assert observer.samples > 5
    assert set(points_reached(one.reached_file)) == set(Point)


@pytest.mark.parametrize("point", list(Point))
def test_killed_worker_is_started_again(survives: Survives, point: Point) -> None:
    verdict = survives(find(*name(point, ONE)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


@pytest.mark.parametrize("point", list(Point))
def test_other_worker_goes_on(survives: Survives, point: Point) -> None:
    verdict = survives(find(*name(point, TWO, Moment.ALONE)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


@pytest.mark.parametrize(("placement", "point"), PLACED)
def test_placed_worker_is_started_again(survives: Survives, placement: str, point: Point) -> None:
    verdict = survives(find(*name(point, placement)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


def test_kill_that_hits_no_interval_is_none(survives: Survives) -> None:
    def kill_a_worker_that_owns_nothing(world: World) -> None:
        waiting = world.worker(gated=True)
        waiting.await_ready()
        recovery = world.kill(waiting)
        again = world.worker(gated=False)
        recovery.wait(watched=again)
        world.await_finished(again)
        world.kill(again)

    verdict = survives(Case("a worker that owns nothing is killed", "", kill_a_worker_that_owns_nothing))

    assert (verdict.kills, verdict.idle_kills, verdict.recovered) == (0, 2, [])
