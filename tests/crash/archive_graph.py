"""A graph whose source and whose step are archived: `archive_graph.py`, with the input that ARCHIVE_INPUT names."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from millpy.computation import Computation, Context
from millpy.graph import Graph
from millpy.ingest.settings import Dedupe, EventTime
from millpy.model.time import hours, seconds
from millpy.sources.files.source import File

RECORDS = 600
START_US = 1_790_000_000_000_000
DISORDER_S = 20


class Reading(msgspec.Struct):
    device: str
    n: int
    at: datetime


class Doubled(msgspec.Struct):
    device: str
    twice: int


class Double(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        context.produce(Doubled(record.device, 2 * record.n))


def event_times() -> list[int]:
    """Event times in order of arrival: out of order, over three hours."""
    return [START_US + (n * 18 + n * 7 % 11 * 3) * 1_000_000 for n in range(RECORDS)]


def write_input(file: Path) -> Path:
    """Write the records; every seventh comes twice."""
    lines = []
    for n, at in enumerate(event_times()):
        moment = datetime.fromtimestamp(at / 1_000_000, UTC).isoformat()
        line = json.dumps({"device": f"d{n % 40}", "n": n, "at": moment})
        lines += [line] * (2 if n % 7 == 0 else 1)
    file.write_text("\n".join(lines) + "\n")
    return file


def archived_graph(file: Path, when_behind: Literal["wait", "skip"] = "wait") -> Graph:
    """The graph over one input."""
    graph = Graph("plant")
    readings = graph.inject(
        "readings",
        File(file),
        schema=Reading,
        event_time=EventTime("at", max_disorder=seconds(DISORDER_S)),
        dedupe=Dedupe("n", within=hours(2)),
    )
    keyed = readings.key_by("device")
    keyed.archive(buckets=4, when_behind=when_behind)
    doubles = keyed.process(Double(), name="doubles", output=Doubled, intervals=2)
    doubles.key_by("device").archive(buckets=4, when_behind=when_behind)
    return graph


graph = archived_graph(Path(os.environ.get("ARCHIVE_INPUT", "absent.ndjson")))
