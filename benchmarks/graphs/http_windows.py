"""Readings over HTTP through windows into a table, as in W1 otherwise; dedupe ids on, as clients may send again."""

import os

import msgspec

from millpy import Count, Dedupe, EventTime, FixedWindows, Graph, Http, Max, Mean, Min, minutes, seconds


class Reading(msgspec.Struct):
    device: str
    event_ms: int
    temperature: float
    humidity: float
    seq: int


graph = Graph("http")
readings = graph.inject(
    "readings",
    Http("/readings", url=os.environ["BENCH_URL"]),
    schema=Reading,
    event_time=EventTime("event_ms", unit="ms", max_disorder=minutes(5)),  # connections overtake each other
    dedupe=Dedupe("device", "seq", within=minutes(10)),
)
(
    readings.key_by("device")
    .window(FixedWindows(seconds(10)))
    .aggregate(n=Count(), mean=Mean("temperature"), low=Min("temperature"), high=Max("temperature"))
    .to_table("temperature_10s")
)
