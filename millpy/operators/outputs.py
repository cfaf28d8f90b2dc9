"""Outlets: check a computation's output record by record, and gather it into productions and result rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.model.checkpoint import ResultRows
from millpy.model.record import Records, RecordType
from millpy.model.stage import StageBinding, StepResult
from millpy.model.time import Instant
from millpy.operators.validation import Admission


class StreamOutlet:
    """One output stream: its type, its result table if it has one, and whether it has a consumer."""

    def __init__(self, stream: str, record_type: RecordType, table_id: int | None, subscribed: bool) -> None:
        self.stream = stream
        self.record_type = record_type
        self.table_id = table_id
        self.subscribed = subscribed
        self._admission = Admission(record_type, f"stream {stream!r} carries")

    def checked_copy(self, record: Any) -> Any:
        """Return a storable copy of a record, which the caller no longer shares.

        Raises:
            RefusedValueError: the record is not of the stream's type, or has a value that cannot be stored.
        """
        return self._admission.checked_copy(record)

    def gather(self, records: list[Any], times: Sequence[Instant]) -> tuple[Records | None, ResultRows | None]:
        """Return productions for the stream's consumers and rows for its table."""
        productions = rows = None
        if self.subscribed:
            productions = Records(self.record_type, np.array(times, np.int64), objects=records)
        if self.table_id is not None:
            columns: list[Any] = [
                self.record_type.plain_values(name, [getattr(record, name) for record in records])
                for name in self.record_type.fields
            ]
            rows = ResultRows(self.table_id, [*columns, list(times), list(range(len(records)))], len(records), True)
        return productions, rows

    def emit(self, records: Records, result: StepResult) -> None:
        """Give records to the stream's consumers and its table, as columns."""
        if self.subscribed:
            result.productions[self.stream] = records
        if self.table_id is not None:
            result.results.append(_rows_of(self.table_id, records))


def outlets_of(binding: StageBinding) -> Mapping[str | None, StreamOutlet]:
    """Return the outlets by stream name; the name None stands for the only outlet, if there is just one."""
    outlets: dict[str | None, StreamOutlet] = {
        stream: StreamOutlet(stream, record_type, binding.tables.get(stream), stream in binding.subscribed)
        for stream, record_type in binding.outputs.items()
    }
    if len(outlets) == 1:
        outlets[None] = next(iter(outlets.values()))
    return outlets


def _rows_of(table_id: int, records: Records) -> ResultRows:
    """Return records as rows of a result table of records."""
    batch = records.batch()
    columns: list[Any] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in records.type.json:
            column = column.cast(pa.binary())  # bytes are JSON text already
        columns.append(column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column)
    count = len(records)
    columns += [pa.array(records.event_times), pa.array(np.arange(count, dtype=np.int64))]
    return ResultRows(table_id, columns, count, True)
