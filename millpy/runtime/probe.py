"""Named points of the cycle where tests kill, freeze and pause; no-op in production."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class Point(StrEnum):
    """Every place of a turn at which a process may die (design: Points)."""

    AFTER_CLAIM = "after_claim"
    AFTER_POLL = "after_poll"
    AFTER_DECODE = "after_decode"
    AFTER_LOAD = "after_load"
    AFTER_STEP = "after_step"
    BEFORE_COMMIT = "before_commit"
    AFTER_FENCE = "after_fence"
    AFTER_COMMIT = "after_commit"
    AFTER_ACKNOWLEDGE = "after_acknowledge"
    BEFORE_FOLD_END = "before_fold_end"
    AFTER_FOLD = "after_fold"
    AFTER_SLOT_FREED = "after_slot_freed"
    BEFORE_RELEASE = "before_release"


class Probe(Protocol):
    """What the engine calls at each point."""

    @property
    def watches_fence(self) -> bool:
        """Whether the commit has to stop between fence and COMMIT for this probe."""
        ...

    async def reach(self, point: Point) -> None:
        """The cycle has reached a point."""
        ...

    def reach_now(self, point: Point) -> None:
        """The same, from the thread that steps."""
        ...


class NoProbe:
    """Production: nothing happens at any point."""

    watches_fence = False

    async def reach(self, point: Point) -> None:
        """Go on."""

    def reach_now(self, point: Point) -> None:
        """Go on."""
