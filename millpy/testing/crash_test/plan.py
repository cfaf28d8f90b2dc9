"""Plan: which faults, in which order, with which dice. Pure, and the same for the same seed.

The plan is what a seed repeats; where in the code a fault strikes is up to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from millpy.testing.crash_test.options import FaultKind

WEIGHTS = {FaultKind.KILL: 4, FaultKind.FREEZE: 2, FaultKind.NETWORK: 3, FaultKind.DB: 1, FaultKind.BROKER: 1}
AT_ONCE = 0.25
"""So many of the faults do not wait until the one before is recovered from."""


class NetworkFault(StrEnum):
    """What a proxy can do to the connections of one worker; the last four strike its next commit."""

    CUT = "connections cut"
    STALL = "network stalled"
    SWALLOW = "answer to COMMIT lost"
    LATE_COMMIT = "COMMIT arrives after its connection is lost"
    LATE_PIPELINE = "commit arrives after its connection is lost"
    CUT_COMMIT = "connection lost before COMMIT"


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault to come.

    Attributes:
        victim: dice for the worker, in [0, 1).
        length: dice for how long it lasts, in [0, 1).
        gap: dice for how long to wait before it, in [0, 1).
        at_once: strikes while the system still recovers from the one before.
    """

    kind: FaultKind
    victim: float
    length: float
    gap: float
    at_once: bool
    network: NetworkFault | None = None


def draw(kinds: Sequence[FaultKind], count: int, seed: int) -> list[PlannedFault]:
    """So many faults of these kinds, each kind at least once if there are enough."""
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
    """How long a fault is likely to take, recovery and the pause before it included."""
    recovery = {
        FaultKind.KILL: lease_s + 1.0,
        FaultKind.FREEZE: 2 * lease_s + 1.0,
        FaultKind.DB: lease_s + 2.0,
        FaultKind.NETWORK: lease_s + 1.0,
        FaultKind.BROKER: 2.0,
    }[fault.kind]
    return pause_s(fault, lease_s) + recovery * (0.5 if fault.at_once else 1.0)


def pause_s(fault: PlannedFault, lease_s: float) -> float:
    """How long to wait before it: a fault at once comes within the lease of the one before."""
    return fault.gap * lease_s if fault.at_once else 0.2 + fault.gap
