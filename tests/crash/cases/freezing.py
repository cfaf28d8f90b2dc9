"""A worker that is frozen past its lease and resumed (MillWheel's figure 12): no orphan timer, segment or result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import COMPUTATIONS, INJECTOR
from tests.crash.harness import GRAPH, Worker
from tests.crash.world import Case, World

PLACES = {
    Failpoint.AFTER_POLL: 20,
    Failpoint.AFTER_STEP: 20,
    Failpoint.BEFORE_COMMIT: 20,
    Failpoint.AFTER_FENCE: 20,
    Failpoint.AFTER_COMMIT: 20,
    Failpoint.AFTER_ACKNOWLEDGE: 20,
    Failpoint.BEFORE_FOLD: 3,
    Failpoint.AFTER_FOLD: 3,
}


def cases() -> Iterator[Case]:
    """Each place, for the worker with the source and for one without."""
    for point in PLACES:
        for only, variant in ((INJECTOR, "injector"), (COMPUTATIONS, "computations")):
            yield Case(f"frozen at {point}", variant, partial(_frozen, point=point, only=only))


def _frozen(world: World, point: Failpoint, only: str) -> None:
    freeze_and_thaw(world, point, only)


def freeze_and_thaw(world: World, point: Failpoint, only: str = "", graph: Path = GRAPH) -> tuple[Worker, float]:
    """Freeze one of two workers at a point until the other owns all, then let it go on.

    Who comes first keeps a source: the one that freezes does when it is about the source, else the other does.

    Returns:
        The worker that was frozen, at its end, and the seconds from freezing to the next commit of all that it owned.
    """
    failpoint = f"{point}:{PLACES[point] if only else 5}:stop"
    heir = world.worker(graph=graph, gated=True, bundle_records_max=30)
    frozen = world.worker(graph=graph, gated=True, bundle_records_max=30, only=only, failpoint=failpoint)
    heir.await_ready()
    frozen.await_ready()
    for worker in (frozen, heir) if only == INJECTOR else (heir, frozen):
        worker.begin()
        worker.await_reached(Failpoint.AFTER_CLAIM)
    recovery = world.await_frozen(frozen)
    assert recovery.hit, frozen.log
    taken_over_s = recovery.wait(watched=heir)
    frozen.thaw()
    world.await_finished(heir, frozen)
    return frozen, taken_over_s
