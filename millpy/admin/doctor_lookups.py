"""Judge the lookup tables of live workers."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts, Row
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

NEAR_BOUND = 0.8
"""Part of a bound from which a table is near it."""
CHECK = "lookup"


def judge_lookups(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each lookup table of a graph."""
    for row in facts.lookups:
        table = f"{row['graph']}: table {row['table_name']}"
        needed_by = row["computations"]
        if row["waiting"]:
            unread = f"{row['waiting']} of {row['workers']} workers"
            yield Finding(
                Severity.ERROR,
                CHECK,
                f"{table} was not read yet by {unread}: {row['error'] or 'no answer'}",
                f"input of {needed_by} waits there",
                "correct the cause: the worker's log has a hint, and it tries again by itself",
            )
        elif row["error"]:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{table} cannot be read since {row['failing_s']:.0f} s: {row['error']}",
                f"{needed_by} looks up in the rows of {row['loaded_at']:%Y-%m-%d %H:%M:%S}",
                "correct the cause: the worker's log has a hint, and it tries again by itself",
            )
        elif row["misfits"]:
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{table}: {row['misfits']} rows do not fit their class: {row['misfit']}",
                "they are treated as missing",
                "correct the rows, or the class in the graph",
            )
        else:
            yield _of_size(table, row, limits)


def _of_size(table: str, row: Row, limits: Limits) -> Finding:
    found = f"{table} has {row['rows']:,} rows, {row['bytes'] / 1e6:.1f} MB"
    for used, most, setting in (
        (row["rows"], limits.lookup_rows_max, "MILLPY_LOOKUP_ROWS_MAX"),
        (row["bytes"], limits.lookup_bytes_max, "MILLPY_LOOKUP_BYTES_MAX"),
    ):
        if used >= NEAR_BOUND * most:
            return Finding(
                Severity.WARNING,
                CHECK,
                f"{found}; the bound is {most:,}",
                "beyond it, no change of the table is seen any more",
                f"look up in a view with the rows and columns that are needed, or raise {setting}",
            )
    return Finding(Severity.OK, CHECK, found)
