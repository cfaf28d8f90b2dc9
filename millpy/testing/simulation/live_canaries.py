"""Canaries of changes in place, corrections and retention: the engine broken where operators touch a running graph."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from millpy.hosting import step
from millpy.model.checkpoint import Checkpoint
from millpy.model.deployment import Deployment, GraphSpec
from millpy.store.memory import database as memory_database
from millpy.store.memory.database import MemoryDatabase
from millpy.store.memory.requests import Requests
from millpy.store.memory.store import MemoryStore
from millpy.store.memory.tables import Header
from millpy.testing.simulation.canaries import BROKEN, Canary
from millpy.testing.simulation.edges import EDGES, KeepsFulfilledRequests, rewritten
from millpy.windowing.corrections import Corrections
from millpy.windowing.operator import WindowedInterval


class KeepsRowsOfReset(MemoryStore):
    """Leaves the rows of a computation in its result table when it is reset."""

    async def reset(self, spec: GraphSpec, names: Collection[str]) -> Deployment:
        """Reset, and put the rows back."""
        rows = {name: dict(self.database.table(name).rows) for name in names}
        found = await super().reset(spec, names)
        for name, of_table in rows.items():
            self.database.table(name).rows.update(of_table)
        return found


class SettlesFirst(MemoryStore):
    """Settles the corrections of a commit in a transaction of their own, before it."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        """Settle, then commit."""
        outcomes = [o for c in checkpoints for o in c.outcomes if o.corrects and not options.get("trial")]
        states = [self.database.requests.state_of(o.request.table, o.request.id) for o in outcomes]
        for state in states:
            state.state = "replayed"
        await asyncio.sleep(0)
        for state in states:
            state.state = "requested"
        try:
            await super().commit(checkpoints, **options)
        finally:
            for state in states:
                state.state = "replayed"


def _of_any_version(check_fence: Any) -> Any:
    def checked(database: MemoryDatabase, checkpoints: Sequence[Checkpoint], _: int) -> None:
        graph_id = database.headers[checkpoints[0].grant.interval_id].graph_id
        check_fence(database, checkpoints, database.graphs[graph_id].deployment.version)

    return checked


def _nothing(_: Any) -> Any:
    return lambda self: None


def _edge(name: str, checker: str, needs: str, place: tuple[Any, str], old: str, new: str, *, first: int = 0) -> Canary:
    """Return a canary with one replacement in a function."""
    return Canary(name, checker, patches=((*place, rewritten(old, new)),), needs=needs, first=first)


LIVE = (
    _edge(
        *("reopens windows that were over", "I9", "changes", (WindowedInterval, "_over_by")),
        *("self._over_floor", "-(2**62)"),
        first=13,
    ),
    Canary(
        "changes a graph under its workers",
        "versions",
        patches=((memory_database, "check_fence", _of_any_version), (Header, "disown", _nothing)),
        needs="changes",
    ),
    _edge(
        *("passes what is in transit when a stream is added", "I3", "changes", (MemoryDatabase, "_united")),
        *("cursors.setdefault(", "cursors.__setitem__("),
        first=374,
    ),
    _edge(
        *("begins an added step at the beginning of time", "I5", "resets", (MemoryDatabase, "_subscribe")),
        *("(header.bundle, header.low_watermark)", "(header.bundle, INSTANT_MIN)"),
        first=279,
    ),
    _edge(
        *("begins an added source at the beginning of time", "I5", "changes", (MemoryDatabase, "_united")),
        *("max(header.low_watermark, *reached)", "header.low_watermark"),
        first=1557,
    ),
    Canary("leaves the rows of what is reset", "I7", KeepsRowsOfReset, needs="resets", first=5),
    Canary("adds a late record to its window twice", "I9", KeepsFulfilledRequests, needs="corrections"),
    Canary("settles a correction before it is made", "oracle", SettlesFirst, needs="corrections"),
    _edge(
        *("overwrites a row that was corrected meanwhile", "I7", "corrections", (Requests, "check")),
        *("self._row_of(window) != window.row", "False"),
        first=5,
    ),
    _edge(
        *("forgets the row that it amends", "I9", "corrections", (Corrections, "_correct")),
        *(" if row is None else self._accumulators_of(row, corrections)", ""),
    ),
    _edge(
        *("counts an added record as late", "I8", "corrections", (step, "uncount_replayed")),
        *('interval.count("consumed", of[outcome.request.input], 1)', "pass"),
    ),
    _edge(
        *("adds a late record to a window that was dropped", "retention", "retention", (Corrections, "_correct")),
        *("window.row is None and self._may_be_dropped(window)", "False"),
        first=29,
    ),
)
CANARIES = (*BROKEN, *EDGES, *LIVE)
