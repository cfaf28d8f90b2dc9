"""SIGKILL at every failpoint of the turn: no row is lost, doubled or changed, with any successor. More: `make crash`.

A worker that is started again has died with another turn in flight; if another worker continues, it has died alone.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from millpy.hosting.failpoints import Failpoint
from millpy.testing.crash import Moment
from tests.crash.cases import find, killing
from tests.crash.cases.killing import ALONE, NTH, OF_COMPUTATIONS, OF_INJECTOR, ONE, TWO, impossible
from tests.crash.checks import Observer, faults
from tests.crash.conftest import Survives
from tests.crash.harness import Worker
from tests.crash.workload import Expected
from tests.crash.world import Case, World

PLACED = [
    *((OF_INJECTOR, point) for point in (Failpoint.AFTER_DECODE, Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT)),
    *((OF_COMPUTATIONS, point) for point in (Failpoint.AFTER_POLL, Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT)),
]


def name(point: Failpoint, placement: str, moment: Moment = Moment.OVERLAPPED) -> tuple[str, str]:
    moment = Moment.ALONE if impossible(point, placement, moment) else moment
    return f"SIGKILL at {point}", f"{placement}, {moment}"


def test_every_point_has_a_kill() -> None:
    names = {(case.fault, case.variant) for case in killing.cases()}
    wanted = {
        (f"SIGKILL at {point}", f"{placement}, {moment}")
        for point, placement, moment in product(
            Failpoint, (ONE, TWO, OF_INJECTOR, OF_COMPUTATIONS), (Moment.ALONE, Moment.OVERLAPPED)
        )
        if not impossible(point, placement, moment)
    }

    assert set(NTH) == set(Failpoint)
    assert names == wanted
    assert {fault for fault, _ in names} == {f"SIGKILL at {point}" for point in Failpoint}


@pytest.mark.parametrize("settings", [{}, ALONE], ids=["overlapping", "alone"])
def test_run_without_faults_reaches_every_point(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, settings: dict[str, float]
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, failpoint="after_fence:1:count", **settings) as one,
    ):
        one.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []
    assert observer.samples > 5
    assert set(one.points_reached) == set(Failpoint)


@pytest.mark.parametrize("point", list(Failpoint))
def test_killed_worker_is_started_again(survives: Survives, point: Failpoint) -> None:
    verdict = survives(find(*name(point, ONE)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("point", list(Failpoint))
def test_other_worker_continues(survives: Survives, point: Failpoint) -> None:
    verdict = survives(find(*name(point, TWO, Moment.ALONE)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("placement", "point"), PLACED)
def test_placed_worker_is_started_again(survives: Survives, placement: str, point: Failpoint) -> None:
    verdict = survives(find(*name(point, placement)))

    assert (verdict.kills, verdict.idle_kills) == (1, 0)
    assert len(verdict.recovered) == 1


def test_kill_of_a_worker_without_intervals_does_not_count(survives: Survives) -> None:
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
