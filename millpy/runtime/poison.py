"""The hunt for poison: trials of a refused turn, until all that the database refuses of it is known.

What leaving something out means is said in `isolation`; this says in which order it is tried. Every trial starts from
the turn's inbox and ends in a rollback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from millpy.errors import CorruptionError, PoisonError, TransientError
from millpy.model.checkpoint import Checkpoint
from millpy.model.keys import Key
from millpy.runtime.isolation import EVERYTHING, Isolation, find_refused, rows_of, without_rows
from millpy.runtime.turn import Turn

Step = Callable[[Isolation], Awaitable[Turn | None]]
Refusal = Callable[[Sequence[Checkpoint]], Awaitable[PoisonError | None]]


class Hunt:
    """For one refused turn.

    Args:
        step: steps the turn again, on soft state as it was before; None when there is nothing to commit.
        refusal: tries to commit and rolls back; what the database says against it.
        computations: which computation writes a result table.
        fired: what the refused turn fired of timers where it was cut, by interval; so does every trial.
    """

    def __init__(
        self, step: Step, refusal: Refusal, computations: Mapping[int, str], fired: Mapping[int, Mapping[Key, int]]
    ) -> None:
        self._step = step
        self._refusal = refusal
        self._computations = computations
        self._isolation = Isolation(fired=dict(fired), again=True)
        self._rows: dict[int, str] = {}
        self.is_given_up = False
        """More is refused than was looked for, or it took too long."""

    @property
    def records(self) -> int:
        """How many input records are refused, as far as is known."""
        return len(self._isolation.refused)

    @property
    def rows(self) -> int:
        """How many result rows are refused without any record, as far as is known."""
        return len(self._rows)

    async def run(self, records_max: int, error: PoisonError, is_over: Callable[[], bool]) -> Turn | None:
        """The turn without what is refused, as the last trial had it; None: nothing is to commit.

        Args:
            records_max: how many refused records and rows are looked for.
            error: why the turn was refused at first.
            is_over: whether the search has taken its time; asked before another refused record or row is looked for.

        Raises:
            TransientError: there are more, or it took too long: a smaller turn has less of them.
            CorruptionError: the turn is refused without any record or result row: what millpy writes is at fault.
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
                final = await self._without_refused_rows(found, records_max, is_over)
                if final is not None:
                    return final
                break
        self.is_given_up = True
        raise TransientError(
            f"the database refuses {self.records} records and {self.rows} rows of one turn, and more: {error}",
            hint="look at the constraints of the result tables; nothing is lost, a smaller turn is tried",
        )

    async def _trial(self, under: Isolation) -> PoisonError | None:
        found = await self._step(under)
        return None if found is None else await self._refusal(found.checkpoints)

    async def _without_refused_rows(self, found: Turn, rows_max: int, is_over: Callable[[], bool]) -> Turn | None:
        """The turn without the rows that are refused, whoever made them; None when there are more.

        A row is known by its place, so it is left out of the very checkpoints in which it was found.
        """
        for _ in range(rows_max):
            await self._find_row(found.checkpoints)
            checkpoints = self._without(found.checkpoints, EVERYTHING)
            if await self._refusal(checkpoints) is None:
                return replace(found, checkpoints=checkpoints)
            if is_over():
                break
        return None

    def _without(self, checkpoints: Sequence[Checkpoint], upto: int) -> list[Checkpoint]:
        return without_rows(checkpoints, upto, self._rows, self._computations)

    async def _find_row(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Bisect for the result row that the database refuses on its own."""
        error = await self._refusal(self._without(checkpoints, 0))
        if error is not None:
            raise CorruptionError(
                f"the database refuses a turn without any record or result row in it: {error.message}",
                hint="nothing is lost; please report this, with the statement in the server's log",
            )
        passes, fails = 0, rows_of(checkpoints)
        reason = "refused by the database"
        while fails - passes > 1:
            middle = (passes + fails) // 2
            error = await self._refusal(self._without(checkpoints, middle))
            if error is None:
                passes = middle
            else:
                fails, reason = middle, error.message
        self._rows[fails - 1] = reason
