"""Every type of a field, and a function that kills its process once."""

import os
import signal
from datetime import datetime
from pathlib import Path
from uuid import UUID

import msgspec

from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, Sum, Top, seconds


class Thing(msgspec.Struct):
    id: int
    at: int
    text: str
    number: float
    yes: bool
    data: bytes
    moment: datetime
    uuid: UUID
    several: list[int]
    missing: str | None = None


def once_killed(thing: Thing) -> Thing:
    marker = Path(__file__).with_name("marker")
    if thing.id == 5 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return thing


graph = Graph("types")
things = graph.inject(
    "things",
    Mqtt("things/#", host="nowhere"),
    schema=Thing,
    event_time=EventTime("at", unit="s", max_disorder=seconds(5)),
)
passed = things.map(once_killed)
passed.deduplicate(["id"], seconds(60), name="all_things", intervals=2).to_table("all_things")
passed.key_by("text").window(FixedWindows(seconds(10)), intervals=2, name="sums").aggregate(
    n=Count(), total=Sum("id"), best=Top("id", 2)
).to_table("sums")
