"""Outlets: what a computation produces, checked record by record, and gathered into productions and result rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from millpy.errors import RefusedValueError
from millpy.model.checkpoint import ResultRows
from millpy.model.delta import encode_value
from millpy.model.record import Records, RecordType
from millpy.model.stage import Binding
from millpy.model.time import Instant

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class StreamOutlet:
    """One output stream: its type, its table if it has one, and whether anybody consumes it."""

    def __init__(self, stream: str, record_type: RecordType, table_id: int | None, subscribed: bool) -> None:
        self.stream = stream
        self.record_type = record_type
        self.table_id = table_id
        self.subscribed = subscribed
        self._struct = record_type.struct
        self._decode = msgspec.json.Decoder(record_type.struct).decode

    def admitted(self, record: Any) -> Any:
        """The record as it will be carried: every value can be stored, and it is no longer shared with the caller.

        Raises:
            RefusedValueError: not of the stream's type, or a value that cannot be stored.
        """
        if not isinstance(record, self._struct):
            raise RefusedValueError(
                f"stream {self.stream!r} carries {self._struct.__name__}, not {type(record).__name__}"
            )
        try:
            copied = self._decode(encode_value(record))
        except (msgspec.DecodeError, ValueError) as error:
            raise RefusedValueError(f"not a {self._struct.__name__}: {error}") from error
        for name in self._struct.__struct_fields__:
            _refuse_unfit(getattr(copied, name))
        return copied

    def gather(self, records: list[Any], times: Sequence[Instant]) -> tuple[Records | None, ResultRows | None]:
        """Productions for who consumes the stream, rows for its table."""
        productions = rows = None
        if self.subscribed:
            productions = Records(self.record_type, np.array(times, np.int64), objects=records)
        if self.table_id is not None:
            columns: list[Any] = [[getattr(record, name) for record in records] for name in self.record_type.fields]
            rows = ResultRows(self.table_id, [*columns, list(times), list(range(len(records)))], len(records), True)
        return productions, rows


def _refuse_unfit(value: Any) -> None:
    """Refuse what a column cannot hold: whole numbers beyond 64 bits, datetimes that name no instant."""
    if isinstance(value, int):
        if not INT64_MIN <= value <= INT64_MAX:
            raise RefusedValueError(f"{value} does not fit in 64 bits")
    elif isinstance(value, datetime):
        if value.tzinfo is None:
            raise RefusedValueError(f"naive datetime {value!r} names no instant", hint="give it a time zone")
    elif isinstance(value, list):
        for part in value:
            _refuse_unfit(part)
    elif isinstance(value, dict):
        for part in value.values():
            _refuse_unfit(part)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _refuse_unfit(getattr(value, name))


def outlets_of(binding: Binding) -> Mapping[str | None, StreamOutlet]:
    """The outlets by stream name; None names the only one, if there is one."""
    outlets: dict[str | None, StreamOutlet] = {
        stream: StreamOutlet(stream, record_type, binding.tables.get(stream), stream in binding.subscribed)
        for stream, record_type in binding.outputs.items()
    }
    if len(outlets) == 1:
        outlets[None] = next(iter(outlets.values()))
    return outlets
