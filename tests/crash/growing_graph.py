"""A graph over files of which more may come, as source partitions: `graph_text` gives its file.

A partition is a file of records. It is read as far as it is written, and ends behind the line `end`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from millpy.ingest.protocol import Injector, Source, SourceBatch, SourceSetup
from millpy.model.identity import Identity

GRAPH = """
import msgspec
from pathlib import Path
from millpy import Computation, Count, EventTime, FixedWindows, Graph, Sum, Value, seconds
from tests.crash.growing_graph import Lines

class Note(msgspec.Struct):
    device: str
    at: int
    value: float

class Newest(msgspec.Struct):
    device: str = ""
    number: int = 0

class Following(Computation):
    newest = Value(Newest)

    def process_record(self, context, record):
        newest = context[Following.newest]
        newest.device, newest.number = record.device, newest.number + 1
        context.produce(newest)

graph = Graph("growing")
notes = graph.inject("notes", Lines(Path(__file__).parent, NAMES), schema=Note,
                     event_time=EventTime("at", unit="s", max_disorder=seconds(3)))
keyed = notes.key_by("device")
keyed.archive(buckets=1)
windows = keyed.window(FixedWindows(seconds(10)), allowed_lateness=seconds(5), intervals=2, name="windows")
windows.aggregate(n=Count(), total=Sum("value")).to_table("windows")
keyed.process(Following(), name="following", output=Newest, intervals=1).to_table("following")
"""
TAKES = "graph.archive_takes()\n"


def graph_text(*names: str, takes: bool) -> str:
    """The text of a graph's file with these partitions."""
    return GRAPH.replace("NAMES", repr(names)) + (TAKES if takes else "")


def write(directory: Path, name: str, start: int, end: int) -> None:
    """Write records of a time range, in seconds; some are late. What does not end yet is written on."""
    with (directory / f"{name}.ndjson").open("a") as file:
        for at in range(start, end):
            for device in range(3):
                late = 12 if (at + device) % 7 == 0 else 0
                file.write(json.dumps({"device": f"d{device}", "at": at - late, "value": at / 7 + device}) + "\n")


def write_end(directory: Path, *names: str) -> None:
    """End partitions."""
    for name in names:
        with (directory / f"{name}.ndjson").open("a") as file:
            file.write("end\n")


class Lines(Source):
    """The files of a directory that are named."""

    def __init__(self, directory: Path, names: tuple[str, ...]) -> None:
        self._directory = directory
        self._names = names

    def identity(self) -> Identity:
        return {"kind": "lines"}

    def partitions(self) -> tuple[str, ...]:
        return self._names

    def ends(self) -> bool:
        return True

    def connect(self, setup: SourceSetup) -> Injector:
        return LinesInjector(self._directory / f"{setup.partition}.ndjson", setup)


class LinesInjector:
    """Reads one file, up to twenty records at a time."""

    def __init__(self, path: Path, setup: SourceSetup) -> None:
        self._path = path
        self._setup = setup
        self._at = 0
        self._ended = False

    async def open(self, position: bytes | None) -> None:
        self._at = 0 if position is None else int(position)

    async def take(self) -> SourceBatch | None:
        lines = self._path.read_bytes().splitlines()[self._at :][:20] if self._path.exists() else []
        if self._ended or not lines:
            return None
        self._ended = lines[-1] == b"end"
        self._at += len(lines)
        payloads = lines[:-1] if self._ended else lines
        now_us = self._setup.clock.now_us()
        return SourceBatch(
            "json", now_us, payloads=payloads, position=b"%d" % self._at, finished=self._ended, describe=str
        )

    async def acknowledge(self, token: Any) -> None:
        pass

    def quiet(self) -> bool:
        return False

    async def close(self) -> None:
        pass
