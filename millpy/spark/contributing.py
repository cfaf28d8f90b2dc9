"""The archived records of windows that differ: an audit shows them beside the difference.

A window's records are those of its key that happened in it, late ones too. They can be found where the windows stand
directly on the stream of a source, and the stream has an archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from millpy.model.deployment import TableSpec
from millpy.model.time import instant
from millpy.store.archive.input import ArchivedInput
from millpy.store.archive.parquet import EVENT_TIME, PARTITION
from millpy.store.archive.storage import parquet_file

if TYPE_CHECKING:
    from millpy.spark.audit import AuditDifference

RECORDS_MAX = 20
RECORD_CHARACTERS_MAX = 1_000


def archived_records(spark: SparkSession, of: ArchivedInput, files: Sequence[str]) -> DataFrame:
    """Return the source's records in archived files, which may have those of other sources, too.

    A file from before a deployment may lack a field, which is null then.
    """
    schema = from_arrow_schema(of.schema)
    if not files:
        return spark.createDataFrame([], schema)
    return _records_in(spark, schema, files).where(F.col(PARTITION).startswith(f"{of.source}/"))


def _records_in(spark: SparkSession, schema: StructType, files: Sequence[str]) -> DataFrame:
    if "://" not in files[0]:  # `hour=` in a path is not a column
        return spark.read.schema(schema).option("recursiveFileLookup", True).parquet(*files)
    # Spark's JVM has no client of an object store, but Python has.
    urls = spark.createDataFrame([(url,) for url in files], "url string")
    return urls.mapInArrow(partial(_read, to_arrow_schema(schema)), schema)


def _read(schema: pa.Schema, urls: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the records of files, a row group at a time; runs in Spark's tasks."""
    for url in (url for batch in urls for url in batch["url"].to_pylist()):
        file = parquet_file(url)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=schema.names)
            for name in set(schema.names) - set(table.column_names):
                table = table.append_column(name, pa.nulls(len(table), schema.field(name).type))
            yield from table.select(schema.names).cast(schema).to_batches()


def with_records(
    examples: Sequence[AuditDifference], records: DataFrame, of: ArchivedInput, table: TableSpec
) -> list[AuditDifference]:
    """Add the records of the windows that differ: of each at most `RECORDS_MAX`, in the order of event time."""
    if not examples:
        return []
    # No field of a record has a space in its name.
    fields = [f"`key {number}`" for number in range(len(of.key_fields))]
    kinds = [records.select(name).dtypes[0][1] for name in of.key_fields]
    ddl = ", ".join(f"{name} {kind}" for name, kind in zip(fields, kinds, strict=True))
    keys = [tuple(one.row[key.name] for key in table.keys) for one in examples]
    rows = [
        (number, instant(one.row["window_start"]), instant(one.row["window_end"]), *key)
        for number, (one, key) in enumerate(zip(examples, keys, strict=True))
    ]
    wanted = records.sparkSession.createDataFrame(
        rows, f"`of window` int, `window from` bigint, `window to` bigint, {ddl}"
    )
    same = [F.col(name).eqNullSafe(F.col(field)) for name, field in zip(fields, of.key_fields, strict=True)]
    inside = [F.col(EVENT_TIME) >= F.col("`window from`"), F.col(EVENT_TIME) < F.col("`window to`")]
    text = F.substring(F.to_json(F.struct(*(f"`{name}`" for name in records.columns))), 1, RECORD_CHARACTERS_MAX)
    there = records.withColumn("as text", text).join(F.broadcast(wanted), [*same, *inside])
    order = Window.partitionBy("`of window`").orderBy(EVENT_TIME, "_partition", "_seq", "`as text`")
    ranked = there.select("`of window`", "`as text`", F.row_number().over(order).alias("place in window"))
    found: dict[int, list[str]] = {}
    for row in (
        ranked.where(F.col("`place in window`") <= RECORDS_MAX).orderBy("`of window`", "`place in window`").collect()
    ):
        found.setdefault(row["of window"], []).append(row["as text"])
    return [replace(one, records=found.get(number, [])) for number, one in enumerate(examples)]
