"""What a worker tells whoever watches it: health, metrics and traces are built on this, and the engine needs none.

Called in the worker's event loop, between turns or just behind a commit: an observer is quick, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millpy.errors import MillError
from millpy.runtime.soft_state import Owned
from millpy.runtime.turn import Turn

if TYPE_CHECKING:
    from millpy.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class Moments:
    """A turn on the monotonic clock, in seconds: gathered from, stepped from and to, committed from and to."""

    gathered: float
    stepped_from: float
    stepped_to: float
    sent: float
    committed: float


class Observer(Protocol):
    """Watches one worker process."""

    def waiting(self, error: MillError) -> None:
        """There is no worker, because the database does not answer or is not migrated."""
        ...

    def begun(self, worker: Worker) -> None:
        """There is a worker with a lease; it owns nothing yet."""
        ...

    def ended(self) -> None:
        """The worker has left, or was lost."""
        ...

    def holds(self, intervals: Mapping[int, Owned], claimed: int) -> None:
        """What it owns has changed, or was read again; so many intervals it has just taken over from others."""
        ...

    def committed(self, turn: Turn, at: Moments) -> None:
        """A turn is committed and its sources are acknowledged."""
        ...

    def failed(self, error: MillError) -> None:
        """A turn has failed; everything is read again."""
        ...


class Observers:
    """Several, told in order; none is nobody."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Tell this one too, from now on."""
        self._observers.append(observer)

    def waiting(self, error: MillError) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.waiting(error)

    def begun(self, worker: Worker) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.begun(worker)

    def ended(self) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.ended()

    def holds(self, intervals: Mapping[int, Owned], claimed: int) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.holds(intervals, claimed)

    def committed(self, turn: Turn, at: Moments) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.committed(turn, at)

    def failed(self, error: MillError) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.failed(error)
