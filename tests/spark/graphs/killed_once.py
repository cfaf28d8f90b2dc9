"""Counts over a file, with a function that kills its process once."""

import os
import signal
from pathlib import Path

import msgspec

from millpy import Count, EventTime, File, FixedWindows, Graph, Sum, seconds


class Note(msgspec.Struct):
    device: str
    at: int
    number: int


def once_killed(note: Note) -> Note:
    marker = Path(__file__).with_name("marker")
    if note.number == 50 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return note


graph = Graph("killed_once")
at = EventTime("at", unit="s", sorted=True)
notes = graph.inject("notes", File(Path(__file__).with_name("notes.ndjson")), schema=Note, event_time=at)
keyed = notes.map(once_killed).key_by("device")
sums = keyed.window(FixedWindows(seconds(20)), intervals=2, name="sums")
sums.aggregate(n=Count(), total=Sum("number")).to_table("sums")
