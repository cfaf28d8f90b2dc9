"""A probe that kills or freezes its own process at a named point; tests start it through `crash_worker`.

A spec is a comma-separated list of traps, `point:n:action`:

    after_fence:3:kill      the third time that the point is reached, SIGKILL this process
    before_commit:5:stop    the fifth time, SIGSTOP this process (SIGCONT lets it go on)
    after_fence:1:count     nothing happens; the commit stops between fence and COMMIT, so that the point is reached

Whatever is reached is appended to a file, one name a line, in single O_APPEND writes that survive SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millpy.errors import ConfigError
from millpy.runtime.probe import Point


class Action(StrEnum):
    """What a trap does to its own process."""

    KILL = "kill"
    STOP = "stop"
    COUNT = "count"


SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Trap:
    """At the `nth` time that `point` is reached, do `action`."""

    point: Point
    nth: int
    action: Action


def parse_spec(spec: str) -> tuple[Trap, ...]:
    """Read a spec; see the module.

    Raises:
        ConfigError: it is not one.
    """
    traps = []
    for text in filter(None, spec.split(",")):
        try:
            point, nth, action = text.split(":")
            traps.append(Trap(Point(point), int(nth), Action(action)))
        except ValueError as error:
            raise ConfigError(f"{text!r} is no trap: {error}", hint='write "after_fence:3:kill"') from error
    return tuple(traps)


class CrashProbe:
    """Counts the points that the engine reaches and springs the traps set for them."""

    def __init__(self, traps: Sequence[Trap], reached: Path | None = None) -> None:
        self._traps = {(trap.point, trap.nth): trap.action for trap in traps}
        self._file = None if reached is None else os.open(reached, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()  # points are reached by the loop and by the thread that steps
        self.counts: Counter[Point] = Counter()
        self.watches_fence = any(trap.point is Point.AFTER_FENCE for trap in traps)

    async def reach(self, point: Point) -> None:
        """The cycle has reached a point."""
        self.reach_now(point)

    def reach_now(self, point: Point) -> None:
        """The same, from the thread that steps."""
        with self._lock:
            self.counts[point] += 1
            action = self._traps.get((point, self.counts[point]))
        if self._file is not None:
            os.write(self._file, f"{point}\n".encode())
        if action in SIGNALS:
            os.kill(os.getpid(), SIGNALS[action])


def points_reached(reached: Path) -> Counter[Point]:
    """How often each point was reached, from the file that probes wrote."""
    return Counter(Point(line) for line in reached.read_text().split()) if reached.exists() else Counter()
