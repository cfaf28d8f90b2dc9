"""Windows and records over days of event time, in tables that keep two hours of them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millpy import Count, EventTime, File, Graph, SessionWindows, Sum, hours, minutes

GAP_MIN, RETENTION_H = 20, 2


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


graph = Graph("kept")
readings = graph.inject(
    "readings",
    File(str(Path(__file__).parent / "kept.ndjson")),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=minutes(30)),
)
windowed = readings.key_by("device").window(SessionWindows(minutes(GAP_MIN)), allowed_lateness=hours(1), intervals=2)
sums = windowed.aggregate(n=Count(), total=Sum("value"))
sums.to_table("sums", history=True, retention=hours(RETENTION_H))
unique = readings.deduplicate(["device", "at", "value"], minutes(60), name="unique", intervals=2)
unique.to_table("raw", retention=hours(RETENTION_H))
