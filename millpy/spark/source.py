"""The Spark data source "millpy": result tables as Arrow batches.

    spark.read.format("millpy").option("table", "factory.temperature_1m").load()

Options: `table` (schema.table); `url` (default: MILLPY_DATABASE_URL of the driver), or `graph` (a graph's
file, for the embedded database beside it); `columns` (comma-separated);
`from` and `to` (ISO 8601: windows that start, or records that happen, at or after the one and before the other); `keys`
(JSON: column -> values, `{"device": ["a", "b"]}`); `partitions` (connections that read at the same time, default 4);
`batch_rows` (default 500,000); `key` (comma-separated: columns that identify a view's rows and are never null; a table
has its primary key). Streams (`spark.readStream`, see `pane_stream`) have two more: `max_rows_per_trigger` (default
1,000,000) and `after_restore` (`refuse`, `continue` or `reread`).

What the options leave out is not read at all. Spark's own push-down of `where` is not used: up to version 4.3 it keeps
the filters of one query for the next one over the same DataFrame, which then silently lacks rows.

The table is cut by its primary key into ranges, one per partition, and each range is read in pieces of bounded size
between two keys. Each piece is one statement and one snapshot, usually a second long: a longer one would keep old row
versions alive and slow every commit. A window is therefore read exactly once, in the version committed when its piece
was read; windows of different pieces may be from different times, but never from two tables.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from millpy.errors import ConfigError
from millpy.spark.options import (
    DatabaseLocation,
    after_restore,
    check_names,
    check_not_streaming,
    conditions,
    names,
    positive,
)
from millpy.spark.pane_stream import PaneStreamReader
from millpy.spark.row_ranges import RowRange, RowReader
from millpy.spark.tables import describe

PARTITIONS_DEFAULT = 4
BATCH_ROWS_DEFAULT = 500_000
MAX_ROWS_DEFAULT = 1_000_000


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
        self._max_rows = positive(options, "max_rows_per_trigger", MAX_ROWS_DEFAULT)
        self._after_restore = after_restore(options)

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "millpy"

    def schema(self) -> StructType:
        """Return the columns, in the table's order or that of the option `columns`."""
        return from_arrow_schema(self._table.arrow_schema(self._wanted))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the columns in `schema`, which may be fewer than the table has."""
        check_not_streaming(self.options)
        return _PartitionReader(self._rows(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of the panes that are committed while it runs."""
        return PaneStreamReader(self._rows(schema), self._max_rows, self._after_restore)

    def _rows(self, schema: StructType) -> RowReader:
        self._table.select(schema.fieldNames())
        arrow = to_arrow_schema(schema, timezone="UTC")
        return RowReader(self._location, self._table, arrow, self._conditions, self._partitions, self._batch_rows)


class _PartitionReader(DataSourceReader):
    def __init__(self, rows: RowReader) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[RowRange]:
        """Return ranges of about equal size, from a sample."""
        return self._rows.ranges()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield one range, piece by piece; runs in a process of Spark's."""
        assert isinstance(partition, RowRange)
        yield from self._rows.read(partition)
