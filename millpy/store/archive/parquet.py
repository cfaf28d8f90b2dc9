"""Bundles as Parquet: the fields of the records and five or six columns, one row group for each bucket.

    _partition       where the bundle was made: "COMPUTATION/PARTITION", or the place of a key interval
    _seq             the bundle's number there
    _ordinal         the record's place in the bundle, across its buckets
    _event_time_us   the record's event time, µs since the epoch
    _watermark_us    the watermark before the record, so that lateness is a filter on a row; null behind a stage, whose
                     records are judged by the watermark of their consumer
    _retracts        whether the record is a retraction of an equal one before it; only of a stream that may have them

A bucket is a part of the key space: the first bits of the key's hash. A bundle is in one file, and records keep their
order within a bucket, so a sum over a key adds the same numbers in the same order as the worker's. `_seq` and
`_ordinal` restore the bundle for any other key. Bundles can be small, and a row group costs a millisecond, so a row
group has records of all bundles. The metadata `millpy` describes bundles and row groups as JSON (`FileDescription`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from millpy.model.bundle import Bundle
from millpy.model.keys import KEY_SPACE

METADATA = "millpy"
PARTITION, SEQ, ORDINAL = "_partition", "_seq", "_ordinal"
EVENT_TIME, WATERMARK, RETRACTS = "_event_time_us", "_watermark_us", "_retracts"
ADDED = (
    pa.field(PARTITION, pa.string()),
    pa.field(SEQ, pa.int64()),
    pa.field(ORDINAL, pa.int32()),
    pa.field(EVENT_TIME, pa.int64()),
    pa.field(WATERMARK, pa.int64()),
)
RowGroup = tuple[int, int]
"""(bucket, records)."""
ArchivedBundle = tuple[str, int, int | None, int]
"""(partition, seq, the seq of the bundle before it, the partition's watermark after it)."""


class FileDescription(msgspec.Struct, frozen=True):
    """What the metadata of a file say.

    Attributes:
        buckets: number of parts of the key space.
        bundles: the bundles of the file. If the bundle before one of them is in no file, records are missing.
        row_groups: the row groups, in their order.
    """

    buckets: int
    bundles: list[ArchivedBundle]
    row_groups: list[RowGroup]


def open_writer(sink: pa.BufferOutputStream, schema: pa.Schema) -> pq.ParquetWriter:
    """Return the writer of a file's row groups.

    Integers and times differ little from row to row, so their differences are stored, which no codec makes smaller.
    Floats do not compress well, so they get the fast codec. Dictionaries pay off for texts only. Against Parquet's
    default encodings with zstd this takes two fifths of the time to write, and two thirds of the space.
    """
    leaves = dict(leaf for field in schema for leaf in _leaves(field.name, field.type))
    differing = [path for path, of in leaves.items() if pa.types.is_integer(of) or pa.types.is_timestamp(of)]
    floats = [path for path, of in leaves.items() if pa.types.is_floating(of)]
    return pq.ParquetWriter(
        sink,
        schema,
        compression=dict.fromkeys(leaves, "zstd") | dict.fromkeys(floats, "lz4") | dict.fromkeys(differing, "none"),
        use_dictionary=[path for path, of in leaves.items() if pa.types.is_string(of) or pa.types.is_large_string(of)],
        column_encoding=dict.fromkeys(differing, "DELTA_BINARY_PACKED"),
    )


def _leaves(path: str, of: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the paths and types of the Parquet columns of a field."""
    if pa.types.is_struct(of):
        for field in of:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(of):
        yield from _leaves(f"{path}.list.element", of.value_type)
    elif pa.types.is_map(of):
        yield from _leaves(f"{path}.key_value.key", of.key_type)
        yield from _leaves(f"{path}.key_value.value", of.item_type)
    else:
        yield path, of


def encode(bundles: Sequence[Bundle], partitions: Mapping[int, str], buckets: int) -> pa.Buffer:
    """Encode bundles of one record type as a Parquet file.

    Args:
        bundles: at least one.
        partitions: the name of each producer, by its interval.
        buckets: number of buckets.
    """
    marks = [] if bundles[0].records.retracts is None else [pa.field(RETRACTS, pa.bool_())]
    schema = pa.schema([*bundles[0].records.type.schema, *ADDED, *marks])
    table = pa.concat_tables([_table(bundle, partitions[bundle.producer], schema) for bundle in bundles])
    of_row = np.concatenate([_buckets(each, buckets) for each in bundles])
    table = table.take(pa.array(np.argsort(of_row, kind="stable")))
    counts = np.bincount(of_row).tolist()
    groups: list[RowGroup] = [(bucket, count) for bucket, count in enumerate(counts) if count]
    sink, start = pa.BufferOutputStream(), 0
    with open_writer(sink, schema) as writer:
        for _, count in groups:
            writer.write_table(table.slice(start, count), row_group_size=count)
            start += count
        of_file = [(partitions[each.producer], each.seq, each.previous_seq, each.watermark) for each in bundles]
        description = FileDescription(buckets, list(dict.fromkeys(of_file)), groups)
        writer.add_key_value_metadata({METADATA: msgspec.json.encode(description).decode()})
    return sink.getvalue()


def _buckets(bundle: Bundle, buckets: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return the bucket of each record, in the narrowest type, which NumPy sorts in linear time."""
    narrow = np.min_scalar_type(buckets - 1)
    return (bundle.keys.hashes // (KEY_SPACE // buckets)).astype(narrow)[bundle.keys.codes]


def _table(bundle: Bundle, partition: str, schema: pa.Schema) -> pa.Table:
    records, count = bundle.records, len(bundle)
    watermarks = pa.nulls(count, pa.int64()) if records.watermarks is None else pa.array(records.watermarks)
    return pa.Table.from_arrays(
        [
            *records.batch().columns,
            pa.repeat(pa.scalar(partition), count),
            pa.repeat(pa.scalar(bundle.seq, pa.int64()), count),
            pa.array(np.arange(count, dtype=np.int32)),
            pa.array(records.event_times),
            watermarks,
            *([] if records.retracts is None else [pa.array(records.retracts)]),
        ],
        schema=schema,
    )
