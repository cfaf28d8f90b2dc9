"""The seat of triggers: every kind of window fires when its trigger says so, and names its panes as it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import EventTime, File, FixedWindows, Graph, minutes
from millpy.errors import GraphError
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX, Instant, instant
from millpy.windowing.accumulator import Aggregate
from millpy.windowing.aggregates.numeric import Count
from millpy.windowing.composite_triggers import AFTER_WATERMARK
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.triggers import Ends, Timing, Trigger
from millpy.windowing.window import Windows
from tests.property.test_windowed import (
    MAX_DISORDER,
    WINDOWS,
    Reading,
    breaks,
    kinds,
    newest_panes,
    oracle,
    rows,
    run,
    table_of,
    us,
)
from tests.stage_driver import StageDriver

DELAY, ALLOWED = 5, 1_000
COUNT: dict[str, Aggregate] = {"n": Count()}


class Timed(msgspec.Struct):
    key: str
    at: datetime


@dataclass(frozen=True)
class Delayed(Trigger):
    """As `AfterWatermark`, but later; and it calls every pane early."""

    @property
    def per_pane(self) -> bool:
        return False

    def identity(self) -> Identity:
        return {"kind": "delayed"}

    def latest_end(self, watermark: Ends) -> Ends:
        if isinstance(watermark, np.ndarray):
            return cast("Ends", np.where(watermark == INSTANT_MAX, INSTANT_MAX, watermark - DELAY))
        return Instant(watermark if watermark == INSTANT_MAX else watermark - DELAY)

    def due_at(self, end: Instant) -> Instant:
        return Instant(end + DELAY)

    def timings(self, late_counts: Sequence[int]) -> list[Timing]:
        return ["early"] * len(late_counts)


def driver(windows: Windows, trigger: Trigger, few: int) -> StageDriver:
    logic = WindowedLogic(windows, ALLOWED * us, COUNT, few_records_max=few, trigger=trigger)
    outputs = {"windows": logic.output_type(RecordType(Reading), ("key", "site"))}
    return StageDriver(
        logic, Reading, key=("key", "site"), outputs=outputs, tables={"windows": 1}, max_disorder=MAX_DISORDER
    )


@kinds
@pytest.mark.parametrize("few", [0, 10_000], ids=["columns", "few"])
@settings(max_examples=25, deadline=None)
@given(feed=rows, where=breaks, panes_max=st.sampled_from([2, 10_000]))
def test_the_trigger_decides_when_every_kind_of_window_fires(
    windows: Windows, feed: list[Any], where: list[str], panes_max: int, few: int
) -> None:
    subject = driver(windows, Delayed(), few)
    subject.panes_max = panes_max
    feed_and_watch(subject, feed, where, columns=few == 0)

    found = newest_panes(subject, COUNT)
    wanted = oracle(windows, feed, ALLOWED, lambda group: (len(group.records),)).windows
    assert {name: values[0] for name, values in found.items()} == {name: values[0] for name, values in wanted.items()}
    assert table_of(subject) == found.keys()
    assert {values[1] for values in found.values()} <= {"early"}


@pytest.mark.parametrize("panes_max", [2, 10_000])
def test_a_window_that_a_late_record_opens_fires_after_a_takeover(panes_max: int) -> None:
    """It ends behind the low watermark and has not fired: a new owner reads it, however many windows are closed."""
    windows, subject = WINDOWS["sliding with offset"], driver(WINDOWS["sliding with offset"], Delayed(), 10_000)
    subject.panes_max = panes_max
    late = Reading(key="a", site=1, value=None, number=None, text=None, gap=None)
    feed = [(late, at) for at in (*[0] * 6, 19, 1, *[0] * 6)]

    feed_and_watch(subject, feed, [*["none"] * 6, "cut", "fold", "restart"], columns=False)

    found = newest_panes(subject, COUNT)
    wanted = oracle(windows, feed, ALLOWED, lambda group: (len(group.records),)).windows
    assert {name: values[0] for name, values in found.items()} == {name: values[0] for name, values in wanted.items()}


def feed_and_watch(subject: StageDriver, feed: list[Any], where: list[str], *, columns: bool) -> None:
    """Like `run`; also check that no pane precedes its trigger, and when the stage is due."""
    step = subject.commit

    def commit(result: Any) -> None:
        step(result)
        for record in result.productions["windows"].objects() if "windows" in result.productions else ():
            assert instant(record.window_end) + DELAY <= subject.watermark
        if not result.unfinished and subject.watermark < INSTANT_MAX:
            assert subject.interval.next_due()[0] > subject.watermark

    subject.commit = commit  # type: ignore[method-assign]
    run(subject, feed, where, columns=columns)


def test_a_trigger_that_fires_when_the_window_is_over_is_refused() -> None:
    files = Graph("plant").inject("files", File("a.csv"), schema=Timed, event_time=EventTime("at", sorted=True))

    with pytest.raises(GraphError, match=r"fires windows after allowed_lateness=.* when they are over"):
        files.key_by("key").window(FixedWindows(minutes(1)), trigger=Delayed())


@kinds
def test_a_window_is_due_when_its_trigger_fires(windows: Windows) -> None:
    for trigger, delay in ((AFTER_WATERMARK, 0), (Delayed(), DELAY)):
        subject = driver(windows, trigger, 0)
        subject.feed([(Reading("a", 1, None, None, None), 0)])
        hold, (due, _) = subject.interval.oldest_work(), subject.interval.next_due()

        assert due == hold + 1 + delay
        assert not subject.feed([], watermark=due - 1).productions
        assert subject.feed([], watermark=due).productions["windows"]
