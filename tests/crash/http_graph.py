"""Readings over HTTP: two source partitions, ids from the Idempotency-Key of each request."""

from __future__ import annotations

import os

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Http, Sum, hours, seconds


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int
    request: str = ""


graph = Graph("posted")
readings = graph.inject(
    "readings",
    Http("/readings", partitions=2, key_field="request", url=os.environ["HTTP_URL"]),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=hours(1)),
    dedupe=Dedupe("request", within=hours(1)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), total=Sum("value"))
    .to_table("per_device_10s")
)
