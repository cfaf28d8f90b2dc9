"""Observers of a worker: health, metrics and traces implement this protocol; the engine works without them.

The worker calls its observer in the event loop, between turns or just after a commit. An observer must be quick and
must not raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpy.errors import MillError
from millpy.runtime.owned_interval import OwnedInterval

if TYPE_CHECKING:
    from millpy.runtime.turn import Turn
    from millpy.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """The times of a turn, in seconds on the monotonic clock.

    Attributes:
        gathered: when the worker began to gather its input.
        stepped_from, stepped_to: begin and end of the step.
        sent: when the commit began.
        committed: when the commit was known.
    """

    gathered: float
    stepped_from: float
    stepped_to: float
    sent: float
    committed: float


class Observer(Protocol):
    """What one worker process reports about itself; see the module for what an observer must not do."""

    def waiting(self, error: MillError) -> None:
        """Handle that no worker can start, because the database does not answer or is not migrated."""
        ...

    def begun(self, worker: Worker) -> None:
        """Handle a new worker, which has a lease and owns no interval yet."""
        ...

    def ended(self) -> None:
        """Handle the end of the worker, orderly or not."""
        ...

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Handle the intervals that are owned now: `claimed` of them are new, or some were released or read again."""
        ...

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Handle a turn that is committed and whose sources are acknowledged."""
        ...

    def failed(self, error: MillError) -> None:
        """Handle the error of a turn, before the worker reacts to it."""
        ...


class Observers:
    """A list of observers, called in order; it may be empty."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._observers.append(observer)

    def waiting(self, error: MillError) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.waiting(error)

    def begun(self, worker: Worker) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.begun(worker)

    def ended(self) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.ended()

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.holds(intervals, claimed)

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.committed(turn, at)

    def failed(self, error: MillError) -> None:
        """Call every observer."""
        for observer in self._observers:
            observer.failed(error)
