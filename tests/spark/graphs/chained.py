"""Windows over windows: two stages, one after the other."""

from datetime import timedelta

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, Sum


class Note(msgspec.Struct):
    device: str
    at: int
    value: float


def us(number):
    return timedelta(microseconds=number)


graph = Graph("chained")
at = EventTime("at", unit="us", max_disorder=us(5))
notes = graph.inject("notes", Mqtt("notes/#", host="nowhere"), schema=Note, event_time=at).key_by("device")
short = notes.window(FixedWindows(us(16)), intervals=2, name="short").aggregate(n=Count(), total=Sum("value"))
short.to_table("short")
short.key_by("device").window(FixedWindows(us(160)), intervals=1, name="long").aggregate(total=Sum("n")).to_table(
    "long"
)
