"""Windows, sessions and a computation over several source partitions, whose takes are archived."""

from pathlib import Path

import msgspec

from millpy import (
    Computation,
    Context,
    Count,
    EventTime,
    Files,
    FixedWindows,
    Graph,
    Mean,
    SessionWindows,
    Sum,
    Value,
    seconds,
)
from millpy.model.timer import Timer


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class Said(msgspec.Struct):
    device: str
    number: int
    total: float


class Silence(Computation):
    """Reports each device whenever it is silent for a moment, in event time and in processing time."""

    said = Value(Said, default=Said("", 0, 0.0))

    def process_record(self, context: Context, record: Reading) -> None:
        said = context[Silence.said]
        said.device, said.number, said.total = record.device, said.number + 1, said.total + record.value
        if not context.late:
            context.set_timer("silent", at=context.event_time_us + 9_000_000)
        context.set_timer("waited", at=context.now_us + 30_000, processing=True)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(context[Silence.said])


graph = Graph("replayed")
files = Files(str(Path(__file__).parent / "feed-*.ndjson"), partitions=3)
readings = graph.inject(
    "readings", files, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(4))
)
keyed = readings.key_by("device")
keyed.archive(buckets=4)
windows = keyed.window(FixedWindows(seconds(20)), allowed_lateness=seconds(15), intervals=2, name="fixed")
windows.aggregate(n=Count(), total=Sum("value"), mean=Mean("value")).to_table("fixed")
keyed.window(SessionWindows(seconds(3)), intervals=2, name="sessions").aggregate(total=Sum("value")).to_table(
    "sessions"
)
said = keyed.process(Silence(), name="silence", output=Said, intervals=2)
said.to_table("said")
said.key_by("number").window(FixedWindows(seconds(40)), name="per_number").aggregate(n=Count()).to_table("per_number")
graph.archive_takes()
