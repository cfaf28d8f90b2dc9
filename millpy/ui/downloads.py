"""Rows as files, CSV or Parquet, page by page: the memory that a download takes is that of one page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millpy.admin.json_output import json_safe
from millpy.admin.loaders import TimeText
from millpy.admin.pages import RowPage
from millpy.admin.queries import Row
from millpy.admin.results import DeployedTable

ROWS_MAX = 100_000
"""Of a download."""
PAGE_ROWS = 1_000
FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""Beginnings of what a spreadsheet computes (OWASP, CSV injection)."""
MEDIA_TYPES = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
_INTEGERS = ("ordinal", "interval_id", "bundle", "pane_index", "late_count")
_TIMES = ("window_start", "window_end", "event_time", "emitted_at")
_TYPES: Mapping[str, pa.DataType] = {
    "bigint": pa.int64(),
    "double precision": pa.float64(),
    "boolean": pa.bool_(),
    "bytea": pa.binary(),
    "timestamptz": pa.timestamp("us", tz="UTC"),
}
"""All other types are text."""
Read = Callable[[Sequence[str], int], Any]


async def csv_chunks(table: DeployedTable, read: Read) -> AsyncIterator[bytes]:
    """Yield a CSV file after RFC 4180: instants are RFC 3339, bytes base64, missing values empty.

    A text that a spreadsheet would take for a formula gets an apostrophe before it: keys come from devices.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.columns)
    async for rows in _pages(read):
        writer.writerows([_cell(row[name]) for name in table.columns] for row in rows)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


async def parquet_chunks(table: DeployedTable, read: Read) -> AsyncIterator[bytes]:
    """Yield a Parquet file: numerics, UUIDs and JSON are text, and infinite times are missing."""
    file = _Chunks()
    schema = pa.schema([(name, _type_of(table, name)) for name in table.columns])
    with pq.ParquetWriter(pa.PythonFile(file, "w"), schema) as writer:
        async for rows in _pages(read):
            columns = [
                pa.array([_value(row[field.name], field.type) for row in rows], field.type) for field in schema
            ]  # fmt: skip
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            yield file.taken()
    yield file.taken()


WRITERS = {"csv": csv_chunks, "parquet": parquet_chunks}


async def _pages(read: Read) -> AsyncIterator[list[Row]]:
    after: Sequence[str] = ()
    left = ROWS_MAX
    while left:
        found: RowPage = await read(after, min(PAGE_ROWS, left))
        yield found.rows
        left -= len(found.rows)
        if found.next is None:
            return
        after = found.next


class _Chunks(io.RawIOBase):
    """A file that keeps what was written until it is taken."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        return len(part)

    def tell(self) -> int:
        return self._size

    def taken(self) -> bytes:
        found = b"".join(self._parts)
        self._parts.clear()
        return found


def _cell(value: object) -> object:
    safe = json_safe(value)
    if isinstance(safe, dict | list):
        return json.dumps(safe, ensure_ascii=False)
    if isinstance(value, str) and not isinstance(value, TimeText) and value.startswith(FORMULAS):
        return f"'{value}"
    return ("true" if safe else "false") if isinstance(safe, bool) else safe


def _type_of(table: DeployedTable, name: str) -> pa.DataType:
    if name in table.keys or name in table.values:
        return _TYPES.get(table.type_of(name), pa.string())
    if name in _INTEGERS:
        return pa.int64()
    if name in _TIMES:
        return _TYPES["timestamptz"]
    return pa.bool_() if name == "is_final" else pa.string()


def _value(value: Any, kind: pa.DataType) -> Any:
    if value is None or pa.types.is_int64(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return value
    if pa.types.is_timestamp(kind):
        try:
            return datetime.fromisoformat(str(json_safe(value)))
        except ValueError:
            return None
    if pa.types.is_binary(kind):
        return bytes(value)
    return json.dumps(json_safe(value)) if isinstance(value, dict | list) else str(value)
