"""Grouping: the rows of a bundle by (window, key), and reductions of its columns by group, with numpy.

Rows are sorted once by group (a radix sort: group numbers fit in 16 bits for any legal bundle but the strangest);
every reduction is then one `reduceat`. A row that is in several windows is an entry of several groups: `entries` below
are rows, or (row, window) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.record import Instants, Records, column_of

Integers = npt.NDArray[np.integer[Any]]
Column = npt.NDArray[Any]

_DENSE_FACTOR = 8
"""Windows × keys may exceed the entries by so much before the table of groups is made by sorting instead."""


@dataclass(slots=True)
class Sorted:
    """A column's values that are not null, by group.

    Attributes:
        values: group after group, in order of arrival within each; times as µs.
        groups: the groups that have any, ascending.
        offsets: where each of them begins in `values`.
        rows: the row of each value.
    """

    values: Column
    groups: Integers
    offsets: Integers
    rows: Integers

    def ends(self) -> Integers:
        """Where each group ends in `values`."""
        return np.append(self.offsets[1:], len(self.values))[: len(self.groups)]


class Groups:
    """The groups of a bundle's entries.

    Args:
        starts, ends, codes: window and key code per group.
        group_of: group per entry.
        counts: entries per group; never 0.
        records: the rows.
        rows: the row of each entry; None when entry n is row n.
    """

    def __init__(
        self,
        starts: Instants,
        ends: Instants,
        codes: Integers,
        group_of: Integers,
        counts: Integers,
        records: Records,
        rows: Integers | None = None,
    ) -> None:
        self.starts = starts
        self.ends = ends
        self.codes = codes
        self.counts = counts
        self.records = records
        self._group_of = group_of
        self._order = stable_order(group_of)
        self._rows = self._order if rows is None else rows[self._order]
        self._columns: dict[str, Sorted] = {}
        self._by_time: dict[str, Sorted] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def counts_where(self, mask: npt.NDArray[np.bool_]) -> Integers:
        """Entries per group for which the mask (by entry) is true."""
        return np.bincount(self._group_of[mask], minlength=len(self))

    def valid_counts(self, field: str) -> Integers:
        """Entries per group whose field is not null."""
        if not column_of(self.records.batch(), field).null_count:
            return self.counts
        found = self.by_group(field)
        counts = np.zeros(len(self), np.int64)
        counts[found.groups] = found.ends() - found.offsets
        return counts

    def sums(self, field: str) -> Column:
        """Sum per group, nulls left out: float64, int64, or Python ints where 64 bits might not do; 0 for none."""
        found = self.by_group(field)
        return self.reduced(np.add, found, unbounded(found.values))

    def smallest(self, field: str) -> Column:
        """Smallest value per group that is not null; undefined for a group without."""
        found = self.by_group(field)
        return self.reduced(np.minimum, found, found.values)

    def largest(self, field: str) -> Column:
        """Largest value per group that is not null; undefined for a group without."""
        found = self.by_group(field)
        return self.reduced(np.maximum, found, found.values)

    def reduced(self, reduction: np.ufunc, found: Sorted, values: Column) -> Column:
        """Reduce values (in the order of `found`), and put the results where their groups are."""
        result = np.zeros(len(self), values.dtype)
        if len(values):
            with np.errstate(over="ignore", invalid="ignore"):  # infinity is a result like any other
                result[found.groups] = reduction.reduceat(values, found.offsets)
        return result

    def by_group(self, field: str) -> Sorted:
        """A field's values by group, in order of arrival."""
        known = self._columns.get(field)
        if known is not None:
            return known
        column = column_of(self.records.batch(), field)
        rows = self._rows
        if not column.null_count:
            offsets = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
            found = Sorted(_numpy(column)[rows], np.arange(len(self)), offsets, rows)
        else:
            there = pc.is_valid(column).to_numpy(zero_copy_only=False)[rows]
            rows, by_entry = rows[there], self._group_of[self._order[there]]
            offsets = np.flatnonzero(np.diff(by_entry, prepend=-1))
            found = Sorted(_numpy(column)[rows], by_entry[offsets], offsets, rows)
        self._columns[field] = found
        return found

    def by_time(self, field: str) -> Sorted:
        """A field's values by group, in order of event time; of equal times, in order of arrival."""
        known = self._by_time.get(field)
        if known is None:
            found = self.by_group(field)
            order = self.order_within(found, self.records.event_times[found.rows])
            known = Sorted(found.values[order], found.groups, found.offsets, found.rows[order])
            self._by_time[field] = known
        return known

    def order_within(self, found: Sorted, by: Column) -> Integers:
        """The order of `found`'s values that sorts each group by some column, stably."""
        numbers = np.repeat(np.arange(len(found.groups)), found.ends() - found.offsets)
        return np.lexsort((by, numbers))

    def rows_by_group(self) -> list[list[int]]:
        """The rows of each group, in order of arrival."""
        ends = np.cumsum(self.counts).tolist()
        rows = self._rows.tolist()
        return [rows[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]


def aligned_groups(
    starts: Instants,
    size_us: int,
    every_us: int,
    codes: Integers,
    keys: int,
    records: Records,
    rows: Integers | None,
) -> Groups:
    """Groups of entries by aligned window, then key; those of one window are contiguous.

    `starts` and `codes` are by entry; there are `keys` key codes; `records` and `rows` are as `Groups` takes them.
    """
    lo = int(starts.min())
    windows = (starts - lo) // every_us
    span = int(windows.max()) + 1
    if span * keys >= 2**62:  # windows centuries apart: they are numbered one after the other
        used_windows, windows = np.unique(windows, return_inverse=True)
        span = len(used_windows)
    else:
        used_windows = None
    combined = windows * keys + codes
    if span * keys <= _DENSE_FACTOR * len(starts) + 1024:
        counts = np.bincount(combined, minlength=span * keys)
        used = np.flatnonzero(counts)
        number = np.empty(span * keys, np.int64)
        number[used] = np.arange(len(used))
        group_of = number[combined]
        counts = counts[used]
    else:
        used, group_of, counts = np.unique(combined, return_inverse=True, return_counts=True)
    group_windows = used // keys if used_windows is None else used_windows[used // keys]
    group_starts = group_windows * every_us + lo
    return Groups(group_starts, group_starts + size_us, used % keys, group_of, counts, records, rows)


def stable_order(numbers: Integers) -> Integers:
    """The order that sorts numbers from 0 on; those of 16 bits by radix, ten times as fast."""
    small = len(numbers) and int(numbers.max()) < 2**16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def unbounded(values: Column) -> Column:
    """Whole numbers as Python has them where 64 bits might not do for a sum; other values as they are."""
    if values.dtype.kind != "i" or not len(values):
        return values
    widest = max(abs(int(values.min())), abs(int(values.max())))
    return values.astype(object) if widest * len(values) >= 2**63 else values


def _numpy(column: pa.Array) -> Column:
    """A column as numpy, times as int64 µs, what is no number as Python objects; nulls as anything.

    Zero has no sign: -0.0 and 0.0 are equal, and which of them an aggregate had would depend on order.
    """
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            column = pc.fill_null(column, 0)
        values: Column = column.to_numpy(zero_copy_only=False)
        return values + 0.0 if values.dtype.kind == "f" else values
    values = np.empty(len(column), object)
    values[:] = column.to_pylist()
    return values
