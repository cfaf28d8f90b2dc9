"""Every parameter of a step is compared with the deployed graph, or may change at any time; none is forgotten."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    Accumulation,
    AdvanceWithClock,
    AfterWatermark,
    Computation,
    Context,
    Count,
    Dedupe,
    ErrorRate,
    EventTime,
    File,
    FiringBehavior,
    FixedWindows,
    Graph,
    KeyedStream,
    ListCell,
    Stream,
    TimestampCombiner,
    hours,
    minutes,
    seconds,
)
from millpy.graph.windowed import WindowedStream
from millpy.model.graph_changes import changes_between
from tests.property.test_triggers import Delayed


class Reading(msgspec.Struct):
    device: str
    note: str
    at: datetime
    value: float


class Other(msgspec.Struct):
    device: str
    note: str
    at: datetime
    value: int


class Place(msgspec.Struct):
    device: str
    note: str
    site: str


class Plant(msgspec.Struct):
    device: str
    note: str
    plant: str


class Spikes(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        raise NotImplementedError


class Lists(Spikes):
    found = ListCell(int)


def one(record: Any) -> Any:
    raise NotImplementedError


def two(record: Any) -> Any:
    raise NotImplementedError


IN_ORDER = EventTime("at", sorted=True)
NAMES: dict[str, list[Any]] = {"name": ["step", "other"]}
FUNCTIONS: dict[str, list[Any]] = {"function": [one, two]}
HOW: dict[str, list[Any]] = {"columns": [False, True], "immediate": [False, True]}
STEPS: Mapping[str, tuple[Any, dict[str, list[Any]], dict[str, list[Any]]]] = {
    "graph": (Graph.__init__, {}, {"generation": [1, 2], "max_skew": [None, hours(1)]}),
    "inject": (
        Graph.inject,
        {
            "name": ["readings", "others"],
            "source": [File("a"), File("b")],
            "schema": [Reading, Other],
            "event_time": [IN_ORDER, EventTime("at", max_disorder=seconds(1))],
            "dedupe": [None, Dedupe("device", within=hours(1))],
            "idle": [None, AdvanceWithClock(after=seconds(1))],
            "lax": [False, True, ("device",)],
        },
        {"pause_above": [None, ErrorRate(share=0.5)], "device": [None, "device"]},
    ),
    "map": (Stream.map, {**FUNCTIONS, "output": [Reading, Other], "event_time": [None, "at"]}, HOW),
    "flat_map": (Stream.flat_map, {**FUNCTIONS, "output": [Reading, Other], "event_time": [None, "at"]}, HOW),
    "filter": (Stream.filter, FUNCTIONS, HOW),
    "split": (Stream.split, FUNCTIONS, {**HOW, "into": [["left", "right"], ["left", "right", "middle"]]}),
    "deduplicate": (
        Stream.deduplicate,
        {**NAMES, "by": ["device", ("device", "note")], "within": [hours(1), hours(2)], "intervals": [4, 8]},
        {},
    ),
    "lookup": (
        Stream.lookup,
        {
            **NAMES,
            "row": [Place, Plant],
            "key": ["device", "note"],
            "suffix": ["_table", "_row"],
            "intervals": [4, 8],
            "table_key": ["device", "note"],
        },
        {
            "table": ["places", "plants"],
            "refresh": [seconds(1), seconds(2)],
            "missing": ["drop", "dead_letter"],
        },
    ),
    "window": (
        KeyedStream.window,
        {
            **NAMES,
            "windows": [FixedWindows(minutes(1)), FixedWindows(minutes(2))],
            "allowed_lateness": [minutes(1), hours(1)],
            "trigger": [AfterWatermark(), Delayed()],
            "accumulation": list(Accumulation)[::-1],
            "timestamp_combiner": list(TimestampCombiner)[::-1],
            "on_time_pane": list(FiringBehavior),
            "final_pane": list(FiringBehavior),
            "pane_info": [False, True],
            "intervals": [4, 8],
        },
        {},
    ),
    "aggregate": (WindowedStream.aggregate, {"aggregates": [{"n": Count()}, {"n": Count("value")}]}, {}),
    "process": (
        Graph.process,
        {**NAMES, "computation": [Spikes(), Lists()], "output": [None, Reading, Other], "intervals": [4, 8]},
        {"on_failure": ["dead_letter", "park"]},
    ),
}
TAKEN_ELSEWHERE = {"graph": {"name"}, "process": {"inputs"}}
"""What a graph or step is, or what it reads: see test_versions.py."""


def described(**given: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a graph with every step; `given` replaces parameters of some."""
    of = {
        step: {name: options[0] for name, options in (compared | free).items()} | dict(given.get(step, {}))
        for step, (_, compared, free) in STEPS.items()
    }
    graph = Graph("factory", **of["graph"])
    readings = graph.inject(**of["inject"])
    made = readings.filter(**of["filter"]).map(**of["map"]).flat_map(**of["flat_map"]).split(**of["split"])["left"]
    once = made.deduplicate(**of["deduplicate"] | {"name": "once" + of["deduplicate"]["name"]})
    made.lookup(**of["lookup"] | {"name": "lookup" + of["lookup"]["name"]})
    windows = once.key_by("device").window(**of["window"])
    windows.aggregate(**of["aggregate"]["aggregates"]).to_table("table")
    process = of["process"] | {"name": "process" + of["process"]["name"]}
    graph.process(inputs=[made.key_by("device")], **process)
    return graph.spec().description()


@pytest.mark.parametrize("step", STEPS)
def test_every_parameter_of_a_step_is_tested_here(step: str) -> None:
    method, compared, free = STEPS[step]

    parameters = set(inspect.signature(method).parameters) - {"self"}

    assert parameters == {*compared, *free, *TAKEN_ELSEWHERE.get(step, ())}


@pytest.mark.parametrize(("step", "parameter"), [(step, name) for step, found in STEPS.items() for name in found[1]])
def test_parameter_that_is_compared_is_a_change(step: str, parameter: str) -> None:
    for value in STEPS[step][1][parameter][1:]:
        assert changes_between(described(), described(**{step: {parameter: value}})), value


@pytest.mark.parametrize(("step", "parameter"), [(step, name) for step, found in STEPS.items() for name in found[2]])
def test_parameter_that_may_change_at_any_time_is_no_change(step: str, parameter: str) -> None:
    for value in STEPS[step][2][parameter][1:]:
        assert described() == described(**{step: {parameter: value}}), value
