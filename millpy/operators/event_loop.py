"""The private event loop of a computation's `async def` callbacks; clients that the callbacks keep live on this loop.

A callback that calls `sys.exit` in a task that it has started, cancels itself, or never returns ends its record, never
the loop. Usually a callback runs in the task of its key (`wait`). One that has failed there runs again in a separate
task (`wait_apart`), whose end cannot affect other callbacks.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from millpy.errors import CallTimeoutError
from millpy.model.step_progress import StepProgress

TICK_S_MAX = 1.0
CANCEL_S = 1.0
"""Seconds that a callback may take to react to its cancellation after a time-out."""


class PrivateLoop:
    """The event loop of one computation. While it answers, its step is not stuck: each call in it has a time-out.

    Args:
        progress: progress of the step, to which the loop reports that it answers.
        call_s_max: seconds that a call may take.
    """

    def __init__(self, progress: StepProgress, call_s_max: float) -> None:
        self._progress = progress
        self._call_s_max = call_s_max
        self._tick_s = min(TICK_S_MAX, call_s_max / 8)
        self._run = progress.run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._begun: dict[asyncio.Future[Any], float] = {}
        self._units = 0
        self._moved_at = 0.0
        self._ticking: asyncio.TimerHandle

    def run(self, calls: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, even from a thread in which another loop is running."""
        if self._run != self._progress.run:
            # An abandoned thread may be inside the old loop for ever.
            self._run, self._loop, self._lock = self._progress.run, None, threading.Lock()
            self._begun = {}
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, _close, self._loop)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self._run_on(self._loop, calls)
            else:
                with ThreadPoolExecutor(1) as elsewhere:
                    elsewhere.submit(self._run_on, self._loop, calls).result()

    def task_in_hand(self) -> asyncio.Task[Any] | None:
        """Return the task that is running now, for a caller in another thread; None when all tasks wait."""
        return None if self._loop is None else asyncio.current_task(self._loop)

    async def wait(self, answer: Awaitable[None]) -> None:
        """Run a callback to its end in the current task.

        Raises:
            CallTimeoutError: the callback does not return in time.
            asyncio.CancelledError: the callback has cancelled itself.
        """
        task = asyncio.current_task()
        assert task is not None
        begun = self._begun
        begun[task] = task.get_loop().time()
        try:
            await answer
            if task.cancelling():
                await asyncio.sleep(0)  # the next await raises the cancellation; it must not be one of ours
        except asyncio.CancelledError as error:
            if task in begun:
                raise
            raise self._timed_out() from error
        finally:
            begun.pop(task, None)
            while task.cancelling():
                task.uncancel()

    async def wait_apart(self, task: asyncio.Future[None]) -> None:
        """Wait for a callback that runs in a separate task; raise the same errors as `wait`."""
        await asyncio.wait((task,), timeout=self._call_s_max)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=CANCEL_S)
            raise self._timed_out()
        if task.cancelled():
            raise asyncio.CancelledError("the callback has cancelled itself")
        if (error := task.exception()) is not None:
            raise error

    def _timed_out(self) -> CallTimeoutError:
        return CallTimeoutError(f"the call did not return within {self._call_s_max:g} s")

    def _run_on(self, loop: asyncio.AbstractEventLoop, calls: Coroutine[Any, Any, None]) -> None:
        self._units, self._moved_at = self._progress.units, loop.time()
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)
        task = loop.create_task(calls)
        try:
            while True:
                try:
                    loop.run_until_complete(task)
                    return
                except (SystemExit, KeyboardInterrupt):
                    # asyncio re-raises these at once when any task raises them, here one that a callback has started.
                    if task.done():
                        raise
        finally:
            self._ticking.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report that the loop answers, if a call has ended within 2 · `call_s_max`; cancel calls that time out."""
        now = loop.time()
        if self._progress.units != self._units:
            self._moved_at = now
        if now - self._moved_at < 2 * self._call_s_max:
            self._progress.units += 1
        self._units = self._progress.units
        for task, begun_at in list(self._begun.items()):
            if now - begun_at > self._call_s_max:
                del self._begun[task]
                task.cancel()
        self._ticking = loop.call_later(self._tick_s, self._tick, loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_running():
        loop.close()
