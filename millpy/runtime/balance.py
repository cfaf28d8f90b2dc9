"""Balancing: a pure decision on the intervals to claim and to release, from one snapshot of the ownership table.

Each worker aims at its fair share per computation. It claims free intervals up to the share rounded up and releases
those beyond it. It releases one more when an eligible worker has less than the share rounded down. So ownership is
sticky, and nothing moves once shares differ by at most one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from millpy.store.protocol import Ownership


@dataclass(frozen=True, slots=True)
class Moves:
    """The ids of the intervals that a worker has to claim and to release."""

    to_claim: tuple[int, ...]
    to_release: tuple[int, ...]


def moves(me: UUID, ownership: Ownership, computations: Mapping[str, Sequence[int]], held: frozenset[int]) -> Moves:
    """Decide which intervals a worker claims and which it releases.

    Args:
        me: the worker that decides.
        ownership: live workers and owners.
        computations: computation -> its interval ids, by index.
        held: intervals that this worker holds in memory.

    Returns:
        The intervals to claim (without a live owner) and to release (held, and due to another worker).
    """
    owners = {owned.interval_id: owned.worker_id if owned.live else None for owned in ownership.intervals}
    to_claim: list[int] = []
    to_release: list[int] = []
    for name, intervals in computations.items():
        eligible = [worker.worker_id for worker in ownership.workers if not worker.only or name in worker.only]
        if me not in eligible:
            continue
        share_down, rest = divmod(len(intervals), len(eligible))
        share_up = share_down + (1 if rest else 0)
        mine = [i for i in intervals if i in held or owners.get(i) == me]
        free = [i for i in intervals if owners.get(i) is None and i not in held]
        # Owned in the table but not held in memory: the answer to a claim was lost. Claim the interval again.
        lost = [i for i in mine if i not in held]
        to_claim.extend(lost)
        to_claim.extend(free[: max(0, share_up - len(mine))])
        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker != me}
        poorest = min(counts.values(), default=share_up)
        if len(mine) > share_up:
            # Another worker has less than the share rounded up and will claim them.
            to_release.extend([i for i in mine if i in held][share_up:])
        elif len(mine) > share_down > poorest:
            to_release.extend([i for i in mine if i in held][-1:])  # none, while all are claims whose answers were lost
    return Moves(tuple(to_claim), tuple(to_release))
