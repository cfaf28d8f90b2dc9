"""Groups of a bundle's rows by (window, key), and reductions of columns by group, with numpy.

Rows are sorted once by group, with a radix sort: group numbers fit in 16 bits for almost any legal bundle. Every
reduction is then one `reduceat`. An *entry* is a row in one of its windows; a row in several windows has several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.field_types import units_of
from millpy.model.record import Instants, Records, column_of, retractions_of

Integers = npt.NDArray[np.integer[Any]]
Column = npt.NDArray[Any]

_DENSE_FACTOR = 8
"""Factor by which windows × keys may exceed the entries before groups are found by sorting instead of a dense table."""


@dataclass(slots=True)
class GroupedColumn:
    """The values of a column that are not null, by group.

    Attributes:
        values: the values, group after group, in order of arrival within each; times as µs.
        groups: the groups that have values, ascending.
        offsets: the position in `values` where each of those groups begins.
        rows: the row of each value.
    """

    values: Column
    groups: Integers
    offsets: Integers
    rows: Integers

    def ends(self) -> Integers:
        """Return the position in `values` where each group ends."""
        return np.append(self.offsets[1:], len(self.values))[: len(self.groups)]


class Groups:
    """The groups of a bundle's entries. No group is empty.

    Args:
        starts, ends, codes: by group: start and end of its window, and its key code.
        group_of: by entry: its group.
        counts: by group: its number of entries.
        records: the rows.
        rows: by entry: its row; None if entry n is row n.
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
        self._columns: dict[str, GroupedColumn] = {}
        self._by_time: dict[str, GroupedColumn] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def counts_where(self, mask: npt.NDArray[np.bool_]) -> Integers:
        """Count the entries of each group for which a mask is true; it has one value per entry."""
        return np.bincount(self._group_of[mask], minlength=len(self))

    def reduced(self, reduction: np.ufunc, values: Column) -> Column:
        """Reduce the values of the entries of each group to one; they are given by row."""
        result: Column = reduction.reduceat(values[self._rows], np.cumsum(self.counts) - self.counts)
        return result

    def balances(self, field: str | None) -> Integers:
        """Count the entries of each group whose field is not null, retractions as -1; all entries without a field."""
        if field is None:
            return np.add.reduceat(self.signs(self._rows), np.cumsum(self.counts) - self.counts)
        found = self.by_group(field)
        return self.reduce(np.add, found, self.signs(found.rows))

    def signs(self, rows: Integers) -> Integers:
        """Return 1 for a row that is a value, and -1 for one that is a retraction."""
        return np.where(retractions_of(self.records)[rows], -1, 1)

    def valid_counts(self, field: str) -> Integers:
        """Count the entries of each group whose field is not null."""
        if not column_of(self.records.batch(), field).null_count:
            return self.counts
        found = self.by_group(field)
        counts = np.zeros(len(self), np.int64)
        counts[found.groups] = found.ends() - found.offsets
        return counts

    def sums(self, field: str) -> Column:
        """Sum the values of each group: as float64, int64, or Python ints if 64 bits may overflow; 0 without values."""
        found = self.by_group(field)
        return self.reduce(np.add, found, unbounded(found.values))

    def smallest(self, field: str) -> Column:
        """Return the smallest value of each group; undefined for a group without values."""
        found = self.by_group(field)
        return self.reduce(np.minimum, found, found.values)

    def largest(self, field: str) -> Column:
        """Return the largest value of each group; undefined for a group without values."""
        found = self.by_group(field)
        return self.reduce(np.maximum, found, found.values)

    def reduce(self, reduction: np.ufunc, found: GroupedColumn, values: Column) -> Column:
        """Reduce `values`, which are parallel to `found.values`, to one result per group; 0 for one without values."""
        result = np.zeros(len(self), values.dtype)
        if len(values):
            with np.errstate(over="ignore", invalid="ignore"):  # infinity is a result like any other
                result[found.groups] = reduction.reduceat(values, found.offsets)
        return result

    def by_group(self, field: str) -> GroupedColumn:
        """Return a field's values by group, in order of arrival. Results are cached."""
        known = self._columns.get(field)
        if known is not None:
            return known
        column = column_of(self.records.batch(), field)
        if self.records.type.field_type(field) is Decimal:
            values = np.empty(len(column), object)
            values[:] = [0 if text is None else units_of(text) for text in column.to_pylist()]
        else:
            values = _numpy(column)
        rows = self._rows
        if not column.null_count:
            offsets = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
            found = GroupedColumn(values[rows], np.arange(len(self)), offsets, rows)
        else:
            there = pc.is_valid(column).to_numpy(zero_copy_only=False)[rows]
            rows, by_entry = rows[there], self._group_of[self._order[there]]
            offsets = np.flatnonzero(np.diff(by_entry, prepend=-1))
            found = GroupedColumn(values[rows], by_entry[offsets], offsets, rows)
        self._columns[field] = found
        return found

    def by_time(self, field: str) -> GroupedColumn:
        """Return a field's values by group, in order of event time, then of arrival. Results are cached."""
        known = self._by_time.get(field)
        if known is None:
            found = self.by_group(field)
            order = self.order_within(found, self.records.event_times[found.rows])
            known = GroupedColumn(found.values[order], found.groups, found.offsets, found.rows[order])
            self._by_time[field] = known
        return known

    def order_within(self, found: GroupedColumn, by: Column) -> Integers:
        """Return the order that sorts the values of each group by a column, stably; groups stay in place."""
        numbers = np.repeat(np.arange(len(found.groups)), found.ends() - found.offsets)
        return np.lexsort((by, numbers))

    def last_times(self) -> Instants:
        """Return the last event time of each group."""
        found: Instants = np.maximum.reduceat(
            self.records.event_times[self._rows], np.cumsum(self.counts) - self.counts
        )
        return found

    def rows_by_group(self) -> list[list[int]]:
        """Return the rows of each group, in order of arrival."""
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
    """Group entries by aligned window, then key; the groups of a window are neighbors.

    Args:
        starts: the window start of each entry.
        size_us: the window size.
        every_us: the time from one window start to the next.
        codes: the key code of each entry.
        keys: the number of key codes.
        records: the rows.
        rows: the row of each entry; None if entry n is row n.
    """
    lo = int(starts.min())
    windows = (starts - lo) // every_us
    span = int(windows.max()) + 1
    if span * keys >= 2**62:  # windows are centuries apart: number only those in use
        used_windows, windows = np.unique(windows, return_inverse=True)
        span = len(used_windows)
    else:
        used_windows = None
    used, group_of, counts = _numbered(windows, span, codes, keys)
    group_windows = used // keys if used_windows is None else used_windows[used // keys]
    group_starts: Instants = group_windows * every_us + lo
    return Groups(group_starts, group_starts + size_us, used % keys, group_of, counts, records, rows)


