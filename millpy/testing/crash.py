"""A probe that kills or freezes its own process at a named point; tests start it through `crash_worker`.

A spec is a comma-separated list of traps, `point:n:action` or `point:n:action:moment`:

    after_fence:3:kill      the third time that the point is reached, SIGKILL this process
    before_commit:5:stop    the fifth time, SIGSTOP this process (SIGCONT lets it go on)
    after_fence:1:count     nothing happens; the commit stops between fence and COMMIT, so that the point is reached
    after_step:25:kill:overlapped    from the 25th time on, as soon as another turn of this worker is in the air too
    after_step:25:kill:alone         from the 25th time on, as soon as none is

Turns overlap: while one commits, the next is stepped. At a point of a step, the other turn is the one that commits; at
a point of a commit, it is the one stepped behind it; at any other point (folding, claiming), it is either.

Whatever is reached is appended to a file, one name a line, in single O_APPEND writes that survive SIGKILL.
"""

from __future__ import annotations

import asyncio
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


class Moment(StrEnum):
    """What else the worker does when a trap may spring."""

    ANY = "any"
    ALONE = "alone"
    OVERLAPPED = "overlapped"


STEPPING = frozenset([Point.AFTER_POLL, Point.AFTER_DECODE, Point.AFTER_LOAD, Point.AFTER_STEP])
COMMITTING = frozenset([Point.BEFORE_COMMIT, Point.AFTER_FENCE, Point.AFTER_COMMIT, Point.AFTER_ACKNOWLEDGE])
PATIENCE_MS = 20
"""How long a commit waits for the next step to begin, when a trap is set for both: as behind a slow network."""
SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Trap:
    """At the `nth` time that `point` is reached, do `action`; with a moment, at the first fitting time from then on."""

    point: Point
    nth: int
    action: Action
    moment: Moment = Moment.ANY

    def springs(self, times: int, overlapped: bool) -> bool:
        """Whether this is the time."""
        if self.moment is Moment.ANY:
            return times == self.nth
        return times >= self.nth and overlapped is (self.moment is Moment.OVERLAPPED)


def parse_spec(spec: str) -> tuple[Trap, ...]:
    """Read a spec; see the module.

    Raises:
        ConfigError: it is not one.
    """
    traps = []
    for text in filter(None, spec.split(",")):
        try:
            point, nth, action, *moment = text.split(":")
            traps.append(Trap(Point(point), int(nth), Action(action), *map(Moment, moment)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{text!r} is no trap: {error}", hint='write "after_fence:3:kill"') from error
    return tuple(traps)


class CrashProbe:
    """Counts the points that the engine reaches and springs the traps set for them."""

    def __init__(self, traps: Sequence[Trap], reached: Path | None = None) -> None:
        self._traps = list(traps)
        self._file = None if reached is None else os.open(reached, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()  # points are reached by the loop and by the thread that steps
        self._stepping = self._committing = self._behind = False
        self.counts: Counter[Point] = Counter()
        self.overlapped: Counter[Point] = Counter()
        self.watches_fence = any(trap.point is Point.AFTER_FENCE for trap in traps)

    async def reach(self, point: Point) -> None:
        """The cycle has reached a point; where a trap waits for another turn in the air, that may take a moment."""
        for _ in range(PATIENCE_MS):
            if not self._lacks_company(point):
                break
            await asyncio.sleep(0.001)
        self.reach_now(point)

    def _lacks_company(self, point: Point) -> bool:
        behind = self._stepping if point is Point.BEFORE_COMMIT else self._behind
        return (
            point in COMMITTING
            and not behind
            and any(trap.point is point and trap.springs(self.counts[point] + 1, True) for trap in self._traps)
            and all(trap.moment is Moment.OVERLAPPED for trap in self._traps if trap.point is point)
        )

    def reach_now(self, point: Point) -> None:
        """The same, from the thread that steps."""
        with self._lock:
            self.counts[point] += 1
            overlapped = self._is_overlapped(point)
            self.overlapped[point] += overlapped
            sprung = [trap for trap in self._traps if trap.point is point]
            sprung = [trap for trap in sprung if trap.springs(self.counts[point], overlapped)]
            self._traps = [trap for trap in self._traps if trap not in sprung]
        if self._file is not None:
            os.write(self._file, f"{point}\n".encode())
        for trap in sprung:
            if trap.action in SIGNALS:
                os.kill(os.getpid(), SIGNALS[trap.action])

    def _is_overlapped(self, point: Point) -> bool:
        """Follow the turns; whether at this point another one than the one that reaches it is in the air."""
        if point is Point.AFTER_POLL:
            self._stepping = self._behind = True
        elif point is Point.AFTER_STEP:
            self._stepping = False
        elif point is Point.BEFORE_COMMIT:
            self._committing, self._behind = True, self._stepping
        elif point is Point.AFTER_COMMIT:
            self._committing = False
        if point in STEPPING:
            return self._committing
        if point in COMMITTING:
            return self._behind
        return self._committing or self._stepping


def points_reached(reached: Path) -> Counter[Point]:
    """How often each point was reached, from the file that probes wrote."""
    return Counter(Point(line) for line in reached.read_text().split()) if reached.exists() else Counter()
