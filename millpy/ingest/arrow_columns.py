"""Decoding of rows that a source already has as Arrow columns (Parquet). The record class decides, as it does for text.

A column of a suitable type is used as a whole: integers, floats and decimals as numbers, text, booleans, bytes, and
timestamps with a zone (truncated to microseconds). If a column as a whole is in doubt (a null that is not allowed, NaN,
NUL in text, an overflow, a timestamp without a zone, nesting), msgspec decides row by row.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.ingest.text_columns import NO_READERS, UUID_TEXT, Readers, fields_of, takes
from millpy.ingest.timestamps import DATETIME_HI, DATETIME_LO
from millpy.model.record import ARROW_TYPES, RecordType

_JSON = msgspec.json.Encoder(enc_hook=str, decimal_format="number")


class TableColumns:
    """Converts batches of rows to the columns of one record type."""

    def __init__(self, record_type: RecordType, readers: Readers = NO_READERS) -> None:
        self._type = record_type
        self._readers = readers
        self._fields = fields_of(record_type)
        self._takes = takes(record_type)

    def columns(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the rows as the record type's columns, or None if msgspec has to decide."""
        if not self._takes:
            return None
        arrays = []
        for field in self._type.schema:
            place = batch.schema.get_field_index(field.name)
            column = pa.nulls(len(batch), field.type) if place < 0 else batch.column(place)
            typed = self._typed(field.name, column)
            if typed is None:
                return None
            arrays.append(typed)
        return pa.RecordBatch.from_arrays(arrays, schema=self._type.schema)

    def _typed(self, name: str, column: pa.Array) -> pa.Array | None:
        kind = self._type.field_type(name)
        if column.null_count and not (self._type.is_nullable(name) and self._fields[name].default is None):
            return None
        if pa.types.is_null(column.type):
            return column.cast(ARROW_TYPES[kind])
        if (reader := self._readers.get(name)) is not None and _is_unread(column.type):
            return reader.column(column) if pa.types.is_string(column.type) else reader.naive_column(column)
        if not _suits(kind, column.type):
            return None
        try:
            typed = column.cast(ARROW_TYPES[kind])
        except pa.ArrowException:
            return None
        return typed if _is_storable(kind, typed) else None


def _is_unread(found: pa.DataType) -> bool:
    """Tell whether a column of times has to be read by a format or a zone."""
    return bool(pa.types.is_string(found) or (pa.types.is_timestamp(found) and found.tz is None))


def _suits(kind: type, found: pa.DataType) -> bool:
    if kind is str or kind is UUID:
        return bool(pa.types.is_string(found))
    if kind is int:
        # Other tools store an integer column that once had a gap as doubles, and numbers of databases as decimals. A
        # fraction does not cast.
        return bool(pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found))
    if kind is float:
        return bool(pa.types.is_floating(found) or pa.types.is_integer(found))
    if kind is bool:
        return bool(pa.types.is_boolean(found))
    if kind is datetime:
        return bool(pa.types.is_timestamp(found) and found.tz is not None)
    return False


def _is_storable(kind: type, column: pa.Array) -> bool:
    if kind is float:
        values = column.to_numpy(zero_copy_only=False)
        return bool(np.count_nonzero(np.isfinite(values)) == len(column) - column.null_count)
    if kind is datetime:
        times = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return bool((times >= DATETIME_LO).all() and (times <= DATETIME_HI).all())
    if kind is str or kind is UUID:
        try:
            column.validate(full=True)  # a text column of a Parquet file may hold any bytes
        except pa.ArrowException:
            return False
        if kind is UUID:
            return bool(pc.all(pc.match_substring_regex(column, UUID_TEXT), skip_nulls=True, min_count=0).as_py())
        return not bool(pc.any(pc.match_substring(column, "\0"), skip_nulls=True, min_count=0).as_py())
    return True


def plain(batch: pa.RecordBatch, exact: Collection[str] = ()) -> pa.RecordBatch:
    """Return the rows in the types that both decoders know: without dictionaries, views, decimals, nanoseconds.

    Decimals become floats, but not in the columns `exact`.
    """
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        found = column.type
        if pa.types.is_dictionary(found):
            column, found = column.dictionary_decode(), found.value_type
        if pa.types.is_large_string(found) or pa.types.is_string_view(found):
            column = column.cast(pa.string())
        elif pa.types.is_large_binary(found) or pa.types.is_binary_view(found):
            column = column.cast(pa.binary())
        elif (pa.types.is_decimal(found) and name not in exact) or pa.types.is_float16(found):
            column = column.cast(pa.float64())
        elif pa.types.is_timestamp(found) and found.unit == "ns":
            column = column.cast(pa.timestamp("us", found.tz), safe=False)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def long_rows(batch: pa.RecordBatch, bytes_max: int) -> list[int]:
    """Return the rows that have a value longer than `bytes_max`."""
    found: set[int] = set()
    for column in batch.columns:
        if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            lengths = pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            found.update(np.flatnonzero(lengths > bytes_max).tolist())
    return sorted(found)


def row_of(batch: pa.RecordBatch, row: int) -> dict[str, Any]:
    """Return one row as Python values.

    Raises:
        ValueError: Python cannot hold a value: text that is not UTF-8, the year 10,000, a map that has a key twice or
            a key that is a list or a struct.
    """
    try:
        found: dict[str, Any] = batch.slice(row, 1).to_pylist(maps_as_pydicts="strict")[0]
    except (KeyError, TypeError) as error:
        raise ValueError(f"invalid map: {error}") from None
    return found


def row_text(batch: pa.RecordBatch, row: int) -> bytes:
    """Return one row as a JSON object, the payload of its dead letter. A value that JSON cannot hold becomes text."""
    values = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[row].as_py()
        except (ValueError, OverflowError):
            values[name] = str(column.slice(row, 1).cast(pa.binary())[0].as_py()) if _is_text(column) else None
    return _JSON.encode(values)


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type))
