"""An interval that a worker owns: its soft state, its source, what waits for its turns, and its unfolded deltas."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from millpy.hosting.interval_state import IntervalState, state_of
from millpy.hosting.plan import ComputationPlan
from millpy.limits import Limits
from millpy.model.checkpoint import Grant, Request
from millpy.model.stage import Release
from millpy.runtime.guarded_injector import GuardedInjector
from millpy.store.protocol import OwnerSnapshot


@dataclass(slots=True)
class OwnedInterval(IntervalState):
    """One interval under one grant of a worker.

    Attributes:
        injector: its source partition, while it is open.
        backpressured: whether the source waits because the stored backlog is above its bound.
        quiet: whether the source had nothing and was proven idle at the last take.
        requested: replay requests that wait for a turn.
        replaying: whether replay requests are in a turn that is not known to be committed.
        releases: releases of parked keys that wait for a turn.
        needs_fold: whether a fold is due because it makes room in memory.
        committed_bundle: the last bundle that this worker knows to be committed.
        folded_bundle: the last bundle whose deltas are rows.
        unfolded_since: time of the last fold, in seconds on the monotonic clock.
        unfolded, unfolded_bytes: (bundle, bytes of its deltas) above the folded bundle, including those in flight,
            oldest first; and their sum.
    """

    injector: GuardedInjector | None = None
    backpressured: bool = False
    quiet: bool = False
    requested: list[Request] = field(default_factory=list)
    replaying: bool = False
    releases: list[Release] = field(default_factory=list)
    needs_fold: bool = False
    committed_bundle: int = 0
    unfolded_since: float = 0.0
    unfolded: deque[tuple[int, int]] = field(default_factory=deque)
    unfolded_bytes: int = 0

    def expired_windows(self) -> list[str]:
        """Return the subkeys of windows that have expired in committed bundles, and may have rows."""
        expired = () if self.stage is None else self.stage.expired_windows()
        return [subkey for subkey, bundle in expired if bundle <= self.committed_bundle]

    def log(self, bundle: int, size: int) -> None:
        """Note that the deltas of a new bundle have `size` bytes and are not folded."""
        self.unfolded.append((bundle, size))
        self.unfolded_bytes += size

    def fold_to(self, bundle: int) -> None:
        """Forget the deltas up to a bundle, which are rows now; keep those that were in flight during the fold."""
        while self.unfolded and self.unfolded[0][0] <= bundle:
            self.unfolded_bytes -= self.unfolded.popleft()[1]


def owned(grant: Grant, plan: ComputationPlan, opened: OwnerSnapshot, now: float, limits: Limits) -> OwnedInterval:
    """Build soft state from what the store returned, without its stage, intake or injector."""
    interval = state_of(OwnedInterval, grant, plan, opened, limits)
    interval.unfolded_since = now
    interval.committed_bundle = opened.recovered.bundle
    if opened.unfolded_bytes:
        # The store does not say which bundles have these bytes; a fold takes all of them.
        interval.log(opened.recovered.folded_bundle + 1, opened.unfolded_bytes)
    return interval
