"""Result rows, late records and dead letters of hosted steps, as Arrow batches and as DataFrames.

Whole numbers of any width become decimals of 38 digits; JSON, UUIDs and Decimals become text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.model.delta import decode_document, encode_value
from millpy.model.deployment import TableSpec
from millpy.model.field_types import decimal_text
from millpy.model.time import instant
from millpy.spark.tables import FIRST_DAY, LAST_DAY

ROWS_MAX = 16_384
"""Rows of one payload, so that Spark never holds many megabytes in one row."""
BUNDLE = "_bundle"
TYPES: dict[str, tuple[pa.DataType, str]] = {
    "text": (pa.string(), "string"),
    "bigint": (pa.int64(), "bigint"),
    "numeric": (pa.decimal128(38, 0), "decimal(38,0)"),
    "decimal": (pa.string(), "string"),
    "date": (pa.date32(), "date"),
    "double precision": (pa.float64(), "double"),
    "boolean": (pa.bool_(), "boolean"),
    "bytea": (pa.binary(), "binary"),
    "timestamptz": (pa.timestamp("us", "UTC"), "timestamp"),
    "uuid": (pa.string(), "string"),
    "jsonb": (pa.string(), "string"),
}
"""SQL type -> (Arrow type, Spark's type)."""
_MOMENT = pa.timestamp("us", "UTC")
LATE = pa.schema(
    [
        ("stream", pa.string()),
        ("computation", pa.string()),
        ("key", pa.string()),
        ("payload", pa.binary()),
        ("event_time", _MOMENT),
        ("watermark", _MOMENT),
        ("window_start", _MOMENT),
        ("window_end", _MOMENT),
        ("retracts", pa.bool_()),
    ]
)
DEAD_LETTERS = pa.schema(
    [
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("stream", pa.string()),
        ("computation", pa.string()),
        ("position", pa.string()),
        ("payload", pa.binary()),
        ("event_time", _MOMENT),
        ("key", pa.string()),
        ("traceback", pa.string()),
        ("retracts", pa.bool_()),
    ]
)
STATE = pa.schema(
    [
        ("interval", pa.int32()),
        ("kind", pa.string()),
        ("namespace", pa.string()),
        ("key", pa.string()),
        ("subkey", pa.string()),
        ("value", pa.string()),
        ("fire_at", pa.int64()),
    ]
)


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """Encode a batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def result_batches(spec: TableSpec, columns: Sequence[pa.Array | list[Any]], bundle: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table with their bundle; rows to delete have only the columns of the primary key."""
    specs = spec.columns()[: len(columns)]
    arrays = [_array(column.sql_type, values) for column, values in zip(specs, columns, strict=True)]
    count = len(arrays[0]) if arrays else 0
    names = [*(column.name for column in specs), BUNDLE]
    whole = pa.RecordBatch.from_arrays([*arrays, pa.repeat(pa.scalar(bundle, pa.int64()), count)], names=names)
    for start in range(0, count, ROWS_MAX):
        yield whole.slice(start, ROWS_MAX)


def _array(sql_type: str, values: pa.Array | list[Any]) -> pa.Array:
    target = TYPES[sql_type][0]
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array) and sql_type not in ("jsonb", "uuid"):
        moment = sql_type == "timestamptz" and not pa.types.is_timestamp(values.type)
        return (values.cast(pa.int64()) if moment else values).cast(target)
    if isinstance(values, pa.Array):
        values = values.to_pylist(maps_as_pydicts="strict") if sql_type == "jsonb" else values.to_pylist()
    if sql_type == "jsonb":
        return pa.array([None if v is None else _json(v) for v in values], target)
    if sql_type == "decimal":  # as the database shows it, not as 1E-7
        return pa.array([decimal_text(v) if isinstance(v, Decimal) else v for v in values], target)
    if sql_type == "uuid":
        return pa.array([None if v is None else str(v) for v in values], target)
    if sql_type == "timestamptz":
        return pa.array([instant(v) if isinstance(v, datetime) else v for v in values], pa.int64()).cast(target)
    if sql_type == "text":
        return pa.array([v.decode() if isinstance(v, bytes) else v for v in values], target)
    return pa.array(values, target)


def _json(value: Any) -> str:
    """Return JSON text; bytes are JSON text already."""
    return (value if isinstance(value, bytes) else encode_value(value)).decode()


def late_batch(late: LateRows) -> pa.RecordBatch:
    """Return late records as columns; an infinite watermark is read as in a table."""
    count, first, last = len(late), instant(FIRST_DAY), instant(LAST_DAY)
    columns: list[list[Any]] = [
        [late.stream] * count,
        [late.computation] * count,
        [key.decode() for key in late.keys],
        late.payloads,
        late.event_times,
        [min(max(at, first), last) for at in late.watermarks],
        late.window_starts,
        late.window_ends,
        late.retracts or [False] * count,
    ]
    return _batch(LATE, columns)


