"""The source partitions that a feed has gained while it is read, to be added to the deployed graph.

A source reports them by `SourceSetup.gained`. The worker then ends as for another version of its graph, and begins
again with a deployment that has the new partitions, as if the graph's file named them; the other workers follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from millpy.errors import GraphVersionError, MillError
from millpy.model.deployment import DeployedInterval, GraphSpec

log = logging.getLogger(__name__)


class GainedPartitionsError(GraphVersionError):
    """A feed has partitions that the deployed graph does not have yet."""


@dataclass(slots=True)
class SourceGrowth:
    """What the feeds of a process's graph have gained. It outlives a worker.

    Attributes:
        partitions: the names of the source partitions of each injector that has gained some, in order.
        refused: the injectors whose new partitions could not be deployed; they gain none any more.
        is_pending: whether a worker has to begin again with more partitions.
    """

    partitions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    is_pending: bool = False

    def reporter(
        self, injector: str, deployed: Iterable[DeployedInterval], wake: Callable[[], None]
    ) -> Callable[[Sequence[str]], bool]:
        """Return the function by which a source of a worker reports all partitions of its feed.

        Args:
            injector: its name.
            deployed: its intervals.
            wake: wakes the worker.
        """
        known = frozenset(interval.partition for interval in deployed)

        def gained(partitions: Sequence[str]) -> bool:
            if injector in self.refused:
                return False
            if not known.issuperset(partitions):
                self.partitions[injector] = tuple(partitions)
                self.is_pending = True
                wake()
            return True

        return gained

    def check(self) -> None:
        """Raise GainedPartitionsError if a worker has to begin again."""
        if self.is_pending:
            names = ", ".join(f"{name}: {len(partitions)} partitions" for name, partitions in self.partitions.items())
            raise GainedPartitionsError(f"a feed has gained partitions ({names})")

    def applied_to(self, spec: GraphSpec) -> GraphSpec:
        """Return a spec with what was gained; it needs not be gained again."""
        self.is_pending = False
        computations = [
            replace(found, partitions=tuple(dict.fromkeys([*found.partitions, *self.partitions.get(found.name, ())])))
            for found in spec.computations
        ]
        return replace(spec, computations=tuple(computations))

    def refuse(self, error: MillError) -> bool:
        """Forget what was gained, because it cannot be deployed; return whether there was anything."""
        if not self.partitions:
            return False
        log.warning("new partitions of %s are not read: %s", ", ".join(self.partitions), error)
        self.refused.update(self.partitions)
        self.partitions.clear()
        return True
