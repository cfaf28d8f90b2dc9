"""Hourly bills of electricity meters, and the total of each day; readings that come late correct both.

An hour is billed when the watermark has passed it. A reading that is up to a day late makes a new bill of its hour:
the old one is *retracted*, so the day subtracts it and adds the new one, in the same commit. By night the price is
lower: the bill of an hour goes through `priced`, and so does its retraction.

    millpy run examples/billing.py
    millpy sql "SELECT customer, window_start::date AS day, hours, cents FROM billing.days ORDER BY 1, 2"
"""

from datetime import datetime
from pathlib import Path

import msgspec

from millpy import Accumulation, Count, Dedupe, EventTime, File, FixedWindows, Graph, Sum, days, hours, minutes


class Reading(msgspec.Struct):
    customer: str
    at: datetime
    watt_hours: int
    id: str


class Bill(msgspec.Struct):
    customer: str
    cents: int


DAY_PRICE, NIGHT_PRICE = 32, 21
"""Cents for a kilowatt-hour, from 06:00 to 22:00 UTC and otherwise."""

graph = Graph("billing")
readings = graph.inject(
    "readings",
    File(Path(__file__).parent / "data/meters.ndjson"),
    schema=Reading,
    event_time=EventTime("at", max_disorder=minutes(5)),
    dedupe=Dedupe("id", within=days(2)),
)
hourly = (
    readings.key_by("customer")
    .window(FixedWindows(hours(1)), allowed_lateness=days(1), accumulation=Accumulation.RETRACTING)
    .aggregate(readings=Count(), watt_hours=Sum("watt_hours"))
    .to_table("hours")
)


def priced(hour: msgspec.Struct) -> Bill:
    """Return the bill of an hour, in whole cents."""
    price = DAY_PRICE if 6 <= hour.window_start.hour < 22 else NIGHT_PRICE
    return Bill(hour.customer, round(hour.watt_hours * price / 1000))


(
    hourly.map(priced, Bill)
    .key_by("customer")
    .window(FixedWindows(days(1)), allowed_lateness=days(1))
    .aggregate(hours=Count(), cents=Sum("cents"))
    .to_table("days")
)
