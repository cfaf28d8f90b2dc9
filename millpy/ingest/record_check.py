"""Which records of a batch a stream will reject, said before they are taken: for a source that can tell its client.

The check decodes as the intake does, so that both agree. What depends on the records before (a sorted source, the
horizon of dedupe ids), and what later steps reject, only the intake and those steps can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from millpy.ingest.decode import Decoder, DecodeResult
from millpy.ingest.event_times import field_times
from millpy.ingest.protocol import RejectedRow, SourceBatch
from millpy.ingest.rejections import time_problems
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.record import Instants, RecordType
from millpy.model.time import ClockReading, Instant, describe


def record_check(
    record_type: RecordType,
    event_time: EventTime,
    dedupe: Dedupe | None,
    lax: Sequence[str],
    limits: Limits,
    read_clock: Callable[[], ClockReading],
) -> Callable[[SourceBatch], list[RejectedRow]]:
    """Return a function from a batch to the rows that the stream will reject, in order.

    Args:
        record_type: the type of the records.
        event_time: the event time of the stream.
        dedupe: the dedupe ids of the stream; their clock may be a field.
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
        refused = {rejected.row: rejected for rejected in decoded.refused}
        if len(decoded.rows):
            clock = read_clock()
            latest = Instant(taken.arrived_at + clock.latest_us - clock.now_us + event_time.future_tolerance_us)
            if not event_time.arrives:
                explain = time_problems(decoded, event_time.field, event_time.unit)
                judged = field_times(decoded, event_time.field, event_time.unit)
                after = f"{event_time.field} is after {describe(latest)}"
                refused |= untimely(decoded, *judged, latest, ("event_time", explain), after)
            if dedupe is not None and dedupe.time is not None:  # judged before the event time
                judged = field_times(decoded, dedupe.time, dedupe.unit)
                after = f"dedupe time {dedupe.time} is after {describe(latest)}"
                missing = f"dedupe time {dedupe.time} is missing or outside the years 1 to 9999"
                refused |= untimely(decoded, *judged, latest, ("refused", lambda _index: missing), after)
        return sorted(refused.values(), key=attrgetter("row"))

    return check


def untimely(
    decoded: DecodeResult,
    times: Instants,
    timed: npt.NDArray[np.bool_],
    latest: Instant,
    missing: tuple[str, Callable[[int], str]],
    after: str,
) -> dict[int, RejectedRow]:
    """Return the rows without a time, by reason and detail of `missing`, and those later than `latest`."""
    reason, explain = missing
    found = {}
    for index in np.flatnonzero(~timed | (times > latest)).tolist():
        row = int(decoded.rows[index])
        found[row] = RejectedRow(row, *(("future", after) if timed[index] else (reason, explain(index))))
    return found
