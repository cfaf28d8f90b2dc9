"""The archive that has the records of a table's windows, just as the windows took them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from millpy.model.deployment import GraphSpec, TableSpec
from millpy.store.archive.parquet import EVENT_TIME, PARTITION, SEQ, WATERMARK
from millpy.store.archive.reader import archive_of

_ADDED = (
    pa.field(PARTITION, pa.string()),
    pa.field(SEQ, pa.int64()),
    pa.field(EVENT_TIME, pa.int64()),
    pa.field(WATERMARK, pa.int64()),
)


@dataclass(frozen=True, slots=True)
class ArchivedInput:
    """The archive of the records that a table's windows take.

    Attributes:
        archive: its name. One of a union has the records of other sources, too.
        source: the source of the records.
        schema: the columns of the archive.
        key_fields: fields of the records that make up the key, in the order of the table's keys.
    """

    archive: str
    source: str
    schema: pa.Schema
    key_fields: tuple[str, ...]


def archived_input(spec: GraphSpec, table: TableSpec) -> ArchivedInput | str:
    """Return the archive of a table's input, or why there is none."""
    inputs = [subscription for subscription in spec.subscriptions if subscription.consumer == table.computation]
    if table.kind != "windowed" or table.stream != table.computation:
        return "it is no table of windows"
    if len(inputs) != 1:
        return "its windows have several inputs"
    (taken,) = inputs
    if taken.operators:
        return f"functions of yours stand between {taken.stream} and its windows"
    stream = next(stream for stream in spec.streams if stream.name == taken.stream)
    if not any(one.name == stream.producer and one.kind == "injector" for one in spec.computations):
        return f"its records come from the computation {stream.producer}, so an archive has no watermarks of them"
    archive = archive_of(spec, taken.stream)
    if archive is None:
        return f"stream {taken.stream} has no archive: declare one with .archive()"
    return ArchivedInput(archive.name, stream.producer, pa.schema([*stream.schema, *_ADDED]), taken.key_fields)