def unequal_groups(
    starts: Instants,
    ends_of: Callable[[Instants], Instants],
    codes: Integers,
    keys: int,
    records: Records,
    rows: Integers | None,
) -> Groups:
    """Group entries as `aligned_groups`, by windows of unequal length.

    Args:
        starts: the window start of each entry.
        ends_of: the ends of the windows with given starts.
        codes: the key code of each entry.
        keys: the number of key codes.
        records: the rows.
        rows: the row of each entry; None if entry n is row n.
    """
    distinct = np.unique(starts)
    used, group_of, counts = _numbered(np.searchsorted(distinct, starts), len(distinct), codes, keys)
    group_windows = used // keys
    group_starts, group_ends = distinct[group_windows], ends_of(distinct)[group_windows]
    return Groups(group_starts, group_ends, used % keys, group_of, counts, records, rows)


def _numbered(
    windows: Integers, span: int, codes: Integers, keys: int
) -> tuple[npt.NDArray[np.int64], Integers, Integers]:
    """Give numbers to the groups, by window, then key.

    Returns:
        (per group: window * keys + key code; per entry: its group; per group: its number of entries).
    """
    combined = windows * keys + codes
    if span * keys > _DENSE_FACTOR * len(windows) + 1024:
        return np.unique(combined, return_inverse=True, return_counts=True)
    counts = np.bincount(combined, minlength=span * keys)
    used = np.flatnonzero(counts)
    number = np.empty(span * keys, np.int64)
    number[used] = np.arange(len(used))
    return used, number[combined], counts[used]


def stable_order(numbers: Integers) -> Integers:
    """Return the order that sorts non-negative numbers, stably; below 2**16 by a radix sort, ten times as fast."""
    small = len(numbers) and int(numbers.max()) < 2**16
    return np.argsort(numbers.astype(np.uint16) if small else numbers, kind="stable")


def unbounded(values: Column) -> Column:
    """Return values so that their sum cannot overflow: integers as Python ints if it might exceed 64 bits."""
    if values.dtype.kind != "i" or not len(values):
        return values
    widest = max(abs(int(values.min())), abs(int(values.max())))
    return values.astype(object) if widest * len(values) >= 2**63 else values


def _numpy(column: pa.Array) -> Column:
    """Return a column as numpy: times as int64 µs, dates as days, wide integers as Python ints.

    Other values become Python objects.
    Nulls are undefined. -0.0 becomes 0.0: the two are equal, so that which one an aggregate keeps would depend on the
    order of rows.
    """
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    elif pa.types.is_date(column.type):
        column = column.cast(pa.int32()).cast(pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            column = pc.fill_null(column, 0)
        values: Column = column.to_numpy(zero_copy_only=False)
        return values + 0.0 if values.dtype.kind == "f" else values
    values = np.empty(len(column), object)
    values[:] = column.to_pylist()
    if pa.types.is_decimal(column.type):  # a `WideInt`; decimals would round sums, and do not add to floats
        values[:] = [None if value is None else int(value) for value in values]
    return values
