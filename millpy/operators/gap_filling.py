"""Gap filling: of each key, one record for each step of a grid, made of records at any times.

A grid point is a multiple of `every`, counted from the epoch plus `offset`. Its record has the values as of that point:

    the step (point - every, point] has a record    the last one's values; with "linear", those of the point
    it has none: the step is part of a gap          "previous": the values of the last record before
                                                    "linear": values between the records on both sides
                                                    "null": None

Of records at one time, the last one's values are those as of that time; with "linear", the points before go towards
the first one's. A gap longer than `limit` is filled up to `limit` after its last record, with "linear" not at all; the
next record begins anew. So one gap gives a bounded number of records, however long it is.

"previous" and "null" emit a point once the watermark has passed it. "linear" waits for the next record, and holds the
low watermark meanwhile, by at most `limit`. Records come in event-time order (`event_time_order.py`).

    record   close the segment of the grid between the last record and this one -> emit it, or queue it if it is long
    timer    emit up to POINTS_A_CALL points: of queued segments, then of what follows the last record

The engine bounds the number of timers that fire in a turn, and thereby what a turn emits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from millpy.computation import Computation, Context, MapCell, Value
from millpy.errors import GraphError, RefusedValueError
from millpy.model.record import RecordType, column_name, getter, without_none
from millpy.model.time import YEARS_HI, Instant, check_length, microseconds, to_datetime
from millpy.model.timer import Timer
from millpy.operators.keyed_output import key_values, output_type

Method = Literal["previous", "linear", "null"]
METHODS = ("previous", "linear", "null")
POINTS_MAX = 100_000
"""Maximum of grid points within `limit`."""
POINTS_A_CALL = 20
"""Maximum of grid points that one timer emits."""
POINTS_AT_ONCE = 10
"""A segment of at most this many points is emitted with the record that closes it."""
SEGMENTS_MAX = 1_000
"""Maximum of segments of one key that wait to be emitted."""
_TIMER = "grid"
_LAST = YEARS_HI - 1
"""The last time that a timer can wait for."""


class GapFilling(Computation):
    """Emits one record for each step of a grid.

    Args:
        record_type: the type of the records.
        fields: the fields whose values are filled in.
        key: the fields of the key, and their types.
        every: the length of a step.
        limit: how long after its last record a gap is filled.
        method: how.
        offset: where the grid begins, from the epoch.

    Raises:
        GraphError: a parameter is out of bounds, or does not fit the fields.
        SchemaError: there is no such field.
    """

    immediate = True

    def __init__(
        self,
        record_type: RecordType,
        fields: Sequence[str],
        key: Mapping[str, type],
        *,
        every: timedelta,
        limit: timedelta,
        method: Method = "previous",
        offset: timedelta = timedelta(0),
    ) -> None:
        durations = isinstance(every, timedelta) and isinstance(limit, timedelta)
        if not durations or every <= timedelta(0) or limit < every:
            raise GraphError(
                f"every={every!r}, limit={limit!r}: a gap is at least one step long", hint="use every=minutes(1)"
            )
        check_length("limit", limit)
        if limit // every > POINTS_MAX:
            raise GraphError(
                f"limit={limit!r} is {limit // every:,} steps of every={every!r}, of at most {POINTS_MAX:,}",
                hint="choose a shorter limit or longer steps",
            )
        if not isinstance(offset, timedelta) or not timedelta(0) <= offset < every:
            raise GraphError(f"offset={offset!r} of fill_gaps must be from zero to every={every!r}", hint="seconds(30)")
        if method not in METHODS:
            raise GraphError(f"unknown method={method!r} of fill_gaps", hint='use "previous", "linear" or "null"')
        if not fields:
            raise GraphError("fill_gaps needs the fields whose values it fills in", hint='for example "temperature"')
        self._kinds = [without_none(record_type.field_type(field))[0] for field in fields]
        for field, kind in zip(fields, self._kinds, strict=True):
            if kind not in (int, float) and (method == "linear" or kind not in (str, bool, datetime)):
                raise GraphError(
                    f"fill_gaps cannot fill in field {field!r} by method={method!r}: {kind!r}",
                    hint='use numbers; with "previous" and "null" also text, bools and datetimes',
                )
        self.fields, self.every, self.limit, self.method, self.offset = tuple(fields), every, limit, method, offset
        self._read = [getter(field) for field in fields]
        self._every_us, self._limit_us = microseconds(every), microseconds(limit)
        self._offset_us = microseconds(offset)
        linear = method == "linear"
        columns: list[tuple[str, Any]] = [
            (column_name(field), (float if linear else kind) | None)
            for field, kind in zip(fields, self._kinds, strict=True)
        ]
        self.output = output_type("GridRecord", key, [("at", datetime), *columns, ("filled", bool)])
        values: Any = tuple.__class_getitem__(tuple(kind | None for kind in self._kinds))
        # The last record's time and values, the first point that is neither emitted nor queued, and the numbers of the
        # queued segments.
        self._progress: Callable[..., Any] = msgspec.defstruct(
            "GridProgress", [("at", int), ("next", int), ("values", values), ("first", int, 0), ("end", int, 0)]
        )
        # The points from `next` to `until` behind the record at `at`; with "linear", before the one at `to`.
        self._segment: Callable[..., Any] = msgspec.defstruct(
            "GridSegment",
            [("next", int), ("until", int), ("at", int), ("values", values), ("to", int), ("to_values", values)],
            array_like=True,
        )
        self.progress: Value[Any] = Value(self._progress)
        self.segments: MapCell[int, Any] = MapCell(int, self._segment)

    def parameters(self) -> Mapping[str, Any]:
        """Return the grid, and how it is filled."""
        return {
            "fields": list(self.fields),
            "every": self.every,
            "limit": self.limit,
            "method": self.method,
            "offset": self.offset,
        }

    def process_record(self, context: Context, record: Any) -> None:
        """Close the segment before the record, and begin the next one."""
        at = int(context.event_time_us)
        values = tuple(read(record) for read in self._read)
        progress = context[self.progress]
        if progress is None:
            context[self.progress] = self._progress(at, self._first_point(at), values)
        elif at == progress.at:
            progress.values = values
            return
        else:
            self._close(context, progress, at, values)
            progress.at, progress.values = at, values
            progress.next = max(progress.next, self._first_point(at))
        self._set_timer(context)

    def process_timer(self, context: Context, timer: Timer) -> None:
        """Emit the next points that are due."""
        progress = context[self.progress]
        if progress is None:
            return
        left = POINTS_A_CALL
        while left and progress.first < progress.end:
            segment = context[self.segments][progress.first]
            left -= self._emit(context, segment, left)
            if segment.next > segment.until:
                del context[self.segments][progress.first]
                progress.first += 1
        if left and progress.first == progress.end:
            self._emit_tail(context, progress, left)
        self._set_timer(context)

    # Segments.

    def _first_point(self, at: int) -> int:
        """Return the first grid point that is not before a time."""
        return -((self._offset_us - at) // self._every_us) * self._every_us + self._offset_us

    def _filled_until(self, progress: Any) -> int:
        """Return the time up to which the gap after the last record is filled."""
        return min(int(progress.at) + self._limit_us, int(_LAST))

    def _close(self, context: Context, progress: Any, at: int, values: Any) -> None:
        """Emit the points from the last record up to the next one, or queue them."""
        until = min(at - 1, self._filled_until(progress))
        if self.method == "linear" and at - progress.at > self._limit_us:
            until = progress.at  # a gap that is too long: only the point at the record itself
        if progress.next > until:
            return
        segment = self._segment(progress.next, until, progress.at, progress.values, at, values)
        points = (until - progress.next) // self._every_us + 1
        if points <= POINTS_AT_ONCE and progress.first == progress.end:
            self._emit(context, segment, points)
            return
        if progress.end - progress.first >= SEGMENTS_MAX:
            raise RefusedValueError(f"{SEGMENTS_MAX:,} gaps of this key wait to be filled")
        context[self.segments][progress.end] = segment
        progress.end += 1

    def _emit_tail(self, context: Context, progress: Any, points_max: int) -> None:
        """Emit what follows the last record, as far as the watermark has come; forget the key after `limit`."""
        passed = int(context.input_watermark_us)
        over = self._filled_until(progress)
        until = min(passed - 1, over)
        if self.method == "linear":
            until = progress.at if passed > over else progress.at - 1
        if progress.next <= until:
            segment = self._segment(progress.next, until, progress.at, progress.values, progress.at, progress.values)
            self._emit(context, segment, points_max)
            progress.next = segment.next
        if passed > over and progress.next > until:
            del context[self.progress]

    def _emit(self, context: Context, segment: Any, points_max: int) -> int:
        """Emit the first points of a segment; return their number."""
        made, key = 0, key_values(context.key)
        while made < points_max and segment.next <= segment.until:
            point = segment.next
            filled = segment.at <= point - self._every_us
            values = self._values_at(segment, point, filled)
            context.produce(self.output(*key, to_datetime(Instant(point)), *values, filled), at=point)
            segment.next += self._every_us
            made += 1
        return made

    def _values_at(self, segment: Any, point: int, filled: bool) -> list[Any]:
        if filled and self.method == "null":
            return [None] * len(self._kinds)
        values = list(segment.values)
        if self.method != "linear":
            return values
        if point == segment.at:
            return [None if value is None else float(value) for value in values]
        part = (point - segment.at) / (segment.to - segment.at)
        return [
            None if start is None or end is None else start * (1.0 - part) + end * part
            for start, end in zip(values, segment.to_values, strict=True)
        ]

    # The timer.

    def _set_timer(self, context: Context) -> None:
        """Set the timer for the next point: it holds the low watermark there until the point is emitted."""
        progress = context[self.progress]
        if progress is None:
            return
        if progress.first < progress.end:
            point = context[self.segments][progress.first].next
            due = point
        else:
            over = self._filled_until(progress)
            point, due = progress.next, progress.next
            if self.method == "linear" or point > over:
                due = over
        due = min(due + 1, int(YEARS_HI))
        self._arm(context, due, min(point, due))

    @staticmethod
    def _arm(context: Context, due: int, point: int) -> None:
        timer = context.timer(_TIMER)
        if timer is None or (timer.at_us, timer.event_time_us) != (due, point):
            context.set_timer(_TIMER, at=due, event_time=point)
