"""Late records and dead letters of a stream, as rows of its output that lose nothing.

Beside the columns that a batch shows, they have in columns with an underscore what a replay in PostgreSQL needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from millpy.model.checkpoint import DeadLetter, LateRows
from millpy.spark.hosted_rows import BUNDLE, dead_letter_batch, late_batch

LATE_MORE = pa.schema([("_input", pa.int32()), ("_whole", pa.bool_()), (BUNDLE, pa.int64())])
DEAD_LETTERS_MORE = pa.schema(
    [("_input", pa.int32()), ("_wire", pa.string()), ("_dedupe_id", pa.binary()), (BUNDLE, pa.int64())]
)


def late_record_rows(late: LateRows, bundle: int) -> pa.RecordBatch:
    """Return late records of a bundle."""
    count = len(late)
    return _widened(late_batch(late), LATE_MORE, [[late.input] * count, late.whole or [True] * count, [bundle] * count])


def dead_letter_rows(letters: Sequence[DeadLetter], bundle: int) -> pa.RecordBatch:
    """Return dead letters of a bundle."""
    more: list[list[Any]] = [
        [letter.input for letter in letters],
        [letter.wire for letter in letters],
        [letter.dedupe_id for letter in letters],
        [bundle] * len(letters),
    ]
    return _widened(dead_letter_batch(letters), DEAD_LETTERS_MORE, more)


def late_rows_of(batch: pa.RecordBatch) -> list[LateRows]:
    """Return late records as a checkpoint has them."""
    found: dict[tuple[str, str, int], LateRows] = {}
    for row in _plain(batch):
        of = row["stream"], row["computation"], row["_input"]
        late = found.setdefault(of, LateRows(of[0], of[1], input=of[2]))
        late.whole.append(row["_whole"])
        late.keys.append(row["key"].encode())
        late.payloads.append(row["payload"])
        late.event_times.append(row["event_time"])
        late.watermarks.append(row["watermark"])
        late.window_starts.append(row["window_start"])
        late.window_ends.append(row["window_end"])
        late.retracts.append(row["retracts"])
    return list(found.values())


def dead_letters_of(batch: pa.RecordBatch) -> list[DeadLetter]:
    """Return dead letters as a checkpoint has them."""
    return [
        DeadLetter(
            reason=row["reason"],
            detail=row["detail"],
            payload=row["payload"],
            stream=row["stream"],
            computation=row["computation"],
            position=row["position"],
            traceback=row["traceback"],
            event_time=row["event_time"],
            key=None if row["key"] is None else row["key"].encode(),
            input=row["_input"],
            wire=row["_wire"],
            dedupe_id=row["_dedupe_id"],
            retracts=row["retracts"],
        )
        for row in _plain(batch)
    ]


def _widened(batch: pa.RecordBatch, more: pa.Schema, columns: Sequence[list[Any]]) -> pa.RecordBatch:
    arrays = [pa.array(values, field.type) for field, values in zip(more, columns, strict=True)]
    schema = pa.schema([*batch.schema, *more])
    return pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=schema)


def _plain(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows with times in µs."""
    arrays = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns]
    rows: list[dict[str, Any]] = pa.RecordBatch.from_arrays(arrays, names=batch.schema.names).to_pylist()
    return rows
