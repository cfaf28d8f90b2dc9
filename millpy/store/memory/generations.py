"""Switching generations in a `MemoryDatabase`, as `store.postgres.deployment.generations` does it.

    1. It locks the headers of both graphs, in the order that every holder uses. It waits for the commits in flight, and
       ends those of workers whose lease has expired.
    2. It raises both versions and fences both graphs, then changes names and tables at once.

A switch that is canceled half way has changed nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.errors import UsageError
from millpy.model.deployment import generation_name
from millpy.store.memory.tables import DeployedGraph, Holder
from millpy.store.protocol import Event

if TYPE_CHECKING:
    from millpy.store.memory.database import MemoryDatabase


async def switch(database: MemoryDatabase, family: str, generation: int) -> bool:
    """Make a generation the current one. Return False when it already is.

    Raises:
        UsageError: the generation does not exist.
    """
    while family in database.deploying:
        await database.wait_for_release()
    database.deploying.add(family)
    lock = Holder(committing=True)  # so that it cannot be terminated
    try:
        before, after = _both(database, family, generation)
        if before is after:
            return False
        for graph in sorted((before, after), key=lambda graph: graph.deployment.graph_id):
            await _lock_headers(database, lock, graph)
        for graph in (before, after):
            fence(database, graph)
        _give_name(database, before, after)
        return True
    finally:
        database.deploying.discard(family)
        database.unlock(lock)


def _both(database: MemoryDatabase, family: str, generation: int) -> tuple[DeployedGraph, DeployedGraph]:
    """Return the current generation, and the one that becomes current."""
    known = {graph.spec.generation: graph for graph in database.graphs.values() if graph.spec.name == family}
    if generation not in known:
        raise UsageError(f"graph {family!r} has no generation {generation}", hint=f"there are: {sorted(known)}")
    return next(graph for graph in known.values() if graph.deployment.name == family), known[generation]


async def _lock_headers(database: MemoryDatabase, lock: Holder, graph: DeployedGraph) -> None:
    for interval_id in sorted(interval.interval_id for interval in graph.deployment.intervals):
        while (holder := database.holder(interval_id)) is not None:
            if holder.committing or database.is_live(database.headers[interval_id].owner):
                await database.wait_for_release()
            else:
                database.terminate(holder)
        lock.interval_ids.append(interval_id)
        database.hold(lock, interval_id)


def fence(database: MemoryDatabase, graph: DeployedGraph) -> None:
    """Raise the version of a graph, which fences off all its workers. Nothing else about the graph changes."""
    graph.deployment = replace(graph.deployment, version=graph.deployment.version + 1)
    for interval in graph.deployment.intervals:
        database.headers[interval.interval_id].disown()


def _give_name(database: MemoryDatabase, before: DeployedGraph, after: DeployedGraph) -> None:
    """Give the graph's name, and with it the names of the result tables, to the generation `after`."""
    family = before.spec.name
    rename(database, before, generation_name(family, before.spec.generation))
    rename(database, after, family)
    detail: dict[str, object] = {"from": before.spec.generation, "to": after.spec.generation}
    database.events += [(graph.deployment.graph_id, Event("switched", detail)) for graph in (before, after)]


def rename(database: MemoryDatabase, graph: DeployedGraph, name: str) -> None:
    """Rename a graph, and move its tables to that name."""
    graph.deployment = replace(graph.deployment, name=name)
    for table_id in graph.deployment.table_ids.values():
        database.tables[table_id].graph = name
