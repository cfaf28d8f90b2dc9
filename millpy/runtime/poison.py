"""The hunt for poison: trials of a refused turn, until all that the database refuses of it is known.

What leaving something out means is said in `isolation`; this says in which order it is tried. Every trial starts from
the turn's inbox and ends in a rollback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from millpy.errors import CorruptionError, PoisonError, TransientError
from millpy.model.checkpoint import Checkpoint
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
    """

    def __init__(self, step: Step, refusal: Refusal, computations: Mapping[int, str]) -> None:
        self._step = step
        self._refusal = refusal
        self._computations = computations
        self._isolation = Isolation()
        self._rows: dict[int, str] = {}

    @property
    def records(self) -> int:
        """How many input records are refused, as far as is known."""
        return len(self._isolation.refused)

    @property
    def rows(self) -> int:
        """How many result rows are refused without any record, as far as is known."""
        return len(self._rows)

    async def run(self, records_max: int, error: PoisonError, is_over: Callable[[], bool]) -> Turn | None:
        """The turn without what is refused, its tokens being those of the last trial; None: nothing is to commit.

        Args:
            records_max: how many refused records and rows are looked for.
            error: why the turn was refused at first.
            is_over: whether the search has taken its time; asked before another refused record or row is looked for.

        Raises:
            TransientError: there are more, or it took too long: a smaller turn has less of them.
            CorruptionError: the turn is refused without any record or result row: what millpy writes is at fault.
        """
        for _ in range(records_max):
            refused = await self._trial(self._isolation)
            if refused is None:
                final = await self._step(self._isolation)
                if final is None:
                    return None
                return replace(final, checkpoints=self._without(final.checkpoints, EVERYTHING))
            if is_over():
                break
            if await find_refused(self._trial, self._isolation, self._isolation.seen, refused) is None:
                continue
            found = await self._step(self._isolation)
            assert found is not None
            await self._find_row(found.checkpoints)
        raise TransientError(
            f"the database refuses {self.records} records and {self.rows} rows of one turn, and more: {error}",
            hint="look at the constraints of the result tables; nothing is lost, a smaller turn is tried",
        )

    async def _trial(self, under: Isolation) -> PoisonError | None:
        found = await self._step(under)
        return None if found is None else await self._refusal(self._without(found.checkpoints, EVERYTHING))

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
