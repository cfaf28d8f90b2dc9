"""Poison isolation: a value that the database refuses never stops an interval.

When a turn is refused (SQLSTATE class 22, or 23 on a user's constraint), it is stepped again from the same inbox in
trial transactions that always roll back, with ever shorter prefixes of its input records, until the one record is
found whose presence makes it fail. That record is dead-lettered, the rest commits. Watermarks and positions are those
of the whole turn in every trial, so leaving records out cannot change what closes or fires.

When the turn fails without any record (a window or timer of earlier turns emits a refused row, or makes one go), the
result row itself is dead-lettered instead, or stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.errors import PoisonError
from millpy.model.checkpoint import AbsorbedRows, Checkpoint, DeadLetter, ResultRows
from millpy.model.keys import Key
from millpy.model.record import Records

EVERYTHING = 2**62
RowsT = TypeVar("RowsT", ResultRows, AbsorbedRows)


@dataclass(frozen=True, slots=True)
class Blamed:
    """A record that the database refuses: its row, the database's words, and the table that would not have it."""

    row: int
    detail: str
    table: str


@dataclass(slots=True)
class Isolation:
    """Which of a turn's input records take part, by their place in the turn.

    Attributes:
        upto: records at this place and after are left out (trials only).
        refused: place -> why the database refused it, and which table; these become dead letters.
        seen: how many records the run has met so far.
        fired: interval -> key -> timers that fired at the end of the turn, where it was cut before all had.
        again: whether this turn is stepped again, and so fires what it fired before.
    """

    upto: int = EVERYTHING
    refused: dict[int, tuple[str, str]] = field(default_factory=dict)
    seen: int = 0
    fired: dict[int, Mapping[Key, int]] = field(default_factory=dict)
    again: bool = False

    def under(self, upto: int) -> Isolation:
        """The same for a trial with fewer records."""
        return replace(self, upto=upto, seen=0)

    def admit(self, records: Records) -> tuple[npt.NDArray[np.int64] | None, list[Blamed]]:
        """Which rows take part (None: all), and those that the database has refused."""
        start = self.seen
        self.seen += len(records)
        if self.seen <= self.upto and not any(start <= place < self.seen for place in self.refused):
            return None, []
        places = np.arange(start, self.seen)
        keep = (places < self.upto) & ~np.isin(places, list(self.refused))
        blamed = [
            Blamed(place - start, *self.refused[place]) for place in sorted(self.refused) if start <= place < self.seen
        ]
        return np.flatnonzero(keep), blamed


Trial = Callable[[Isolation], Coroutine[Any, Any, PoisonError | None]]


async def find_refused(trial: Trial, isolation: Isolation, records: int, first: PoisonError) -> PoisonError | None:
    """Find one more refused record by bisection and add it to `isolation.refused`.

    Args:
        trial: steps the turn with an isolation and says whether the database refuses it.
        isolation: what is known so far; the turn as it stands is refused.
        records: input records of the turn.
        first: why the turn is refused.

    Returns:
        None when a record was found; the error when the turn is refused without any record.

    Cost: log2(records) trials.
    """
    error = await trial(isolation.under(0))
    if error is not None:
        return error
    passes, fails = 0, records
    blamed = (first.message, first.table)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        error = await trial(isolation.under(middle))
        if error is None:
            passes = middle
        else:
            fails, blamed = middle, (error.message, error.table)
    isolation.refused[fails - 1] = blamed
    return None


def rows_of(checkpoints: Sequence[Checkpoint]) -> int:
    """How many rows go to result tables, or are to be deleted from them."""
    return sum(part.count for c in checkpoints for part in c.results) + sum(
        part.count for c in checkpoints for part in c.absorbed
    )


def without_rows(
    checkpoints: Sequence[Checkpoint], upto: int, refused: dict[int, str], computations: Mapping[int, str]
) -> list[Checkpoint]:
    """The checkpoints with rows [0, upto) and without the refused ones, which become dead letters.

    Rows to delete count as well; one that is refused stays in its table. `computations` says which computation writes
    a result table.
    """
    kept: list[Checkpoint] = []
    start = 0
    for checkpoint in checkpoints:
        dead: list[DeadLetter] = []

        def select(parts: Sequence[RowsT], dead: list[DeadLetter] = dead) -> list[RowsT]:
            nonlocal start
            selected = []
            for part in parts:
                places = range(start, start + part.count)
                start += part.count
                keep = [place - places.start for place in places if place < upto and place not in refused]
                dead.extend(
                    _letter(part, place - places.start, refused[place], computations)
                    for place in places
                    if place in refused
                )
                if keep:
                    selected.append(part if len(keep) == part.count else _take(part, keep))
            return selected

        results, absorbed = select(checkpoint.results), select(checkpoint.absorbed)
        letters = [*checkpoint.dead_letters, *dead]
        kept.append(replace(checkpoint, results=results, absorbed=absorbed, dead_letters=letters))
    return kept


def _letter(rows: ResultRows | AbsorbedRows, place: int, reason: str, computations: Mapping[int, str]) -> DeadLetter:
    row = [column[place].as_py() if isinstance(column, pa.Array) else column[place] for column in rows.columns]
    deleted = isinstance(rows, AbsorbedRows)
    return DeadLetter(
        reason="refused",
        detail=f"the row of a session that has become part of another cannot be deleted: {reason}"
        if deleted
        else reason,
        payload=msgspec.json.encode(row, enc_hook=str),
        stream="",
        computation=computations.get(rows.table_id, ""),
    )


def _take(rows: RowsT, keep: list[int]) -> RowsT:
    columns = [
        column.take(pa.array(keep)) if isinstance(column, pa.Array) else [column[place] for place in keep]
        for column in rows.columns
    ]
    return replace(rows, columns=columns, count=len(keep))
