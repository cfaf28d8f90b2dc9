"""Two gateways that hear the same devices; a step that fails until it is repaired, and parks the key until then."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from millpy.computation import Computation, Context, Value
from millpy.graph import Graph
from millpy.ingest.settings import EventTime
from millpy.model.time import milliseconds, minutes
from millpy.sources.files.source import File

FOLDER = Path(os.environ["CRASH_INPUT"])
MENDED = FOLDER / "mended"
FAULTY = 13


class Heard(msgspec.Struct):
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

    def process_record(self, context: Context, record: Heard) -> None:
        running = context[Totals.running]
        running.number += 1
        running.total += record.value
        if record.value == FAULTY and not MENDED.exists():
            raise ValueError("this version cannot take it")
        context.produce(Total(record.device, record.id, running.number, running.total))


graph = Graph("parking")
north, south = (
    graph.inject(
        gateway,
        File(str(FOLDER / gateway)),
        schema=Heard,
        event_time=EventTime("at", unit="us", max_disorder=milliseconds(5)),
    )
    for gateway in ("north", "south")
)
unique = (
    north.union(south).filter(lambda heard: heard.value >= 0).deduplicate(by="id", within=minutes(1), name="unique")
)
unique.key_by("device").process(Totals(), name="totals", output=Total, on_failure="park").to_table("totals")
