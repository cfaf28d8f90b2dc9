"""Changes: of each key, the records whose value differs enough from that of the last record that has passed.

The first record of a key passes. A later one passes if its value differs from the last one that has passed by more than
`by`, or by more than `by_ratio` times that value, or if that one is `max_silence` or longer before it. Records come in
event-time order (`event_time_order.py`), so the result does not depend on how they were delayed. One with NaN or an
infinity cannot be stored, and becomes a dead letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.errors import GraphError
from millpy.model.record import RecordType, getter, without_none
from millpy.model.time import check_positive, microseconds

COMPARABLE = (int, float, str, bool)


class Changes(Computation):
    """Passes the records that differ from the last one that has passed.

    Args:
        record_type: the type of the records.
        field: the field that is compared.
        by: the difference that a record must exceed; 0 for any change.
        by_ratio: the same, as a part of the last value.
        max_silence: the time after which a record passes in any case.

    Raises:
        GraphError: a parameter does not fit the field.
        SchemaError: there is no such field.
    """

    immediate = True

    def __init__(
        self,
        record_type: RecordType,
        field: str,
        *,
        by: float = 0,
        by_ratio: float | None = None,
        max_silence: timedelta | None = None,
    ) -> None:
        annotation = record_type.field_type(field)
        kind, _ = without_none(annotation)
        if kind not in COMPARABLE:
            raise GraphError(f"changes cannot compare field {field!r}: {kind!r}", hint="use a number, text or bool")
        numeric = kind in (int, float)
        if (by or by_ratio is not None) and not numeric:
            raise GraphError(
                f"changes cannot measure by how much field {field!r} differs: it is no number",
                hint="omit by= and by_ratio=: any change passes",
            )
        if not (_is_amount(by) and (by_ratio is None or _is_amount(by_ratio))):
            raise GraphError(
                f"by={by!r}, by_ratio={by_ratio!r} of changes: use finite numbers that are not negative",
                hint="for example by=0.5, or by_ratio=0.05",
            )
        if by and by_ratio is not None:
            raise GraphError("changes take by= or by_ratio=, not both", hint="by_ratio=0.05 is 5 % of the last value")
        if max_silence is not None:
            check_positive("max_silence", max_silence, "for example max_silence=hours(1)")
        self.field, self.by, self.by_ratio, self.max_silence = field, by, by_ratio, max_silence
        self._read = getter(field)
        self._measures = numeric
        self._silence_us = None if max_silence is None else microseconds(max_silence)
        passed = msgspec.defstruct("Passed", [("at", int), ("value", kind | None)])
        self._passed: Callable[[int, Any], Any] = passed
        self.last: Value[Any] = Value(passed)

    def parameters(self) -> Mapping[str, Any]:
        """Return the field. What is a change may be another from the next record on."""
        return {"field": self.field}

    def process_record(self, context: Context, record: Any) -> None:
        """Pass the record if it differs."""
        last, value, at = context[self.last], self._read(record), context.event_time_us
        if last is not None:
            silent = self._silence_us is not None and at - last.at >= self._silence_us
            if not silent and not self.differs(last.value, value):
                return
        context[self.last] = self._passed(at, value)
        context.produce(record)

    def differs(self, last: Any, value: Any) -> bool:
        """Tell whether a value differs enough from the last one; None differs from every value."""
        if last is None or value is None or not self._measures:
            return bool(last != value)
        bound = self.by if self.by_ratio is None else self.by_ratio * abs(last)
        return bool(abs(value - last) > bound)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
