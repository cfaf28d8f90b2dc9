"""The global window is refused where it would never give a pane, and an audit knows what it is."""

from __future__ import annotations

from datetime import datetime

import msgspec
import pytest

from millpy import (
    AfterCount,
    AfterWatermark,
    Count,
    Directory,
    EventTime,
    Every,
    Files,
    FixedWindows,
    GlobalWindow,
    Graph,
    Never,
    Repeatedly,
    Stream,
    hours,
)
from millpy.cli.auditor import _reach
from millpy.errors import GraphError
from millpy.sources import Source
from millpy.spark.native import native_plans
from millpy.windowing.global_window import GLOBAL_END_US, GLOBAL_START_US


class Reading(msgspec.Struct):
    key: str
    at: datetime


def read(graph: Graph, name: str, source: Source) -> Stream:
    return graph.inject(name, source, schema=Reading, event_time=EventTime("at", max_disorder=hours(1)))


def test_it_is_refused_behind_any_source_that_does_not_end() -> None:
    graph = Graph("site")
    ends, does_not = read(graph, "history", Files("a.ndjson")), read(graph, "watched", Directory("incoming"))
    hourly = does_not.key_by("key").window(FixedWindows(hours(1)), name="hourly").aggregate(n=Count())

    for stream in (does_not, ends.union(does_not), does_not.filter(lambda _: True), hourly):
        with pytest.raises(
            GraphError, match="would never have a pane: the source of 'watched' does not end"
        ) as refused:
            stream.key_by("key").window(GlobalWindow())
        assert "early" in refused.value.hint
        with pytest.raises(GraphError, match="would never have a pane"):
            stream.key_by("key").window(GlobalWindow(), trigger=Never())
    assert ends.key_by("key").window(GlobalWindow()).windows == GlobalWindow()


def test_a_trigger_that_does_not_wait_for_the_end_is_accepted() -> None:
    stream = read(Graph("site"), "watched", Directory("incoming"))

    for trigger in (AfterWatermark(early=Every(hours(1))), Repeatedly(AfterCount(10))):
        assert stream.key_by("key").window(GlobalWindow(), trigger=trigger).windows == GlobalWindow()


def test_an_audit_reaches_over_all_of_it_and_says_why_it_is_not_native() -> None:
    graph = Graph("site")
    windows = read(graph, "history", Files("a.ndjson")).key_by("key").window(GlobalWindow())
    windows.aggregate(n=Count()).to_table("totals")
    spec = graph.spec()

    assert _reach(spec, spec.tables[0]) == GLOBAL_END_US - GLOBAL_START_US
    assert "9999" in native_plans(spec)[1]["totals"]
