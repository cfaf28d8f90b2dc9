"""Generations of a simulated graph: what they are called, whose tables those are, and who knows it.

A worker knows its graph by the name that it had when it looked it up, and finds the result tables by that name. A
switch gives both to another generation, so a worker that goes on as before would write into the tables of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from millpy.model.checkpoint import Checkpoint
from millpy.store.memory_database import MemoryDatabase
from millpy.testing.simulation.graphs import NAME

if TYPE_CHECKING:
    from millpy.testing.simulation.books import Landing
    from millpy.testing.simulation.checkers import Evidence


class Names:
    """What the generations of the graph are called, as it was seen last.

    Attributes:
        switches: how often the graph's name has gone to another generation.
    """

    def __init__(self, database: MemoryDatabase) -> None:
        self.switches = 0
        self._database = database
        self._current: int | None = None

    def look(self) -> Iterator[str]:
        """The graph's name is that of exactly one generation at any moment; the others have their numbers."""
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


def named(database: MemoryDatabase, name: str, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose rows go to the tables that are found under a name now."""
    if not checkpoint.results and not checkpoint.absorbed:
        return checkpoint
    there = {table.spec.name: table.table_id for table in database.tables.values() if table.graph == name}

    def found(table_id: int) -> int:
        return there.get(database.tables[table_id].spec.name, table_id)

    return replace(
        checkpoint,
        results=tuple(replace(rows, table_id=found(rows.table_id)) for rows in checkpoint.results),
        absorbed=tuple(replace(rows, table_id=found(rows.table_id)) for rows in checkpoint.absorbed),
    )


def at_home(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """Nobody ever writes a row of one generation into a table of the other."""
    books, interval_id = evidence.books, landing.book.interval_id
    if landing.checkpoint is None or not landing.checkpoint.results:
        return
    for table in books.database.tables.values():
        if table.graph_id != books.graph_id:
            strays = [row for row in table.rows.values() if row["interval_id"] == interval_id]
            if strays:
                yield f"interval {interval_id} has written into {table.spec.name} of the other generation: {strays[:2]}"


def looked_up(evidence: Evidence, landing: Landing) -> Iterator[str]:
    """A worker that has not looked its graph up since the last switch commits nothing more."""
    attempt, switches = landing.attempt, evidence.books.names.switches
    if attempt is not None and attempt.switches < switches:
        yield (
            f"bundle {landing.bundle} of interval {landing.book.interval_id} is of a worker that looked its graph up "
            f"after {attempt.switches} switches, there were {switches}"
        )
