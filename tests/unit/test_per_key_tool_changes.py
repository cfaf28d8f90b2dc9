"""Per-key tools over stored state: which changes of them may be deployed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from millpy import Graph, KeyedStream, Stream, minutes, seconds
from millpy.model.graph_changes import changes_between
from tests.per_key_events import DOOR, DOOR_ALARM, Event, events_of, grid, is_alarm


def description(add: Callable[[KeyedStream], Any], schema: type = Event) -> Any:
    graph = Graph("tools")
    add(events_of(graph, schema=schema).key_by("device"))
    return graph.spec().description()


def is_another(event: Event) -> bool:
    return True


Tool = Callable[[KeyedStream], Any]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            lambda keyed: keyed.match(DOOR_ALARM, name="t"),
            lambda keyed: keyed.match(DOOR.then("alarm", is_alarm, within=minutes(6)), name="t"),
        ),
        (
            lambda keyed: keyed.match(DOOR_ALARM, name="t"),
            lambda keyed: keyed.match(DOOR.then("alarm", is_another, within=minutes(5)), name="t"),
        ),
        (
            lambda keyed: keyed.match(DOOR_ALARM, name="t"),
            lambda keyed: keyed.match(DOOR_ALARM.unless("reset", is_another), name="t"),
        ),
        (
            lambda keyed: keyed.match(DOOR_ALARM, name="t"),
            lambda keyed: keyed.match(DOOR_ALARM, name="t", after_match="to_next"),
        ),
        (lambda keyed: keyed.changes("value", name="t"), lambda keyed: keyed.changes("count", name="t")),
        (lambda keyed: keyed.rates("value", name="t"), lambda keyed: keyed.rates("count", name="t")),
        (lambda keyed: grid(keyed, name="t"), lambda keyed: grid(keyed, name="t", every=seconds(30))),
        (lambda keyed: grid(keyed, name="t"), lambda keyed: grid(keyed, name="t", limit=minutes(6))),
        (lambda keyed: grid(keyed, name="t"), lambda keyed: grid(keyed, name="t", method="null")),
        (lambda keyed: grid(keyed, name="t"), lambda keyed: grid(keyed, name="t", offset=seconds(1))),
    ],
)
def test_another_meaning_of_stored_state_is_refused(before: Tool, after: Tool) -> None:
    changes = [change for change in changes_between(description(before), description(after)) if change.subject == "t"]

    assert "meaning" in {change.kind for change in changes}
    (words,) = [change.difference for change in changes if change.kind == "meaning"]
    was, now = re.fullmatch(r"parameter '\w+' changed from (.+) to (.+)", words).groups()  # type: ignore[union-attr]
    assert was != now
    assert '"kind"' not in was + now, "as a user writes it"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            lambda keyed: keyed.match(DOOR_ALARM, name="t"),
            lambda keyed: keyed.match(DOOR_ALARM, name="t", partials_max=5),
        ),
        (
            lambda keyed: keyed.changes("value", name="t"),
            lambda keyed: keyed.changes("value", by=1, max_silence=minutes(1), name="t"),
        ),
        (
            lambda keyed: keyed.rates("count", name="t"),
            lambda keyed: keyed.rates("count", wraps_at=2**32, max_gap=minutes(1), name="t"),
        ),
    ],
)
def test_bounds_and_thresholds_may_change_over_stored_state(before: Tool, after: Tool) -> None:
    assert changes_between(description(before), description(after)) == []


def test_a_partial_match_with_records_of_another_type_needs_a_migration() -> None:
    noted = msgspec.defstruct("Event", [("note", str, "")], bases=(Event,))

    def tool(keyed: KeyedStream) -> Stream:
        return keyed.match(DOOR_ALARM, name="t")

    changes = [c for c in changes_between(description(tool), description(tool, noted)) if c.subject == "t"]

    assert {change.kind for change in changes} == {"state"}
