"""Rows: all records of an interval in one turn, grouped by key, each with the watermark that judges it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import numpy as np

from millpy.model.arrivals import joined_keys, judging_watermarks
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX, retractions_of
from millpy.model.stage import Work
from millpy.model.time import Instant


@dataclass(slots=True)
class RowColumns:
    """Columns over the rows of a turn, in order of arrival.

    Attributes:
        keys, hashes: the distinct keys and their hashes; a key's index is its code in this turn.
        order: row numbers by key; those of code c are `order[bounds[c]:bounds[c + 1]]`, in order of arrival.
        inputs: input index per row, or None when all rows have the index `input`.
        retracts: whether each row is a retraction, or None when none is.
    """

    keys: list[Key] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])
    objects: list[Any] = field(default_factory=list)
    times: list[Instant] = field(default_factory=list)
    watermarks: list[Instant] = field(default_factory=list)
    inputs: list[int] | None = None
    input: int = 0
    retracts: list[bool] | None = None

    def __len__(self) -> int:
        return len(self.objects)

    def rows_of(self, code: int) -> list[int]:
        """Return the row numbers of a key."""
        return self.order[self.bounds[code] : self.bounds[code + 1]]

    def by_key(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (code, row numbers) of every key."""
        order, lo = self.order, 0
        for code, hi in enumerate(islice(self.bounds, 1, None)):
            yield code, order[lo:hi]
            lo = hi

    def input_of(self, row: int) -> int:
        """Return the input index of a row."""
        return self.input if self.inputs is None else self.inputs[row]

    def is_retraction(self, row: int) -> bool:
        """Tell whether a row is a retraction."""
        return self.retracts is not None and self.retracts[row]


def gather(work: Work) -> RowColumns:
    """Join the bundles of a turn in order of arrival and group their rows by key."""
    arrived = [arrival for arrival in work.arrived if len(arrival.bundle)]
    if not arrived:
        return RowColumns()
    rows = RowColumns(input=arrived[0].bundle.input)
    codes, rows.keys, rows.hashes = joined_keys(arrived)
    if any(arrival.bundle.input != rows.input for arrival in arrived):
        rows.inputs = [arrival.bundle.input for arrival in arrived for _ in range(len(arrival.bundle))]
    if any(arrival.bundle.records.retracts is not None for arrival in arrived):
        rows.retracts = [mark for arrival in arrived for mark in retractions_of(arrival.bundle.records).tolist()]
    for arrival in arrived:
        records = arrival.bundle.records
        rows.objects.extend(records.objects())
        rows.times.extend(records.event_times.tolist())
        rows.watermarks.extend(judging_watermarks(arrival, work).tolist())
    if len(rows) <= SMALL_RECORDS_MAX:
        _group_few(rows, codes.tolist())
    else:
        rows.order = np.argsort(codes, kind="stable").tolist()
        rows.bounds = [0, *np.cumsum(np.bincount(codes, minlength=len(rows.keys))).tolist()]
    return rows


def _group_few(rows: RowColumns, codes: list[int]) -> None:
    rows.order = sorted(range(len(codes)), key=codes.__getitem__)
    counts = [0] * len(rows.keys)
    for code in codes:
        counts[code] += 1
    rows.bounds = [0, *accumulate(counts)]
