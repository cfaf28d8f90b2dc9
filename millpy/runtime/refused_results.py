"""What a worker does and tells while a result table, or what a statement of a sink names, refuses its turns.

The worker tries again after 0.1 s, and then after twice as long each time, up to a minute: only somebody who restores
the table can help, and each attempt computes the turn again. It tells `results_refused` at once, and again after 30 s,
1, 2, 4 … minutes, up to 1 h. Once a turn has written to the table, it tells `results_written`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


class RefusedResults:
    """The refusal that a worker waits for, if any.

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
        self._table: str | None = None
        self._since = Instant(0)
        self._attempts = 0
        self._retry_s = self._repeat_s = self._repeat_at = 0.0

    def refused(self, error: ResultTableError) -> float:
        """Note a refusal, and tell it if that is due. Return the seconds until the next attempt."""
        now = self._clock.monotonic()
        if self._table != error.table:
            self._table, self._since, self._attempts = error.table, self._clock.now_us(), 0
            self._retry_s, self._repeat_s, self._repeat_at = self._limits.retry_s_min, REPEAT_S_MIN / 2, now
        self._attempts += 1
        self._retry_s = min(RETRY_S_MAX, self._retry_s * 2)
        if now >= self._repeat_at:
            self._repeat_s = min(REPEAT_S_MAX, self._repeat_s * 2)
            self._repeat_at = now + self._repeat_s
            self._tell("results_refused", self._detail() | {"why": error.message, "hint": error.hint})
        return self._retry_s * self._rng.uniform(0.5, 1.0)

    def committed(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Note a committed turn. One that has not written to the table says nothing about it."""
        if self._table is not None and self._has_written(checkpoints):
            self._tell("results_written", self._detail())
            self._table = None

    def _has_written(self, checkpoints: Sequence[Checkpoint]) -> bool:
        table_id = self._table_ids.get(self._table or "")
        written = {rows.table_id for part in checkpoints for rows in part.results if rows.count}
        written |= {rows.table_id for part in checkpoints for rows in part.deleted if rows.count}
        sinks = {rows.sink for part in checkpoints for rows in part.statements}
        return table_id in written or self._table in sinks or (not self._table and bool(written or sinks))

    def _detail(self) -> dict[str, object]:
        return {"table": self._table, "since": describe(self._since), "attempts": self._attempts}
