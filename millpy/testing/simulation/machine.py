"""One simulated machine: a real worker on a clock of its own, with its heartbeat, its connection, and its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast
from uuid import UUID

from millpy.errors import GraphVersionError
from millpy.graph import Graph
from millpy.limits import Limits
from millpy.model.checkpoint import Entries, Grant
from millpy.runtime.ownership import Heartbeat, Lease
from millpy.runtime.plan import plan
from millpy.runtime.probe import Point
from millpy.runtime.worker import Worker
from millpy.store.memory import MemoryStore
from millpy.testing.clock import SkewedClock
from millpy.testing.simulation.books import Recording
from millpy.testing.simulation.loop import Killed, Process, SimulatedLoop

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that only yields, without letting others run: as one blocking call in a thread would."""
    while True:
        try:
            work.send(None)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]


class Beat:
    """The heartbeat's own connection."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def beat(self, worker_id: UUID, ttl_s: float) -> bool:
        """Renew the lease."""
        return at_once(self._store.heartbeat(worker_id, ttl_s))

    def close(self) -> None:
        """Nothing is held."""


class Machine:
    """A worker's process.

    Args:
        connect: a connection of its own to the database, and another one for each life of its worker.
        reached: told of every point; says what happens there.
        generation: which of the graph's it runs.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        limits: Limits,
        clock: SkewedClock,
        connect: Callable[[], Recording],
        rng: random.Random,
        worker_type: type[Worker],
        only: Sequence[str],
        reached: Callable[[Machine, Point], str | None],
        generation: int = 1,
    ) -> None:
        self.process = Process(name)
        self.name = name
        self.clock = clock
        self._connect = connect
        self.store = connect()
        self.generation = generation
        self.stop = asyncio.Event()
        self.worker: Worker | None = None
        self.ended: asyncio.Task[Any] | None = None
        self._graph = graph
        self._limits = limits
        self._rng = rng
        self._worker_type = worker_type
        self.only = tuple(only)
        self._reached = reached
        self.watches_fence = rng.random() < 0.5

    @property
    def worker_id(self) -> UUID:
        """Of the present life of its worker."""
        return self.store.worker

    async def live(self) -> None:
        """From start to end, as `assembly.run_worker` has it."""
        left = 0  # the version that the worker before this one has left
        while True:
            lease = Lease(self._limits, self.clock)
            worker = await self._begin(lease)
            beat = Beat(MemoryStore(self.store.database))
            heartbeat = Heartbeat(beat, self.worker_id, lease, self._limits, self.clock)
            loop = cast("SimulatedLoop", asyncio.get_running_loop())
            heart = loop.start(self.process, self.process.heart, partial(self._beat, heartbeat))
            try:
                await worker.run(self.stop)
                return
            except GraphVersionError:
                if worker.graph_version == left:
                    raise
                left = worker.graph_version
            heart.cancel()
            await self.store.close()
            self.store = self._connect()

    async def _begin(self, lease: Lease) -> Worker:
        """Connect, deploy, register: a worker with a lease."""
        await self.store.open()
        while True:
            deployment = await self.store.deploy(self._graph.spec())
            self.worker = self._worker_type(
                self.store,
                plan(self._graph, deployment, self._limits),
                self.worker_id,
                limits=self._limits,
                clock=self.clock,
                probe=self,
                lease=lease,
                rng=self._rng,
                only=self.only,
                load=self._load,
            )
            try:
                await self.worker.start()
            except GraphVersionError:  # switched meanwhile
                self.store.worker = self._connect().worker
                continue
            return self.worker

    async def _beat(self, heartbeat: Heartbeat) -> None:
        """What the thread of the heartbeat does."""
        while True:
            await self.clock.sleep(self._limits.heartbeat_s)
            heartbeat.attempt()

    def _load(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        return at_once(self.store.load_state(grant, keys))

    # As the engine's probe.

    async def reach(self, point: Point) -> None:
        """The cycle has reached a point."""
        if self._happens(point):
            await asyncio.sleep(0)

    def reach_now(self, point: Point) -> None:
        """The same, from inside a step."""
        self._happens(point)

    def _happens(self, point: Point) -> bool:
        action = self._reached(self, point)
        if action == "crash":
            self.die()
        return action is not None

    def die(self) -> None:
        """The process is killed at this very place."""
        self.process.doomed = True
        raise Killed
