"""`AfterPercentile`: a share of the records decides, long before the watermark; bundles and crashes do not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from millpy import (
    AfterAll,
    AfterAny,
    AfterPercentile,
    AfterProcessingTime,
    AfterWatermark,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    SessionWindows,
    minutes,
    seconds,
)
from millpy.errors import GraphError
from millpy.model.checkpoint import Entries
from millpy.model.record import RecordType
from millpy.model.time import Instant, instant
from millpy.testing import GraphDriver, ManualSource
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.percentile_trigger import PercentileWatermark
from millpy.windowing.triggers import Trigger
from millpy.windowing.window import Windows
from tests.stage_driver import StageDriver

MS, S = 1_000, 1_000_000
NOW = 10_000 * S
"""Behind all event times."""


class Reading(msgspec.Struct):
    key: str


def driver(trigger: Trigger, windows: Windows | None = None) -> StageDriver:
    windows = windows or FixedWindows(seconds(1))
    logic = WindowedLogic(windows, seconds(0), {"n": Count()}, trigger=trigger)
    outputs = {"panes": logic.output_type(RecordType(Reading), ("key",))}
    found = StageDriver(logic, Reading, outputs=outputs, tables={"panes": 1}, max_disorder=600 * S)
    found.now_us = NOW
    return found


def disordered(number: int, first_us: int = 0, behind_us: int = 500 * MS) -> list[tuple[Reading, int]]:
    """Records every ms, every twentieth of them behind."""
    return [(Reading("ab"[n % 2]), first_us + n * MS - (behind_us if n % 20 == 19 else 0)) for n in range(number)]


def told(result: Any) -> list[tuple[str, float, str]]:
    records = result.productions.get("panes")
    panes = [] if records is None else records.objects()
    return [(pane.key, instant(pane.window_start) / S, pane.pane_timing) for pane in panes]


def in_bundles(subject: StageDriver, rows: list[Any], size: int, *, restarts: bool) -> list[Any]:
    found = []
    for at in range(0, len(rows), size):
        result = subject.feed(rows[at : at + size], columns=size > 100)
        assert not result.unfinished
        found += told(result)
        if restarts:
            subject.restart()
    return found


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("size", [97, 512, 4096])
def test_a_window_fires_when_its_share_of_records_has_come(size: int, restarts: bool) -> None:
    subject = driver(AfterWatermark(early=AfterPercentile(0.9)))
    found = in_bundles(subject, disordered(4096), size, restarts=restarts)

    ended = {(key, start) for key in "ab" for start in (0.0, 1.0, 2.0, 3.0)}
    assert {(key, start) for key, start, _ in found} == {*ended, ("b", -1.0)}
    assert {timing for _, _, timing in found} == {"early"}
    assert subject.watermark < 0, "the watermark is ten minutes behind"


def test_a_larger_share_waits_for_the_records_behind() -> None:
    for percentile, wanted in ((0.9, 4.0), (0.99, 3.0)):
        subject = driver(AfterAny(AfterPercentile(percentile)))
        found = in_bundles(subject, disordered(4200), 100, restarts=False)
        assert max(start + 1 for _, start, _ in found) == wanted
        assert len(found) == len({(key, start) for key, start, _ in found}), "once, then closed"


def test_before_it_has_learned_it_does_not_fire() -> None:
    subject = driver(AfterPercentile(0.99))
    assert in_bundles(subject, disordered(1023), 97, restarts=False) == []
    assert told(subject.feed(disordered(2, 5 * S))) != []


@pytest.mark.parametrize("restarts", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("size", [1, 33, 1024, 3000])
def test_what_is_learned_depends_on_the_order_of_records_alone(size: int, restarts: bool) -> None:
    times = np.array([at for _, at in disordered(3000, behind_us=3 * S)], np.int64)
    whole, parts = PercentileWatermark(0.9, ()), PercentileWatermark(0.9, ())
    whole.learn(times, Instant(NOW))
    stored: dict[Any, Entries] = {}
    for at in range(0, len(times), size):
        for entries in parts.learn(times[at : at + size], Instant(NOW)):
            for subkey, value in zip(entries.subkeys, entries.values, strict=True):
                one = stored[entries.kind, entries.namespace, subkey] = Entries(entries.kind, entries.namespace)
                one.add(b'""', 0, subkey, value)
        if restarts and size > 1:
            parts = PercentileWatermark(0.9, list(stored.values()))

    assert parts.reached == whole.reached > 0


def test_records_from_the_future_count_as_now() -> None:
    subject = driver(AfterPercentile(0.9))
    in_bundles(subject, disordered(2048, NOW - 10 * S), 512, restarts=False)
    assert told(subject.feed([(Reading("b"), NOW + 30 * S)])) != []
    result = subject.feed([(Reading("a"), NOW + 60 * S)])

    assert all(start < NOW / S for _, start, _ in told(result))
    assert subject.feed([(Reading("a"), NOW - S)]).unfinished is False


def test_panes_that_exceed_a_turn_leave_in_the_next_turns() -> None:
    subject = driver(AfterWatermark(early=AfterPercentile(0.5)))
    in_bundles(subject, [(Reading("z"), n * MS) for n in range(2048)], 1024, restarts=False)
    subject.feed([(Reading(key), 5 * S) for key in "dacb"])
    subject.panes_max = 1
    result = subject.feed([(Reading("z"), 7 * S)])
    found = told(result)
    while result.unfinished:
        subject.restart()
        result = subject.feed([])
        found += told(result)

    assert sorted(key for key, start, _ in found if start == 5.0) == ["a", "b", "c", "d"]


def test_sessions_fire_by_percentile() -> None:
    subject = driver(AfterPercentile(0.9), SessionWindows(seconds(1)))
    rows = [(Reading("b"), n * MS) for n in range(2048)]
    rows[100:100] = [(Reading("a"), 100 * MS), (Reading("a"), 900 * MS - 800 * MS)]
    found = in_bundles(subject, rows, 256, restarts=True)

    assert ("a", 0.1, "early") in found
    assert [key for key, _, _ in found] == ["a"]


def test_an_expected_window_still_waits_for_the_clock() -> None:
    subject = driver(AfterAll(AfterPercentile(0.5), AfterProcessingTime(seconds(30))))
    in_bundles(subject, [(Reading("a"), n * MS) for n in range(2048)], 512, restarts=True)
    subject.restart()

    assert subject.interval.next_due()[1] == NOW + 30 * S
    assert told(subject.feed([], now_us=NOW + 30 * S)) == [("a", 0.0, "early"), ("a", 1.0, "early")]


@pytest.mark.parametrize("percentile", [0.0, 1.0, 0.99999, 1, "0.9"])
def test_what_is_no_percentile_is_refused(percentile: Any) -> None:
    with pytest.raises(GraphError, match=r"above 0 and up to 0\.9999"):
        AfterPercentile(percentile)


def test_a_trigger_has_one_percentile() -> None:
    AfterAny(AfterPercentile(0.9), AfterWatermark(early=AfterPercentile(0.9)))
    with pytest.raises(GraphError, match=r"AfterAny has several percentiles: 0\.9, 0\.99"):
        AfterAny(AfterPercentile(0.9), AfterWatermark(early=AfterPercentile(0.99)))


class Sample(msgspec.Struct):
    device: str
    at: datetime


def test_a_graph_shows_a_minute_when_most_of_it_has_come() -> None:
    graph = Graph("early")
    event_time = EventTime("at", max_disorder=minutes(60))
    samples = graph.inject("samples", ManualSource(), schema=Sample, event_time=event_time)
    trigger = AfterWatermark(early=AfterPercentile(0.95))
    windows = samples.key_by("device").window(FixedWindows(minutes(1)), trigger=trigger, intervals=1)
    windows.aggregate(n=Count()).to_table("minutes")
    subject = GraphDriver(graph)
    noon = datetime(2026, 11, 20, 12, tzinfo=UTC)

    with subject.crashing():
        for start in range(0, 2_000, 500):
            rows = [Sample("pump", noon + timedelta(seconds=0.1 * (start + n))) for n in range(500)]
            subject.feed("samples", rows)
            subject.crash()

    found = [(pane.window[0].minute, pane.timing, pane.values["n"]) for pane in subject.panes("minutes")]
    assert found == [(0, "early", 600), (1, "early", 600), (2, "early", 600)]
