"""A graph whose code is not deterministic: one column of its alerts is drawn by lot."""

import random
from datetime import datetime

import msgspec

from millpy import Computation, Context, Count, EventTime, File, FixedWindows, Graph, Value, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime
    value: float


class Seen(msgspec.Struct):
    n: int = 0


class Alert(msgspec.Struct):
    device: str
    n: int
    drawn: float


class Dice(Computation):
    seen = Value(Seen)

    def process_record(self, context: Context, record: Reading) -> None:
        seen = context[Dice.seen]
        seen.n += 1
        if seen.n % 5 == 0:
            context.produce(Alert(record.device, seen.n, random.random()))


graph = Graph("dice")
time = EventTime("at", max_disorder=seconds(2))
readings = graph.inject("readings", File("none.ndjson"), schema=Reading, event_time=time)
readings.key_by("device").window(FixedWindows(seconds(30))).aggregate(n=Count()).to_table("per_window")
readings.key_by("device").process(Dice(), name="dice", output=Alert).to_table("alerts")
