"""Texts of times and the instants that they mean, read one by one and as a column."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pyarrow as pa
import pytest

from millpy.errors import GraphError
from millpy.ingest.intake import Intake, IntakeResult, IntakeSettings
from millpy.ingest.local_times import TimeFormatError, TimeReader
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.settings import EventTime
from millpy.model.checkpoint import Kind
from millpy.model.identity_text import identity_text
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, Instant, instant, seconds


class Reading(msgspec.Struct):
    at: datetime
    level: float = 0.0


BERLIN = "Europe/Berlin"
MEANINGS = [
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.2026 08:00:00", "2026-11-26T07:00:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "6.7.2026 8:05:09", "2026-07-06T06:05:09"),
    ("%d.%m.%Y %H:%M:%S,%f", BERLIN, "26.11.2026 08:00:00,5", "2026-11-26T07:00:00.5"),
    ("%d.%m.%Y %H:%M:%S,%f", BERLIN, "26.11.2026 08:00:00,1234565", "2026-11-26T07:00:00.123457"),
    ("%d.%m.%Y %H:%M:%S,%f", BERLIN, "31.12.2026 23:59:59,9999995", "2026-12-31T23:00:00"),
    ("%m/%d/%y %I:%M %p", "UTC", "11/26/26 12:30 AM", "2026-11-26T00:30:00"),
    ("%m/%d/%y %I:%M %p", "UTC", "11/26/69 12:30 pm", "1969-11-26T12:30:00"),
    ("%d-%b-%Y %H:%M", "UTC", "26-nov-2026 08:00", "2026-11-26T08:00:00"),
    ("%Y%m%d%H%M%S", "UTC", "20261126080000", "2026-11-26T08:00:00"),
    ("%F %T%z", None, "2026-11-26 08:00:00+0530", "2026-11-26T02:30:00"),
    ("%F %T%z", None, "2026-11-26 08:00:00-05", "2026-11-26T13:00:00"),
    ("%F %T%z", None, "2026-11-26 08:00:00Z", "2026-11-26T08:00:00"),
    (None, BERLIN, "2026-11-26T08:00:00", "2026-11-26T07:00:00"),
    (None, BERLIN, "2026-11-26 08:00:00.25", "2026-11-26T07:00:00.25"),
    (None, BERLIN, "2026-11-26 08:00:00+00", "2026-11-26T08:00:00"),
    (None, BERLIN, "2026-11-26 08:00:00+05:30", "2026-11-26T02:30:00"),
    # The hour from 2 to 3 comes twice; the first is meant.
    (None, BERLIN, "2026-10-25T02:30:00", "2026-10-25T00:30:00"),
    # The hour from 2 to 3 is skipped; 02:30 is half an hour after the change.
    (None, BERLIN, "2026-03-29T02:30:00", "2026-03-29T01:30:00"),
    (None, "Australia/Lord_Howe", "2026-04-05T01:45:00", "2026-04-04T14:45:00"),
    (None, BERLIN, "9999-12-31T23:59:59", "9999-12-31T22:59:59"),
]
NO_TIMES = [
    ("%d.%m.%Y %H:%M:%S", BERLIN, "2026-11-26 08:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.2026 08:00:00 "),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.2026 08:00:00\n"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "31.11.2026 08:00:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.2026 24:00:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.2026 08:00:60"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "26.11.0000 08:00:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "٢٦.11.2026 08:00:00"),
    ("%d.%m.%Y %H:%M:%S", BERLIN, "01.01.0001 00:00:00"),
    ("%d.%m.%Y %H:%M:%S", "America/New_York", "31.12.9999 23:59:59"),
    ("%m/%d/%y %I:%M %p", "UTC", "11/26/26 13:30 PM"),
    ("%m/%d/%y %I:%M %p", "UTC", "11/26/26 00:30 AM"),
    ("%d-%b-%Y %H:%M", "UTC", "26-nox-2026 08:00"),
    ("%Y%m%d%H%M%S", "UTC", "2026112608000"),
    ("%F %T%z", None, "2026-11-26 08:00:00"),
    ("%F %T%z", None, "2026-11-26 08:00:00+24"),
    (None, BERLIN, "2026-11-26"),
    (None, BERLIN, ""),
]


@pytest.mark.parametrize(("format", "zone", "text", "utc"), MEANINGS)
def test_text_means_an_instant(format: str | None, zone: str | None, text: str, utc: str) -> None:
    reader = TimeReader(format, zone)
    expected = datetime.fromisoformat(f"{utc}+00:00")

    assert reader.read(text) == expected
    assert reader.column(pa.array([text, None, text])).to_pylist() == [expected, None, expected]


@pytest.mark.parametrize("text", ["2026-11-26T08:00:00", "2026-11-26T07:00:00Z", "2026-11-26 07:00:00+00"])
def test_rfc_3339_is_read_beside_a_format(text: str) -> None:
    found = TimeReader("%d.%m.%Y %H:%M:%S", BERLIN).read(text)

    assert found == datetime.fromisoformat("2026-11-26T07:00:00+00:00")


@pytest.mark.parametrize(("format", "zone", "text"), NO_TIMES)
def test_text_that_is_no_time_is_refused_and_declined_by_columns(
    format: str | None, zone: str | None, text: str
) -> None:
    reader = TimeReader(format, zone)

    with pytest.raises(TimeFormatError):
        reader.read(text)
    assert reader.column(pa.array([text])) is None
    assert (reader.counts.repeated, reader.counts.skipped) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"format": "%d.%m.%Y %H:%M"}, "has no %z"),
        ({"format": "%F %T%z", "zone": "UTC"}, "zone= has no use"),
        ({"format": "%d.%m. %H:%M", "zone": "UTC"}, "has no year"),
        ({"format": "%d.%m.%Y", "zone": "UTC"}, "has no hour"),
        ({"format": "%F %H:%M %H", "zone": "UTC"}, "twice"),
        ({"format": "%F %y %H", "zone": "UTC"}, "twice"),
        ({"format": "%F %I:%M", "zone": "UTC"}, "go together"),
        ({"format": "%F %H %S", "zone": "UTC"}, "gap"),
        ({"format": "%c", "zone": "UTC"}, "unknown directive %c"),
        ({"format": "%F %T%", "zone": "UTC"}, "unknown directive"),
        ({"format": "%F %T" + " " * 100, "zone": "UTC"}, "1 to 100 characters"),
        ({"format": 3, "zone": "UTC"}, "1 to 100 characters"),
        ({"zone": "Europe/Berlim"}, "unknown time zone"),
        ({"zone": "UTC", "unit": "ms"}, "unit= is for numbers"),
    ],
)
def test_wrong_format_or_zone_is_refused_when_the_graph_is_built(arguments: dict[str, object], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        EventTime("at", sorted=True, **arguments)


def test_format_needs_a_datetime_field() -> None:
    with pytest.raises(GraphError, match="type datetime"):
        EventTime("level", zone="UTC", sorted=True).validate(RecordType(Reading))


EVENT_TIME = EventTime("at", zone=BERLIN, max_disorder=seconds(10))


def step(intake: Intake, *texts: str, **how: object) -> IntakeResult:
    now = Instant(instant(datetime.fromisoformat("2027-01-01T00:00:00+00:00")))
    payloads = [b'{"at":"%s"}' % text.encode() for text in texts]
    return intake.step(SourceBatch("json", now, payloads=payloads, **how), clock=ClockReading.certain(now), quiet=False)


def counters(result: IntakeResult) -> dict[str, int]:
    return {e.namespace: int(e.values[0] or b"0") for e in result.delta if e.kind is Kind.COUNTER}


@pytest.mark.parametrize("records", [1, 100])
def test_repeated_and_skipped_times_are_counted_through_a_takeover(records: int) -> None:
    settings = IntakeSettings(stream="r", record_type=RecordType(Reading), event_time=EVENT_TIME)
    first = step(Intake(settings, StoredInterval(1, 1)), *["2026-03-29T02:30:00", "2026-10-25T02:30:00"] * records)

    second = step(
        Intake(settings, StoredInterval(1, 2, entries=first.delta)), "2026-10-25T02:59:59", "2026-10-25T03:00:00"
    )

    found = counters(second)
    assert (found["repeated_times"], found["skipped_times"]) == (records + 1, records)


@pytest.mark.parametrize("records", [1, 100])
def test_text_that_is_no_time_becomes_a_dead_letter_and_counts_nothing_twice(records: int) -> None:
    settings = IntakeSettings(stream="r", record_type=RecordType(Reading), event_time=EVENT_TIME)

    result = step(Intake(settings, StoredInterval(1, 1)), *["2026-10-25T02:30:00"] * records, "25.10.2026 02:30")

    assert [(letter.reason, letter.detail) for letter in result.dead_letters] == [
        ("event_time", "at: '25.10.2026 02:30' is not a time in the format RFC 3339")
    ]
    assert counters(result)["repeated_times"] == records


@pytest.mark.parametrize("records", [1, 100])
def test_timestamps_without_a_zone_in_columns_are_local_times(records: int) -> None:
    settings = IntakeSettings(stream="r", record_type=RecordType(Reading), event_time=EVENT_TIME)
    local = pa.array([datetime(2026, 10, 25, 2, 30)] * records, pa.timestamp("us"))  # noqa: DTZ001
    batch = pa.RecordBatch.from_arrays([local, pa.array([1.0] * records)], names=["at", "level"])
    now = Instant(instant(datetime.fromisoformat("2027-01-01T00:00:00+00:00")))

    result = Intake(settings, StoredInterval(1, 1)).step(
        SourceBatch("columns", now, batch=batch), clock=ClockReading.certain(now), quiet=False
    )

    assert (
        result.records.event_times.tolist() == [instant(datetime.fromisoformat("2026-10-25T00:30:00+00:00"))] * records
    )
    assert counters(result)["repeated_times"] == records


def test_each_form_of_event_time_has_another_identity() -> None:
    forms = [
        EventTime("at", sorted=True),
        EventTime("at", sorted=True, zone="UTC"),
        EventTime("at", sorted=True, zone=BERLIN),
        EventTime("at", sorted=True, zone=BERLIN, format="%F %T"),
        EventTime("at", sorted=True, format="%F %T%z"),
        EventTime.arrival(),
    ]

    described = [msgspec.json.encode(form.identity()) for form in forms]

    assert len(set(described)) == len(forms)
    assert [identity_text(form.identity()) for form in (forms[3], forms[5])] == [
        "EventTime('at', format='%F %T', zone='Europe/Berlin')",
        "EventTime.arrival()",
    ]
