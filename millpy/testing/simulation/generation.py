"""One generation of the graph in a simulated world: its sessions, its machines, and the evidence about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpy.graph import Graph
from millpy.model.deployment import GraphSpec
from millpy.store.memory.store import MemoryDatabase
from millpy.testing.simulation.branches import Branches
from millpy.testing.simulation.broker import MORE, Broker
from millpy.testing.simulation.checkers import Evidence
from millpy.testing.simulation.graphs import Shape, build
from millpy.testing.simulation.history import RunHistory
from millpy.testing.simulation.input import Feed
from millpy.testing.simulation.machine import Machine
from millpy.testing.simulation.names import Names
from millpy.testing.simulation.oracle import END
from millpy.testing.simulation.sites import source_oracle


@dataclass(frozen=True, slots=True)
class Environment:
    """The parts of a world that its generations share.

    Attributes:
        path: the path of the file, if that is the source.
        feed: everything that is published.
    """

    database: MemoryDatabase
    path: Path
    feed: Feed
    names: Names
    trace: list[str]


class SimulatedGeneration:
    """A deployed generation of the graph, with its machines and the evidence about it.

    Args:
        environment: the world; the constructor deploys the generation to its database.
        generation: the number of the generation.
        shape: its graph.
        workers: the number of its machines.
        brokers: its sessions, by source partition.

    Attributes:
        computations: the names of its computations.
        spawn_at: the steps at which machines are started again.
        proposed: the descriptions that users have tried to deploy, with their shapes.
    """

    def __init__(
        self,
        environment: Environment,
        generation: int,
        shape: Shape,
        workers: int,
        brokers: Mapping[str, Broker],
    ) -> None:
        database, feed = environment.database, environment.feed
        self._path = environment.path
        self.generation = generation
        self.shape = shape
        self.workers = workers
        self.brokers = brokers
        self.graph: Graph = build(shape, str(environment.path), generation)
        spec = self.graph.spec()
        self.computations = [computation.name for computation in spec.computations]
        deployment = database.deploy(spec)
        if shape.poison and "watcher" in shape.branches:
            database.constrain("marks", "not_refused", lambda row: row["kind"] != "refused", deployment.name)
        self.history = RunHistory(database, deployment.graph_id, environment.names, environment.trace)
        self.spawn_at: list[int] = []
        sources = {
            observed.interval_id: source_oracle(feed.truths, shape)
            for observed in self.history.intervals_of("readings")
        }
        self.proposed: list[tuple[GraphSpec, Shape]] = []
        self.evidence = Evidence(
            history=self.history,
            brokers=brokers,
            file=feed.payloads if shape.feed == "file" else None,
            sources=sources,
            shape=shape,
            branches=Branches(self.history, sources, shape),
        )

    def propose(self, shape: Shape) -> GraphSpec:
        """Return the description of another shape, for a user who deploys it."""
        spec = build(shape, str(self._path), self.generation).spec()
        self.proposed.append((spec, shape))
        return spec

    def change(self, spec: GraphSpec, more: Broker) -> None:
        """Give the file of its machines and the evidence the meaning that was just deployed.

        Args:
            spec: what was deployed.
            more: the session of a source that a deployment may have added.
        """
        shape = next(shape for proposed, shape in self.proposed if proposed is spec)
        self.shape, self.graph = shape, build(shape, str(self._path), self.generation)
        self.computations = [computation.name for computation in spec.computations]
        self.evidence.change(shape)
        if shape.joined:
            self.evidence.brokers = {**self.brokers, MORE: more}

    def machines(self, among: Sequence[Machine]) -> list[Machine]:
        """Return those of the machines that run this generation."""
        return [machine for machine in among if machine.generation == self.generation]

    def is_covered(self, among: Sequence[Machine]) -> bool:
        """Tell whether every computation has a machine that may own it."""
        taken = {name for machine in self.machines(among) for name in machine.only or self.computations}
        return taken.issuperset(self.computations)

    def has_finished(self) -> bool:
        """Tell whether every interval has finished."""
        return all(observed.header.low_watermark >= END for observed in self.history.by_interval.values())
