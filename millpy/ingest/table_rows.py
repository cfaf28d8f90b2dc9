"""The rows of a lookup table: JSON text, one row a line, becomes columns, as the payloads of a source do.

A row that does not fit its class is left out and counted. It decides nothing else: its key has no row.
"""

from __future__ import annotations

import pyarrow as pa
import xxhash

from millpy.errors import TableLoadError
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.model.lookup import LookupTable, TableVersion
from millpy.model.time import Instant

DETAIL_CHARACTERS_MAX = 500


def version_of(text: bytes) -> str:
    """Return what identifies the rows of this text."""
    return xxhash.xxh3_128_hexdigest(text)


def check_size(table: LookupTable, rows: int, size: int, limits: Limits) -> None:
    """Check that a table is within its bounds.

    Raises:
        TableLoadError: it has too many rows or bytes.
    """
    for what, found, most, setting in (
        ("rows", rows, limits.lookup_rows_max, "MILLPY_LOOKUP_ROWS_MAX"),
        ("bytes as JSON", size, limits.lookup_bytes_max, "MILLPY_LOOKUP_BYTES_MAX"),
    ):
        if found > most:
            raise TableLoadError(
                f"table {table.name} has more than {most:,} {what}",
                hint=f"look up in a view with the rows and columns that are needed, or raise {setting}",
            )


def table_version(
    table: LookupTable, text: bytes, loaded_at: Instant, before: TableVersion | None = None
) -> TableVersion:
    """Return the version of a table that has these rows, ready for look-ups; `before` if it has the same rows.

    Args:
        table: the table.
        text: the rows as JSON objects, each ended by a newline, except perhaps the last.
        loaded_at: when they were read.
        before: the version that is in use.

    Raises:
        TableLoadError: two rows have the same key.
    """
    version = version_of(text)
    if before is not None and before.version == version:
        return before
    taken = SourceBatch("json", loaded_at, block=text)
    found = Decoder(table.record_type).decode(taken)
    batch = found.batch
    if batch is None:
        batch = table.record_type.batch_of(found.objects or [])
    misfit = found.refused[0].detail[:DETAIL_CHARACTERS_MAX] if found.refused else ""
    made = TableVersion(table, version, loaded_at, _owned(batch), len(text), len(found.refused), misfit)
    _ = made.index  # made here, in the background, and not in the first turn that uses it
    return made


def _owned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without columns that keep a larger buffer alive."""
    return pa.concat_batches([batch]) if batch.num_columns else batch
