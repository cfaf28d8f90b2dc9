"""Devices with wrong clocks, and one that floods, behind a source that learns its disorder bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from millpy.ingest.disorder import BLOCK
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import AdvanceWithClock, EventTime
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant, minutes, seconds

MS, S, MINUTE, YEAR = 1_000, 1_000_000, 60_000_000, 31_536_000_000_000
BEGIN = 1_700_000_000 * S
REMEMBERED = 131_072
PUNCTUAL, WRONG = "punctual", "wrong"


class Reading(msgspec.Struct):
    device: str
    at: int


Sent = tuple[str, int, int]
"""Device, event time and time of arrival."""
EVENT_TIME = EventTime("at", unit="us", max_disorder=minutes(5), percentile=0.99)


class Fed:
    """An intake, and what has become of the records of each device."""

    def __init__(self, event_time: EventTime = EVENT_TIME, **how: Any) -> None:
        settings = IntakeSettings(stream="r", record_type=RecordType(Reading), event_time=event_time, **how)
        self.intake = Intake(settings, StoredInterval(1, 1))
        self.late: dict[str, int] = {}
        self.dead = 0
        self.counted: dict[str, Any] = {}
        self.stored_bytes = 0

    def take(self, records: Sequence[Sent]) -> None:
        for bundle in batches(records):
            arrived = Instant(bundle[-1][2])
            payloads = [b'{"device":"%s","at":%d}' % (device.encode(), at) for device, at, _ in bundle]
            before = self.intake.watermark
            result = self.intake.step(
                SourceBatch("json", arrived, payloads=payloads), clock=ClockReading.certain(arrived), quiet=False
            )
            assert result.watermark >= before  # I5
            assert result.watermark <= arrived
            self.dead += len(result.dead_letters)
            assert result.records.watermarks is not None and result.rows is not None
            behind = result.records.event_times < result.records.watermarks
            for row in result.rows[behind].tolist():
                device = bundle[row][0]
                self.late[device] = self.late.get(device, 0) + 1
            for entries in result.delta:
                if entries.kind is Kind.DISORDER:
                    self.counted = msgspec.json.decode(entries.values[0] or b"")
                    self.stored_bytes = max(self.stored_bytes, sum(len(value or b"") for value in entries.values))

    def idle(self, now_us: int) -> int:
        return self.intake.step(None, clock=ClockReading.certain(Instant(now_us)), quiet=True).watermark


def batches(records: Sequence[Sent]) -> Iterator[Sequence[Sent]]:
    return (records[at : at + 200] for at in range(0, len(records), 200))


def plant(count: int, first: int = 0, delay_ms: tuple[int, int] = (0, 2_000), seed: int = 1) -> list[Sent]:
    """Return a thousand records a second, each with a delay from a range of milliseconds."""
    rng = random.Random(seed)
    arrivals = [BEGIN + k * MS for k in range(first, first + count)]
    return [(PUNCTUAL, arrived - rng.randrange(*delay_ms) * MS, arrived) for arrived in arrivals]


def one_in_a_thousand(records: list[Sent], event_time: Callable[[int], int]) -> list[Sent]:
    """Let a device with a wrong clock send each thousandth record."""
    return [
        (WRONG, event_time(arrived), arrived) if k % 1_000 == 999 else (device, at, arrived)
        for k, (device, at, arrived) in enumerate(records)
    ]


def test_clock_that_is_years_ahead_changes_nothing() -> None:
    fed, without = Fed(), Fed()
    records = one_in_a_thousand(plant(20_000), lambda arrived: arrived + 3 * YEAR)
    fed.take(records)
    without.take([sent for sent in records if sent[0] == PUNCTUAL])

    assert fed.dead == 20
    assert fed.late == without.late
    assert fed.counted == without.counted
    assert fed.intake.watermark == without.intake.watermark


def test_clock_that_is_years_behind_makes_only_its_own_records_late() -> None:
    fed = Fed()
    fed.take(one_in_a_thousand(plant(20_000), lambda arrived: arrived - 3 * YEAR))

    assert fed.counted["bound"] < 2_300 * MS
    assert fed.late[WRONG] == 20
    assert fed.late.get(PUNCTUAL, 0) < 0.01 * 20_000
    assert fed.intake.watermark > BEGIN + 17 * S


def test_clock_that_is_tolerably_fast_makes_no_more_late_than_is_documented() -> None:
    fed = Fed()
    fed.take(plant(20_000, delay_ms=(1_900, 2_000)))
    assert fed.counted["bound"] < 120 * MS
    early = fed.late.get(PUNCTUAL, 0)

    fast = plant(60_000, first=20_000, delay_ms=(1_900, 2_000))
    fed.take(one_in_a_thousand(fast, lambda arrived: arrived + 9 * MINUTE))

    assert WRONG not in fed.late
    assert 1_800 * MS < fed.counted["bound"] < 2_300 * MS
    # Each is now 2 s behind: late until a hundredth of what counts is, and until the watermark has waited for 2 s.
    assert 100 < fed.late[PUNCTUAL] - early <= 0.01 * REMEMBERED + BLOCK + 2_000


def test_device_that_floods_decides_for_the_others() -> None:
    """It can lower the bound, to 0, and raise it, to `max_disorder`: no further."""
    punctual = [(device, at if k % 200 else at - 3 * S, arrived) for k, (device, at, arrived) in enumerate(
        plant(40_000, delay_ms=(0, 1))
    )]  # fmt: skip
    flood = [(PUNCTUAL if k % 200 == 0 else WRONG, at, arrived) for k, (_, at, arrived) in enumerate(punctual)]
    fed, promised = Fed(), Fed(EventTime("at", unit="us", max_disorder=minutes(5)))
    fed.take(flood)
    promised.take(flood)

    assert (fed.counted["bound"], promised.late) == (0, {})
    assert fed.late[PUNCTUAL] == fed.counted["late_by_percentile"] > 150  # each since the bound is learned

    fed.take([(WRONG, arrived - YEAR, arrived) for *_, arrived in plant(40_000, first=40_000)])

    assert fed.counted["bound"] == 5 * MINUTE


def test_clock_closes_windows_by_the_learned_bound() -> None:
    fed = Fed(EventTime("at", unit="us", max_disorder=minutes(5), percentile=0.9), idle=AdvanceWithClock(seconds(10)))
    fed.take(plant(5_000))
    bound, end = fed.counted["bound"], BEGIN + 5 * S
    assert S < bound < 2_300 * MS

    assert fed.idle(end) == fed.idle(end + 9 * S)
    assert fed.idle(end + 20 * S) == end + 10 * S - bound

    # Between the learned watermark and the one that was promised, a record is late by the percentile.
    fed.take([(PUNCTUAL, end, end + 20 * S), (WRONG, end - 291 * S, end + 20 * S)])
    before = fed.counted["late_by_percentile"]
    fed.take([(PUNCTUAL, end, end + 20 * S)])
    assert fed.counted["late_by_percentile"] == before + 1

    # The watermark stays where it is while the clock gives an earlier one, because the bound has grown.
    fed.take([(WRONG, arrived - YEAR, arrived) for *_, arrived in plant(15_000, first=26_000)])
    assert fed.counted["bound"] == 5 * MINUTE
    reached = fed.intake.watermark
    assert fed.idle(end + 40 * S) == fed.idle(end + 60 * S) == reached
    assert fed.idle(end + 1_000 * S) == end + 990 * S - 5 * MINUTE


def test_device_with_every_lag_fills_the_histogram_and_no_more() -> None:
    fed, rng = Fed(), random.Random(3)
    newest = (PUNCTUAL, BEGIN, BEGIN)
    lags = [int(10 ** rng.uniform(0, 15.5)) for _ in range(30_000)]
    fed.take([newest, *((WRONG, BEGIN - min(lag, 1_700_000_000 * S), BEGIN) for lag in lags)])

    assert len(fed.counted["block"]) > 150
    assert 6_000 < fed.stored_bytes < 20_000
