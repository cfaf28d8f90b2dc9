"""Workers and archivers that are killed: `python -m tests.crash.killed_run GRAPH.py DATABASE ARCHIVE`.

One worker runs to the end. Beside it others are killed, one after the other, at points of their cycle. When all have
ended, archivers are killed, and the last one archives the rest.
"""

from __future__ import annotations

import asyncio
import os
import sys

from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.process.assembly import archives_of, run_worker
from millpy.store.postgres.archiving import ArchiveInto
from millpy.testing.crash import CrashFailpoints, parse_spec
from tests.crash.archiver import is_killed

LIMITS = Limits(lease_ttl_s=0.5, bundle_records_max=7, turn_panes_max=3, turn_timers_max=2)
KILLS = ("after_step:9:kill", "after_fence:6:kill", "after_commit:12:kill", "before_commit:7:kill")


def work(graph: str, url: str, failpoint: str = "") -> None:
    """Run a worker to the end of the graph, or until it is killed."""
    points = CrashFailpoints(parse_spec(failpoint))
    asyncio.run(run_worker(load_graph(graph), url, limits=LIMITS, failpoints=points))


def archive(graph: str, url: str, place: str, failpoint: str = "") -> None:
    """Archive everything, or until killed."""
    loaded, points = load_graph(graph), CrashFailpoints(parse_spec(failpoint))
    limits = Limits(lease_ttl_s=0.5, bundle_records_max=100)
    into = ArchiveInto(place, every_s=0.0)
    asyncio.run(run_worker(loaded, url, limits=limits, only=archives_of(loaded), archive=into, failpoints=points))


def main(graph: str, url: str, place: str) -> int:
    """Run everything; return how often nobody was killed."""
    if not (first := os.fork()):
        work(graph, url)
        os._exit(0)
    spared = sum(not is_killed(lambda: work(graph, url, failpoint)) for failpoint in KILLS)  # noqa: B023
    _, status = os.waitpid(first, 0)
    spared += sum(
        not is_killed(lambda: archive(graph, url, place, failpoint))  # noqa: B023
        for failpoint in ("after_fence:2:kill", "after_commit:2:kill")
    )
    archive(graph, url, place)
    return spared + 10 * bool(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
