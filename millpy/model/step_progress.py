"""How far the step in hand is: told by the thread that steps, read by those who watch it.

A *unit* is one call of user code (of a record, a timer, a piece of columns) or a stretch of our own work between two
looks. A step whose units rise is alive, however long it takes; a unit that lasts longer than `Limits.call_s_max` is
taken for one that never ends. Then the step is given up (`begin_anew`): the thread that is still inside the call stops
at its end, before it changes or calls anything else, and the call is remembered. One that has not returned twice is
dead-lettered without being made again.

Whoever calls user code does, with `run = progress.run` from before the call:

    progress.in_hand = call      what is being called, if it is known by name (see `Call`)
    ...                          the call
    progress.done(run)           one unit; raises StepAbandoned when the step was given up meanwhile
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

CALLS_REMEMBERED_MAX = 1_000
UNRETURNED_MAX = 2
"""A call that has not returned so often is not made again."""

Call = tuple[str, tuple[Any, ...]]
"""Whose code, and of which record or timer: hashable."""


class StepAbandoned(BaseException):
    """Leaves a step that was given up; not an Exception, so that no user code catches it."""


class StepProgress:
    """Progress of the steps of one worker.

    Attributes:
        units: rises with each unit.
        run: which attempt counts; rises when a step is given up.
        stepping: whether a step is in hand.
        in_hand: says which call is being made, if that is known; asked only when it does not return.
        unreturned: call -> how often it has not returned.
    """

    __slots__ = ("in_hand", "run", "stepping", "units", "unreturned")

    def __init__(self) -> None:
        self.units = 0
        self.run = 0
        self.stepping = False
        self.in_hand: Callable[[], Call | None] | None = None
        self.unreturned: dict[Call, int] = {}

    def done(self, run: int) -> None:
        """Count a unit of the attempt that began as `run`.

        Raises:
            StepAbandoned: it was given up.
        """
        self.units += 1
        if run != self.run:
            raise StepAbandoned

    def begin_anew(self, *, blame: bool = True) -> Call | None:
        """Give the step in hand up; returns the call that does not return, if it is known.

        Args:
            blame: whether that call is the reason.
        """
        self.run += 1
        call = self.in_hand() if self.in_hand is not None else None
        self.in_hand = None
        if call is not None and blame:
            if len(self.unreturned) >= CALLS_REMEMBERED_MAX:
                self.unreturned.clear()
            self.unreturned[call] = self.unreturned.get(call, 0) + 1
        return call

    def is_hopeless(self, call: Call) -> bool:
        """Whether a call has not returned so often that it is not to be made again."""
        return self.unreturned.get(call, 0) >= UNRETURNED_MAX


def is_users(error: BaseException) -> bool:
    """Whether what a call of user code has raised is to be dead-lettered, whatever its class.

    Not what ends a step of ours, and not Ctrl-C, which Python raises in the main thread only.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is not threading.main_thread()
    return not isinstance(error, StepAbandoned)
