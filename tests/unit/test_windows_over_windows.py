"""Windows over panes: right where every window has one pane, else refused when the graph is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from millpy import (
    Computation,
    Context,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    SessionWindows,
    SlidingWindows,
    Stream,
    Sum,
    hours,
    minutes,
    seconds,
)
from millpy.errors import GraphError

INNER = {
    "fixed": FixedWindows(minutes(1)),
    "sliding": SlidingWindows(minutes(2), every=minutes(1)),
    "sessions": SessionWindows(minutes(1)),
}
OUTER = {**INNER, "fixed": FixedWindows(hours(1))}


class Reading(msgspec.Struct):
    device: str
    at: int
    value: float


class Total(msgspec.Struct):
    device: str
    n: int


class Newest(Computation):
    def process_record(self, context: Context, record: Any) -> None:
        context.produce(Total(record.device, record.n))


def to_total(pane: Any) -> Total:
    return Total(pane.device, pane.n)


def anything(pane: Any) -> bool:
    return True


BETWEEN: dict[str, Callable[[Stream, Stream], Stream]] = {
    "nothing": lambda panes, other: panes,
    "map": lambda panes, other: panes.map(to_total, Total),
    "filter": lambda panes, other: panes.filter(anything),
    "split": lambda panes, other: panes.split(lambda pane: "a", into=["a", "b"])["b"],
    "deduplicate": lambda panes, other: panes.deduplicate("device", within=minutes(1), name="first"),
    "union": lambda panes, other: other.union(panes.map(to_total, Total)),
}


def graph_of(inner: Any, lateness: int, between: Callable[[Stream, Stream], Stream], outer: Any) -> Graph:
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(1))
    readings = graph.inject("readings", File("r"), schema=Reading, event_time=event_time)
    keyed = readings.key_by("device")
    panes = keyed.window(inner, allowed_lateness=minutes(lateness), name="inner").aggregate(n=Count())
    other = keyed.process(Newest(), name="other", output=Total)
    between(panes, other).key_by("device").window(outer).aggregate(total=Sum("n")).to_table("outer")
    return graph


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("inner", INNER)
def test_windows_over_panes_that_may_be_amended_are_refused(inner: str, between: str, outer: str) -> None:
    with pytest.raises(GraphError, match="each would count") as refused:
        graph_of(INNER[inner], 5, BETWEEN[between], OUTER[outer])

    assert "'inner'" in refused.value.message
    assert "allowed_lateness" in refused.value.hint
    assert graph_of(INNER[inner], 0, BETWEEN[between], OUTER[outer]).spec()


@pytest.mark.parametrize("inner", INNER)
def test_computation_in_between_decides_which_panes_count(inner: str) -> None:
    def through_a_computation(panes: Stream, other: Stream) -> Stream:
        kept: Stream = panes.key_by("device").process(Newest(), name="newest", output=Total)
        return kept

    assert graph_of(INNER[inner], 5, through_a_computation, OUTER["fixed"]).spec()
