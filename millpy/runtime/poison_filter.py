"""Poison isolation: a value that the database refuses never stops an interval.

When the database refuses a turn (SQLSTATE class 22, or 23 on a user's constraint), the turn is stepped again from the
same inbox in trial transactions that always roll back. Bisection over prefixes of its input records finds the record
whose presence makes the turn fail. That record is dead-lettered, the rest commits. Every trial uses the watermarks and
positions of the whole turn, so leaving records out cannot change which windows close or which timers fire.

When the turn fails without any record, because a window or timer of earlier turns emits or deletes a row, the
row is dead-lettered instead: a refused row is not written, and a row that cannot be deleted stays.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pyarrow as pa

from millpy.errors import PoisonError
from millpy.hosting.isolation import Isolation
from millpy.model.checkpoint import Checkpoint, DeadLetter, DeletedRows, ResultRows

RowsT = TypeVar("RowsT", ResultRows, DeletedRows)


Trial = Callable[[Isolation], Coroutine[Any, Any, PoisonError | None]]


async def find_refused(trial: Trial, isolation: Isolation, records: int, first: PoisonError) -> PoisonError | None:
    """Find one more refused record by bisection and add it to `isolation.refused`.

    Args:
        trial: steps the turn with an isolation and returns the database's error, if any.
        isolation: refused records found so far; the database refuses the turn without them, too.
        records: number of input records of the turn.
        first: error with which the database refused the turn.

    Returns:
        None when a record was found; the error when the database refuses the turn without any record.

    Cost: log2(records) trials for the first one. For others a few, where many are refused: the search continues behind
    the last one, as the turn passes up to there without it, and begins with a step as wide as the last two are apart.
    """
    found = sorted(isolation.refused)
    passes, fails = found[-1] + 1 if found else 0, records
    if not found or passes >= fails:
        error = await trial(isolation.limited_to(passes := 0))
        if error is not None:
            return error
    blamed = (first.message, first.table)
    step = fails if passes == 0 else found[-1] - (found[-2] if len(found) > 1 else -1)
    while passes + step < fails:
        error = await trial(isolation.limited_to(passes + step))
        if error is None:
            passes, step = passes + step, 2 * step
        else:
            fails, blamed = passes + step, (error.message, error.table)
    while fails - passes > 1:
        middle = (passes + fails) // 2
        error = await trial(isolation.limited_to(middle))
        if error is None:
            passes = middle
        else:
            fails, blamed = middle, (error.message, error.table)
    isolation.refused[fails - 1] = blamed
    return None


def rows_of(checkpoints: Sequence[Checkpoint]) -> int:
    """Return the number of rows to write to result tables and to delete from them, and of runs of statements."""
    return (
        sum(part.count for c in checkpoints for part in c.results)
        + sum(part.count for c in checkpoints for part in c.deleted)
        + sum(len(part.rows) for c in checkpoints for part in c.statements)
    )


def without_rows(
    checkpoints: Sequence[Checkpoint], upto: int, refused: dict[int, str], computations: Mapping[int, str]
) -> list[Checkpoint]:
    """Return the checkpoints with rows [0, upto) and without the refused rows, which become dead letters.

    Rows to delete count as well; a refused one stays in its table. So do the runs of users' statements, which are left
    out as records if no row is at fault (`hosting/isolation.py`). `computations` maps a result table to the
    computation that writes it.
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

        results, deleted = select(checkpoint.results), select(checkpoint.deleted)
        statements = []
        for part in checkpoint.statements:
            places = range(start, start + len(part.rows))
            start += len(part.rows)
            rows = [row for place, row in zip(places, part.rows, strict=True) if place < upto and place not in refused]
            dead.extend(
                _row_letter(part.rows[place - places.start], refused[place], part.sink)
                for place in places
                if place in refused
            )
            statements += [replace(part, rows=rows)] if rows else []
        letters = [*checkpoint.dead_letters, *dead]
        kept.append(replace(checkpoint, results=results, deleted=deleted, statements=statements, dead_letters=letters))
    return kept


def _letter(rows: ResultRows | DeletedRows, place: int, reason: str, computations: Mapping[int, str]) -> DeadLetter:
    row = [column[place].as_py() if isinstance(column, pa.Array) else column[place] for column in rows.columns]
    deleted = isinstance(rows, DeletedRows)
    detail = f"cannot delete the row of a window that is gone: {reason}" if deleted else reason
    return _row_letter(row, detail, computations.get(rows.table_id, ""))


def _row_letter(row: Sequence[Any], detail: str, computation: str) -> DeadLetter:
    payload = msgspec.json.encode(row, enc_hook=str)
    return DeadLetter(reason="refused", detail=detail, payload=payload, stream="", computation=computation)


def _take(rows: RowsT, keep: list[int]) -> RowsT:
    columns = [
        column.take(pa.array(keep)) if isinstance(column, pa.Array) else [column[place] for place in keep]
        for column in rows.columns
    ]
    return replace(rows, columns=columns, count=len(keep))
