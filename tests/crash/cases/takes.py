"""SIGKILL of workers and archivers of a graph that archives its takes: an exact batch makes every bundle again.

Three source partitions are shared by two workers, so a step has several producers, here and elsewhere, and a worker
that is lost leaves its producers and consumers at different positions. The archiver runs beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from millpy.graph.loader import load_graph
from millpy.hosting.failpoints import Failpoint
from millpy.process.assembly import archives_of
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.takes import replay_faults, write_feeds
from tests.crash.world import Case, World

RECORDS = 400
WORKERS = {"bundle_records_max": 7, "turn_panes_max": 3, "turn_timers_max": 2}
OF_ARCHIVERS = (Failpoint.AFTER_CLAIM, Failpoint.AFTER_POLL, Failpoint.AFTER_STEP, Failpoint.BEFORE_COMMIT,
                Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT, Failpoint.AFTER_ACKNOWLEDGE)  # fmt: skip


def cases() -> Iterator[Case]:
    """Each point, in a worker and in an archiver."""
    for point in Failpoint:
        yield worker_case(point)
    for point in OF_ARCHIVERS:
        yield archiver_case(point)


def worker_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with takes", "worker", partial(_play, of_worker=point))


def archiver_case(point: Failpoint) -> Case:
    """Return the case in which the archiver is killed, and started again."""
    return Case(f"SIGKILL at {point}, with takes", "archiver", partial(_play, of_archiver=point))


def _play(world: World, of_worker: Failpoint | None = None, of_archiver: Failpoint | None = None) -> None:
    graph, archive = write_feeds(world.directory, 1, RECORDS), world.directory / "archive"
    # Small bundles: an archiver that begins when all is there has its moment, too.
    only = ",".join(archives_of(load_graph(str(graph))))
    archiving = {"graph": graph, "archive": archive, "only": only, "bundle_records_max": 20}
    one = world.worker(graph=graph, failpoint="" if of_worker is None else trap(of_worker), gated=True, **WORKERS)
    other = world.worker(graph=graph, gated=True, **WORKERS, **({"epoch_s": 60} if of_worker else {}))
    one.await_ready()
    other.await_ready()
    one.begin()
    other.begin()
    archiver = world.worker(failpoint="" if of_archiver is None else trap(of_archiver), **archiving)
    if of_worker is not None:
        spring(one, of_worker)
        recovery = world.await_killed(one)
        again = one = world.worker(graph=graph, **WORKERS)
    else:
        recovery = world.await_killed(archiver)
        again = archiver = world.worker(**archiving)
    recovery.wait(watched=again)
    world.await_finished(one, other, archiver)
    world.oracle = partial(replay_faults, world.url, graph, archive)
