"""Calendar windows begin where PostgreSQL's `date_trunc` truncates to, in zones that it treats alike."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import psycopg
import pytest

from millpy.model.time import instant
from millpy.windowing.calendar_windows import CalendarAssigner, CalendarWindows

TRUNCATED = """
SELECT (extract(epoch FROM date_trunc(%(unit)s, at, %(zone)s)) * 1000000)::bigint
  FROM generate_series(%(first)s::timestamptz, %(last)s::timestamptz, interval '5 hours 17 minutes') AS series (at)
"""
SERIES = (5 * 60 + 17) * 60_000_000
FIRST, LAST = datetime(1996, 1, 1, tzinfo=UTC), datetime(2020, 1, 1, tzinfo=UTC)


# Where the clock repeats or skips midnight the two differ on purpose: PostgreSQL takes the second of two.
@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "UTC"])
@pytest.mark.parametrize("unit", ["day", "week", "month", "quarter", "year"])
def test_windows_begin_where_postgres_truncates_to(database_url: str, unit: Any, zone: str) -> None:
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(TRUNCATED, {"unit": unit, "zone": zone, "first": FIRST, "last": LAST}).fetchall()
    times = np.arange(instant(FIRST), instant(LAST) + 1, SERIES, dtype=np.int64)

    starts, _ = CalendarAssigner(CalendarWindows(unit, zone=zone)).assign(times)

    assert len(rows) == len(times) > 30_000
    assert starts.tolist() == [start for (start,) in rows]
