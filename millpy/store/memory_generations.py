"""Switching generations in a `MemoryDatabase`, as `store.postgres.generations` does it.

    1. the headers of both are locked, in one order with everybody, which waits for the commits in flight; those of
       workers whose lease has expired are ended
    2. both versions are raised and both graphs fenced, then the names and the places of the tables change: at once

Whoever is cancelled in the middle has changed nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.errors import UsageError
from millpy.model.deployment import name_beside
from millpy.store.memory_tables import DeployedGraph, Holder
from millpy.store.protocol import Event

if TYPE_CHECKING:
    from millpy.store.memory_database import MemoryDatabase


async def switch(database: MemoryDatabase, family: str, generation: int) -> bool:
    """Make a generation the current one; False when it is that already.

    Raises:
        UsageError: there is no such generation.
    """
    while family in database.deploying:
        await database.released()
    database.deploying.add(family)
    lock = Holder(committing=True)  # nobody terminates it
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
    """The current generation, and the one that is to be it."""
    known = {graph.spec.generation: graph for graph in database.graphs.values() if graph.spec.name == family}
    if generation not in known:
        raise UsageError(f"graph {family!r} has no generation {generation}", hint=f"there are: {sorted(known)}")
    return next(graph for graph in known.values() if graph.deployment.name == family), known[generation]


async def _lock_headers(database: MemoryDatabase, lock: Holder, graph: DeployedGraph) -> None:
    for interval_id in sorted(interval.interval_id for interval in graph.deployment.intervals):
        while (holder := database.holder(interval_id)) is not None:
            if holder.committing or database.is_live(database.headers[interval_id].owner):
                await database.released()
            else:
                database.terminate(holder)
        lock.interval_ids.append(interval_id)
        database.hold(lock, interval_id)


def fence(database: MemoryDatabase, graph: DeployedGraph) -> None:
    """Fence off every worker of a graph, which stays what it is."""
    graph.deployment = replace(graph.deployment, version=graph.deployment.version + 1)
    for interval in graph.deployment.intervals:
        database.headers[interval.interval_id].disown()


def _give_name(database: MemoryDatabase, before: DeployedGraph, after: DeployedGraph) -> None:
    """The graph's name, and with it the place of the result tables, goes from one generation to the other."""
    family = before.spec.name
    rename(database, before, name_beside(family, before.spec.generation))
    rename(database, after, family)
    detail: dict[str, object] = {"from": before.spec.generation, "to": after.spec.generation}
    database.events += [(graph.deployment.graph_id, Event("switched", detail)) for graph in (before, after)]


def rename(database: MemoryDatabase, graph: DeployedGraph, name: str) -> None:
    """Call a graph otherwise, and move its tables to that name."""
    graph.deployment = replace(graph.deployment, name=name)
    for table_id in graph.deployment.table_ids.values():
        database.tables[table_id].graph = name
