"""What `make compose-test` runs: windows of 10 s per device, and an hour for whatever was published again."""

from __future__ import annotations

from datetime import datetime

import msgspec

from millpy import AdvanceWithClock, Count, Dedupe, EventTime, FixedWindows, Graph, Max, Mqtt, Sum, hours, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: int
    id: int


graph = Graph("plant")
(
    graph.inject(
        "readings",
        Mqtt("sensors/+/reading"),
        schema=Reading,
        event_time=EventTime("at", max_disorder=seconds(2)),
        dedupe=Dedupe("id", within=hours(1)),
        idle=AdvanceWithClock(after=seconds(5)),
    )
    .key_by("device")
    .window(FixedWindows(seconds(10)), allowed_lateness=hours(1))
    .aggregate(n=Count(), total=Sum("value"), high=Max("value"))
    .to_table("per_device")
)
