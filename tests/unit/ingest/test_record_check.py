"""The check of a batch before it is taken says what the intake will say."""

from __future__ import annotations

import msgspec
import pytest

from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import RejectedRow, SourceBatch
from millpy.ingest.record_check import record_check
from millpy.ingest.settings import Dedupe, EventTime
from millpy.limits import Limits
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant, seconds

S = 1_000_000
NOW = Instant(1_700_000_000 * S)
LIMITS = Limits(record_bytes_max=100)


class Reading(msgspec.Struct):
    device: str
    at: int
    sent: int | None = NOW // S


RECORD_TYPE = RecordType(Reading)
BY_FIELD = EventTime("at", unit="s", max_disorder=seconds(10))
TOLERATED_S = BY_FIELD.future_tolerance_us // S


def reading(device: str = "a", after_s: int = 0) -> bytes:
    return msgspec.json.encode(Reading(device, NOW // S + after_s))


def rows_found(
    event_time: EventTime, batch: SourceBatch, clock: ClockReading, dedupe: Dedupe | None = None
) -> tuple[list[int], list[int]]:
    """Return the rows that the check rejects, and those that become dead letters; the reasons must be the same."""
    check = record_check(RECORD_TYPE, event_time, dedupe, (), LIMITS, lambda: clock)
    settings = IntakeSettings(stream="s", record_type=RECORD_TYPE, event_time=event_time, dedupe=dedupe, limits=LIMITS)
    result = Intake(settings, StoredInterval(1, 1)).step(batch, clock=clock, quiet=False)
    rejected, letters = check(batch), result.dead_letters
    assert [(row.reason, row.detail) for row in rejected] == [(letter.reason, letter.detail) for letter in letters]
    return [row.row for row in rejected], [int(letter.position) for letter in letters]


@pytest.mark.parametrize("event_time", [BY_FIELD, EventTime.arrival()], ids=["field", "arrival"])
def test_rows_are_in_order_whoever_rejects_them(event_time: EventTime) -> None:
    payloads = [b"[" * 200, reading(), reading("x" * 200), b"{}", reading()]
    batch = SourceBatch("json", NOW, payloads=payloads, refused=[RejectedRow(0, "undecodable", "not an object")])

    assert rows_found(event_time, batch, ClockReading.certain(NOW)) == ([0, 2, 3], [0, 2, 3])


def test_columns_are_in_order_too() -> None:
    payloads = [b"[", *(reading() for _ in range(500)), reading("x" * 200)]
    batch = SourceBatch("json", NOW, payloads=payloads, refused=[RejectedRow(0, "undecodable", "not an object")])

    assert rows_found(EventTime.arrival(), batch, ClockReading.certain(NOW)) == ([0, 501], [0, 501])


def test_future_begins_later_while_the_clock_is_in_doubt() -> None:
    payloads = [reading(after_s=TOLERATED_S + after) for after in (0, 60, 61)]
    batch = SourceBatch("json", NOW, payloads=payloads)
    in_doubt = ClockReading(NOW, NOW, Instant(NOW + 60 * S))

    assert rows_found(BY_FIELD, batch, ClockReading.certain(NOW)) == ([1, 2], [1, 2])
    assert rows_found(BY_FIELD, batch, in_doubt) == ([2], [2])


def test_time_of_dedupe_ids_is_checked_as_well() -> None:
    far = NOW // S + TOLERATED_S + 1
    sent = [Reading("a", NOW // S, None), Reading("b", far, far), Reading("c", far), Reading("d", NOW // S)]
    batch = SourceBatch("json", NOW, payloads=[msgspec.json.encode(reading) for reading in sent])
    dedupe = Dedupe("device", within=seconds(60), time="sent", unit="s")

    assert rows_found(BY_FIELD, batch, ClockReading.certain(NOW), dedupe) == ([0, 1, 2], [0, 1, 2])
