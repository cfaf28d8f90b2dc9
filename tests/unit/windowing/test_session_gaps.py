"""Sessions whose gap comes from a field: what is refused, when the graph is made and record by record."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from millpy import Count, EventTime, FixedWindows, Graph, SessionWindows, days, hours, minutes, seconds
from millpy.cli.auditor import _reach
from millpy.errors import GraphError, SchemaError
from millpy.model.record import RecordType, WideInt
from millpy.model.time import YEARS_HI
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import Windows
from tests.feed import Feed
from tests.stage_driver import StageDriver

S = 1_000_000


class Inside(msgspec.Struct):
    wait: int | None = None


class Visit(msgspec.Struct):
    key: str
    at: datetime | None = None
    timeout: float | None = None
    whole: int = 1
    text: str = ""
    inside: Inside | None = None
    total: WideInt | None = None


def subject(windows: Windows) -> StageDriver:
    logic = WindowedLogic(windows, timedelta(0), {"n": Count()})
    outputs = {"windows": logic.output_type(RecordType(Visit), ("key",))}
    return StageDriver(logic, Visit, outputs=outputs, tables={"windows": 1})


def spans(stage: StageDriver) -> list[tuple[str, float, float, int]]:
    stage.finish()
    found = [
        (pane.key, pane.window_start.timestamp(), pane.window_end.timestamp(), pane.n)
        for result in stage.results
        for part in result.productions.values()
        for pane in part.objects()
    ]
    return sorted(found)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a field that is no name": (
        lambda: SessionWindows(minutes(1), by_field=lambda record: record.timeout),  # type: ignore[arg-type]
        'by_field="timeout_s"',
    ),
    "a longest gap without a field": (lambda: SessionWindows(minutes(1), max_gap=days(1)), 'by_field="timeout_s"'),
    "a longest gap of zero": (
        lambda: SessionWindows(minutes(1), by_field="timeout", max_gap=seconds(0)),
        "max_gap=days(1)",
    ),
    "a longest gap of ten thousand years": (
        lambda: SessionWindows(minutes(1), by_field="timeout", max_gap=days(3_660_000)),
        "shorter",
    ),
}


@pytest.mark.parametrize(("make", "hint"), REFUSED.values(), ids=REFUSED)
def test_definitions_are_refused_with_a_hint(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(GraphError) as refused:
        make()

    assert hint in refused.value.hint


@pytest.mark.parametrize("field", ["text", "at", "missing", "inside", "inside.missing"])
def test_a_field_that_is_no_number_is_refused_when_the_graph_is_made(field: str) -> None:
    stream = Graph("site").inject("visits", Feed(), schema=Visit, event_time=EventTime("at", max_disorder=hours(1)))
    windowed = stream.key_by("key").window(SessionWindows(minutes(1), by_field=field))

    with pytest.raises(SchemaError):
        windowed.aggregate(n=Count())


@pytest.mark.parametrize("many", [False, True], ids=["few", "columns"])
def test_gaps_that_are_none_are_dead_letters_and_the_others_count(many: bool) -> None:
    stage = subject(SessionWindows(seconds(10), by_field="timeout", max_gap=minutes(1)))
    bad = [0.0, -1.0, 60.000_001, 1e300, 0.000_000_4, math.nan, math.inf, -math.inf]
    good = [0.000_001, 0.29, 1.0, 60.0, None]
    rows: list[tuple[Any, int]] = [(Visit("bad", None, gap), 1_000 * S) for gap in bad]
    rows += [(Visit(f"good {gap}", None, gap), 1_000 * S) for gap in good]
    rows += [(Visit("filler", None, 1.0), 1_000 * S)] * (100 * many)
    result = stage.feed(rows, columns=many)

    assert [letter.reason for letter in result.dead_letters] == ["refused"] * len(bad)
    assert all("max_gap=minutes(1)" in letter.detail for letter in result.dead_letters)
    assert result.dead_lettered_by_input == {0: len(bad)}
    expected = [(f"good {gap}", 1_000.0, 1_000 + (10 if gap is None else gap), 1) for gap in good]
    assert [span for span in spans(stage) if span[0] != "filler"] == sorted(expected)


@pytest.mark.parametrize("many", [False, True], ids=["few", "columns"])
def test_whole_and_nested_fields_have_gaps(many: bool) -> None:
    rows = [(Visit("a", None, None, 5), 0), (Visit("a", None, None, 1), 4 * S), (Visit("a", None, None, 1), 5 * S)]
    stage = subject(SessionWindows(seconds(10), by_field="whole"))
    stage.feed(rows * (40 if many else 1), columns=many)
    assert [span[1:3] for span in spans(stage)] == [(0, 5), (5, 6)]

    nested = subject(SessionWindows(seconds(10), by_field="inside.wait"))
    rows = [(Visit("a", inside=Inside(3)), 0), (Visit("b", inside=Inside()), 0), (Visit("c"), 0)]
    nested.feed(rows * (40 if many else 1), columns=many)
    assert [span[:3] for span in spans(nested)] == [("a", 0, 3), ("b", 0, 10), ("c", 0, 10)]


@pytest.mark.parametrize("many", [False, True], ids=["few", "columns"])
def test_the_result_of_a_sum_may_be_a_gap_however_large_it_is(many: bool) -> None:
    stage = subject(SessionWindows(seconds(10), by_field="total"))
    gaps = {"small": 3, "none": None, "large": 2**63, "low": -(2**100)}
    rows: list[tuple[Any, int]] = [(Visit(key, total=gap), 0) for key, gap in gaps.items()]
    result = stage.feed(rows * (40 if many else 1), columns=many)

    assert len(result.dead_letters) == (80 if many else 2)
    assert [span[:3] for span in spans(stage)] == [("none", 0, 10), ("small", 0, 3)]


def test_the_last_event_time_leaves_room_for_the_longest_gap() -> None:
    stage = subject(SessionWindows(seconds(10), by_field="timeout", max_gap=days(2)))
    result = stage.feed([(Visit("a", None, 1.0), YEARS_HI - 2 * 86_400 * S + n) for n in (0, 1)])

    assert len(result.dead_letters) == 1


def test_a_key_with_open_sessions_keeps_their_gaps_after_a_takeover() -> None:
    stage = subject(SessionWindows(seconds(1), by_field="timeout"))
    stage.feed([(Visit("a", None, 100.0), 0), (Visit("a", None, 1.0), 50 * S)])
    stage.restart()
    stage.feed([(Visit("a"), 99 * S)])
    stage.restart()
    stage.feed([(Visit("a"), 100 * S)])

    assert spans(stage) == [("a", 0, 100, 3), ("a", 100, 101, 1)]


def test_an_audit_reaches_as_far_as_the_longest_gap() -> None:
    stream = Graph("site").inject("visits", Feed(), schema=Visit, event_time=EventTime("at", max_disorder=hours(1)))
    windows = [
        SessionWindows(minutes(1)),
        SessionWindows(minutes(1), by_key={"slow": minutes(7)}),
        SessionWindows(minutes(1), by_field="timeout", max_gap=minutes(9)),
        FixedWindows(minutes(3)),
    ]
    for number, one in enumerate(windows):
        stream.key_by("key").window(one).aggregate(n=Count()).to_table(f"t{number}")
    spec = stream.graph.spec()

    assert [_reach(spec, table) for table in spec.tables] == [minute * 60 * S for minute in (1, 7, 9, 3)]


def test_stored_sessions_refuse_another_longest_gap() -> None:
    one, other = (SessionWindows(minutes(1), by_field="timeout", max_gap=minutes(n)) for n in (5, 6))

    assert one.identity() != other.identity()
    assert one != other
    assert repr(one) == "SessionWindows(minutes(1), by_field='timeout', max_gap=minutes(5))"
    assert SessionWindows(minutes(1), by_field="timeout") == SessionWindows(
        minutes(1), by_field="timeout", max_gap=days(1)
    )
