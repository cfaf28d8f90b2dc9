"""A running count and sum of each device over the files of a watched directory: a row for each record that was read.

Twice: read by one source partition, and by three.
"""

from __future__ import annotations

import os
from datetime import timedelta

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import hours
from millpy.sources.files.source import Directory


class Reading(msgspec.Struct):
    id: str
    device: str
    at: int
    value: int


class Total(msgspec.Struct):
    device: str
    id: str
    number: int
    total: int


class Running(msgspec.Struct):
    number: int = 0
    total: int = 0


class Totals(Computation):
    running = Value(Running)

    def process_record(self, context: Context, record: Reading) -> None:
        running = context[Totals.running]
        running.number += 1
        running.total += record.value
        context.produce(Total(record.device, record.id, running.number, running.total))


graph = Graph("inbox")
for partitions in (1, 3):
    files = Directory(
        os.environ["CRASH_INPUT"],
        settle=timedelta(seconds=0.2),
        every=timedelta(seconds=0.05),
        partitions=partitions,
    )
    event_time = EventTime("at", unit="s", max_disorder=hours(1))
    readings = graph.inject(f"in_{partitions}", files, schema=Reading, event_time=event_time)
    totals = readings.key_by("device").process(Totals(), name=f"totals_{partitions}", output=Total)
    totals.to_table(f"totals_{partitions}")
