"""SIGKILL of workers that join two streams, at every failpoint: the joined records are those of a loop over all pairs.

Two workers share the intervals, so that a join reads one side from memory and the other from segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.joins import join_faults, write
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "join_graph.py"
SOURCES, JOINS = "orders,payments", "pairs,whole,counts,latest,of_windows"
SETTINGS = {"bundle_records_max": 7, "turn_panes_max": 5}
"""A turn that may hold few pairs leaves rows that are still to be joined."""


def cases() -> Iterator[Case]:
    """Each point."""
    for point in Failpoint:
        yield join_case(point)


def join_case(point: Failpoint) -> Case:
    """Return the case in which one of two workers is killed, and started again."""
    return Case(f"SIGKILL at {point}, with joins", "", partial(_play, point=point))


def _play(world: World, point: Failpoint) -> None:
    source = world.directory / "orders.ndjson"
    drawn = write(source, 1)
    environment = {"CRASH_INPUT": str(source)}
    # Only an injector decodes: the victim has both, so that it has its moment.
    mine, theirs = (SOURCES, JOINS) if point is Failpoint.AFTER_DECODE else ("", "")
    how: dict[str, Any] = {"graph": GRAPH, "environment": environment, **SETTINGS}
    one = world.worker(**how, only=mine, failpoint=trap(point), gated=True)
    other = world.worker(**how, only=theirs, gated=True, epoch_s=60)
    one.await_ready()
    other.await_ready()
    one.begin()
    other.begin()
    spring(one, point)
    recovery = world.await_killed(one)
    again = world.worker(**how, only=mine)
    recovery.wait(watched=again)
    world.await_finished(other, again)
    world.oracle = partial(join_faults, world.url, drawn)
