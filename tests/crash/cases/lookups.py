"""SIGKILL of workers and of PostgreSQL while the rows of a lookup table change: each commit has one version of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import kill_server_twice
from tests.crash.cases.killing import spring
from tests.crash.cases.sources import trap
from tests.crash.lookups import changing, lookup_faults, write
from tests.crash.world import Case, World

GRAPH = Path(__file__).parents[1] / "lookup_graph.py"
SOURCE, LOOKUPS = "readings", "known,kept,watch"
SETTINGS = {"graph": GRAPH, "bundle_records_max": 7}


def cases() -> Iterator[Case]:
    """Each point, and the server."""
    for point in Failpoint:
        yield Case(f"SIGKILL at {point}, with lookups", "", partial(_play, point=point))
    yield Case("PostgreSQL killed and restarted, with lookups", "", _server_killed)


def _play(world: World, point: Failpoint) -> None:
    source = world.directory / "readings.ndjson"
    drawn = write(source, 1)
    # Only an injector decodes: the victim has both, so that it has its moment.
    mine, theirs = (SOURCE, LOOKUPS) if point is Failpoint.AFTER_DECODE else ("", "")
    how: dict[str, Any] = {"environment": {"CRASH_INPUT": str(source)}, **SETTINGS}
    with changing(world.url):
        one = world.worker(**how, only=mine, failpoint=trap(point), gated=True)
        other = world.worker(**how, only=theirs, gated=True, epoch_s=60)
        one.await_ready()
        other.await_ready()
        one.begin()
        spring(one, point)  # while it is alone: later it hands intervals over, and dies of that
        other.begin()
        recovery = world.await_killed(one)
        again = world.worker(**how, only=mine)
        recovery.wait(watched=again)
        world.await_finished(other, again)
    world.oracle = partial(lookup_faults, world.url, drawn)


def _server_killed(world: World) -> None:
    server = world.own_server()
    source = world.directory / "readings.ndjson"
    drawn = write(source, 2)
    how: dict[str, Any] = {"environment": {"CRASH_INPUT": str(source)}, **SETTINGS}
    with changing(world.url):
        kill_server_twice(world, server, **how)
    world.oracle = partial(lookup_faults, world.url, drawn)
