"""Which files of which source an `--input` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpy.errors import UsageError
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.spark.job import make_job

GRAPH = """
from datetime import datetime

import msgspec

from millpy import EventTime, Graph, Mqtt, seconds


class Reading(msgspec.Struct):
    device: str
    at: datetime


graph = Graph("plant")
readings = graph.inject("readings", Mqtt("a/#"), schema=Reading, event_time=EventTime("at", max_disorder=seconds(1)))
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "plant.py"
    path.write_text(GRAPH)
    for hour in ("06", "07"):
        (tmp_path / f"hour={hour}").mkdir()
        (tmp_path / f"hour={hour}" / "a.ndjson").touch()
    return path


@pytest.mark.parametrize("source", ["", "readings="])
@pytest.mark.parametrize("pattern", ["hour=*/*.ndjson", "hour=06/a.ndjson"])
def test_a_path_with_an_equals_sign_is_a_path(
    graph: Path, monkeypatch: pytest.MonkeyPatch, source: str, pattern: str
) -> None:
    monkeypatch.chdir(graph.parent)
    job = make_job(str(graph), [source + pattern], limits=Limits(), now_us=Instant(0))
    expected = sorted(str(path) for path in graph.parent.glob(pattern))
    assert {name: list(history.files) for name, history in job.histories.items()} == {"readings": expected}


def test_a_name_that_is_no_source_is_refused(graph: Path) -> None:
    with pytest.raises(UsageError, match="the graph has no source 'reading'"):
        make_job(str(graph), [f"reading={graph.parent}/*/a.ndjson"], limits=Limits(), now_us=Instant(0)).load_graph()
