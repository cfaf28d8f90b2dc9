"""Named points of the cycle where tests kill, freeze and pause a worker; no-op in production."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Failpoint(StrEnum):
    """Every point at which a test can stop a worker: after a claim, in the cycle, in maintenance, before a release."""

    AFTER_CLAIM = "after_claim"
    AFTER_POLL = "after_poll"
    AFTER_DECODE = "after_decode"
    AFTER_LOAD = "after_load"
    AFTER_STEP = "after_step"
    BEFORE_COMMIT = "before_commit"
    AFTER_FENCE = "after_fence"
    AFTER_COMMIT = "after_commit"
    AFTER_ACKNOWLEDGE = "after_acknowledge"
    BEFORE_FOLD = "before_fold"
    AFTER_FOLD = "after_fold"
    AFTER_SLOT_FREED = "after_slot_freed"
    BEFORE_RELEASE = "before_release"


class Failpoints(Protocol):
    """What the engine calls at each point; the crash tests implement it."""

    @property
    def watches_fence(self) -> bool:
        """Whether a commit has to call `reach` between fence and COMMIT."""
        ...

    async def reach(self, point: Failpoint) -> None:
        """Kill, freeze or pause the process here if the test has chosen this point."""
        ...

    def reach_now(self, point: Failpoint) -> None:
        """Do the same as `reach` from inside a step, which cannot await."""
        ...


class NoFailpoints:
    """The failpoints of production: every point is a no-op."""

    watches_fence = False

    async def reach(self, point: Failpoint) -> None:
        """Do nothing."""

    def reach_now(self, point: Failpoint) -> None:
        """Do nothing."""
