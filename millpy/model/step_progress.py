"""Progress of the current step: written by the thread that steps, read by its watchdogs.

A *unit* is one call of user code (for a record, a timer, a piece of columns) or a piece of the engine's work between
two checks. A step whose units rise is alive, however long it takes. A unit that lasts longer than `Limits.call_s_max`
is assumed never to end, and the step is abandoned. If the call returns after all, its thread stops there, before it
changes or calls anything else. The second time that a call does not return, its record is dead-lettered without
another call.

Code that calls user code does the following, with `run = progress.run` from before the call:

    progress.current_call = call   the call, if it can be identified (see `Call`)
    ...                            the call
    progress.count_unit(run)       one unit; raises StepAbandonment if the step was abandoned meanwhile
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

CALLS_REMEMBERED_MAX = 1_000
UNRETURNED_MAX = 2
"""How often a call may fail to return before it is not made again."""

Call = tuple[str, tuple[Any, ...]]
"""The owner of the code, and the record or timer of the call: hashable."""


class StepAbandonment(BaseException):
    """Ends an abandoned step. It is no Exception, so that user code does not catch it."""


class StepProgress:
    """Progress of the steps of one worker.

    Attributes:
        units: number of units so far.
        run: number of the valid attempt; rises when a step is abandoned.
        stepping: whether a step is running.
        current_call: returns the current call, if known; used only when the call does not return.
        unreturned: call -> how often it did not return.
    """

    __slots__ = ("current_call", "run", "stepping", "units", "unreturned")

    def __init__(self) -> None:
        self.units = 0
        self.run = 0
        self.stepping = False
        self.current_call: Callable[[], Call | None] | None = None
        self.unreturned: dict[Call, int] = {}

    def count_unit(self, run: int) -> None:
        """Count a unit of the attempt that began as `run`.

        Raises:
            StepAbandonment: the attempt was abandoned.
        """
        self.units += 1
        if run != self.run:
            raise StepAbandonment

    def abandon(self, *, blame: bool = True) -> Call | None:
        """Abandon the current step. Return the call that does not return, if known.

        Args:
            blame: whether to count that call as unreturned.
        """
        self.run += 1
        call = self.current_call() if self.current_call is not None else None
        self.current_call = None
        if call is not None and blame:
            if len(self.unreturned) >= CALLS_REMEMBERED_MAX:
                self.unreturned.clear()
            self.unreturned[call] = self.unreturned.get(call, 0) + 1
        return call

    def is_hopeless(self, call: Call) -> bool:
        """Tell whether a call has failed to return so often that it must not be made again."""
        return self.unreturned.get(call, 0) >= UNRETURNED_MAX


def is_user_error(error: BaseException) -> bool:
    """Tell whether an exception from a call of user code counts as the user's error, and causes a dead letter.

    Only two do not: StepAbandonment, and Ctrl-C, which Python raises in the main thread.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is not threading.main_thread()
    return not isinstance(error, StepAbandonment)
