"""Checks the names of a simulated graph's generations, and of their tables.

A worker looks its graph up once, and finds the result tables by the name that the graph had then. A switch gives name
and tables to another generation, so a worker that simply continued would write into the tables of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.model.checkpoint import Checkpoint
from millpy.store.memory.database import MemoryDatabase
from millpy.testing.simulation.graphs import NAME

if TYPE_CHECKING:
    from millpy.testing.simulation.checkers import Evidence
    from millpy.testing.simulation.history import CommittedBundle


class Names:
    """The names of the generations at the last look.

    Attributes:
        switches: how often the graph's name has moved to another generation.
    """

    def __init__(self, database: MemoryDatabase) -> None:
        self.switches = 0
        self._database = database
        self._current: int | None = None

    def check(self) -> Iterator[str]:
        """Yield faults: one generation must have the graph's name, every other one its number behind it."""
        current = []
        for graph in self._database.graphs.values():
            name, generation = graph.deployment.name, graph.spec.generation
            if name == NAME:
                current.append(generation)
            elif name != f"{NAME}_{generation}":
                yield f"generation {generation} is called {name}"
            strangers = {t.graph for t in self._database.tables.values() if t.graph_id == graph.deployment.graph_id}
            if strangers - {name}:
                yield f"generation {generation} is called {name}, its tables are in {strangers}"
        if len(current) != 1:
            yield f"{NAME} is the name of generations {current}"
        elif current[0] != self._current:
            self.switches += self._current is not None
            self._current = current[0]


def routed_by_name(database: MemoryDatabase, name: str, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its rows in the tables that a name means now."""
    if not checkpoint.results and not checkpoint.deleted:
        return checkpoint
    there = {table.spec.name: table.table_id for table in database.tables.values() if table.graph == name}

    def table_now(table_id: int) -> int:
        return there.get(database.tables[table_id].spec.name, table_id)

    return replace(
        checkpoint,
        results=tuple(replace(rows, table_id=table_now(rows.table_id)) for rows in checkpoint.results),
        deleted=tuple(replace(rows, table_id=table_now(rows.table_id)) for rows in checkpoint.deleted),
    )


def rows_in_own_tables(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield rows of one generation in a table of the other."""
    history, interval_id = evidence.history, commit.observed.interval_id
    if commit.checkpoint is None or not commit.checkpoint.results:
        return
    for table in history.database.tables.values():
        if table.graph_id != history.graph_id:
            strays = [row for row in table.rows.values() if row["interval_id"] == interval_id]
            if strays:
                yield f"interval {interval_id} has written into {table.spec.name} of the other generation: {strays[:2]}"


def name_is_current(evidence: Evidence, commit: CommittedBundle) -> Iterator[str]:
    """Yield commits of workers that have not looked up their graph since the last switch or change."""
    attempt, history = commit.attempt, evidence.history
    switches = history.names.switches
    if attempt is not None and not switches and attempt.version != history.version:
        yield f"a commit of version {attempt.version} is in version {history.version}: {commit.checkpoint}"
    if attempt is not None and attempt.switches < switches:
        yield (
            f"bundle {commit.bundle} of interval {commit.observed.interval_id} is by a worker that looked its graph "
            f"up after {attempt.switches} of {switches} switches"
        )
