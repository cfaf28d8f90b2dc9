"""Windows of each kind and a table of records, over a file: FEED beside this graph."""

from pathlib import Path

import msgspec

from millpy import (
    Computation,
    Context,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    Mean,
    SessionWindows,
    Sum,
    Top,
    seconds,
)


class Note(msgspec.Struct):
    device: str
    at: int
    value: float
    number: int


class Large(msgspec.Struct):
    device: str
    value: float
    parts: list[int]


class Largest(Computation):
    def process_record(self, context: Context, record: Note) -> None:
        if record.number % 10 == 0:
            context.produce(Large(record.device, record.value, [record.number, -1]))


graph = Graph("audited")
at = EventTime("at", unit="s", max_disorder=seconds(5))
notes = graph.inject("notes", File(Path(__file__).with_name("notes.ndjson")), schema=Note, event_time=at)
keyed = notes.key_by("device")
fixed = keyed.window(FixedWindows(seconds(20)), allowed_lateness=seconds(20), intervals=2, name="fixed")
fixed.aggregate(n=Count(), mean=Mean("value"), total=Sum("number"), best=Top("number", 2)).to_table("fixed")
sessions = keyed.window(SessionWindows(seconds(3)), allowed_lateness=seconds(9), intervals=2, name="sessions")
sessions.aggregate(n=Count()).to_table("sessions")
keyed.process(Largest(), name="largest", output=Large, intervals=2).to_table("largest")
