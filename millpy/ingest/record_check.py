"""Which records of a batch a stream will reject, said before they are taken: for a source that can tell its client.

The check decodes as the intake does, so that both agree. What depends on the records before (a sorted source, the
horizon of dedupe ids), and what later steps reject, only the intake and those steps can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.event_times import field_times
from millpy.ingest.protocol import RejectedRow, SourceBatch
from millpy.ingest.rejections import time_problems
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.time import ClockReading, Instant, describe


def record_check(
    record_type: RecordType,
    event_time: EventTime,
    lax: Sequence[str],
    limits: Limits,
    read_clock: Callable[[], ClockReading],
) -> Callable[[SourceBatch], list[RejectedRow]]:
    """Return a function from a batch to the rows that the stream will reject, in order.

    Args:
        record_type: the type of the records.
        event_time: the event time of the stream.
        lax: the fields whose numbers and booleans may be written as text.
        limits: the bounds of a record.
        read_clock: reads the worker's clock.
    """
    decoder = Decoder(
        record_type,
        time_field=event_time.field,
        times=event_time.reader(),
        lax=lax,
        record_bytes_max=limits.record_bytes_max,
    )

    def check(taken: SourceBatch) -> list[RejectedRow]:
        decoded = decoder.decode(taken)
        refused = list(decoded.refused)
        if not event_time.arrives and len(decoded.rows):
            refused += untimely(taken, decoded)
        return sorted(refused, key=attrgetter("row"))

    def untimely(taken: SourceBatch, decoded: DecodeResult) -> Iterator[RejectedRow]:
        clock = read_clock()
        times, timed = field_times(decoded, event_time.field, event_time.unit)
        latest = Instant(taken.arrived_at + clock.latest_us - clock.now_us + event_time.future_tolerance_us)
        explain = time_problems(decoded, event_time.field, event_time.unit)
        for index in np.flatnonzero(~timed | (times > latest)).tolist():
            row = int(decoded.rows[index])
            if timed[index]:
                yield RejectedRow(row, "future", f"{event_time.field} is after {describe(latest)}")
            else:
                yield RejectedRow(row, "event_time", explain(index))

    return check
