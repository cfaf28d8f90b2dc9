"""The operators that make new records, `map` and `flat_map`. Their output is checked before it goes to consumers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from millpy.errors import RefusedValueError, SchemaError, TimerError
from millpy.limits import CALL_RECORDS_MAX
from millpy.model.identity import Identity
from millpy.model.record import Records, RecordType, column_of, getter
from millpy.model.time import Instant, describe, instant
from millpy.operators.stateless import Function, FunctionOutput, Operator, Rows
from millpy.operators.validation import Admission


class Map(Operator):
    """Makes one record of each record.

    `event_time` names the field of the new record that has its event time, which must not precede that of the original.
    """

    word = "map"

    def __init__(
        self,
        function: Function,
        input: RecordType,
        output: RecordType,
        *,
        columns: bool,
        event_time: str | None,
        immediate: bool = False,
    ) -> None:
        super().__init__(function, input, output, columns=columns, immediate=immediate)
        self._event_time = event_time
        self._read = getter(event_time) if event_time is not None else None
        self._admission = Admission(output, f"{self!r} makes")

    def identity(self) -> Identity:
        """Describe the operator with its event time."""
        return {**super().identity(), "event_time": self._event_time}

    def _one(self, record: Any, at: Instant) -> Any:
        return self._admitted(self.function(record), at)

    def _admitted(self, record: Any, at: Instant) -> tuple[Any, Instant]:
        admitted = self._admission.checked_copy(record)
        if self._read is not None:
            named = self._read(admitted)
            if named is None:
                raise RefusedValueError(f"{self!r}: the event time {self._event_time} is None")
            at = self._checked(instant(named), at)
        return admitted, at

    def _checked(self, named: Instant, at: Instant) -> Instant:
        if named < at:
            raise TimerError(
                f"{self!r}: the new record at {describe(named)} is older than its original at {describe(at)}",
                hint="return an event time not before the original's; the watermark may have passed older ones",
            )
        return named

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> FunctionOutput:
        return self._made(records, values, np.array(rows, np.int64))

    def _made(self, records: Records, values: Sequence[tuple[Any, Instant]], parents: Rows) -> FunctionOutput:
        return FunctionOutput(
            Records(
                self.output,
                np.array([at for _, at in values], np.int64),
                watermarks=None if records.watermarks is None else records.watermarks[parents],
                retracts=None if records.retracts is None else records.retracts[parents],
                objects=[record for record, _ in values],
            ),
            parents,
        )

    def _many(self, records: Records) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
        return self._taken(records, self.function(records.batch()), np.arange(len(records)))

    def _taken(
        self, records: Records, answer: Any, parents: Rows
    ) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
        """Return the function's columns without the rows that cannot be carried, and the errors of those rows."""
        batch = self._batch(answer, len(parents))
        refused: dict[int, BaseException] = dict(self._admission.refused(batch))
        times = records.event_times[parents]
        if self._event_time is not None:
            column = column_of(batch, self._event_time)
            named = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
            known = column.is_valid().to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(~known | (named < times)).tolist():
                try:
                    self._admitted(self.output.objects_of(batch.slice(row, 1))[0], Instant(int(times[row])))
                except (RefusedValueError, TimerError) as error:
                    refused.setdefault(row, error)
            times = named
        by_parent = {int(parents[row]): error for row, error in refused.items()}
        made = Records(
            self.output,
            times,
            watermarks=None if records.watermarks is None else records.watermarks[parents],
            retracts=None if records.retracts is None else records.retracts[parents],
            batch=batch,
        )
        if by_parent:  # if one output of a record fails, drop all of them
            rows = np.flatnonzero(~np.isin(parents, list(by_parent)))
            made, parents = made.take(rows), parents[rows]
        return FunctionOutput(made, parents), by_parent

    def _batch(self, answer: Any, count: int) -> pa.RecordBatch:
        """Convert the function's answer to a batch of the output's schema."""
        if isinstance(answer, pa.Table | pa.RecordBatch):
            answer = {name: answer.column(name) for name in answer.schema.names}
        if not isinstance(answer, Mapping):
            raise SchemaError(
                f"{self!r} returned {type(answer).__name__}", hint="return a RecordBatch or a dict of columns"
            )
        fields = self.output.fields
        if set(answer) != set(fields):
            raise SchemaError(
                f"{self!r} returned the columns {', '.join(map(str, answer))}", hint=f"return {', '.join(fields)}"
            )
        columns = [self._column(field, answer[field.name]) for field in self.output.schema]
        if any(len(column) != count for column in columns):
            raise SchemaError(f"{self!r} returned {[len(c) for c in columns]} values for {count} records")
        return pa.RecordBatch.from_arrays(columns, schema=self.output.schema)

    def _column(self, field: pa.Field, values: Any) -> pa.Array:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if not isinstance(values, pa.Array):
            values = pa.array(values)
        if values.type == field.type:
            return values
        naive = pa.types.is_timestamp(values.type) and values.type.tz is None
        try:
            if naive or pa.types.is_string(field.type) or pa.types.is_string(values.type):
                raise pa.ArrowNotImplementedError
            return values.cast(field.type)
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(
                f"{self!r} returned {values.type} for {field.name!r}", hint=f"return {field.type}"
            ) from error


class FlatMap(Map):
    """Makes any number of records of each record."""

    word = "flat_map"

    def _one(self, record: Any, at: Instant) -> Any:
        found = [self._admitted(made, at) for made in islice(self.function(record), CALL_RECORDS_MAX + 1)]
        if len(found) > CALL_RECORDS_MAX:
            raise RefusedValueError(f"{self!r} makes more than {CALL_RECORDS_MAX:,} records of one")
        return found

    def _gathered(self, records: Records, values: list[Any], rows: list[int]) -> FunctionOutput:
        counts = np.array([len(made) for made in values], np.int64)
        parents = np.repeat(np.array(rows, np.int64), counts)
        part = self._made(records, [pair for made in values for pair in made], parents)
        part.filtered, part.added = _none_and_more(counts)
        return part

    def _many(self, records: Records) -> tuple[FunctionOutput, Mapping[int, BaseException]]:
        answer = self.function(records.batch())
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise SchemaError(
                f"{self!r} returned {type(answer).__name__}",
                hint="return (columns, rows): rows has for each new row the row of its original",
            )
        columns, rows = answer
        parents = np.asarray(rows)
        if parents.dtype.kind not in "iu" and len(parents):
            raise SchemaError(f"{self!r} returned rows of {parents.dtype}", hint="return whole numbers")
        parents = parents.astype(np.int64)
        if len(parents) and (parents[0] < 0 or parents[-1] >= len(records) or (np.diff(parents) < 0).any()):
            raise SchemaError(
                f"{self!r} returned row indexes that are not ascending, or not from 0 to {len(records) - 1}",
                hint="count rows from 0 and return them in ascending order",
            )
        part, refused = self._taken(records, columns, parents)
        counts = np.bincount(parents, minlength=len(records))
        part.filtered, part.added = _none_and_more(np.delete(counts, list(refused)))
        return part, refused


def _none_and_more(counts: Rows) -> tuple[int, int]:
    """Return how many records have no output, and how many outputs there are beyond one each; `counts` is by record."""
    return int(np.count_nonzero(counts == 0)), int(np.maximum(counts - 1, 0).sum())
