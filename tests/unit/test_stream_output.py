"""What a killed query leaves in its directories does not stop the next one, and does not stay."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from millpy import Count, EventTime, FixedWindows, Graph, Mqtt, minutes, seconds
from millpy.errors import UsageError
from millpy.spark.stream_offsets import OffsetLog, TakenRange
from millpy.spark.stream_output import TABLES_FILE, StreamOutput


class Reading(msgspec.Struct):
    device: str
    at: datetime


def a_graph() -> Graph:
    graph = Graph("plant")
    at = EventTime("at", max_disorder=seconds(1))
    keyed = graph.inject("readings", Mqtt("a/#"), schema=Reading, event_time=at).key_by("device")
    keyed.window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
    return graph


def test_the_description_of_the_output_is_whole_or_not_there(tmp_path: Path) -> None:
    output, half = tmp_path / "output", f".{TABLES_FILE}"
    output.mkdir()
    (output / half).write_bytes(b'{"per_')
    for _ in range(2):
        StreamOutput(output, a_graph().spec())
    assert [path.name for path in output.iterdir()] == [TABLES_FILE]
    assert msgspec.json.decode((output / TABLES_FILE).read_bytes()) == {
        "per_minute": ["device", "window_start", "window_end"]
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(UsageError, match="is not empty"):
        StreamOutput(tmp_path / "other", a_graph().spec())


def test_offsets_of_committed_batches_and_of_killed_attempts_are_swept(tmp_path: Path) -> None:
    log = OffsetLog(tmp_path)
    log.create()
    for batch in (3, 4):
        log.decide(batch, 1, TakenRange(7, 7, False))
    (tmp_path / "offsets" / "0a1b.tmp").touch()
    log.sweep(3)
    assert [path.name for path in (tmp_path / "offsets").iterdir()] == ["0000000004-1.json"]
