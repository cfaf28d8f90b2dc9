"""Failpoints that kill or freeze their own process at a named point; tests start it through `crash_worker`.

A spec is a comma-separated list of traps, `point:n:action` or `point:n:action:moment`:

    after_fence:3:kill      the third time that the point is reached, SIGKILL this process
    before_commit:5:stop    the fifth time, SIGSTOP this process (until SIGCONT)
    after_fence:1:count     do nothing but pause each commit between fence and COMMIT, so that the point is reached
    after_step:25:kill:overlapped    from the 25th time on, as soon as another turn of this worker is in flight
    after_step:25:kill:alone         from the 25th time on, as soon as no other turn is in flight

Turns overlap: while one commits, the next is stepped. At a point of a step, the other turn is the one that commits; at
a point of a commit, it is the one stepped behind it; at any other point (folding, claiming), it is either.

Each point that is reached is appended to a file, one name a line, by single O_APPEND writes that survive SIGKILL.
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
from millpy.hosting.failpoints import Failpoint


class Action(StrEnum):
    """What a trap does to its own process."""

    KILL = "kill"
    STOP = "stop"
    COUNT = "count"


class Moment(StrEnum):
    """Whether another turn must be in flight for a trap to spring."""

    ANY = "any"
    ALONE = "alone"
    OVERLAPPED = "overlapped"


STEPPING = frozenset([Failpoint.AFTER_POLL, Failpoint.AFTER_DECODE, Failpoint.AFTER_LOAD, Failpoint.AFTER_STEP])
COMMITTING = frozenset(
    [Failpoint.BEFORE_COMMIT, Failpoint.AFTER_FENCE, Failpoint.AFTER_COMMIT, Failpoint.AFTER_ACKNOWLEDGE]
)
PATIENCE_MS = 20
"""How long a commit waits for the next step to begin, for a trap that needs both."""
SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Trap:
    """Do `action` when `point` is reached for the `nth` time, or at the first time from then on that fits `moment`."""

    point: Failpoint
    nth: int
    action: Action
    moment: Moment = Moment.ANY

    def springs(self, times: int, overlapped: bool) -> bool:
        """Tell whether the trap springs when its point is reached for the `times`-th time."""
        if self.moment is Moment.ANY:
            return times == self.nth
        return times >= self.nth and overlapped is (self.moment is Moment.OVERLAPPED)


def parse_spec(spec: str) -> tuple[Trap, ...]:
    """Parse a spec, which the module's docstring describes. An empty text has no traps.

    Raises:
        ConfigError: a trap is invalid.
    """
    traps = []
    for text in filter(None, spec.split(",")):
        try:
            point, nth, action, *moment = text.split(":")
            traps.append(Trap(Failpoint(point), int(nth), Action(action), *map(Moment, moment)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"invalid trap {text!r}: {error}", hint='write "after_fence:3:kill"') from error
    return tuple(traps)


class CrashFailpoints:
    """Counts the points that the engine reaches, and springs the traps that are set there."""

    def __init__(self, traps: Sequence[Trap], reached: Path | None = None) -> None:
        self._traps = list(traps)
        self._file = None if reached is None else os.open(reached, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()  # points are reached on the loop and in the step thread
        self._stepping = self._committing = self._behind = False
        self.counts: Counter[Failpoint] = Counter()
        self.overlapped: Counter[Failpoint] = Counter()
        self.watches_fence = any(trap.point is Failpoint.AFTER_FENCE for trap in traps)

    async def reach(self, point: Failpoint) -> None:
        """Count a point of the cycle. If a trap waits for another turn in flight, wait a moment for one."""
        for _ in range(PATIENCE_MS):
            if not self._lacks_company(point):
                break
            await asyncio.sleep(0.001)
        self.reach_now(point)

    def _lacks_company(self, point: Failpoint) -> bool:
        behind = self._stepping if point is Failpoint.BEFORE_COMMIT else self._behind
        return (
            point in COMMITTING
            and not behind
            and any(trap.point is point and trap.springs(self.counts[point] + 1, True) for trap in self._traps)
            and all(trap.moment is Moment.OVERLAPPED for trap in self._traps if trap.point is point)
        )

    def reach_now(self, point: Failpoint) -> None:
        """Count a point and spring its traps; safe in any thread."""
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

    def _is_overlapped(self, point: Failpoint) -> bool:
        """Update which turns are in flight; return whether one is besides the turn that reached the point."""
        if point is Failpoint.AFTER_POLL:
            self._stepping = self._behind = True
        elif point is Failpoint.AFTER_STEP:
            self._stepping = False
        elif point is Failpoint.BEFORE_COMMIT:
            self._committing, self._behind = True, self._stepping
        elif point is Failpoint.AFTER_COMMIT:
            self._committing = False
        if point in STEPPING:
            return self._committing
        if point in COMMITTING:
            return self._behind
        return self._committing or self._stepping
