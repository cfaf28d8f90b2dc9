"""Grouping: the rows of a bundle by (window, key), and reductions of its columns by group, with numpy.

Groups are numbered by window, then key, so those of one window are contiguous. Rows are sorted once by group (a radix
sort: group numbers fit in 16 bits for any legal bundle but the strangest); every reduction is then one `reduceat`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.record import Instants, column_of

Integers = npt.NDArray[np.integer[Any]]
Column = npt.NDArray[Any]

_DENSE_FACTOR = 8
"""Windows × keys may exceed the rows by so much before the table of groups is made by sorting instead."""


class Groups:
    """The groups of a bundle's rows.

    Attributes:
        starts: window start per group, ascending.
        codes: key code per group.
        counts: rows per group; never 0.
    """

    def __init__(self, starts: Instants, size_us: int, codes: Integers, keys: int, batch: Callable[[], pa.RecordBatch]):
        self._batch = batch
        lo = int(starts.min())
        windows = (starts - lo) // size_us
        span = int(windows.max()) + 1
        combined = windows * keys + codes
        if span * keys <= _DENSE_FACTOR * len(starts) + 1024:
            counts = np.bincount(combined, minlength=span * keys)
            used = np.flatnonzero(counts)
            number = np.empty(span * keys, np.int64)
            number[used] = np.arange(len(used))
            group_of = number[combined]
            self.counts = counts[used]
        else:
            used, group_of, self.counts = np.unique(combined, return_inverse=True, return_counts=True)
        self.starts = used // keys * size_us + lo
        self.codes = used % keys
        self._group_of = group_of
        small = group_of.astype(np.uint16) if len(used) <= 2**16 else group_of
        self._order = np.argsort(small, kind="stable")
        self._columns: dict[str, tuple[Column, Integers, Integers]] = {}

    def __len__(self) -> int:
        return len(self.starts)

    def counts_where(self, mask: npt.NDArray[np.bool_]) -> Integers:
        """Rows per group for which the mask is true."""
        return np.bincount(self._group_of[mask], minlength=len(self))

    def valid_counts(self, field: str) -> Integers:
        """Rows per group whose field is not null."""
        column = column_of(self._batch(), field)
        if not column.null_count:
            return self.counts
        return self.counts_where(pc.is_valid(column).to_numpy(zero_copy_only=False))

    def sums(self, field: str) -> Column:
        """Sum per group, nulls left out: float64, int64, or Python ints where 64 bits might not do; 0 for none."""
        values, groups, offsets = self._sorted(field)
        if values.dtype.kind == "b":
            values = values.astype(np.int64)
        elif values.dtype.kind == "i" and len(values):
            widest = max(abs(int(values.min())), abs(int(values.max())))
            if widest * len(values) >= 2**63:
                values = values.astype(object)
        return self._spread(np.add, values, groups, offsets)

    def smallest(self, field: str) -> Column:
        """Smallest value per group that is not null; undefined for a group without."""
        return self._spread(np.minimum, *self._sorted(field))

    def largest(self, field: str) -> Column:
        """Largest value per group that is not null; undefined for a group without."""
        return self._spread(np.maximum, *self._sorted(field))

    def _spread(self, reduction: np.ufunc, values: Column, groups: Integers, offsets: Integers) -> Column:
        """Reduce, and put the results where their groups are."""
        found = np.zeros(len(self), values.dtype)
        if len(values):
            with np.errstate(over="ignore", invalid="ignore"):  # infinity is a result like any other
                found[groups] = reduction.reduceat(values, offsets)
        return found

    def _sorted(self, field: str) -> tuple[Column, Integers, Integers]:
        """(values without nulls by group, the groups that have any, where each begins)."""
        known = self._columns.get(field)
        if known is not None:
            return known
        column = column_of(self._batch(), field)
        order = self._order
        if column.null_count:
            order = order[pc.is_valid(column).to_numpy(zero_copy_only=False)[order]]
        values = _numpy(column)[order]
        if not column.null_count:
            groups = np.arange(len(self))
            offsets = np.concatenate(([0], np.cumsum(self.counts)[:-1]))
        else:
            by_row = self._group_of[order]
            offsets = np.flatnonzero(np.diff(by_row, prepend=-1))
            groups = by_row[offsets]
        found = self._columns[field] = (values, groups, offsets)
        return found


def _numpy(column: pa.Array) -> Column:
    """A column as numpy, times as int64 µs, text as Python objects; nulls as anything."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        if column.null_count:
            column = pc.fill_null(column, 0)
        values: Column = column.to_numpy(zero_copy_only=False)
        return values
    return np.array(column.to_pylist(), dtype=object)
