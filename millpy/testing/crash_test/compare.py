"""Compares the tables of two runs, without I/O.

A table with keys has one row a key; a table without is a multiset of rows. Floats agree to 1e-9: sums depend on order.

    lost      the reference has the row, the run does not
    doubled   the run has a row more often than the reference
    changed   the same key or event time with other values, or a row that the reference does not have
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Row = tuple[Any, ...]
AGREE = 1e-9
TEXTS_MAX = 2


class RowChange(StrEnum):
    """What happened to a row of the reference."""

    LOST = "lost"
    DOUBLED = "doubled"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """The comparable part of a table: key columns, then the other columns."""

    name: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    rows: Sequence[Row]

    @property
    def columns(self) -> tuple[str, ...]:
        """Return all columns, in the order of the rows."""
        return (*self.keys, *self.values)

    def drop_columns(self, columns: Collection[str]) -> ComparedTable:
        """Return the table without some of its value columns."""
        if not columns:
            return self
        kept = [place for place, name in enumerate(self.columns) if name not in columns]
        rows = [tuple(row[place] for place in kept) for row in self.rows]
        return ComparedTable(self.name, self.keys, tuple(name for name in self.values if name not in columns), rows)


@dataclass(frozen=True, slots=True)
class Results:
    """The result tables and the counts of a run. `unbalanced` names streams whose accounting does not add up."""

    tables: dict[str, ComparedTable]
    unbalanced: tuple[str, ...] = ()
    injected: int = 0
    duplicates: int = 0
    dead_lettered: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """One row that differs.

    Attributes:
        identity: the key, or for rows without one the texts that identify them.
        expected, found: values by column; None where there is no row.
        columns: the columns that differ.
    """

    table: str
    change: RowChange
    identity: dict[str, Any]
    expected: dict[str, Any] | None
    found: dict[str, Any] | None
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class UnsteadyParts:
    """How two fault-free runs of the same input differ in a table.

    Attributes:
        columns: columns whose values differ.
        rows: whether a row of one run is missing in the other, whatever its columns.
    """

    columns: frozenset[str] = frozenset()
    rows: bool = False
    differences: list[Difference] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.columns) or self.rows


def differences(reference: ComparedTable, run: ComparedTable) -> list[Difference]:
    """Return the rows that the run has lost, doubled or changed."""
    if reference.keys:
        return list(_by_key(reference, run))
    return list(_as_multiset(reference, run))


def unsteady(one: ComparedTable, other: ComparedTable) -> UnsteadyParts:
    """Return how two fault-free runs differ: in some columns, or in which rows there are."""
    found = differences(one, other)
    if not found:
        return UnsteadyParts()
    if one.keys:
        columns = frozenset(name for difference in found if difference.found and difference.expected
                            for name in difference.columns)  # fmt: skip
    else:
        columns = frozenset(
            name for place, name in enumerate(one.columns) if not _same_values(one.rows, other.rows, place)
        )
        if len(one.rows) != len(other.rows) or len(columns) == len(one.columns):
            return UnsteadyParts(frozenset(), True, found)
    rows = bool(differences(one.drop_columns(columns), other.drop_columns(columns)))
    return UnsteadyParts(columns, rows, found)


def agree(one: Any, other: Any) -> bool:
    """Tell whether two values are equal, floats to 1e-9."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=AGREE, abs_tol=AGREE) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _by_key(reference: ComparedTable, run: ComparedTable) -> Iterator[Difference]:
    width, name = len(reference.keys), reference.name
    expected = {row[:width]: row[width:] for row in reference.rows}
    found = {row[:width]: row[width:] for row in run.rows}
    for key in sorted(expected.keys() | found.keys(), key=repr):
        identity = dict(zip(reference.keys, key, strict=True))
        was = dict(zip(reference.values, expected[key], strict=True)) if key in expected else None
        now = dict(zip(run.values, found[key], strict=True)) if key in found else None
        if was is not None and now is not None:
            columns = tuple(column for column in was if not agree(was[column], now[column]))
            if columns:
                yield Difference(name, RowChange.CHANGED, identity, was, now, columns)
        else:
            yield Difference(name, RowChange.LOST if now is None else RowChange.CHANGED, identity, was, now)


def _as_multiset(reference: ComparedTable, run: ComparedTable) -> Iterator[Difference]:
    missing, extra = Counter(reference.rows), Counter(run.rows)
    known = set(reference.rows)
    missing, extra = missing - extra, extra - missing
    _pair_off_nearly_same(missing, extra)
    columns = reference.columns
    time_column = columns.index("event_time") if "event_time" in columns else 0
    waiting: dict[Any, list[Row]] = defaultdict(list)
    for row in sorted(missing.elements(), key=repr):
        waiting[row[time_column]].append(row)
    for row in sorted(extra.elements(), key=repr):
        now = dict(zip(columns, row, strict=True))
        if row in known:
            yield Difference(reference.name, RowChange.DOUBLED, _label(now, columns[time_column]), now, now)
        elif waiting[row[time_column]]:
            was = dict(zip(columns, _take_nearest(waiting[row[time_column]], row), strict=True))
            differing = tuple(column for column in columns if not agree(was[column], now[column]))
            identity = _label(now, columns[time_column], differing)
            yield Difference(reference.name, RowChange.CHANGED, identity, was, now, differing)
        else:
            yield Difference(reference.name, RowChange.CHANGED, _label(now, columns[time_column]), None, now)
    for left in waiting.values():
        for row in left:
            was = dict(zip(columns, row, strict=True))
            yield Difference(reference.name, RowChange.LOST, _label(was, columns[time_column]), was, None)


def _label(row: dict[str, Any], time: str, differing: Collection[str] = ()) -> dict[str, Any]:
    """Return what identifies a row without a key in a report: its time, and its first texts."""
    texts = [name for name, value in row.items() if isinstance(value, str) and name != time and name not in differing]
    return {time: row[time]} | {name: row[name] for name in texts[:TEXTS_MAX]}


def _pair_off_nearly_same(missing: Counter[Row], extra: Counter[Row]) -> None:
    """Remove pairs of rows that differ only by the rounding of floats."""
    groups: dict[Row, list[Row]] = defaultdict(list)
    for row in missing.elements():
        groups[_rough(row)].append(row)
    for row in list(extra.elements()):
        candidates = groups.get(_rough(row), [])
        same = next((c for c in candidates if all(map(agree, c, row))), None)
        if same is not None:
            candidates.remove(same)
            missing[same] -= 1
            extra[row] -= 1


def _rough(row: Row) -> Row:
    return tuple(None if isinstance(value, float) else value for value in row)


def _take_nearest(rows: list[Row], row: Row) -> Row:
    nearest = max(rows, key=lambda other: sum(map(agree, other, row)))
    rows.remove(nearest)
    return nearest


def _same_values(one: Sequence[Row], other: Sequence[Row], place: int) -> bool:
    """Tell whether a column has the same values in both tables, in any order."""
    first = sorted((row[place] for row in one), key=_order)
    second = sorted((row[place] for row in other), key=_order)
    return len(first) == len(second) and all(map(agree, first, second))


def _order(value: Any) -> tuple[str, Any]:
    return (type(value).__name__, value if isinstance(value, int | float | str | bytes) else repr(value))
