"""Ranges of a table's rows as partitions of Spark, for reads and streams alike."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from millpy.spark.options import DatabaseLocation
from millpy.spark.pieces import Bounds, plan, read
from millpy.spark.tables import RowCondition, SparkTable


@dataclass
class RowRange(InputPartition):
    """Consecutive pieces in the order of the primary key, and a condition beyond the reader's own."""

    bounds: Bounds
    condition: RowCondition | None = None


@dataclass(frozen=True)
class RowReader:
    """What a read needs in each process of Spark: where the rows are, and which of them it wants."""

    location: DatabaseLocation
    table: SparkTable
    schema: pa.Schema
    conditions: Sequence[RowCondition]
    partitions: int
    batch_rows: int

    def ranges(self, condition: RowCondition | None = None) -> list[RowRange]:
        """Return ranges of about equal size, from a sample."""
        planned = plan(
            self.location.open(),
            self.table,
            self.schema.names,
            self._all(condition),
            partitions=self.partitions,
            batch_rows=self.batch_rows,
        )
        return [RowRange(bounds, condition) for bounds in planned]

    def read(self, rows: RowRange) -> Iterator[pa.RecordBatch]:
        """Yield one range, piece by piece."""
        _freeze()
        url, conditions = self.location.open(), self._all(rows.condition)
        yield from read(url, self.table, self.schema, conditions, rows.bounds, batch_rows=self.batch_rows)

    def _all(self, condition: RowCondition | None) -> list[RowCondition]:
        return [*self.conditions, *([] if condition is None else [condition])]


@cache
def _freeze() -> None:
    """Freeze all imports, once a process: Spark's collector scans them after each task (50 ms of CPU)."""
    gc.freeze()
