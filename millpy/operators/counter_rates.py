"""Counter rates: of each key, how fast a counter has risen between successive readings, across resets and wraps.

A counter only rises, unless it begins again. A reading that is less than the one before it means one of two things:

    wrap     the counter has reached `wraps_at` and continued at 0: taken if it then has risen by at most half of
             `wraps_at`, as RFC 2578 has it for Counter32 and Counter64
    reset    the device has restarted and counts from 0: the reading itself is the increase

Readings come in event-time order (`event_time_order.py`). Of readings with one event time the first counts; what the
others have counted is in the increase of the next reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.errors import GraphError
from millpy.model.record import RecordType, getter, without_none
from millpy.model.time import Instant, check_positive, microseconds, to_datetime
from millpy.operators.keyed_output import key_values, output_type


class CounterRates(Computation):
    """Computes the rate of a counter between successive readings.

    Args:
        record_type: the type of the readings.
        field: the counter: a number that is not negative. Readings where it is None are ignored.
        key: the fields of the key, and their types.
        wraps_at: the number at which the counter continues at 0, such as 2**32; None if it does not.
        max_gap: the time between readings beyond which there is no rate.

    Raises:
        GraphError: a parameter does not fit the field.
        SchemaError: there is no such field.
    """

    immediate = True

    def __init__(
        self,
        record_type: RecordType,
        field: str,
        key: Mapping[str, type],
        *,
        wraps_at: int | None = None,
        max_gap: timedelta | None = None,
    ) -> None:
        kind, _ = without_none(record_type.field_type(field))
        if kind not in (int, float):
            raise GraphError(f"field {field!r} cannot be a counter: {kind!r}", hint="use an int or a float")
        if wraps_at is not None and (isinstance(wraps_at, bool) or not isinstance(wraps_at, int) or wraps_at <= 0):
            raise GraphError(f"wraps_at={wraps_at!r} is not a positive int", hint="for example wraps_at=2**32")
        if max_gap is not None:
            check_positive("max_gap", max_gap, "for example max_gap=hours(6)")
        self.field, self.wraps_at, self.max_gap = field, wraps_at, max_gap
        self._read = getter(field)
        self._gap_us = None if max_gap is None else microseconds(max_gap)
        self.output = output_type(
            "Rate",
            key,
            [("since", datetime), ("at", datetime), ("increase", kind), ("per_second", float), ("reset", bool)],
        )
        reading = msgspec.defstruct("CounterReading", [("at", int), ("value", kind)])
        self._reading: Callable[[int, Any], Any] = reading
        self.last: Value[Any] = Value(reading)

    def parameters(self) -> Mapping[str, Any]:
        """Return the field. The other parameters may change from the next reading on."""
        return {"field": self.field}

    def process_record(self, context: Context, record: Any) -> None:
        """Emit the rate since the reading before."""
        value, at, last = self._read(record), context.event_time_us, context[self.last]
        if value is None:
            return
        if not 0 <= value < math.inf or (self.wraps_at is not None and value >= self.wraps_at):
            raise ValueError(f"{self.field} = {value!r} cannot be the reading of this counter")
        if last is not None and at == last.at:
            return
        context[self.last] = self._reading(at, value)
        if last is None or (self._gap_us is not None and at - last.at > self._gap_us):
            return
        increase, reset = self.increase(last.value, value)
        rate = increase * 1_000_000 / (at - last.at)
        since = to_datetime(Instant(last.at))
        context.produce(self.output(*key_values(context.key), since, context.event_time, increase, rate, reset))

    def increase(self, last: Any, value: Any) -> tuple[Any, bool]:
        """Return by how much the counter has risen, and whether it was reset."""
        if value >= last:
            return value - last, False
        if self.wraps_at is not None and 2 * (value + self.wraps_at - last) <= self.wraps_at:
            return value + self.wraps_at - last, False
        return value, True
