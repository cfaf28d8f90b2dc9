"""The one thread in which callbacks, and steps of more than a few quick records, run.

A thread cannot be ended from outside. When a call in it does not return, the step is abandoned: its waiter gets an
error at once, a new thread takes the next step, and the old thread ends when its call returns, if it ever does
(`StepProgress`). The threads are daemons, so they do not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from millpy.hosting.step import StoreLoader
from millpy.model.checkpoint import Entries, Grant
from millpy.model.stored_windows import WindowQuery
from millpy.store.protocol import Store

Job = tuple[Callable[[], Any], "Future[Any]"]


class StepThread(Executor):
    """An executor that runs one job at a time, in a thread that can be replaced."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] | None = None
        self._running: Future[Any] | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Queue a function for the thread and return its future; start the thread if there is none."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name="steps", daemon=True).start()
        self._running = Future()
        self._jobs.put((lambda: fn(*args, **more), self._running))
        return self._running

    def loader(self, store: Store) -> StoreLoader:
        """Return what loads missing state and windows from inside a step; call this in the event loop."""
        loop = asyncio.get_running_loop()

        def state(grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
            return asyncio.run_coroutine_threadsafe(store.load_state(grant, keys), loop).result()

        def windows(grant: Grant, folded: int, subkeys: Sequence[str], keys: Sequence[bytes]) -> Entries:
            return asyncio.run_coroutine_threadsafe(store.load_windows(grant, folded, subkeys, keys), loop).result()

        def query(grant: Grant, folded: int, asked: WindowQuery) -> Entries:
            return asyncio.run_coroutine_threadsafe(store.query_windows(grant, folded, asked), loop).result()

        return StoreLoader(state, windows, query)

    def is_busy(self) -> bool:
        """Tell whether a submitted function has not ended yet."""
        return self._running is not None and not self._running.done()

    def abandon(self, error: Exception) -> None:
        """Set an error as the outcome of the running step and ignore its own; the next step runs in another thread."""
        running, self._running = self._running, None
        self.shutdown()
        if running is not None:
            with suppress(InvalidStateError):  # the step has just ended
                running.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the thread end after its current job; do not wait for it."""
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
