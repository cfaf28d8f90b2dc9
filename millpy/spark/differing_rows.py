"""The rows of a table of windows that differ from a history, whole: what a repair writes or deletes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.errors import UsageError
from millpy.model.deployment import TableSpec
from millpy.spark.audit import EXPECTED, KIND, AuditScope, compare
from millpy.spark.tables import as_text

ROWS_MAX = 50_000
"""How many rows one repair changes: they are in the driver's memory, and in one statement."""


def differing_rows(
    spark: SparkSession, expected: DataFrame, spec: TableSpec, scope: AuditScope
) -> list[tuple[str, Sequence[Any]]]:
    """Return (kind, columns) of each row that differs: keys, start and end of the window, and the expected values.

    Values are text that PostgreSQL reads, times whole µs. Rows that only the database has lack the values.

    Raises:
        UsageError: more than `ROWS_MAX` rows differ.
    """
    wrong = compare(spark, expected, spec, scope).where(F.col(f"`{KIND}`") != "same").limit(ROWS_MAX + 1).collect()
    if len(wrong) > ROWS_MAX:
        raise UsageError(
            f"more than {ROWS_MAX:,} rows of {spec.name} differ",
            hint="repair shorter time ranges, with --from and --to; or is it another history?",
        )
    names = [*(key.name for key in spec.keys), "window_start", "window_end"]
    found: list[tuple[str, Sequence[Any]]] = []
    for row in wrong:
        values = row[EXPECTED] or {}
        given = [row[name] for name in names] + [values[column.name] for column in spec.values if values]
        found.append((row[KIND], [None if value is None else as_text(value) for value in given]))
    return found
