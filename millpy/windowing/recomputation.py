"""Recompute a finished window from archived records, where its row does not tell its accumulators.

Two processes share the work. A command reads the archive, and adds the records of a window to accumulators
(`RecomputedWindow`); these go with the request to add a late record. The owner of the window then restores them
(`restored`), adds the late record, and writes the row in the commit that settles the request. Both check that the
accumulators give the row as it is: an archive that lacks a record, or has one too many, is found out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec

from millpy.model.dead_letter import error_text
from millpy.model.delta import encode_value
from millpy.model.step_progress import is_user_error
from millpy.model.time import Instant, instant
from millpy.windowing.accumulator import AccumulatorSet
from millpy.windowing.rebuilding import NotRebuiltError

TOLERANCE = 1e-9
"""Relative and absolute, as in an audit: sums of floats depend on the order in which records were bundled."""
Place = tuple[str, int, int]
"""Partition, bundle and place in the bundle of an archived record."""


@dataclass(slots=True)
class RecomputedWindow:
    """The accumulators of one window, record by record.

    Attributes:
        values: the accumulators.
        left_out: (event time, digest of the payload) -> number of records that are not in the window: they came too
            late, and nobody has added them.
        added: the same of late records that were added later.
        times: the event times in both.
        unclear: number of records of which nothing tells whether they came too late.
    """

    accumulators: AccumulatorSet
    values: list[Any] = field(init=False)
    left_out: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    added: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    unclear: int = 0
    times: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin with no record."""
        self.values = self.accumulators.empty()

    def expect(self, at: int, digest: bytes, records: int, *, added: bool) -> None:
        """Note records that the window did not take when they came, but got later if `added`."""
        self.times.add(at)
        counts = self.added if added else self.left_out
        counts[at, digest] += records

    def takes(self, at: Instant, digest: bytes, *, may_be_late: bool) -> bool:
        """Tell whether an archived record belongs to the window; records that are equal are interchangeable.

        Args:
            at: its event time.
            digest: digest of its payload; only needed if `at` is among the `times`.
            may_be_late: whether its source had passed the end of the window, and late records may be missing.
        """
        if self.left_out[at, digest] > 0:
            self.left_out[at, digest] -= 1
            return False
        if self.added[at, digest] > 0:
            self.added[at, digest] -= 1
        elif may_be_late:
            self.unclear += 1
        return True

    def add(self, record: Any, at: Instant) -> None:
        """Add a record of the window."""
        self.accumulators.add(self.values, record, at)


def stored_form(accumulators: AccumulatorSet, values: Sequence[Any]) -> bytes:
    """Return accumulators as JSON, as an open window is stored."""
    parts = (encode_value(value) for value in accumulators.to_stored(values))
    return b"[" + b",".join(parts) + b"]"


def restored(accumulators: AccumulatorSet, names: Sequence[str], row: Mapping[str, Any], stored: bytes) -> list[Any]:
    """Return the accumulators that a command has recomputed.

    Args:
        accumulators: the operations of the aggregates.
        names: the result columns.
        row: the row of the window, as `read_row` reads it.
        stored: the accumulators as JSON.

    Raises:
        NotRebuiltError: they do not give the row, or cannot be read.
    """
    try:
        found: list[Any] = accumulators.from_stored(msgspec.json.decode(stored))
        difference = difference_of(names, accumulators.results(found), row)
    except BaseException as error:  # user code decodes combiners, and anybody with the rights may have written it
        if not is_user_error(error):
            raise
        raise NotRebuiltError(f"what an archive says of its window cannot be read: {error_text(error)}") from None
    if difference:
        raise NotRebuiltError(f"the archive does not give the row as it is: {difference}", hint=NOT_GIVEN_HINT)
    return found


NOT_GIVEN_HINT = "its records are not all there, or somebody corrected it: use millpy.correct() or `millpy repair`"


def difference_of(names: Sequence[str], results: Sequence[Any], row: Mapping[str, Any]) -> str:
    """Say in which column results differ from a row; empty if in none.

    A column that is NULL in the row, and whose aggregate counts in the results, differs as well: the window was over
    before the aggregate was added.
    """
    for name, result in zip(names, results, strict=True):
        if not _equal(_plain(result), _plain(row[name])):
            return f"{name} is {_text(row[name])}, and {_text(result)} by the archive"
    return ""


def _text(value: Any) -> str:
    return str(_plain(value))[:100]


def _plain(value: Any) -> Any:
    """Return a value in a form in which equal values are equal: times as µs, nested numbers as floats."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int | float | Decimal):
        return value
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {name: _nested(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_nested(part) for part in value]
    return json.loads(msgspec.json.encode(value))


def _nested(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else _plain(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        return _near(one, other)
    return bool(one == other)


def _near(one: Any, other: Any) -> bool:
    """Compare numbers of which one is a float."""
    try:
        left, right = float(one), float(other)
    except (TypeError, ValueError):
        return False
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right)
    return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
