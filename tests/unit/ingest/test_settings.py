from __future__ import annotations

from datetime import datetime

import msgspec
import pytest

from millpy.errors import GraphError, SchemaError
from millpy.ingest.settings import AdvanceWithClock, Dedupe, EventTime, Wait
from millpy.model.record import RecordType
from millpy.model.time import hours, milliseconds, minutes, seconds


class Reading(msgspec.Struct):
    id: str
    at: datetime
    event_ms: int
    note: str | None = None
    arrival_ms: int | None = None
    parts: list[int] = []


TYPE = RecordType(Reading)


@pytest.mark.parametrize(
    "setting",
    [
        EventTime("at", max_disorder=seconds(10)),
        EventTime("event_ms", unit="ms", max_disorder=milliseconds(250)),
        EventTime("at", sorted=True),
        EventTime("at", sorted=True, watermark_by="id"),
        Dedupe("id", within=hours(1)),
        Dedupe("device", "fcnt", within=minutes(10), time="arrival_ms", unit="ms"),
        AdvanceWithClock(after=seconds(30)),
        Wait(),
    ],
)
def test_repr_evaluates_to_an_equal_value(setting: object) -> None:
    assert eval(repr(setting)) == setting


def test_event_time_needs_a_promise_about_order() -> None:
    with pytest.raises(GraphError) as caught:
        EventTime("at")

    assert "max_disorder" in caught.value.hint


def test_number_without_unit_is_refused() -> None:
    with pytest.raises(GraphError, match="without a unit"):
        EventTime("event_ms", sorted=True).validate(TYPE)

    EventTime("event_ms", unit="ms", sorted=True).validate(TYPE)


def test_field_that_is_not_a_time_is_refused() -> None:
    with pytest.raises(SchemaError):
        EventTime("id", sorted=True).validate(TYPE)
    with pytest.raises(GraphError, match="no field"):
        EventTime("time", sorted=True).validate(TYPE)


def test_dedupe_fields_and_clock_must_not_be_optional() -> None:
    with pytest.raises(SchemaError, match="cannot be part of an id"):
        Dedupe("parts", within=hours(1)).validate(TYPE)
    with pytest.raises(SchemaError, match="no field"):
        Dedupe("uuid", within=hours(1)).validate(TYPE)
    with pytest.raises(GraphError, match="number without a unit") as refused:
        Dedupe("id", within=hours(1), time="event_ms").validate(TYPE)
    assert 'time="event_ms", unit="ms"' in refused.value.hint
    with pytest.raises(GraphError, match="cannot be a clock"):
        Dedupe("id", within=hours(1), time="arrival_ms", unit="ms").validate(TYPE)

    Dedupe("id", "note", within=hours(1), time="at").validate(TYPE)
