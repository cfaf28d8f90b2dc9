"""The partitions of result tables with a retention: made before the commit that needs them, dropped as a whole.

A commit cannot make a partition: workers create no tables, and a commit must not wait for readers. So the committer
compares the times of a turn with the partitions that it knows, and calls `mill.make_partitions` before BEGIN for the
rest. Another process may drop a partition in between: the commit then finds none for its row, and is sent again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import psycopg

from millpy.model.retention import RETENTION_MIN
from millpy.model.time import INSTANT_MIN, microseconds
from millpy.store.postgres.arrays import Bigints
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement

Times = npt.NDArray[np.int64]
HOUR_US = microseconds(RETENTION_MIN)
"""Bounds of partitions are whole hours, so rows of one hour go into one partition."""
MISSING = "23514"
NAME = re.compile(r"result_(\d+)_\w+")
HISTORY = "_history"


def hours_of(times: Times) -> Times:
    """Return the hours that some times are in, each once, as their starts."""
    if len(times) == 0:
        return times
    if times.min() // HOUR_US == times.max() // HOUR_US:
        times = times[:1]
    found: Times = np.maximum(np.unique(times // HOUR_US) * HOUR_US, INSTANT_MIN)
    return found


class KnownPartitions:
    """The ranges of a table's partitions, as this process knows them."""

    def __init__(self) -> None:
        self._los: Times = np.empty(0, np.int64)
        self._his: Times = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._los)

    def learn(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Replace what is known by these ranges, in order."""
        self._los, self._his = (np.array([pair[place] for pair in ranges], np.int64) for place in (0, 1))

    def missing(self, times: Times) -> Times:
        """Return the times that no known partition holds."""
        if len(self._los) == 0:
            return times
        places = np.searchsorted(self._los, times, "right") - 1
        found: Times = times[(places < 0) | (times >= self._his[places])]
        return found


async def make_partitions(connection: Connection, table_id: int, known: KnownPartitions, hours: Times) -> None:
    """Make the partitions that rows of these hours need, unless they are known.

    Raises:
        psycopg.Error: the table is not as it was deployed, or the database is not available.
    """
    missing = known.missing(hours)
    while len(missing):
        parameters: dict[str, Any] = {"table_id": table_id, "instants": Bigints(missing)}
        known.learn(await all_rows(connection, statement("make_partitions"), parameters))
        left = known.missing(hours)
        if len(left) == len(missing):
            return  # the table was dropped, which the fence of the commit finds out
        missing = left


def is_missing(error: psycopg.Error) -> bool:
    """Tell whether a row has no partition. A violated constraint has a name."""
    return error.sqlstate == MISSING and not error.diag.constraint_name


def table_of(error: psycopg.Error) -> int | None:
    """Return the number of the result table that the partition in an error belongs to; None for other relations."""
    found = NAME.fullmatch(error.diag.table_name or "") if error.diag.schema_name == "mill" else None
    return None if found is None else int(found[1])


def is_key(error: psycopg.Error, *, history: bool) -> bool:
    """Tell whether the primary key of a partition is violated: one of a history, or of a result table."""
    name = error.diag.table_name or ""
    return (
        table_of(error) is not None
        and error.diag.constraint_name == f"{name}_pkey"
        and (name.endswith(HISTORY) == history)
    )
