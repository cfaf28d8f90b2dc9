"""`When`: a user's function decides whether a window fires. It is asked once a bundle, and cannot stop a worker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    Accumulation,
    AfterAll,
    AfterCount,
    AfterEach,
    AfterProcessingTime,
    AfterWatermark,
    Count,
    EventTime,
    FiringBehavior,
    FixedWindows,
    Graph,
    Max,
    OrFinally,
    Repeatedly,
    SessionWindows,
    When,
    minutes,
    seconds,
)
from millpy.errors import GraphError
from millpy.model.record import RecordType
from millpy.testing import GraphDriver, ManualSource
from millpy.windowing.aggregates.numeric import Sum
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.pane_rules import PaneRules
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.stage_driver import StageDriver, timedelta_us


class Reading(msgspec.Struct):
    key: str
    number: int


def driver(
    trigger: Trigger, windows: Windows | None = None, mode: Accumulation = Accumulation.ACCUMULATING, **rules: Any
) -> StageDriver:
    logic = WindowedLogic(
        windows or FixedWindows(timedelta_us(10)),
        timedelta_us(100),
        {"n": Count(), "total": Sum("number")},
        trigger=trigger,
        accumulation=mode,
        rules=PaneRules(**rules),
    )
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    return StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=5)


def told(result: Any) -> list[tuple[Any, ...]]:
    records = result.productions.get("panes")
    return [] if records is None else [(pane.key, pane.pane_timing, pane.n) for pane in records.objects()]


class Asked:
    """A predicate that keeps what it was asked."""

    def __init__(self, decide: Callable[[Any], object]) -> None:
        self.decide = decide
        self.panes: list[Any] = []

    def __call__(self, pane: Any) -> object:
        self.panes.append(pane)
        return self.decide(pane)


def test_it_is_asked_once_for_each_bundle_and_window_that_changes() -> None:
    asked = Asked(lambda pane: pane.total >= 7)
    subject = driver(Repeatedly(AfterAll(When(asked), AfterProcessingTime(timedelta_us(30)))))

    subject.feed([(Reading("a", 3), 1), (Reading("a", 3), 2), (Reading("b", 1), 3)])
    subject.feed([], now_us=10)
    subject.restart()
    subject.feed([], now_us=40)
    assert [(pane.key, pane.n, pane.total) for pane in asked.panes] == [("a", 2, 6), ("b", 1, 1)]
    assert told(subject.feed([(Reading("a", 1), 4)])) == [("a", "early", 3)]
    assert len(asked.panes) == 3


def test_an_answer_waits_for_the_clock_through_a_restart() -> None:
    asked = Asked(lambda pane: pane.n == 1)
    subject = driver(AfterAll(AfterProcessingTime(timedelta_us(30)), When(asked)))
    subject.feed([(Reading("a", 1), 1)])
    subject.restart()

    assert subject.interval.next_due()[1] == 30
    assert told(subject.feed([], now_us=30)) == [("a", "early", 1)]
    assert len(asked.panes) == 1


def test_it_gets_the_pane_that_consumers_would_get() -> None:
    asked = Asked(lambda pane: pane.n == 3)
    subject = driver(AfterWatermark(early=AfterEach(AfterCount(1), When(asked))), pane_info=True)
    subject.feed([(Reading("a", 1), 1)])
    subject.feed([(Reading("a", 1), 2)])
    result = subject.feed([(Reading("a", 1), 3)])

    (emitted,) = result.productions["panes"].objects()
    assert [pane.n for pane in asked.panes] == [2, 3]
    assert asked.panes[-1] == emitted
    assert (emitted.pane_index, emitted.pane_on_time_index, emitted.pane_last) == (1, -1, False)


@pytest.mark.parametrize("mode", Accumulation, ids=lambda mode: mode.value)
def test_it_sees_the_whole_window_in_every_mode(mode: Accumulation) -> None:
    subject = driver(OrFinally(Repeatedly(AfterCount(2)), When(lambda pane: pane.n >= 5)), mode=mode)
    for at in range(3):
        result = subject.feed([(Reading("a", 1), at)] * 2)

    assert told(result)[-1] == ("a", "early", 2 if mode is Accumulation.DISCARDING else 6)
    assert sum(subject.feed([(Reading("a", 1), 3)]).late_by_input.values()) == 1


def test_after_it_has_fired_it_fires_again_only_with_new_records() -> None:
    rules = {"on_time_pane": FiringBehavior.ALWAYS}
    subject = driver(Repeatedly(When(lambda pane: pane.n >= 2)), **rules)
    assert told(subject.feed([(Reading("a", 1), 1)] * 2)) == [("a", "early", 2)]
    subject.largest = 15
    assert told(subject.feed([], watermark=10)) == []
    assert told(subject.feed([(Reading("a", 1), 2)])) == [("a", "late", 3)]
    assert told(subject.feed([], watermark=110)) == []


@pytest.mark.parametrize("error", [ValueError("no answer"), SystemExit("no answer")])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_predicate_that_raises_makes_one_dead_letter_until_it_answers(restarts: bool, error: BaseException) -> None:
    def fails(pane: Any) -> bool:
        if pane.n in (1, 2, 4):
            raise error
        return False

    subject = driver(AfterWatermark(early=When(fails)))
    letters = []
    for at in range(5):
        result = subject.feed([(Reading("a", 1), at)])
        assert told(result) == []
        letters.append([letter.detail for letter in result.dead_letters])
        if restarts:
            subject.restart()

    assert [len(of_turn) for of_turn in letters] == [1, 0, 0, 1, 0]
    assert "no answer" in letters[0][0]
    assert told(subject.feed([], watermark=10)) == [("a", "on_time", 5)]


def test_merged_sessions_are_asked_anew() -> None:
    asked = Asked(lambda pane: pane.n >= 3)
    subject = driver(When(asked), SessionWindows(timedelta_us(5)))
    subject.feed([(Reading("a", 1), 1)])
    subject.feed([(Reading("a", 1), 8)])
    result = subject.feed([(Reading("a", 1), 4)])

    assert told(result) == [("a", "early", 3)]
    assert [pane.n for pane in asked.panes] == [1, 1, 3]


def test_a_predicate_does_not_run_on_the_event_loop() -> None:
    assert driver(AfterCount(1)).interval.immediate
    assert not driver(AfterWatermark(early=Repeatedly(When(bool)))).interval.immediate


async def awaited(pane: Any) -> bool:
    return True


def test_what_is_no_predicate_is_refused() -> None:
    with pytest.raises(GraphError, match="When needs a function, not 3"):
        When(3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="When cannot await awaited"):
        When(awaited)


class Sample(msgspec.Struct):
    device: str
    at: datetime
    value: float


def test_an_alert_of_a_graph_survives_crashes() -> None:
    graph = Graph("alerts")
    samples = graph.inject(
        "samples", ManualSource(), schema=Sample, event_time=EventTime("at", max_disorder=seconds(0))
    )
    windows = samples.key_by("device").window(
        FixedWindows(minutes(1)), trigger=When(lambda pane: pane.high > 90 and pane.device != "test"), pane_info=True
    )
    windows.aggregate(n=Count(), high=Max("value")).to_table("alerts")
    subject = GraphDriver(graph)
    start = datetime(2026, 11, 20, 12, tzinfo=UTC)

    with subject.crashing():
        for second, value in enumerate([80.0, 95.0, 99.0]):
            at = start.replace(second=second)
            subject.feed("samples", [Sample(device, at, value) for device in ("pump", "test")])
            subject.crash()
        subject.end()

    found = [(pane.key, pane.timing, pane.index, pane.last, pane.values["high"]) for pane in subject.panes("alerts")]
    assert found == [("pump", "early", 0, True, 95.0), ("test", "on_time", 0, True, 99.0)]
    assert [late.record.value for late in subject.late_records()] == [99.0]
