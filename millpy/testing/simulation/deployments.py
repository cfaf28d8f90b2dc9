"""Deployments that change a simulated graph in place, and from which bundle on each change has an effect.

A change is drawn from the shape that is deployed: the lateness of windows, the horizon of dedupe ids, the promised
disorder, a filter before windows, one more stream before them, more windows, or windows that begin anew. The database
tells when it has changed the graph, so that each record is expected to have the meaning of its bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millpy.clock import Clock
from millpy.model.deployment import Deployment, GraphSpec
from millpy.store.memory.database import MemoryDatabase
from millpy.testing.simulation.graphs import ADDED, CHANGEABLE, DISORDER_US, DOUBLED, DROPPED, RAISED, Shape
from millpy.testing.simulation.per_key import TOOLS
from millpy.testing.simulation.windowed import WINDOWED

T = TypeVar("T")
LATENESSES_US = (0, 400_000, 2_000_000, 20_000_000)
HORIZONS_US = (80_000, 4_000_000)
DISORDERS_US = (100_000, DISORDER_US, 600_000)
BRANCH_OF = {windowed.table: branch for branch, windowed in WINDOWED.items()} | {"per_op": "operators", ADDED: "added"}


def next_shape(shape: Shape, pick: float, size: float) -> Shape | None:
    """Return a shape that may be deployed over another one; None without any.

    Args:
        shape: the deployed shape.
        pick: chooses among the changes, from [0, 1).
        size: chooses among the values, from [0, 1).
    """
    found: list[Shape] = []
    if not set(CHANGEABLE).isdisjoint(shape.branches):
        before_us = shape.lateness_of(CHANGEABLE[0])
        wanted = [us for us in LATENESSES_US if us != before_us and (not shape.sites or us < before_us)]
        found += [replace(shape, changed_us=_chosen(wanted, size))] * 2 if wanted else []
        found.append(replace(shape, filtered=not shape.filtered))
        if not (shape.doubled or shape.joined or shape.sites or set(DOUBLED).isdisjoint(shape.branches)):
            found.append(replace(shape, doubled=True))
            if _may_join(shape):
                found += [replace(shape, joined=True)] * 3
    if not shape.by_arrival and not shape.idle:
        within_us = _chosen([us for us in HORIZONS_US if us != shape.within_us], size)
        found += [replace(shape, within_us=within_us)] * 2
    if not (shape.sites or shape.added):
        found.append(replace(shape, added=True))
    if not shape.sites and not shape.idle:
        disorder_us = _chosen([us for us in DISORDERS_US if us != shape.disorder_us], size)
        found.append(replace(shape, disorder_us=disorder_us))
    return _chosen(found, pick) if found else None


def _may_join(shape: Shape) -> bool:
    """Tell whether one more source may be added: what all branches say must not depend on the order of sources."""
    others = {"watcher", *TOOLS}.isdisjoint(shape.branches)
    return others and shape.feed != "file" and not (shape.idle or shape.skew)


def next_reset(shape: Shape, pick: float) -> str | None:
    """Return a windowed computation that may begin anew; None without any."""
    names = [WINDOWED[branch].table for branch in shape.branches if branch in CHANGEABLE]
    names += [ADDED] if shape.added else []
    return _chosen(names, pick) if names and not shape.sites else None


def _chosen(among: Sequence[T], chance: float) -> T:
    return among[int(chance * len(among))]


@dataclass(slots=True)
class WindowReadings:
    """What the windows of a branch read, by the source's bundles.

    Attributes:
        changes: (source -> newest bundle before a change, the shape from then on), oldest first.
        others: the intervals of a source that was added, whose readings no filter sees.
    """

    shape: Shape
    changes: list[tuple[Mapping[int, int], Shape]] = field(default_factory=list)
    others: set[int] = field(default_factory=set)

    def values(self, branch: str, place: tuple[int, int], value: int) -> Iterator[int]:
        """Yield the values that come of a reading before the windows of a branch.

        Args:
            branch: the name of the branch.
            place: (source, bundle) of the reading.
            value: the value of the reading.
        """
        source, bundle = place
        if source in self.others:
            yield value
            return
        shape = next((shape for before, shape in reversed(self.changes) if bundle > before[source]), self.shape)
        if not (shape.filtered and branch in CHANGEABLE and value % DROPPED == 0):
            yield value
        if shape.doubled and branch in DOUBLED:
            yield value + RAISED


class ObservedDatabase(MemoryDatabase):
    """A database that tells of changes of a deployed graph.

    Args:
        clock: the server's clock.
        deploying: called before a graph that is deployed may change.
        changed: called after it has changed, with its description, its deployment and the computations that were reset.
    """

    def __init__(
        self,
        clock: Clock,
        deploying: Callable[[], None],
        changed: Callable[[GraphSpec, Deployment, Collection[str]], None],
    ) -> None:
        super().__init__(clock)
        self._deploying = deploying
        self._changed = changed

    def deploy(self, spec: GraphSpec, *, on_purpose: bool = False) -> Deployment:
        """Deploy a graph, and tell if that changes a deployed one."""
        known = self._find(spec)
        if known is None:
            return super().deploy(spec, on_purpose=on_purpose)
        self._deploying()
        found = super().deploy(spec, on_purpose=on_purpose)
        if found.changes:
            self._changed(spec, found, ())
        return found

    def reset(self, spec: GraphSpec, names: Collection[str]) -> Deployment:
        """Let computations begin anew, and tell it."""
        self._deploying()
        found = super().reset(spec, names)
        self._changed(spec, found, names)
        return found