def dead_letter_batch(letters: Sequence[DeadLetter]) -> pa.RecordBatch:
    """Return dead letters as columns."""
    columns: list[list[Any]] = [
        [letter.reason for letter in letters],
        [letter.detail for letter in letters],
        [letter.stream for letter in letters],
        [letter.computation for letter in letters],
        [letter.position for letter in letters],
        [letter.payload for letter in letters],
        [letter.event_time for letter in letters],
        [None if letter.key is None else letter.key.decode() for letter in letters],
        [letter.traceback for letter in letters],
        [letter.retracts for letter in letters],
    ]
    return _batch(DEAD_LETTERS, columns)


def _batch(schema: pa.Schema, columns: Sequence[list[Any]]) -> pa.RecordBatch:
    arrays = [
        pa.array(values, pa.int64()).cast(of.type) if of.type == _MOMENT else pa.array(values, of.type)
        for of, values in zip(schema, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def table_frame(parts: DataFrame, spec: TableSpec, table_id: int, *, changed: bool) -> DataFrame:
    """Return a result table: of each window the newest pane.

    Args:
        parts: the parts of the computation that writes the table.
        spec: the table.
        table_id: its id.
        changed: whether any window has a later pane, or has been deleted.
    """
    own = parts.where(F.col("subject") == table_id)
    columns = spec.columns()
    ddl = ", ".join(f"`{column.name}` {TYPES[column.sql_type][1]}" for column in columns)
    rows = _decoded(own.where(F.col("kind").isin("rows", "later_rows")), f"{ddl}, {BUNDLE} bigint")
    names = [f"`{column.name}`" for column in columns]
    if not changed:
        return rows.select(*names)
    key_columns = columns[: len(spec.keys) + 2]
    key = [f"`{column.name}`" for column in key_columns]
    key_ddl = ", ".join(f"`{column.name}` {TYPES[column.sql_type][1]}" for column in key_columns)
    gone = _decoded(own.where(F.col("kind") == "deleted"), f"{key_ddl}, {BUNDLE} bigint")
    both = rows.withColumn("_is_row", F.lit(True)).unionByName(
        gone.withColumn("_is_row", F.lit(False)), allowMissingColumns=True
    )
    # A commit deletes before it writes rows.
    newest = both.groupBy(*key).agg(F.max_by(F.struct(*names, "_is_row"), F.struct(BUNDLE, "_is_row")).alias("_newest"))
    return newest.where("_newest._is_row").select(*(F.col(f"_newest.{name}") for name in names))


def late_frame(parts: DataFrame) -> DataFrame:
    """Return the late records of some computations."""
    return _decoded(parts.where(F.col("kind") == "late"), _ddl(LATE))


def dead_letter_frame(parts: DataFrame) -> DataFrame:
    """Return the dead letters of some computations."""
    return _decoded(parts.where(F.col("kind") == "dead_letters"), _ddl(DEAD_LETTERS))


def state_frame(parts: DataFrame) -> DataFrame:
    """Return the final state of some computations: one row for each cell, timer, window, counter or parked record."""
    return parts.where(F.col("kind") == "state").select("owner", "payload").mapInArrow(decode_state, _ddl(STATE))


def _ddl(schema: pa.Schema) -> str:
    types = {
        pa.string(): "string",
        pa.binary(): "binary",
        _MOMENT: "timestamp",
        pa.int64(): "bigint",
        pa.int32(): "int",
        pa.bool_(): "boolean",
    }
    return ", ".join(f"{of.name} {types[of.type]}" for of in schema)


def _decoded(parts: DataFrame, ddl: str) -> DataFrame:
    return parts.select("payload").mapInArrow(decode_payloads, ddl)


def decode_payloads(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that the column `payload` holds."""
    for batch in batches:
        for payload in batch.column("payload"):
            yield from pa.ipc.open_stream(payload.as_buffer())


def decode_state(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield entries as rows."""
    for batch in batches:
        for owner, document in zip(batch.column("owner").to_pylist(), batch.column("payload").to_pylist(), strict=True):
            for entries in decode_document(document):
                count = len(entries)
                columns: list[list[Any]] = [
                    [owner] * count,
                    [str(entries.kind)] * count,
                    [entries.namespace] * count,
                    [key.decode() for key in entries.keys],
                    entries.subkeys,
                    [None if value is None else value.decode() for value in entries.values],
                    entries.fire_ats,
                ]
                yield _batch(STATE, columns)
