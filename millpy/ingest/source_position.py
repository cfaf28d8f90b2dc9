"""What is stored of a source partition: its position, and where its watermark is from."""

from __future__ import annotations

import msgspec

from millpy.model.time import INSTANT_MIN

NOWHERE = msgspec.Raw(b"null")


class SourcePosition(msgspec.Struct, kw_only=True):
    """The stored state of a source partition: its position, and the origin of its watermark for operators.

    Attributes:
        position: the source's position in its own format; null if the broker keeps it.
        promised: what the watermark would be by `max_disorder` alone; the same unless a percentile is set.
        max_event_time: the largest event time, at most that of arrival: it determines the watermark.
        arrived_at: wall time of the last take.
        unsure_us: uncertainty of `arrived_at`: the true time may have been later by this much. It widens the tolerance
            for records from the future.
        newest_event_time: the largest event time of an accepted record.
        ended_at: the watermark before the end; INSTANT_MIN before that.
        dedupe_shift_us: offset from the time of arrival to the dedupe clock, for a source that names no clock, so that
            a step of the machine's clock neither forgets ids nor keeps them.
    """

    position: msgspec.Raw = NOWHERE
    watermark: int = INSTANT_MIN
    promised: int = INSTANT_MIN
    max_event_time: int = INSTANT_MIN
    arrived_at: int = INSTANT_MIN
    unsure_us: int = 0
    dedupe_shift_us: int = 0
    finished: bool = False
    newest_event_time: int = INSTANT_MIN
    ended_at: int = INSTANT_MIN
