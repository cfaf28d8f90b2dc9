"""The one thread in which steps run, so that callbacks always find the same one.

A thread cannot be ended from outside. When a call in it does not return, the step is given up: whoever waits for it
goes on at once, a new thread takes the next step, and the old one ends when its call returns, if it ever does
(`StepProgress`). Threads are daemons: none of them holds up the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Job = tuple[Callable[[], Any], "Future[Any]"]


class StepThread(Executor):
    """Runs one piece of work after the other in a thread that can be replaced."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] | None = None
        self._running: Future[Any] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Run it behind what was submitted before."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name="steps", daemon=True).start()
        self._running = Future()
        self._jobs.put((lambda: fn(*args, **more), self._running))
        return self._running

    def is_busy(self) -> bool:
        """Whether somebody waits for a step."""
        return self._running is not None and not self._running.done()

    def give_up(self, error: Exception) -> None:
        """Whoever waits for a step is told this error; the next one runs in another thread."""
        running, self._running = self._running, None
        self.shutdown()
        if running is not None:
            with suppress(InvalidStateError):  # it has ended at this moment
                running.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread behind what it is doing; waits for nothing."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        work, outcome = job
        try:
            result = work()
        except BaseException as error:
            with suppress(InvalidStateError):
                outcome.set_exception(error)
        else:
            with suppress(InvalidStateError):
                outcome.set_result(result)
        del job, work, outcome
