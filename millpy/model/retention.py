"""How long a result table keeps its rows, and how long the partitions are in which it drops them.

A table with a retention is partitioned by time: the end of a window, or the event time of a record. A partition is
dropped as a whole, so rows stay for up to one partition longer than the retention says.
"""

from __future__ import annotations

from datetime import timedelta

from millpy.errors import GraphError
from millpy.model.time import days, hours, microseconds

RETENTION_MIN = hours(1)
RETENTION_MAX = days(36_525)
LENGTHS = (hours(1), hours(6), days(1), days(7), days(28), days(364), days(3_640))
"""Lengths of partitions: whole hours, so that their bounds are, too."""
PARTITIONS_WANTED = 32
"""The most partitions that the rows of a retention usually need. A query that names no time locks and plans all."""


def partition_length(retention: timedelta) -> timedelta:
    """Return the shortest length of which PARTITIONS_WANTED partitions hold the rows of a retention."""
    return next((length for length in LENGTHS if length * PARTITIONS_WANTED >= retention), LENGTHS[-1])


def checked_retention(retention: object) -> timedelta | None:
    """Return the retention of a result table; None for a table that keeps its rows.

    Raises:
        GraphError: it is no duration, or not between RETENTION_MIN and RETENTION_MAX.
    """
    if retention is None:
        return None
    hint = "give a duration such as retention=days(90), or omit it to keep all rows"
    if not isinstance(retention, timedelta):
        raise GraphError(f"retention={retention!r} is not a duration", hint=hint)
    if not RETENTION_MIN <= retention <= RETENTION_MAX:
        raise GraphError(f"retention={retention!r} is not between an hour and a hundred years", hint=hint)
    return retention


def partition_us(retention_us: int) -> int:
    """Return the length of the partitions for a retention; both in µs."""
    return microseconds(partition_length(timedelta(microseconds=retention_us)))
