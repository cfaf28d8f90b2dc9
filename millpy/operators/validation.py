"""Admission: check that a stream can carry a user function's output, as objects and as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpy.errors import RefusedValueError
from millpy.ingest.timestamps import DATETIME_HI, DATETIME_LO
from millpy.model.delta import encode_value
from millpy.model.field_types import JSON_DEPTH_MAX, decimal_problem, decimal_text, is_literal
from millpy.model.record import ARROW_TYPES, RecordType, without_none

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Admission:
    """Checks that records are of one type and can be stored.

    Args:
        what: beginning of error messages: "stream 'alerts' carries".
    """

    def __init__(self, record_type: RecordType, what: str) -> None:
        self._type = record_type
        self._struct = record_type.struct
        self._what = what
        self._decode = msgspec.json.Decoder(record_type.struct).decode
        self._by_column = all(
            (kind := without_none(record_type.annotations[name])[0]) in ARROW_TYPES
            and kind in _UNFIT
            and not is_literal(record_type.annotations[name])
            for name in record_type.fields
        )

    def checked_copy(self, record: Any) -> Any:
        """Return a storable copy of a record, which the caller no longer shares.

        Raises:
            RefusedValueError: the record is of another type, or has a value that cannot be stored.
        """
        if not isinstance(record, self._struct):
            raise RefusedValueError(f"{self._what} {self._struct.__name__}, not {type(record).__name__}")
        # msgspec cannot read back whole numbers beyond 64 bits from JSON; they are immutable and need no copy.
        wide = {name: getattr(record, name) for name in self._type.wide}
        if wide:
            record = msgspec.structs.replace(record, **dict.fromkeys(wide, 0))
        try:
            copied = self._decode(encode_value(record))
        except (msgspec.DecodeError, ValueError) as error:
            raise RefusedValueError(f"not a {self._struct.__name__}: {error}") from error
        if (misfit := self._type.misfit(copied)) is not None:
            raise RefusedValueError(misfit)
        for name in self._struct.__struct_fields__:
            value = getattr(copied, name)
            _refuse_unfit(value)
            if type(value) is Decimal:
                msgspec.structs.force_setattr(copied, name, Decimal(decimal_text(value)))
        return msgspec.structs.replace(copied, **wide) if wide else copied

    def refused(self, batch: pa.RecordBatch) -> dict[int, RefusedValueError]:
        """Return the rows of a batch of the type's schema that cannot be carried, with their errors."""
        found: dict[int, RefusedValueError] = {}
        if not self._by_column:
            for row in range(len(batch)):
                try:
                    (values,) = self._type.rows_of(batch.slice(row, 1))
                    self.checked_copy(msgspec.convert(values, self._struct))
                except (msgspec.DecodeError, RefusedValueError) as error:
                    found[row] = RefusedValueError(str(error))
            return found
        for name in self._type.fields:
            column = batch.column(name)
            detail, unfit = _UNFIT[without_none(self._type.annotations[name])[0]]
            self._add(found, unfit(column), f"{name}: {detail}")
            if column.null_count and not self._type.is_nullable(name):
                self._add(found, column.is_null(), f"{name} must not be None")
        return found

    @staticmethod
    def _add(found: dict[int, RefusedValueError], mask: pa.Array | None, detail: str) -> None:
        if mask is not None:
            for row in np.flatnonzero(pc.fill_null(mask, False).to_numpy(zero_copy_only=False)).tolist():
                found.setdefault(row, RefusedValueError(detail))


def _out_of_years(column: pa.Array) -> pa.Array:
    instants = column.cast(pa.int64())
    return pc.or_(pc.less(instants, DATETIME_LO), pc.greater(instants, DATETIME_HI))


_UNFIT: dict[Any, tuple[str, Callable[[pa.Array], pa.Array | None]]] = {
    str: ("NUL in text", lambda column: pc.match_substring(column, "\0")),
    float: ("NaN and infinities cannot be stored", lambda column: pc.invert(pc.is_finite(column))),
    datetime: ("outside of the years 1 to 9999", _out_of_years),
    int: ("", lambda column: None),
    bool: ("", lambda column: None),
    bytes: ("", lambda column: None),
}
"""Type of a field -> message and test for values that a column of it may not hold."""


def _refuse_unfit(value: Any, levels: int = JSON_DEPTH_MAX) -> None:
    """Refuse values that a column cannot hold: whole numbers beyond 64 bits, naive datetimes, deep nesting."""
    parts: Iterable[Any] = ()
    if isinstance(value, int):
        if not INT64_MIN <= value <= INT64_MAX:
            raise RefusedValueError(f"{value} does not fit in 64 bits")
    elif isinstance(value, datetime):
        if value.tzinfo is None:
            raise RefusedValueError(f"datetime {value!r} has no time zone", hint="give it a time zone")
    elif isinstance(value, Decimal):
        if (problem := decimal_problem(value)) is not None:
            raise RefusedValueError(f"{str(value)[:60]}: {problem}")
    elif isinstance(value, list):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, msgspec.Struct):
        parts = (getattr(value, name) for name in value.__struct_fields__)
    for part in parts:
        if not levels:
            raise RefusedValueError(f"a value is nested more than {JSON_DEPTH_MAX} deep")
        _refuse_unfit(part, levels - 1)
