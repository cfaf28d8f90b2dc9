"""One generation of the graph in a simulated world: its sessions, its share of the machines, what is judged of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from millpy.graph import Graph
from millpy.store.memory import MemoryDatabase
from millpy.testing.simulation.books import Books
from millpy.testing.simulation.branches import Branches
from millpy.testing.simulation.broker import Broker
from millpy.testing.simulation.checkers import Evidence
from millpy.testing.simulation.feed import Feed
from millpy.testing.simulation.graphs import Shape, build
from millpy.testing.simulation.machine import Machine
from millpy.testing.simulation.names import Names
from millpy.testing.simulation.oracle import END, SourceOracle


class Side:
    """A generation that is deployed.

    Args:
        database: where; it is deployed now.
        generation: which one.
        shape: its graph.
        path: where the file goes, when that is the source.
        workers: how many machines it is to have.
        brokers: its sessions, by source partition.
        feed: what is published.
        names, trace: those of the world.

    Attributes:
        computations: their names.
        spawn_at: at which steps machines are to be started again.
    """

    def __init__(
        self,
        database: MemoryDatabase,
        generation: int,
        shape: Shape,
        path: Path,
        workers: int,
        brokers: Mapping[str, Broker],
        feed: Feed,
        names: Names,
        trace: list[str],
    ) -> None:
        self.generation = generation
        self.shape = shape
        self.workers = workers
        self.brokers = brokers
        self.graph: Graph = build(shape, str(path), generation)
        spec = self.graph.spec()
        self.computations = [computation.name for computation in spec.computations]
        deployment = database.deploy(spec)
        if shape.poison and "watcher" in shape.branches:
            database.constrain("marks", "not_refused", lambda row: row["kind"] != "refused", deployment.name)
        self.books = Books(database, deployment.graph_id, names, trace)
        self.spawn_at: list[int] = []
        sources = {
            book.interval_id: SourceOracle(feed.truths, shape.by_arrival, shape.within_us)
            for book in self.books.of("readings")
        }
        self.evidence = Evidence(
            books=self.books,
            brokers=brokers,
            file=feed.payloads if shape.feed == "file" else None,
            sources=sources,
            shape=shape,
            branches=Branches(self.books, sources, shape.lateness_us),
        )

    def machines(self, among: Sequence[Machine]) -> list[Machine]:
        """Those that run it."""
        return [machine for machine in among if machine.generation == self.generation]

    def is_covered(self, among: Sequence[Machine]) -> bool:
        """Whether every computation has a machine that may take it."""
        taken = {name for machine in self.machines(among) for name in machine.only or self.computations}
        return taken.issuperset(self.computations)

    def has_finished(self) -> bool:
        """Whether every interval has reached the end."""
        return all(book.header.low_watermark >= END for book in self.books.by_interval.values())
