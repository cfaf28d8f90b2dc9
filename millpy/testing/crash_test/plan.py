"""Plans the faults: their kinds, their order and their random numbers. The same seed gives the same plan.

Where in the code a fault strikes still depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from millpy.testing.crash_test.options import FaultKind

WEIGHTS = {FaultKind.KILL: 4, FaultKind.FREEZE: 2, FaultKind.NETWORK: 3, FaultKind.DB: 1, FaultKind.BROKER: 1}
AT_ONCE = 0.25
"""The share of faults that do not wait for the recovery from the fault before."""


class NetworkFault(StrEnum):
    """The faults of a proxy at the connections of one worker; the last four strike its next commit."""

    CUT = "connections cut"
    STALL = "network stalled"
    SWALLOW = "answer to COMMIT lost"
    LATE_COMMIT = "COMMIT arrives after its connection is lost"
    LATE_PIPELINE = "whole transaction arrives after its connection is lost"
    CUT_COMMIT = "connection lost before COMMIT"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault to come.

    Attributes:
        victim: decides the worker, in [0, 1).
        length: decides the duration, in [0, 1).
        gap: decides the pause before it, in [0, 1).
        at_once: whether it strikes while the system still recovers from the fault before.
    """

    kind: FaultKind
    victim: float
    length: float
    gap: float
    at_once: bool
    network: NetworkFault | None = None


def draw(kinds: Sequence[FaultKind], count: int, seed: int) -> list[PlannedFault]:
    """Draw faults of these kinds, each kind at least once if there are enough."""
    rng = random.Random(f"{seed}/faults")
    drawn = list(kinds)[:count]
    drawn += rng.choices(kinds, [WEIGHTS[kind] for kind in kinds], k=count - len(drawn))
    rng.shuffle(drawn)
    return [
        PlannedFault(
            kind,
            victim=rng.random(),
            length=rng.random(),
            gap=rng.random(),
            at_once=number > 0 and rng.random() < AT_ONCE,
            network=rng.choice(list(NetworkFault)) if kind is FaultKind.NETWORK else None,
        )
        for number, kind in enumerate(drawn)
    ]


def likely_s(fault: PlannedFault, lease_s: float) -> float:
    """Estimate how long a fault takes, with recovery and the pause before it."""
    recovery = {
        FaultKind.KILL: lease_s + 1.0,
        FaultKind.FREEZE: 2 * lease_s + 1.0,
        FaultKind.DB: lease_s + 2.0,
        FaultKind.NETWORK: lease_s + 1.0,
        FaultKind.BROKER: 2.0,
    }[fault.kind]
    return pause_s(fault, lease_s) + recovery * (0.5 if fault.at_once else 1.0)


def pause_s(fault: PlannedFault, lease_s: float) -> float:
    """Return the pause before a fault; a fault at once comes within the lease of the one before."""
    return fault.gap * lease_s if fault.at_once else 0.2 + fault.gap
