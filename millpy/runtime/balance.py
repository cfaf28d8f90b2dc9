"""Which intervals to claim and which to give up: a pure decision on one snapshot of the ownership table.

Each worker aims at its fair share per computation. It claims free intervals up to the share rounded up and gives up
what it holds beyond that; one more when somebody eligible has less than the share rounded down. So ownership is sticky,
and once shares differ by at most one nothing moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from millpy.store.protocol import Ownership


@dataclass(frozen=True, slots=True)
class Moves:
    """Interval ids to claim and to give up."""

    claim: tuple[int, ...]
    give_up: tuple[int, ...]


def moves(me: UUID, ownership: Ownership, computations: Mapping[str, Sequence[int]], held: frozenset[int]) -> Moves:
    """Decide from one snapshot.

    Args:
        me: the worker that decides.
        ownership: live workers and owners.
        computations: computation -> its interval ids, by index.
        held: intervals that this worker holds in memory.

    Returns:
        What to claim (nobody live owns it) and what to give up (held, and owed to another).
    """
    owners = {owned.interval_id: owned.worker_id if owned.live else None for owned in ownership.intervals}
    claim: list[int] = []
    give_up: list[int] = []
    for name, intervals in computations.items():
        eligible = [worker.worker_id for worker in ownership.workers if not worker.only or name in worker.only]
        if me not in eligible:
            continue
        share_down, rest = divmod(len(intervals), len(eligible))
        share_up = share_down + (1 if rest else 0)
        mine = [i for i in intervals if i in held or owners.get(i) == me]
        free = [i for i in intervals if owners.get(i) is None and i not in held]
        # Owned in the table but not held in memory: a claim whose answer was lost. Claim it again.
        lost = [i for i in mine if i not in held]
        claim.extend(lost)
        claim.extend(free[: max(0, share_up - len(mine))])
        counts = {worker: sum(1 for i in intervals if owners.get(i) == worker) for worker in eligible if worker != me}
        poorest = min(counts.values(), default=share_up)
        if len(mine) > share_up:
            # Somebody has less than the share rounded up, and will claim.
            give_up.extend([i for i in mine if i in held][share_up:])
        elif len(mine) > share_down > poorest:
            give_up.extend([i for i in mine if i in held][-1:])  # none, while all are claims whose answers were lost
    return Moves(tuple(claim), tuple(give_up))
