"""The search for poison: trials of a refused turn, until all records and rows that the database refuses are known.

`poison_filter` leaves records and rows out; this module decides the order of the trials. Every trial starts from the
turn's inbox and ends in a rollback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from millpy.errors import CorruptionError, PoisonError, TransientError
from millpy.hosting.isolation import EVERYTHING, Isolation
from millpy.model.checkpoint import Checkpoint
from millpy.model.keys import Key
from millpy.runtime.poison_filter import find_refused, rows_of, without_rows
from millpy.runtime.turn import Turn

Step = Callable[[Isolation], Awaitable[Turn | None]]
Refusal = Callable[[Sequence[Checkpoint]], Awaitable[PoisonError | None]]


class PoisonSearch:
    """A search in one refused turn.

    Args:
        step: steps the turn again, on soft state as it was before; returns None when there is nothing to commit.
        refusal: tries to commit and rolls back; returns the database's error, if any.
        computations: result table -> computation that writes it.
        fired: interval -> key -> number of timers that the refused turn fired; every trial fires the same.
    """

    def __init__(
        self, step: Step, refusal: Refusal, computations: Mapping[int, str], fired: Mapping[int, Mapping[Key, int]]
    ) -> None:
        self._step = step
        self._refusal = refusal
        self._computations = computations
        self._isolation = Isolation(fired=dict(fired), again=True)
        self._rows: dict[int, str] = {}
        self.is_exhausted = False
        """Whether the search ended because the database refuses too much, or because it took too long."""

    @property
    def records(self) -> int:
        """The number of refused input records found so far."""
        return len(self._isolation.refused)

    @property
    def rows(self) -> int:
        """The number of result rows found so far that are refused without any record."""
        return len(self._rows)

    async def run(self, records_max: int, error: PoisonError, is_over: Callable[[], bool]) -> Turn | None:
        """Return the turn of the last trial, without the refused records and rows; None: there is nothing to commit.

        Args:
            records_max: number of refused records and rows to find at most.
            error: error with which the database refused the turn at first.
            is_over: tells whether the time is used up; called before each search for another record or row.

        Raises:
            TransientError: there are more, or the search took too long; a smaller turn has less of them.
            CorruptionError: the database refuses the turn without any record or result row: millpy's own data is at
                fault.
        """
        for _ in range(records_max):
            found = await self._step(self._isolation)
            if found is None:
                return None
            refused = await self._refusal(found.checkpoints)
            if refused is None:
                return found
            if is_over():
                break
            if await find_refused(self._trial, self._isolation, found.records, refused) is not None:
                final = await self._without_refused_rows(found, refused.message, records_max, is_over)
                if final is not None:
                    return final
                break
        self.is_exhausted = True
        raise TransientError(
            f"the database refuses {self.records} records and {self.rows} rows of one turn, and more: {error}",
            hint="check the constraints of the result tables; nothing is lost, millpy tries a smaller turn",
        )

    async def _trial(self, isolation: Isolation) -> PoisonError | None:
        found = await self._step(isolation)
        return None if found is None else await self._refusal(found.checkpoints)

    async def _without_refused_rows(
        self, found: Turn, reason: str, rows_max: int, is_over: Callable[[], bool]
    ) -> Turn | None:
        """Return the turn without the refused rows, whatever made them; None when there are more.

        `reason` is why the database refuses all of them.

        A row is identified by its place, so it is left out of the same checkpoints in which it was found.
        """
        for _ in range(rows_max):
            await self._find_row(found.checkpoints, reason)
            checkpoints = self._cut(found.checkpoints, EVERYTHING)
            refused = await self._refusal(checkpoints)
            if refused is None:
                return replace(found, checkpoints=checkpoints)
            reason = refused.message
            if is_over():
                break
        return None

    def _cut(self, checkpoints: Sequence[Checkpoint], upto: int) -> list[Checkpoint]:
        return without_rows(checkpoints, upto, self._rows, self._computations)

    async def _find_row(self, checkpoints: Sequence[Checkpoint], reason: str) -> None:
        """Find one more row that the database refuses by itself, by bisection, and add it to the refused rows.

        `reason` is why it refuses the last row, if no other.
        """
        error = await self._refusal(self._cut(checkpoints, 0))
        if error is not None:
            raise CorruptionError(
                f"the database refuses a turn without any record or result row: {error.message}",
                hint="nothing is lost; please report this error with the statement in the server's log",
            )
        passes, fails = 0, rows_of(checkpoints)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            error = await self._refusal(self._cut(checkpoints, middle))
            if error is None:
                passes = middle
            else:
                fails, reason = middle, error.message
        self._rows[fails - 1] = reason
