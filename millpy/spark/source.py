"""The Spark data source "millpy": result tables as Arrow batches.

    spark.read.format("millpy").option("table", "factory.temperature_1m").load()

Options: `table` (schema.table); `url` (default: MILLPY_DATABASE_URL of the driver), or `graph` (a graph's
file, for the embedded database beside it); `columns` (comma-separated);
`from` and `to` (ISO 8601: windows that start, or records that happen, at or after the one and before the other); `keys`
(JSON: column -> values, `{"device": ["a", "b"]}`); `partitions` (connections that read at the same time, default 4);
`batch_rows` (default 500,000); `key` (comma-separated: columns that identify a view's rows and are never null; a table
has its primary key).

What the options leave out is not read at all. Spark's own push-down of `where` is not used: up to version 4.3 it keeps
the filters of one query for the next one over the same DataFrame, which then silently lacks rows.

The table is cut by its primary key into ranges, one per partition, and each range is read in pieces of bounded size
between two keys. Each piece is one statement and one snapshot, usually a second long: a longer one would keep old row
versions alive and slow every commit. A window is therefore read exactly once, in the version committed when its piece
was read; windows of different pieces may be from different times, but never from two tables.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from millpy.errors import ConfigError
from millpy.spark.options import DatabaseLocation, check_names, conditions, names, positive
from millpy.spark.pieces import Bounds, plan, read
from millpy.spark.tables import Condition, SparkTable, describe

PARTITIONS_DEFAULT = 4
BATCH_ROWS_DEFAULT = 500_000


class MillpyDataSource(DataSource):
    """`spark.read.format("millpy")`; the module's docstring lists the options.

    Attributes:
        database_url: the database when no option names one; default: MILLPY_DATABASE_URL.
    """

    database_url: str | None = None

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        check_names(options)
        self._location = DatabaseLocation.from_options(options, self.database_url)
        name = options.get("table") or options.get("path") or ""
        schema, dot, table = name.partition(".")
        if not (schema and dot and table):
            raise ConfigError(f"{name!r} is not schema.table", hint='.option("table", "factory.temperature_1m")')
        self._partitions = positive(options, "partitions", PARTITIONS_DEFAULT)
        self._batch_rows = positive(options, "batch_rows", BATCH_ROWS_DEFAULT)
        columns = names(options, "columns")
        self._table = describe(self._location.open(), schema, table, names(options, "key"))
        self._wanted = self._table.select(columns) if columns else tuple(self._table.types)
        self._conditions = conditions(options, self._table)

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "millpy"

    def schema(self) -> StructType:
        """Return the columns, in the table's order or that of the option `columns`."""
        return from_arrow_schema(self._table.arrow_schema(self._wanted))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`, which may be fewer than the table has."""
        self._table.select(schema.fieldNames())
        return _PartitionReader(
            self._location, self._table, schema, self._conditions, self._partitions, self._batch_rows
        )


@dataclass
class _Range(InputPartition):
    """Consecutive pieces in the order of the primary key."""

    bounds: Bounds


class _PartitionReader(DataSourceReader):
    def __init__(
        self,
        location: DatabaseLocation,
        table: SparkTable,
        schema: StructType,
        conditions: list[Condition],
        partitions: int,
        batch_rows: int,
    ) -> None:
        self._location = location
        self._table = table
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._conditions = conditions
        self._partitions = partitions
        self._batch_rows = batch_rows

    def partitions(self) -> Sequence[InputPartition]:
        """Return ranges of about equal size, from a sample."""
        planned = plan(
            self._location.open(),
            self._table,
            self._schema.names,
            self._conditions,
            partitions=self._partitions,
            batch_rows=self._batch_rows,
        )
        return [_Range(bounds) for bounds in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one range, piece by piece; runs in a process of Spark's."""
        assert isinstance(partition, _Range)
        _freeze()
        url = self._location.open()
        yield from read(url, self._table, self._schema, self._conditions, partition.bounds, batch_rows=self._batch_rows)


@cache
def _freeze() -> None:
    """Freeze all imports, once a process: Spark's collector scans them after each task (50 ms of CPU)."""
    gc.freeze()
