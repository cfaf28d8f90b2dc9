"""Poison isolation: a value that the database refuses never stops an interval.

When a turn is refused (SQLSTATE class 22, or 23 on a user's constraint), it is stepped again from the same inbox in
trial transactions that always roll back, with ever shorter prefixes of its input records, until the one record is
found whose presence makes it fail. That record is dead-lettered, the rest commits. Watermarks and positions are those
of the whole turn in every trial, so leaving records out cannot change what closes or fires.

When the turn fails without any record (a window or timer of earlier turns emits a refused row), the result row
itself is dead-lettered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from millpy.errors import PoisonError
from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Checkpoint, DeadLetter, ResultRows
from millpy.model.record import Records

EVERYTHING = 2**62


@dataclass(slots=True)
class Isolation:
    """Which of a turn's input records take part, by their place in the turn.

    Attributes:
        upto: records at this place and after are left out (trials only).
        refused: place -> why the database refused it; these become dead letters.
        seen: how many records the run has met so far.
    """

    upto: int = EVERYTHING
    refused: dict[int, str] = field(default_factory=dict)
    seen: int = 0

    def admit_records(self, records: Records, computation: str) -> tuple[Records, list[DeadLetter]]:
        """The records that take part, and dead letters for the refused ones."""
        rows, dead = self._rows(records, computation, computation)
        return (records if rows is None else records.take(rows)), dead

    def admit(self, bundle: Bundle, computation: str) -> tuple[Bundle, list[DeadLetter]]:
        """The same for a bundle read from a segment."""
        rows, dead = self._rows(bundle.records, "", computation)
        return (bundle if rows is None else bundle.take(rows)), dead

    def _rows(self, records: Records, stream: str, computation: str) -> tuple[Any, list[DeadLetter]]:
        start = self.seen
        self.seen += len(records)
        if self.seen <= self.upto and not any(start <= place < self.seen for place in self.refused):
            return None, []
        places = np.arange(start, self.seen)
        keep = (places < self.upto) & ~np.isin(places, list(self.refused))
        out = [place - start for place in sorted(self.refused) if start <= place < self.seen]
        chosen = records.take(np.array(out, np.int64))
        dead = [
            DeadLetter(
                reason="refused",
                detail=self.refused[place + start],
                payload=msgspec.json.encode(item),
                stream=stream,
                computation=computation,
                event_time=int(event_time),
            )
            for place, item, event_time in zip(out, chosen.objects(), chosen.event_times, strict=True)
        ]
        return np.flatnonzero(keep), dead


Trial = Callable[[Isolation], Coroutine[Any, Any, PoisonError | None]]


async def find_refused(trial: Trial, isolation: Isolation, records: int) -> PoisonError | None:
    """Find one more refused record by bisection and add it to `isolation.refused`.

    Args:
        trial: steps the turn with an isolation and says whether the database refuses it.
        isolation: what is known so far; the turn as it stands is refused.
        records: input records of the turn.

    Returns:
        None when a record was found; the error when the turn is refused without any record.

    Cost: log2(records) trials.
    """
    error = await trial(Isolation(upto=0, refused=isolation.refused))
    if error is not None:
        return error
    passes, fails = 0, records
    reason = "refused by the database"
    while fails - passes > 1:
        middle = (passes + fails) // 2
        error = await trial(Isolation(upto=middle, refused=isolation.refused))
        if error is None:
            passes = middle
        else:
            fails, reason = middle, error.message
    isolation.refused[fails - 1] = reason
    return None


def without_rows(checkpoints: Sequence[Checkpoint], upto: int, refused: dict[int, str]) -> list[Checkpoint]:
    """The checkpoints with result rows [0, upto) and without the refused ones, which become dead letters."""
    kept: list[Checkpoint] = []
    start = 0
    for checkpoint in checkpoints:
        results: list[ResultRows] = []
        dead: list[DeadLetter] = []
        for rows in checkpoint.results:
            places = range(start, start + rows.count)
            keep = [place - start for place in places if place < upto and place not in refused]
            dead.extend(
                DeadLetter(
                    reason="refused",
                    detail=refused[place],
                    payload=msgspec.json.encode(_row(rows, place - start), enc_hook=str),
                    stream="",
                    computation="",
                )
                for place in places
                if place in refused
            )
            start += rows.count
            if len(keep) == rows.count:
                results.append(rows)
            elif keep:
                results.append(_take(rows, keep))
        kept.append(replace(checkpoint, results=results, dead_letters=[*checkpoint.dead_letters, *dead]))
    return kept


def _row(rows: ResultRows, place: int) -> list[Any]:
    return [column[place].as_py() if isinstance(column, pa.Array) else column[place] for column in rows.columns]


def _take(rows: ResultRows, keep: list[int]) -> ResultRows:
    columns = [
        column.take(pa.array(keep)) if isinstance(column, pa.Array) else [column[place] for place in keep]
        for column in rows.columns
    ]
    return ResultRows(rows.table_id, columns, len(keep), rows.first)
