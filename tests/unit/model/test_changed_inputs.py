"""What a deployed step reads may change, for records from the change on: operators before it, one more stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millpy import Accumulation, Count, FixedWindows, Graph, Stream, minutes
from millpy.model.changed_meaning import changed_since, with_marks
from millpy.model.graph_changes import changes_between
from millpy.model.taking_back import cannot_take_back, changes_back
from millpy.model.time import INSTANT_MIN
from tests.unit.model.test_versions import Reading, ReadingOther, readings, spec, varied, windows


def warm(reading: Reading) -> bool:
    return reading.value > 0


def doubled(reading: Reading) -> Reading:
    return Reading(reading.device, reading.at, reading.value * 2)


def moved(reading: Reading) -> ReadingOther:
    return ReadingOther(reading.device, reading.at, int(reading.value))


def before_windows(change: Callable[[Stream, Graph], Stream], **window: Any) -> dict[str, Any]:
    graph = Graph("factory")
    windows(change(readings(graph), graph), {"n": Count()}, **window)
    return graph.spec().description()


def retracted(change: Callable[[Stream, Graph], Stream]) -> dict[str, Any]:
    graph = Graph("factory")
    keyed = (
        readings(graph)
        .key_by("device")
        .window(
            FixedWindows(minutes(1)), allowed_lateness=minutes(1), accumulation=Accumulation.RETRACTING, name="inner"
        )
    )
    outer = change(keyed.aggregate(n=Count()), graph).key_by("device")
    outer.window(FixedWindows(minutes(5)), name="per_minute").aggregate(n=Count())
    return graph.spec().description()


def archived(change: Callable[[Stream, Graph], Stream]) -> dict[str, Any]:
    graph = Graph("factory")
    change(readings(graph), graph).key_by("device").archive("kept")
    return graph.spec().description()


def joined_by(other: Stream, stream: Stream, *, first: bool = False) -> Stream:
    return other.union(stream) if first else stream.union(other)


def some(pane: Any) -> bool:
    return bool(pane.n)


OPERATORS_BEFORE = "the operators before it on readings changed from none to "
INPUTS: dict[str, tuple[Any, Any, list[str]]] = {
    "a filter": (
        before_windows,
        lambda stream, graph: stream.filter(warm),
        [
            f"setting per_minute: {OPERATORS_BEFORE}filter(warm): device: str, at: int, value: float,"
            " for records from now on"
        ],
    ),
    "a map to the same type": (
        before_windows,
        lambda stream, graph: stream.map(doubled, output=Reading),
        [
            f"setting per_minute: {OPERATORS_BEFORE}map(doubled): device: str, at: int, value: float,"
            " for records from now on"
        ],
    ),
    "a map to another type": (
        before_windows,
        lambda stream, graph: stream.map(moved, output=ReadingOther),
        [
            f"meaning per_minute: {OPERATORS_BEFORE}map(moved): device: str, at: int, value: int,"
            " and with them the type of its records"
        ],
    ),
    "a filter of panes that may be retracted": (
        retracted,
        lambda stream, graph: stream.filter(some),
        ["meaning per_minute: the operators before it on inner changed from none to filter(some)"],
    ),
    "a filter before an archive": (
        archived,
        lambda stream, graph: stream.filter(warm),
        [f"meaning kept: {OPERATORS_BEFORE}filter(warm)"],
    ),
    "one more source": (
        before_windows,
        lambda stream, graph: joined_by(readings(graph, name="others"), stream),
        [
            "addition others: the source is new",
            "setting per_minute: it also reads others, for records from now on; those behind its watermark are late",
        ],
    ),
    "one more source, first": (
        before_windows,
        lambda stream, graph: joined_by(readings(graph, name="others"), stream, first=True),
        [
            "addition others: the source is new",
            "meaning per_minute: it no longer reads readings",
            "meaning per_minute: it reads others, which it did not read before; a new stream comes after the others",
            "setting per_minute: it also reads readings",
        ],
    ),
    "one more source of an archive": (
        archived,
        lambda stream, graph: joined_by(readings(graph, name="others"), stream),
        [
            "addition others: the source is new",
            "meaning kept: it reads others, which it did not read before; only windows and a Computation take one more",
        ],
    ),
}


@pytest.mark.parametrize("what", list(INPUTS))
def test_what_a_step_reads_changes_for_records_from_now_on(what: str) -> None:
    build, change, words = INPUTS[what]
    stored, wanted = build(lambda stream, graph: stream), build(change)

    found = [f"{change.kind} {change}" for change in changes_between(stored, wanted)]

    assert len(found) == len(words), found
    assert all(text.startswith(wanted) for text, wanted in zip(found, words, strict=True)), found


def test_one_more_input_is_not_taken_back() -> None:
    stored = before_windows(lambda stream, graph: joined_by(readings(graph, name="others"), stream))
    wanted = before_windows(lambda stream, graph: stream)
    changes = changes_between(stored, wanted)

    assert changes_back(stored, wanted, changes) is None
    assert "it no longer reads others" in str(cannot_take_back("factory", 2, stored, wanted))


def test_audit_begins_behind_the_changes_of_a_computation_and_of_what_it_reads() -> None:
    stored = spec(varied(more=lambda graph, stream, panes, found: panes.key_by("device").window(
        FixedWindows(minutes(60)), name="hourly").aggregate(n=Count())))  # fmt: skip
    marked = with_marks(stored, stored, {"per_minute": 7})

    assert changed_since(marked, "hourly") == changed_since(marked, "per_minute") == 7
    assert changed_since(marked, "spikes") == INSTANT_MIN
    assert changed_since(with_marks(stored, marked, {"hourly": 9}), "hourly") == 9
    assert changed_since(with_marks(stored, marked, {"hourly": 9}), "per_minute") == 7
    assert changes_between(marked, stored) == []
