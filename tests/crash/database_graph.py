"""Readings out of PostgreSQL in windows: injected by transactions, or rows of a table."""

import os

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, InjectedStream, Max, PostgresTable, Sum, seconds


class Reading(msgspec.Struct):
    id: int
    device: str
    at_ms: int
    value: int


graph = Graph("database_crash")
readings = graph.inject(
    "readings",
    InjectedStream("readings") if os.environ["CRASH_INPUT"] == "injected" else PostgresTable("public.readings"),
    schema=Reading,
    event_time=EventTime("at_ms", unit="ms", max_disorder=seconds(5)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)), intervals=2)
    .aggregate(n=Count(), total=Sum("value"), high=Max("value"))
    .to_table("sums")
)
