"""Readings over HTTP: two source partitions, ids from each request (Idempotency-Key) or from each record."""

from __future__ import annotations

import os

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Http, Sum, hours, seconds


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int
    id: str = ""
    request: str = ""


of_request = os.environ["HTTP_IDS"] == "request"
graph = Graph("posted")
readings = graph.inject(
    "readings",
    Http("/readings", partitions=2, key_field="request" if of_request else None, url=os.environ["HTTP_URL"]),
    schema=Reading,
    event_time=EventTime("at", unit="s", max_disorder=hours(1)),
    dedupe=Dedupe("request" if of_request else "id", within=hours(1)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), total=Sum("value"))
    .to_table("per_device_10s")
)
