"""The Spark data source "millpy": result tables as Arrow batches.

    spark.read.format("millpy").option("table", "factory.temperature_1m").load()

Options: `table` (schema.table); `url` (default: MILLPY_DATABASE_URL of the driver); `columns` (comma-separated);
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

import datetime as dt
import gc
import json
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from millpy.config.database_url import complete
from millpy.config.secrets import secret
from millpy.errors import ConfigError
from millpy.spark.pieces import Bounds, plan, read
from millpy.spark.tables import Condition, SparkTable, as_text, describe

PARTITIONS_DEFAULT = 4
BATCH_ROWS_DEFAULT = 500_000
TIME_COLUMNS = ("window_start", "event_time")


class MillpyDataSource(DataSource):
    """`spark.read.format("millpy")`; the module's docstring lists the options.

    Attributes:
        database_url: the database when no option names one; default: MILLPY_DATABASE_URL.
    """

    database_url: str | None = None

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        url = options.get("url") or self.database_url or secret("MILLPY_DATABASE_URL")
        if not url:
            raise ConfigError("no database is configured", hint='set MILLPY_DATABASE_URL, or .option("url", ...)')
        self._url = complete(url, secret("MILLPY_DATABASE_PASSWORD"))
        name = options.get("table") or options.get("path") or ""
        schema, dot, table = name.partition(".")
        if not (schema and dot and table):
            raise ConfigError(f"{name!r} is not schema.table", hint='.option("table", "factory.temperature_1m")')
        self._partitions = _positive(options, "partitions", PARTITIONS_DEFAULT)
        self._batch_rows = _positive(options, "batch_rows", BATCH_ROWS_DEFAULT)
        columns = _names(options, "columns")
        self._table = describe(self._url, schema, table, _names(options, "key"))
        self._wanted = self._table.select(columns) if columns else tuple(self._table.types)
        self._conditions = [*_time_conditions(options, self._table), *_key_conditions(options, self._table)]

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
        return _PartitionReader(self._url, self._table, schema, self._conditions, self._partitions, self._batch_rows)


@dataclass
class _Range(InputPartition):
    """Consecutive pieces in the order of the primary key."""

    bounds: Bounds


class _PartitionReader(DataSourceReader):
    def __init__(
        self,
        url: str,
        table: SparkTable,
        schema: StructType,
        conditions: list[Condition],
        partitions: int,
        batch_rows: int,
    ) -> None:
        self._url = url
        self._table = table
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._conditions = conditions
        self._partitions = partitions
        self._batch_rows = batch_rows

    def partitions(self) -> Sequence[InputPartition]:
        """Return ranges of about equal size, from a sample."""
        planned = plan(
            self._url,
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
        yield from read(
            self._url, self._table, self._schema, self._conditions, partition.bounds, batch_rows=self._batch_rows
        )


@cache
def _freeze() -> None:
    """Freeze all imports, once a process: Spark's collector scans them after each task (50 ms of CPU)."""
    gc.freeze()


def _names(options: MutableMapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in options.get(name, "").split(",") if part.strip())


def _positive(options: MutableMapping[str, str], name: str, default: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"option {name} is {text!r}", hint="give a whole number above 0")
    return int(text)


def _time_conditions(options: MutableMapping[str, str], table: SparkTable) -> Iterator[Condition]:
    for option, comparison in (("from", ">="), ("to", "<")):
        text = options.get(option)
        if text is None:
            continue
        column = next((name for name in TIME_COLUMNS if name in table.types), None)
        if column is None:
            raise ConfigError(
                f"{table.schema}.{table.name} has no time to filter by", hint=f"leave out the option {option}"
            )
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"option {option}: {error}", hint="write it like 2026-11-21T06:00:00Z") from None
        if moment.tzinfo is None:
            raise ConfigError(f"option {option} is {text!r} without a zone", hint=f"write {text}Z if it is UTC")
        yield Condition(column, comparison, (as_text(moment),))


def _key_conditions(options: MutableMapping[str, str], table: SparkTable) -> Iterator[Condition]:
    text = options.get("keys")
    if text is None:
        return
    try:
        given = json.loads(text)
        wanted = {name: [*values] if isinstance(values, list) else [values] for name, values in given.items()}
    except (ValueError, AttributeError):
        raise ConfigError(f"option keys is {text!r}", hint='write JSON: {"device": ["a", "b"]}') from None
    for name in table.select(tuple(wanted)):
        if None in wanted[name]:
            raise ConfigError(
                f"option keys asks for null in {name!r}", hint="keys are never null; use where() for values"
            )
        yield Condition(name, "= ANY", tuple(as_text(value) for value in wanted[name]))
