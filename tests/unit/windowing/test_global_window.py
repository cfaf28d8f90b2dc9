"""The global window is refused where it would never give a pane, and an audit knows what it is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import msgspec
import pytest

from millpy import Count, Directory, EventTime, Files, FixedWindows, GlobalWindow, Graph, Stream, hours
from millpy.cli.auditor import _reach
from millpy.errors import GraphError
from millpy.sources import Source
from millpy.spark.native import native_plans
from millpy.windowing.global_window import GLOBAL_END_US, GLOBAL_START_US
from millpy.windowing.triggers import AfterWatermark


class Reading(msgspec.Struct):
    key: str
    at: datetime


@dataclass(frozen=True, repr=False)
class Early(AfterWatermark):
    """A trigger that is not the default one."""


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
        assert "Files" in refused.value.hint
    assert ends.key_by("key").window(GlobalWindow()).windows == GlobalWindow()


def test_a_trigger_that_does_not_wait_for_the_end_is_accepted() -> None:
    stream = read(Graph("site"), "watched", Directory("incoming"))

    assert stream.key_by("key").window(GlobalWindow(), trigger=Early()).windows == GlobalWindow()


def test_an_audit_reaches_over_all_of_it_and_says_why_it_is_not_native() -> None:
    graph = Graph("site")
    windows = read(graph, "history", Files("a.ndjson")).key_by("key").window(GlobalWindow())
    windows.aggregate(n=Count()).to_table("totals")
    spec = graph.spec()

    assert _reach(spec, spec.tables[0]) == GLOBAL_END_US - GLOBAL_START_US
    assert "9999" in native_plans(spec)[1]["totals"]
