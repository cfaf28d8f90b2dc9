"""The event loop of a simulation: one seeded Random decides the order of callbacks and when time passes.

Everything that a worker awaits goes through its loop, so this is the one place that makes a run repeatable without
changes to the worker: no sockets, no threads, no clock of its own.

    lane       callbacks that run in order: a worker's own code, or its heartbeat
    process    lanes that live and die together; a frozen process keeps its memory and connections, and does not run
    turn()     one callback of one lane; if none is ready, time advances to the next alarm

Work for a thread (`run_in_executor`) runs on the loop too, some time later, as its own callback.
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


class ProcessKilled(BaseException):
    """The process is killed at this point."""


class Lane:
    """A queue of callbacks that run one after the other."""

    def __init__(self, name: str, process: SimulatedProcess) -> None:
        self.name = name
        self.process = process
        self.ready: deque[asyncio.Handle] = deque()
        self.blocked = False

    def may_run(self) -> bool:
        """Tell whether the lane has a callback and nothing blocks it."""
        return bool(self.ready) and not self.blocked and not self.process.frozen


class SimulatedProcess:
    """Lanes that live and die together.

    Attributes:
        slow: on average, runs in only one of this many of its turns.
        patient: may wait for processes that do not exist yet.
        closers: close its files, as the kernel does when a process ends. The garbage collector would be late: log
            records keep tracebacks, which keep the process's objects.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.main = Lane(name, self)
        self.heartbeat = Lane(f"{name}-heartbeat", self)
        self.lanes = (self.main, self.heartbeat)
        self.tasks: list[asyncio.Task[Any]] = []
        self.frozen = False
        self.dead = False
        self.doomed = False
        self.slow = 1
        self.patient = False
        self.closers: list[Callable[[], None]] = []


LANE: ContextVar[Lane] = ContextVar("lane")


class SimulatedLoop:
    """An event loop with the time of a ManualClock and a random order; it has only the methods that workers use."""

    def __init__(self, clock: ManualClock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self.processes: list[SimulatedProcess] = []
        self.unhandled_errors: list[BaseException] = []
        self._self = cast("asyncio.AbstractEventLoop", self)

    # What asyncio needs of a loop.

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True: the simulation drives the loop."""
        return True

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def time(self) -> float:
        """Return the clock's seconds."""
        return self._clock.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self._self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """Return a task of the lane that makes it, or of the lane that the context names."""
        process = (copy_context() if context is None else context)[LANE].process
        task = asyncio.Task(coro, loop=self._self, name=name, context=context)
        if len(process.tasks) > 64:
            process.tasks[:] = [other for other in process.tasks if not other.done()]
        process.tasks.append(task)
        return task

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        """Queue a callback behind those of its lane."""
        handle = asyncio.Handle(callback, args, self._self, context)
        self._enqueue(handle, LANE.get() if context is None else context[LANE])
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Queue a callback; there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Queue a callback after some seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Queue a callback at a time of the clock."""
        handle = asyncio.TimerHandle(when, callback, args, self._self, context)
        lane = LANE.get() if context is None else context[LANE]
        self._clock.call_at(when, lambda: None if handle.cancelled() else self._enqueue(handle, lane))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: the handle is checked when its time has come."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an error that no code awaited."""
        error = context.get("exception")
        if isinstance(error, BaseException) and not isinstance(error, ProcessKilled):
            self.unhandled_errors.append(error)

    async def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Call `func` some time later, as a thread would; return its result."""
        if self._rng.random() < 0.2:
            await self._clock.sleep(self._rng.random() * STALL_S_MAX)
        else:
            await asyncio.sleep(0)
        return func(*args)

    def _enqueue(self, handle: asyncio.Handle, lane: Lane) -> None:
        if not lane.process.dead:
            lane.ready.append(handle)

    # What the simulation needs of it.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Install this as asyncio's running loop for a `with` block; end every process on exit."""
        asyncio._set_running_loop(self._self)
        try:
            yield
        finally:
            for process in list(self.processes):
                self.reap(process)
            asyncio._set_running_loop(None)

    def start(
        self, process: SimulatedProcess, lane: Lane, work: Callable[[], Coroutine[Any, Any, Any]]
    ) -> asyncio.Task[Any]:
        """Start the work of a lane."""
        if process not in self.processes:
            self.processes.append(process)
        context = copy_context()
        context.run(LANE.set, lane)
        return context.run(self.create_task, work(), context=context)

    def turn(self) -> Lane | None:
        """Run one callback and return its lane, or let time pass and return None."""
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

    def reap(self, process: SimulatedProcess) -> None:
        """End a process: cancel its tasks and close what it has open."""
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
                task.exception()  # retrieved, or asyncio would log it
        self.forget(process)

    def forget(self, process: SimulatedProcess) -> None:
        """Forget a process that has ended."""
        process.dead = True
        for close in process.closers:
            close()
        for lane in process.lanes:
            lane.ready.clear()
        self.processes.remove(process)
