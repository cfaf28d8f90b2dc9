"""SIGKILL of a worker at every failpoint: alone or with another turn in flight, with any share, with any successor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from millpy.hosting.failpoints import Failpoint
from millpy.testing.crash import Moment
from tests.crash.harness import Worker, await_true
from tests.crash.world import Case, World

NTH = {  # the how-manieth time is in the middle of the work
    Failpoint.AFTER_CLAIM: 1,
    Failpoint.AFTER_POLL: 25,
    Failpoint.AFTER_DECODE: 20,
    Failpoint.AFTER_LOAD: 60,
    Failpoint.AFTER_STEP: 25,
    Failpoint.BEFORE_COMMIT: 25,
    Failpoint.AFTER_FENCE: 25,
    Failpoint.AFTER_COMMIT: 25,
    Failpoint.AFTER_ACKNOWLEDGE: 25,
    Failpoint.BEFORE_FOLD: 3,
    Failpoint.AFTER_FOLD: 3,
    Failpoint.AFTER_SLOT_FREED: 1,
    Failpoint.BEFORE_RELEASE: 1,
}
INJECTOR = "readings"
COMPUTATIONS = "per_window,watcher,per_group,tally"
ALONE = {"fold_bytes": 1, "unfolded_bytes_max": 1, "fold_every_s": 0.02}
"""A worker that has to fold between its turns takes no input meanwhile: so each commit is alone."""
OVERLAPPED = {"bundle_records_max": 25, "epoch_s": 0.2}
"""More turns and more slots: the moment comes, even where it is rare."""
BETWEEN_TURNS = (Failpoint.AFTER_CLAIM, Failpoint.BEFORE_RELEASE)
ONE, TWO, OF_INJECTOR, OF_COMPUTATIONS = "one worker", "two workers", "injector apart", "computations apart"


def impossible(point: Failpoint, placement: str, moment: Moment) -> str:
    """Return why there is no such case, or an empty text."""
    if moment is Moment.OVERLAPPED and point in BETWEEN_TURNS:
        return "ownership changes only between turns"
    if placement == OF_COMPUTATIONS and point is Failpoint.AFTER_DECODE:
        return "only an injector decodes"
    if placement == OF_INJECTOR and point is Failpoint.AFTER_LOAD:
        return "only a stage loads state"
    return ""


def cases() -> Iterator[Case]:
    """All that are possible."""
    scenarios = {ONE: _one, TWO: _two, OF_INJECTOR: _apart, OF_COMPUTATIONS: _apart}
    for point in Failpoint:
        for placement, scenario in scenarios.items():
            for moment in (Moment.ALONE, Moment.OVERLAPPED):
                if not impossible(point, placement, moment):
                    run = partial(scenario, point=point, moment=moment)
                    if scenario is _apart:
                        run = partial(run, of_injector=placement == OF_INJECTOR)
                    yield Case(f"SIGKILL at {point}", f"{placement}, {moment}", run)


def _trap(point: Failpoint, moment: Moment) -> tuple[str, dict[str, float]]:
    if point in BETWEEN_TURNS:
        return f"{point}:{NTH[point]}:kill", {}
    # The first fitting time from the tenth on: it may be rare.
    return f"{point}:{min(10, NTH[point])}:kill:{moment}", ALONE if moment is Moment.ALONE else OVERLAPPED


def spring(victim: Worker, point: Failpoint) -> None:
    """Drain a worker whose point is the release, while it has work. It reaches every other point by itself.

    A quick worker takes all records in fewer turns, and reaches the release by itself, too.
    """
    if point is Failpoint.BEFORE_RELEASE:
        what = f"{Failpoint.AFTER_COMMIT} 10 times, or ended"
        await_true(lambda: victim.reached(Failpoint.AFTER_COMMIT) >= 10 or victim.process.poll() is not None, what)
        if victim.process.poll() is None:
            victim.drain()


def _one(world: World, point: Failpoint, moment: Moment) -> None:
    """A supervisor starts it again."""
    failpoint, settings = _trap(point, moment)
    victim = world.worker(failpoint=failpoint, **settings)
    spring(victim, point)
    recovery = world.await_killed(victim)
    again = world.worker()
    recovery.wait(watched=again)
    world.await_finished(again)


def _two(world: World, point: Failpoint, moment: Moment) -> None:
    """The other worker continues."""
    failpoint, settings = _trap(point, moment)
    victim = world.worker(failpoint=failpoint, gated=True, **settings)
    # Only the victim turns the rings, so that it is who frees a slot.
    other = world.worker(gated=True, epoch_s=60)
    victim.await_ready()
    other.await_ready()
    victim.begin()
    victim.await_reached(Failpoint.AFTER_CLAIM)
    other.begin()  # it asks for its share, and the victim releases that in the midst of the work
    recovery = world.await_killed(victim)
    recovery.wait(watched=other)
    world.await_finished(other)


def _apart(world: World, point: Failpoint, moment: Moment, of_injector: bool) -> None:
    """Injector and computations are in different processes; the victim is started again."""
    failpoint, settings = _trap(point, moment)
    mine, theirs = (INJECTOR, COMPUTATIONS) if of_injector else (COMPUTATIONS, INJECTOR)
    other = world.worker(only=theirs, epoch_s=60)
    victim = world.worker(only=mine, failpoint=failpoint, **settings)
    spring(victim, point)
    recovery = world.await_killed(victim)
    again = world.worker(only=mine)
    recovery.wait(watched=again)
    world.await_finished(again, other)
