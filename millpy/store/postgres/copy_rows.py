"""Rows in PostgreSQL's binary COPY format, made from whole columns.

    file   signature, int32 flags = 0, int32 length of the header's extension = 0, rows, int16 -1
    row    int16 number of fields, then of each field int32 length (-1 for null) and the bytes

numpy packs neighboring fields of fixed width without nulls together. Any other field is a binary Arrow column, whose
lengths are packed with the fields before it. Arrow joins all of them row by row, so a row is never a Python object.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpy.store.postgres.arrays import PG_EPOCH_DAY, PG_EPOCH_US, numeric_bytes, packed_numerics

HEAD = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
TAIL = struct.pack("!h", -1)
PIECE_BYTES = 2_000_000
"""Bytes of one COPY: over a slow link, it is one statement for as long as its data arrives."""
ROWS_AT_ONCE = 8_192
"""Rows that are joined at once, so that written data is read again while it is still in the processor's cache."""

_DAY_0 = 719_163  # 1970-01-01, as PG_EPOCH_DAY

Packed: TypeAlias = npt.NDArray[Any]
"""Values of one width without nulls, in wire format."""
Field: TypeAlias = "Packed | pa.Array"


def packed_field(column: pa.Array, wire_type: str) -> Field:
    """Encode numbers or booleans as numpy's `wire_type`, big-endian."""
    valid = column.is_valid() if column.null_count else None
    filled = column if valid is None else pc.fill_null(column, pa.scalar(0).cast(column.type))
    return _with_nulls(filled.to_numpy(zero_copy_only=False).astype(wire_type), valid)


def moment_field(column: pa.Array) -> Field:
    """Encode times, given as int64 µs since 1970."""
    return packed_field(pc.subtract(column, pa.scalar(PG_EPOCH_US, pa.int64())), ">i8")


def day_field(column: pa.Array) -> Field:
    """Encode dates."""
    days = pc.subtract(column.cast(pa.int32()), pa.scalar(PG_EPOCH_DAY - _DAY_0, pa.int32()))
    return packed_field(days, ">i4")


def numeric_field(column: pa.Array) -> Field:
    """Encode whole numbers, given as decimals or, beyond these, as the bytes of `numeric_bytes`."""
    if pa.types.is_binary(column.type):
        return bytes_field(column)
    try:
        narrow = column.cast(pa.int64())
    except pa.ArrowInvalid:
        wide = [None if value is None else numeric_bytes(int(value)) for value in column.to_pylist()]
        return pa.array(wide, pa.large_binary())
    valid = narrow.is_valid() if narrow.null_count else None
    numbers = (narrow if valid is None else pc.fill_null(narrow, 0)).to_numpy(zero_copy_only=False)
    return _with_nulls(packed_numerics(numbers), valid)


def bytes_field(column: pa.Array) -> pa.Array:
    """Encode text or bytes of any length."""
    return column.cast(pa.large_binary())


def copy_rows(
    fields: Sequence[Field], order: npt.NDArray[np.int64] | None = None, *, bytes_max: int = PIECE_BYTES
) -> list[bytes]:
    """Encode equally long fields as binary COPY files of whole rows, each a little over `bytes_max` bytes.

    `order` has the row numbers in the order wanted; None keeps the rows as they are.
    """
    count = len(fields[0])
    if order is not None:
        fields = [field[order] if isinstance(field, np.ndarray) else field.take(pa.array(order)) for field in fields]
    files: list[bytes] = []
    blocks: list[bytes | memoryview] = []
    for start in range(0, count, ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, count - start)
        blocks.append(_joined([field[start : start + rows] for field in fields], rows))
        if start + rows == count or sum(map(len, blocks)) >= bytes_max:
            files.append(b"".join([HEAD, *blocks, TAIL]))
            blocks = []
    return files


def _joined(fields: Sequence[Field], rows: int) -> memoryview:
    """Join the fields row by row."""
    parts: list[pa.Array] = []
    run: list[tuple[Packed, Any]] = [(np.full(rows, len(fields), ">i2"), ">i2")]
    for field in fields:
        if isinstance(field, np.ndarray):
            run += [(np.full(rows, field.dtype.itemsize, ">i4"), ">i4"), (field, field.dtype)]
            continue
        lengths = pc.fill_null(pc.binary_length(field), -1).to_numpy(zero_copy_only=False)
        run.append((lengths, ">i4"))
        parts += [_packed_together(run, rows), pc.fill_null(field, b"") if field.null_count else field]
        run = []
    if run:
        parts.append(_packed_together(run, rows))
    joined = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    _, offsets, data = joined.buffers()
    size = int(np.frombuffer(offsets, np.int64, 1, 8 * rows)[0])
    return memoryview(data)[:size]


def _packed_together(run: Sequence[tuple[Packed, Any]], rows: int) -> pa.Array:
    """Return neighboring columns of fixed width as one column."""
    packed = np.empty(rows, [(f"f{place}", wire_type) for place, (_, wire_type) in enumerate(run)])
    for place, (values, _) in enumerate(run):
        packed[f"f{place}"] = values
    return _as_binary(packed)


def _with_nulls(packed: Packed, valid: pa.Array | None) -> Field:
    return packed if valid is None else pc.if_else(valid, _as_binary(packed), pa.scalar(None, pa.large_binary()))


def _as_binary(packed: Packed) -> pa.Array:
    width = packed.dtype.itemsize
    offsets = np.arange(len(packed) + 1, dtype=np.int64) * width
    return pa.Array.from_buffers(pa.large_binary(), len(packed), [None, pa.py_buffer(offsets), pa.py_buffer(packed)])
