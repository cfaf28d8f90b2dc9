"""What a worker does and tells while a result table, or what a statement of a sink names, refuses its turns.

The worker tries again after 0.1 s, and then after twice as long each time, up to a minute: only somebody who restores
the table can help, and each attempt computes the turn again. It tells `results_refused` at once, and again after 30 s,
1, 2, 4 … minutes, up to 1 h. Once a turn has written to the table, it tells `results_written`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from millpy.clock import Clock
from millpy.errors import ResultTableError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint
from millpy.model.time import Instant, describe

RETRY_S_MAX = 60.0
"""The longest delay between two attempts."""
REPEAT_S_MIN, REPEAT_S_MAX = 30.0, 3_600.0
"""Seconds until an event tells a refusal again; after that twice as long each time, up to the maximum."""
Tell = Callable[[str, dict[str, object]], None]


@dataclass(slots=True)
class _Refusal:
    """What one table, or the statement of one sink, refuses.

    Attributes:
        since: the time of the first refusal.
        repeat_at: monotonic time of the next event.
        attempts: the refused turns.
        retry_s, repeat_s: the present delays.
    """

    since: Instant
    repeat_at: float
    attempts: int = 0
    retry_s: float = 0.0
    repeat_s: float = REPEAT_S_MIN / 2


class RefusedResults:
    """The refusals that a worker waits for, by table or sink.

    Args:
        table_ids: result table -> its id.
        limits: the first delay.
        clock: the time of the events.
        rng: makes the delays of workers differ.
        tell: queues an event.
    """

    def __init__(self, table_ids: Mapping[str, int], limits: Limits, clock: Clock, rng: Random, tell: Tell) -> None:
        self._table_ids = table_ids
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._tell = tell
        self._refusals: dict[str, _Refusal] = {}

    def refused(self, error: ResultTableError) -> float:
        """Note a refusal, and tell it if that is due. Return the seconds until the next attempt."""
        now, table = self._clock.monotonic(), error.table
        refusal = self._refusals.get(table)
        if refusal is None:
            refusal = self._refusals[table] = _Refusal(self._clock.now_us(), now, retry_s=self._limits.retry_s_min)
        refusal.attempts += 1
        refusal.retry_s = min(RETRY_S_MAX, refusal.retry_s * 2)
        if now >= refusal.repeat_at:
            refusal.repeat_s = min(REPEAT_S_MAX, refusal.repeat_s * 2)
            refusal.repeat_at = now + refusal.repeat_s
            self._tell("results_refused", _detail(table, refusal) | {"why": error.message, "hint": error.hint})
        return refusal.retry_s * self._rng.uniform(0.5, 1.0)

    def committed(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Note a committed turn. One that has not written to a table says nothing about it."""
        if not self._refusals:
            return
        written = {rows.table_id for part in checkpoints for rows in part.results if rows.count}
        written |= {rows.table_id for part in checkpoints for rows in part.deleted if rows.count}
        sinks = {rows.sink for part in checkpoints for rows in part.statements}
        for table in [t for t in self._refusals if t in sinks or self._table_ids.get(t) in written]:
            self._tell("results_written", _detail(table, self._refusals.pop(table)))


def _detail(table: str, refusal: _Refusal) -> dict[str, object]:
    return {"table": table, "since": describe(refusal.since), "attempts": refusal.attempts}
