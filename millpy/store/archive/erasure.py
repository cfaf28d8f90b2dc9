"""Erasure: an archived file without the records of one key, with everything else as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.model.keys import KEY_SPACE, Key, key_hash
from millpy.model.record import column_of
from millpy.store.archive.parquet import METADATA, PARTITION, FileDescription, open_writer
from millpy.store.archive.reader import described
from millpy.store.archive.storage import parquet_file


def without_key(file: str, key_fields: Mapping[str, tuple[str, ...]], key: Key) -> tuple[pa.Buffer, int] | None:
    """Return a file's content without the records of a key, and the number of records; None if it has none of them.

    A bundle stays described when nothing of it is left, so
    no reader takes it for missing.

    Args:
        file: the full name of the file.
        key_fields: computation that makes the records -> the fields of their key.
        key: the key.
    """
    source = parquet_file(file)
    description = described(source.metadata)
    bucket = key_hash(key) // (KEY_SPACE // description.buckets)
    kept: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}
    for place, (of, _) in enumerate(description.row_groups):
        if of == bucket:
            has = _has(source.read_row_group(place).combine_chunks().to_batches()[0], key_fields, key)
            if has.any():
                kept[place] = ~has
    if not kept:
        return None
    sink, groups = pa.BufferOutputStream(), []
    schema = source.schema_arrow.remove_metadata()
    with open_writer(sink, schema) as writer:
        for place, group in enumerate(description.row_groups):
            table = source.read_row_group(place).cast(schema)
            table = table.filter(pa.array(kept[place])) if place in kept else table
            if len(table):
                writer.write_table(table, row_group_size=len(table))
                groups.append((group[0], len(table)))
        left = FileDescription(description.buckets, description.bundles, groups)
        writer.add_key_value_metadata({METADATA: msgspec.json.encode(left).decode()})
    return sink.getvalue(), sum(count for _, count in groups)


def _has(
    batch: pa.RecordBatch, key_fields: Mapping[str, tuple[str, ...]], key: Key
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which records have the key."""
    found = np.zeros(len(batch), bool)
    for producer, fields in key_fields.items():
        own = pc.starts_with(batch.column(PARTITION), f"{producer}/")
        for name, value in zip(fields, key if isinstance(key, tuple) else (key,), strict=True):
            column = column_of(batch, name)
            wanted = pa.scalar(str(value) if isinstance(value, UUID) else value, column.type)
            own = pc.and_(own, pc.equal(column, wanted).fill_null(False))
        found |= own.to_numpy(zero_copy_only=False)
    return found
