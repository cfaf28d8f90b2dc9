"""SIGKILL at every Point of the turn: nothing lost, doubled or changed, whoever goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.runtime.probe import Point
from millpy.testing.crash import points_reached
from tests.crash.checks import Observer, faults
from tests.crash.harness import Worker
from tests.crash.workload import Expected

# The how-manieth time is in the middle of the work.
NTH = {
    Point.AFTER_CLAIM: 1,
    Point.AFTER_POLL: 25,
    Point.AFTER_DECODE: 20,
    Point.AFTER_LOAD: 60,
    Point.AFTER_STEP: 25,
    Point.BEFORE_COMMIT: 25,
    Point.AFTER_FENCE: 25,
    Point.AFTER_COMMIT: 25,
    Point.AFTER_ACKNOWLEDGE: 25,
    Point.BEFORE_FOLD_END: 3,
    Point.AFTER_FOLD: 3,
    Point.AFTER_SLOT_FREED: 1,
    Point.BEFORE_RELEASE: 1,
}
INJECTOR = "readings"
COMPUTATIONS = "per_window,watcher,per_group,tally"
PLACED = [
    *((INJECTOR, COMPUTATIONS, point) for point in (Point.AFTER_DECODE, Point.AFTER_FENCE, Point.AFTER_COMMIT)),
    *((COMPUTATIONS, INJECTOR, point) for point in (Point.AFTER_POLL, Point.AFTER_FENCE, Point.AFTER_COMMIT)),
]


def test_every_point_has_a_kill() -> None:
    assert set(NTH) == set(Point)


def test_run_without_faults_reaches_every_point(
    tmp_path: Path, database_url: str, source: Path, expected: Expected
) -> None:
    with Observer(database_url) as observer, Worker(tmp_path, database_url, source, probe="after_fence:1:count") as one:
        one.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []
    assert observer.samples > 5
    assert set(points_reached(one.reached_file)) == set(Point)


@pytest.mark.parametrize("point", list(Point))
def test_killed_worker_is_started_again(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, point: Point
) -> None:
    with Observer(database_url) as observer:
        with Worker(tmp_path, database_url, source, probe=f"{point}:{NTH[point]}:kill") as killed:
            killed.await_killed()
        observer.look_now()
        with Worker(tmp_path, database_url, source) as again:
            again.await_finished()

    assert killed.reached(point) == NTH[point]
    assert faults(database_url, expected) == []
    assert observer.faults == []


@pytest.mark.parametrize("point", list(Point))
def test_other_worker_goes_on(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, point: Point
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, probe=f"{point}:{NTH[point]}:kill", gated=True) as killed,
        Worker(tmp_path, database_url, source, gated=True) as other,
    ):
        killed.await_ready()
        other.await_ready()
        killed.begin()
        killed.await_reached(Point.AFTER_CLAIM)
        other.begin()
        killed.await_killed()
        observer.look_now()
        other.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []


@pytest.mark.parametrize(("victim", "rest", "point"), PLACED)
def test_placed_worker_is_started_again(
    tmp_path: Path, database_url: str, source: Path, expected: Expected, victim: str, rest: str, point: Point
) -> None:
    with (
        Observer(database_url) as observer,
        Worker(tmp_path, database_url, source, only=rest) as other,
        Worker(tmp_path, database_url, source, only=victim, probe=f"{point}:{NTH[point]}:kill") as killed,
    ):
        killed.await_killed()
        observer.look_now()
        with Worker(tmp_path, database_url, source, only=victim) as again:
            again.await_finished()
            other.await_finished()

    assert faults(database_url, expected) == []
    assert observer.faults == []
