"""Times of a format or a zone: columns are read as value by value, by the rule for changes of daylight saving."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.decode import Decoder
from millpy.ingest.local_times import TimeReader
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.model.time import Instant

ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Asia/Kolkata",
    "Africa/Casablanca",
    "Pacific/Chatham",
    "America/St_Johns",
)
FORMATS = (
    "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M:%S,%f", "%Y%m%d%H%M%S", "%m/%d/%y %I:%M %p", "%d-%b-%Y %H:%M:%S.%f", "%FT%R",
)  # fmt: skip
CHANGES = [
    datetime.fromisoformat(text)
    for text in (
        "2026-03-29T02:00", "2026-10-25T02:00", "2026-11-01T01:00", "2026-04-05T01:30", "2011-12-30T00:00",
        "2026-04-05T02:45", "2026-09-27T02:45", "2010-11-07T00:01", "1893-04-01T00:00", "0001-01-01T00:00",
        "9999-12-31T23:00",
    )
]  # fmt: skip


class Reading(msgspec.Struct):
    at: datetime
    n: int = 0


TYPE = RecordType(Reading)


def clamped(change: datetime, minutes: int, us: int) -> datetime:
    try:
        return change + timedelta(minutes=minutes, microseconds=us)
    except OverflowError:
        return change


local_times = st.one_of(
    st.datetimes(),
    st.builds(clamped, st.sampled_from(CHANGES), st.integers(-90, 150), st.integers(0, 999_999)),
)


Judged = tuple[list[int], list[Any], list[tuple[int, str]]]


def judged(decoder: Decoder, format: str, payloads: list[bytes], header: tuple[str, ...]) -> Judged:
    decoded = decoder.decode(SourceBatch(format, Instant(0), payloads=payloads, header=header))
    objects = decoded.objects if decoded.batch is None else TYPE.objects_of(decoded.batch)
    return decoded.rows.tolist(), objects, [(r.row, r.reason) for r in decoded.refused]


@settings(deadline=None)
@given(
    st.lists(local_times, min_size=1, max_size=12),
    st.sampled_from(ZONES),
    st.one_of(st.none(), st.sampled_from(FORMATS)),
    st.sampled_from(("", "x", "5", "Z", "+0530")),
    st.sampled_from(("json", "csv")),
)
def test_columns_are_read_as_value_by_value(
    times: list[datetime], zone: str, format: str | None, damage: str, kind: str
) -> None:
    texts = [at.isoformat() if format is None else f"{at:{format}}".replace("%f", "0") for at in times]
    texts[0] += damage
    rows = [f'{{"at":"{text}","n":1}}' if kind == "json" else f'"{text}",1' for text in texts]
    payloads = [row.encode() for row in rows * (1 + 65 // len(rows))]
    many, few = TimeReader(format, zone), TimeReader(format, zone)

    by_column = judged(Decoder(TYPE, time_field="at", times=many), kind, payloads, ("at", "n"))

    decoder = Decoder(TYPE, time_field="at", times=few)
    rows_kept, objects, refused = [], [], []
    for place in range(0, len(payloads), 10):
        kept, found, turned = judged(decoder, kind, payloads[place : place + 10], ("at", "n"))
        rows_kept += [place + row for row in kept]
        objects += found
        refused += [(place + row, reason) for row, reason in turned]
    assert by_column == (rows_kept, objects, refused)
    assert many.counts == few.counts


@pytest.mark.parametrize(
    ("zone", "day", "counts"),
    [
        ("Europe/Berlin", "2026-03-29", (0, 60)),
        ("Europe/Berlin", "2026-10-25", (60, 0)),
        ("America/Havana", "2026-03-08", (0, 60)),
        ("America/Havana", "2026-11-01", (60, 0)),
        ("Pacific/Chatham", "2026-04-05", (60, 0)),  # at a quarter to four
        ("Pacific/Chatham", "2026-09-27", (0, 60)),
        ("America/St_Johns", "2010-11-06", (59, 0)),  # back to this day, at a minute past midnight
    ],
)
def test_each_minute_of_a_change_counts_once_in_columns(zone: str, day: str, counts: tuple[int, int]) -> None:
    start = datetime.fromisoformat(f"{day}T00:00")
    reader = TimeReader(None, zone)
    payloads = [
        f'{{"at":"{(start + timedelta(minutes=minute)).isoformat()}","n":1}}'.encode() for minute in range(24 * 60)
    ]
    judged(Decoder(TYPE, time_field="at", times=reader), "json", payloads, ())
    assert (reader.counts.repeated, reader.counts.skipped) == counts


@settings(deadline=None)
@given(local_times, st.sampled_from(ZONES))
def test_local_time_means_the_first_instant_that_shows_it(local: datetime, zone: str) -> None:
    reader = TimeReader("%Y-%m-%d %H:%M:%S.%f", zone)
    text = f"{local.year:04}-{local:%m-%d %H:%M:%S.%f}"
    try:
        expected = local.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    except OverflowError:
        with pytest.raises(ValueError, match="outside the years"):
            reader.read(text)
        return

    found = reader.read(text)

    assert found == expected
    shows_it = [
        at
        for fold in (0, 1)
        if (at := local.replace(tzinfo=ZoneInfo(zone), fold=fold).astimezone(UTC))
        and at.astimezone(ZoneInfo(zone)).replace(tzinfo=None, fold=0) == local
    ]
    if shows_it:
        assert found == min(shows_it)
    assert reader.counts.skipped == (not shows_it)
    assert reader.counts.repeated == (len(set(shows_it)) == 2)
