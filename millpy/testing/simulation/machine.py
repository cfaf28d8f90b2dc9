"""One simulated machine: a real worker with its own clock, heartbeat and connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID

from millpy.errors import GraphError, GraphVersionError
from millpy.graph import Graph
from millpy.hosting.failpoints import Failpoint
from millpy.hosting.plan import plan
from millpy.hosting.step import StoreLoader
from millpy.limits import Limits
from millpy.model.checkpoint import Entries, Grant
from millpy.model.lease import Renewal, WorkerUsage
from millpy.model.stored_windows import WindowQuery
from millpy.runtime.context import WorkerContext
from millpy.runtime.lease import Heartbeat, Lease
from millpy.runtime.worker import Worker
from millpy.store.memory.store import MemoryStore
from millpy.testing.clock import SkewedClock
from millpy.testing.simulation.history import RecordingStore
from millpy.testing.simulation.loop import ProcessKilled, SimulatedLoop, SimulatedProcess

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end while no other runs, like one blocking call; return its result."""
    while True:
        try:
            work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


class Beat:
    """The connection of the heartbeat."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def beat(self, worker_id: UUID, ttl_s: float, _usage: WorkerUsage) -> Renewal | None:
        """Renew the lease."""
        return at_once(self._store.heartbeat(worker_id, ttl_s))

    def close(self) -> None:
        """Do nothing: the connection holds nothing."""


@dataclass(frozen=True, slots=True)
class Program:
    """The code that a machine runs.

    Attributes:
        graph: returns the graph in its file, which a deployment may change.
        generation: the generation of the graph.
        worker_type: the engine; canaries give a broken one.
        only: the computations that it may own; empty for all.
    """

    graph: Callable[[], Graph]
    generation: int = 1
    worker_type: type[Worker] = Worker
    only: tuple[str, ...] = ()


class Machine:
    """A simulated process that runs a worker.

    Args:
        name: its name in the trace.
        program: the code that it runs.
        limits: the limits of its worker.
        clock: its own clock.
        connect: opens a connection to the database, for each life of its worker.
        rng: decides everything that is random.
        reached: called at each failpoint; returns what happens there, or None.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        limits: Limits,
        clock: SkewedClock,
        connect: Callable[[], RecordingStore],
        rng: random.Random,
        reached: Callable[[Machine, Failpoint], str | None],
    ) -> None:
        self.process = SimulatedProcess(name)
        self.name = name
        self.clock = clock
        self._connect = connect
        self.store = connect()
        self.generation = program.generation
        self.stop = asyncio.Event()
        self.worker: Worker | None = None
        self.ended: asyncio.Task[Any] | None = None
        self._graph = program.graph
        self._limits = limits
        self._rng = rng
        self._worker_type = program.worker_type
        self.only = program.only
        self._reached = reached
        self.watches_fence = rng.random() < 0.5

    @property
    def worker_id(self) -> UUID:
        """The id of the worker's present life."""
        return self.store.worker

    async def live(self) -> None:
        """Run the worker from start to end, like `assembly.run_worker`."""
        left = 0  # the version of the worker before this one
        while True:
            lease = Lease(self._limits, self.clock)
            worker = await self._begin(lease)
            beat = Beat(MemoryStore(self.store.database))
            heartbeat = Heartbeat(beat, self.worker_id, lease, self._limits, self.clock)
            loop = cast("SimulatedLoop", asyncio.get_running_loop())
            heartbeats = loop.start(self.process, self.process.heartbeat, partial(self._beat, heartbeat))
            try:
                await worker.run(self.stop)
                return
            except GraphVersionError:
                if worker.graph_version == left:
                    raise
                left = worker.graph_version
            heartbeats.cancel()
            await self.store.close()
            self.store = self._connect()

    async def _begin(self, lease: Lease) -> Worker:
        """Connect, deploy and register. Return a started worker."""
        await self.store.open()
        while True:
            graph = self._graph()
            try:
                deployment = await self.store.deploy(graph.spec())
            except GraphVersionError:  # a deployment came in between
                continue
            except GraphError:
                if graph is self._graph():
                    raise
                continue  # the file was replaced in between, and the older one refused: its supervisor starts another
            context = WorkerContext(
                store=self.store,
                plan=plan(graph, deployment, self._limits),
                worker_id=self.worker_id,
                limits=self._limits,
                host_clock=self.clock,
                failpoints=self,
                lease=lease,
                rng=self._rng,
                only=self.only,
            )
            self.worker = self._worker_type(context, StoreLoader(self._load, self._load_windows, self._query_windows))
            try:
                await self.worker.start()
            except GraphVersionError:  # a switch came in between
                self.store.worker = self._connect().worker
                continue
            return self.worker

    async def _beat(self, heartbeat: Heartbeat) -> None:
        """Renew the lease, like the heartbeat's thread."""
        while True:
            await self.clock.sleep(self._limits.heartbeat_s)
            heartbeat.attempt()

    def _load(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        return at_once(self.store.load_state(grant, keys))

    def _load_windows(self, grant: Grant, folded: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
        return at_once(self.store.load_windows(grant, folded, subkeys, keys))

    def _query_windows(self, grant: Grant, folded: int, query: WindowQuery) -> Entries:
        return at_once(self.store.query_windows(grant, folded, query))

    # As the engine's failpoints.

    async def reach(self, point: Failpoint) -> None:
        """Reach a point of the cycle."""
        if self._happens(point):
            await asyncio.sleep(0)

    def reach_now(self, point: Failpoint) -> None:
        """Reach a point inside a step."""
        self._happens(point)

    def _happens(self, point: Failpoint) -> bool:
        action = self._reached(self, point)
        if action == "crash":
            self.die()
        return action is not None

    def die(self) -> None:
        """Kill the process at this point."""
        self.process.doomed = True
        raise ProcessKilled
