"""Two sources, sessions that merge, windows with later panes, and windows over windows."""

from datetime import timedelta

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, SessionWindows, Sum


class Note(msgspec.Struct):
    device: str
    at: int
    value: float


def us(number):
    return timedelta(microseconds=number)


graph = Graph("union")
at = EventTime("at", unit="us", max_disorder=us(5))
left, right = (graph.inject(n, Mqtt(f"{n}/#", host="nowhere"), schema=Note, event_time=at) for n in ("left", "right"))
notes = left.union(right).key_by("device")
sessions = notes.window(SessionWindows(us(12)), allowed_lateness=us(20), intervals=2, name="sessions")
sessions.aggregate(n=Count(), total=Sum("value")).to_table("sessions")
fixed = notes.window(FixedWindows(us(16)), allowed_lateness=us(20), intervals=2, name="fixed")
fixed.aggregate(n=Count(), total=Sum("value")).to_table("fixed")
exact = notes.window(FixedWindows(us(16)), intervals=2, name="exact").aggregate(n=Count())
exact.key_by("device").window(FixedWindows(us(160)), intervals=2, name="longer").aggregate(total=Sum("n")).to_table(
    "longer"
)
