"""The event loop of a simulation: whose turn it is, and when time passes, is decided by one seeded Random.

Everything that a worker awaits goes through its loop, so here is the one place that can make a run repeatable without
touching the worker: no sockets, no threads, no clock of its own.

    lane       what runs in order: a worker's own code, or its heartbeat
    process    lanes that live and die together; frozen, it keeps its memory and its connections, and nothing runs
    turn()     one callback of one lane; when none is ready, time goes on to the next alarm

What a worker gives to a thread (`run_in_executor`) runs here too, some time later, as its own callback.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, cast

from millpy.testing.clock import ManualClock

REAP_ROUNDS_MAX = 50
STALL_S_MAX = 0.02


class Killed(BaseException):
    """The process has been killed at this very place."""


class Lane:
    """Callbacks that run one after the other."""

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.ready: deque[asyncio.Handle] = deque()
        self.blocked = False

    def may_run(self) -> bool:
        """Whether there is something to run, and nothing that keeps it from running."""
        return bool(self.ready) and not self.blocked and not self.process.frozen


class Process:
    """Lanes with one fate.

    Attributes:
        slow: only every so many times that it could, it runs.
        patient: it may wait for what only processes that are not there yet will do.
        closers: close what it has open, as the kernel does at its end. The garbage collector does not: log records
            keep tracebacks, and these keep the process's objects.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.main = Lane(name, self)
        self.heart = Lane(f"{name}-heart", self)
        self.lanes = (self.main, self.heart)
        self.tasks: list[asyncio.Task[Any]] = []
        self.frozen = False
        self.dead = False
        self.doomed = False
        self.slow = 1
        self.patient = False
        self.closers: list[Callable[[], None]] = []


LANE: ContextVar[Lane] = ContextVar("lane")


class SimulatedLoop:
    """An event loop whose time is a ManualClock and whose order is a Random's; it has what workers ask of a loop."""

    def __init__(self, clock: ManualClock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self.processes: list[Process] = []
        self.complaints: list[BaseException] = []
        self._self = cast("asyncio.AbstractEventLoop", self)

    # What asyncio asks of a loop.

    def get_debug(self) -> bool:
        """No."""
        return False

    def is_running(self) -> bool:
        """Always: it is driven from outside."""
        return True

    def is_closed(self) -> bool:
        """Never."""
        return False

    def time(self) -> float:
        """The clock's seconds."""
        return self._clock.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self._self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """A task of the lane that makes it, or of the one that the context names."""
        process = (copy_context() if context is None else context)[LANE].process
        task = asyncio.Task(coro, loop=self._self, name=name, context=context)
        if len(process.tasks) > 64:
            process.tasks[:] = [other for other in process.tasks if not other.done()]
        process.tasks.append(task)
        return task

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Queue behind what its lane has to run already."""
        handle = asyncio.Handle(callback, args, self._self, context)
        self._enqueue(handle, LANE.get() if context is None else context[LANE])
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """The same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Queue once so many seconds have passed."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Queue once the clock is there."""
        handle = asyncio.TimerHandle(when, callback, args, self._self, context)
        lane = LANE.get() if context is None else context[LANE]
        self._clock.call_at(when, lambda: None if handle.cancelled() else self._enqueue(handle, lane))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: it is looked at when its time has come."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody waited for."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not isinstance(error, Killed):
            self.complaints.append(error)

    async def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run what was meant for a thread, some time later."""
        if self._rng.random() < 0.2:
            await self._clock.sleep(self._rng.random() * STALL_S_MAX)
        else:
            await asyncio.sleep(0)
        return func(*args)

    def _enqueue(self, handle: asyncio.Handle, lane: Lane) -> None:
        if not lane.process.dead:
            lane.ready.append(handle)

    # What the simulation asks of it.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the running loop, as asyncio sees it; every process has ended afterwards."""
        asyncio._set_running_loop(self._self)
        try:
            yield
        finally:
            for process in list(self.processes):
                self.reap(process)
            asyncio._set_running_loop(None)

    def start(self, process: Process, lane: Lane, work: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
        """Begin a lane's work."""
        if process not in self.processes:
            self.processes.append(process)
        context = copy_context()
        context.run(LANE.set, lane)
        return context.run(self.create_task, work(), context=context)

    def turn(self) -> Lane | None:
        """Run one callback, or let time pass; whose it was, None when only time has passed."""
        able = [lane for process in self.processes for lane in process.lanes if lane.may_run()]
        if not able:
            if not self._clock.advance_to_next():
                assert all(process.patient for process in self.processes), "nothing can ever happen again"
            return None
        lane = able[int(self._rng.random() * len(able))] if len(able) > 1 else able[0]
        if lane.process.slow > 1 and lane is lane.process.main and self._rng.random() * lane.process.slow > 1:
            self._clock.advance(self._rng.random() * STALL_S_MAX)
            return None
        lane.ready.popleft()._run()
        if lane.process.doomed and not lane.process.dead:
            self.reap(lane.process)
        return lane

    def reap(self, process: Process) -> None:
        """End a process: what it holds open is closed by those on the other side; nothing of it runs again."""
        process.frozen = False
        for _ in range(REAP_ROUNDS_MAX):
            living = [task for task in process.tasks if not task.done()]
            if not living:
                break
            for task in living:
                task.cancel()
            for lane in process.lanes:
                while lane.ready:
                    lane.ready.popleft()._run()
        assert all(task.done() for task in process.tasks), process.tasks
        for task in process.tasks:
            if not task.cancelled():
                task.exception()  # nobody is left to ask
        self.bury(process)

    def bury(self, process: Process) -> None:
        """Forget a process that has ended."""
        process.dead = True
        for close in process.closers:
            close()
        for lane in process.lanes:
            lane.ready.clear()
        self.processes.remove(process)
